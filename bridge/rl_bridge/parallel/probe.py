"""One comparison when a model is built: each arrangement of rows against the model's eager forward of each row.

arrangements = probe(model)

A family that nobody here has heard of, or code from a hub, may keep states across documents, put something between the
hidden states and the logits, or read a mask in its own way. A few rows of a few tokens show that before anything is
trained: what differs is not used, and a model that is right in no arrangement is refused by name.
"""

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.common.user_files import told
from rl_bridge.parallel.attention.register import NAME
from rl_bridge.parallel.documents import SEQUENCE, Documents
from rl_bridge.parallel.drawn import SCALES, draw, fingerprint, nudge
from rl_bridge.parallel.fsdp import forget_pass
from rl_bridge.parallel.heads import GivesLogits, HeadKind, is_language_model, token_logprobs, token_values
from rl_bridge.parallel.layer_kinds import has_states, unpackable
from rl_bridge.parallel.mesh import AXES, agree_max_over
from rl_bridge.weights.manifest import class_of, local, without_peft

# The rows of the comparison, and a model's own eager forward of each row alone.

LENGTHS, GROUPS, COMMON = (9, 14, 6), (0, 0, 1), 5
"""Tokens of each row, group of each row, and the number of tokens that the first two begin with.

All of these tokens but the last, which predicts another token in each of the two rows, are a shared prefix.
"""
LONG, LONG_COMMON = (24, 61, 9), 20
"""The same of the rows that a class of the user's own reads besides: a window or a scale may begin late."""


class Rows(NamedTuple):
    ids: Tensor
    lengths: Tensor
    weights: Tensor
    common: int
    """Tokens that the first two rows begin with."""


def plain_values(model: PreTrainedModel, row: Tensor) -> Tensor:
    """The plain computation that all else is compared with: the model's own forward of one row, [T] ids, alone.

    Returns the log-probability of each token after the first, [T − 1], or of a classifier its number at each token,
    [T].
    """
    if not is_language_model(model):
        values = token_values(model, row[None])[0]
        with torch.no_grad():
            pooled = model(input_ids=row[None], use_cache=False).logits[0, 0]
        if not torch.allclose(pooled.float(), values[-1].detach(), rtol=1e-2, atol=1e-2 * float(values.detach().std())):
            raise ValueError(
                f"{class_of(model).__name__} scores a row of {len(row)} tokens with {float(pooled):.4g}, and its head "
                f"gives {float(values[-1].detach()):.4g} at the last token"
            )
        return values
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, row[1:, None])[:, 0]


def rows_for(model: PreTrainedModel, of: Sequence[int] = LENGTHS, common: int = COMMON) -> Rows:
    """Rows of random ordinary tokens, ``of`` so many each, the same in every process, and a weight for each token."""
    inner = cast(PreTrainedModel, without_peft(model))
    generator = torch.Generator().manual_seed(0)
    special = set(_token_ids(inner.config.to_dict()))
    size = int(cast(Any, inner.get_input_embeddings()).weight.shape[0])
    size = min(size, getattr(inner.config.get_text_config(), "vocab_size", size))
    # Of a large vocabulary the first ids are bytes and marks.
    ordinary = torch.tensor([i for i in range(min(size, 4096)) if i not in special] or list(range(size)))
    ids = ordinary[torch.randint(len(ordinary), (len(of), max(of)), generator=generator)]
    ids[1, :common] = ids[0, :common]
    padding = inner.config.get_text_config().pad_token_id
    if isinstance(padding, int) and 0 <= padding < size:
        ids[1, common + 1] = padding  # within a row it is a token: some models count a row's tokens by it
    weights = torch.randn(ids.shape, generator=generator)
    lengths = torch.tensor(of)
    ids = ids.masked_fill(torch.arange(max(of)) >= lengths[:, None], int(ordinary[0]))
    device = _compute_device(model)
    return Rows(ids.to(device), lengths, weights.to(device), common)


def _token_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Ids that a configuration names, such as those of padding and of pictures."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _token_ids(value)
        elif str(name).endswith(("token_id", "token_ids", "token_index")):
            values = value if isinstance(value, Sequence) else [value]
            yield from (v for v in values if isinstance(v, int))


def attention_of(model: PreTrainedModel) -> str:
    return str(cast(PreTrainedModel, without_peft(model)).config._attn_implementation)


def use_attention(model: PreTrainedModel, name: str) -> None:
    if attention_of(model) != name:
        cast(PreTrainedModel, without_peft(model)).set_attn_implementation(name)


@contextmanager
def with_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the model has this attention, as "eager", its own, that others are compared with."""
    before = attention_of(model)
    use_attention(model, name)
    try:
        yield
    finally:
        use_attention(model, before)


def _compute_device(model: PreTrainedModel) -> torch.device:
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


# The arrangements, and the comparison of each with that forward.

EXACT = 1e-3
"""Largest difference in float32 and float64, of the spread of the log-probabilities or the gradients."""
ROUGH_VALUES, ROUGH_GRADIENTS = 0.15, 0.5
"""Largest mean square root of differences in lower precisions, of the spread of the log-probabilities; of a kind of
parameters' gradients, of their norms, in the median over the layers. SmolLM2-135M in bfloat16 has 0.03 to 0.07 and at
most 0.23 under four instruction sets; gradients that are missing or doubled have 1. A gradient that is doubled in one
layer alone is not seen: there rounding moves the gradients of the model's own eager forward by as much as their norm.
"""

_LAYER = re.compile(r"\.\d+\.")
"""A layer's number in a parameter's name."""
BLIND = 1e-6
"""Spread of a row's numbers that no difference can be told from."""


@dataclasses.dataclass(frozen=True)
class Arrangements:
    """The arrangements of rows in which a model gives its own numbers."""

    attention: str = NAME
    """The implementation of attention: "rl_fn", or the model's own "eager"."""
    head: HeadKind = "linear"
    """Whether log-probabilities come from hidden states and the output embeddings, or from the model's own logits."""
    packed: bool = True
    """Whether documents may lie one behind another in one row."""
    shared: bool = True
    """Whether rows of a group may have their common first tokens computed once."""
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Notes on "padded", "packed" and "shared" rows, where something else is used: what, and why."""


class Measured(NamedTuple):
    """Numbers of one arrangement: one for each token of each row, and the gradients of their weighted sum."""

    values: list[Tensor]
    gradients: dict[str, Tensor]


Faults = dict[str, str]
"""The fault of an arrangement, by the arrangement's name."""

_cached: dict[tuple[Any, ...], Arrangements] = {}
_classes: dict[tuple[Any, ...], Faults | None] = {}
"""The faults of classes of the user's own, whatever their weights."""


def probe(model: PreTrainedModel, mesh: DeviceMesh | None = None, *, exact: bool = True) -> Arrangements:
    """Compare padded rows, packed ones and shared prefixes with the model's own eager forward of each row alone.

    Three rows of 29 tokens in all, about ten forward passes; for a model that is trained as many backward passes,
    whose gradients are dropped. All workers of the mesh call the function. A class with one configuration is compared
    once, unless a worker of the mesh has not compared the class yet.

    Args:
        model: with its weights, plain, of peft, after ``parallelize``; a causal language model, or a
            ``*ForSequenceClassification`` with one label. Its attention is "rl_fn" (``use_rl_fn_attention``).
        mesh: of ``make_mesh``. Over sequence ranks all rows are packed.
        exact: whether the model computes in float32 or float64. In less, rounding hides small differences: gross ones
            are looked for, and layers that keep states (``has_states``) are neither packed nor shared.

    Returns:
        What may be used. The model's attention is set to it.

    Raises:
        ValueError: padded rows are wrong with every attention and head; or packed ones with sequence ranks.
    """
    if any(isinstance(p, FakeTensor) or p.is_meta for p in model.parameters()) or is_alone(mesh):
        return _by_config(model)
    inner, key, of_class = without_peft(model), _key(model, mesh, exact), Faults()
    if isinstance(inner, GivesLogits):
        faults = _faults_of_class(inner)
        of_class = faults or {}
        if faults is None:
            key += (fingerprint(model),)  # the answer is one of these weights
            rough = "with drawn weights the class has no numbers to compare, and in low precision its own are too rough"
            of_class = {} if exact else {"packed": rough, "shared": rough}
    arrangements = _cached.get(key)
    # The comparison is collective: a worker that has the answer computes beside one that is new in the mesh.
    if any_worker(arrangements is None, mesh):
        comparison = _Comparison(model, mesh, exact)
        comparison.of_class = of_class
        arrangements = _compared(comparison)
        if comparison.shows:
            _cached[key] = arrangements
    assert arrangements is not None
    use_attention(model, arrangements.attention)
    return arrangements


def _faults_of_class(model: GivesLogits) -> Faults | None:
    """Each arrangement's fault in a new model of the class with drawn weights; None: it has no numbers with any."""
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _classes:
        _classes[key] = None
        # On the CPU float32 is exact, and a fault of the user's code ends no device; some code needs the device.
        devices = dict.fromkeys((torch.device("cpu"), _compute_device(model)))
        for device, scale in itertools.product(devices, SCALES):
            faults = _faults_with(model, scale, device, (LENGTHS, COMMON))
            if faults is not None:
                # Rows that the class cannot read it need not read: it may have few positions without a word.
                longer = _faults_with(model, scale, device, (LONG, LONG_COMMON)) if device.type == "cpu" else None
                _classes[key] = (longer or {}) | faults
                break
    return _classes[key]


def _faults_with(
    model: GivesLogits, scale: float, device: torch.device, rows_of: tuple[Sequence[int], int]
) -> Faults | None:
    """The same of weights of one scale; None: numbers that are not finite, all alike, or a matter of rounding."""
    lengths, common = rows_of
    positions = getattr(model.config, "max_position_embeddings", None) or max(lengths)
    copied = model.remade().requires_grad_(False)
    draw(copied, scale)
    copied.to(device)  # type: ignore[arg-type]
    lengths = [min(length, positions) for length in lengths]
    rows = rows_for(copied, lengths, max(1, min(common, min(lengths[:2]) - 2)))
    try:
        before = torch.cat(_Comparison(copied, None, True, rows=rows).wanted.values)
        nudge(copied)
        comparison = _Comparison(copied, None, True, rows=rows)
    except Exception:  # Whatever the user's code raises: of its own weights it is told.
        return None
    after = torch.cat(comparison.wanted.values)
    rounding, spread = float((after - before).abs().max()), float(after.std())
    if not (spread > 1e-2 and 3 * rounding < EXACT * min(spread, 1.0)):  # NaN is neither
        return None
    each = {arranged: comparison.difference(arranged, NAME, "logits") for arranged in ("padded", "packed", "shared")}
    return {arranged: f"with drawn weights {wrong}" for arranged, wrong in each.items() if wrong is not None}


def _by_config(model: PreTrainedModel) -> Arrangements:
    head: HeadKind = "logits" if isinstance(without_peft(model), GivesLogits) else "linear"
    together = not has_states(model) and unpackable(model) is None
    return Arrangements(head=head, packed=together, shared=together)


def _compared(comparison: "_Comparison") -> Arrangements:
    name, ranks = class_of(without_peft(comparison.model)).__name__, comparison.ranks
    logits_alone = isinstance(without_peft(comparison.model), GivesLogits)
    heads: tuple[HeadKind, ...] = ("linear", "logits") if comparison.is_language_model else ("linear",)
    heads = ("logits",) if logits_alone else heads
    arranged = "padded" if ranks == 1 else "packed"
    ways: list[tuple[str, HeadKind]] = [(NAME, head) for head in heads]
    if ranks == 1 and not logits_alone:  # whose attention is its own by either name
        ways.extend(("eager", head) for head in heads)
    attempts = []
    unlike = unpackable(comparison.model)
    if unlike is not None and ranks > 1:
        raise ValueError(f"{name} over {ranks} sequence ranks, where rows are packed: {unlike}; take sequence=1")
    if any_worker(not all(bool(v.isfinite().all()) for v in comparison.wanted.values), comparison.mesh):
        raise ValueError(
            f"{name}: the model's own forward of a row of a few tokens gives numbers that are NaN or infinite, so "
            "that nothing can be learned from it: its weights or its code do, not how rows lie"
        )
    for attention, head in ways:
        wrong = comparison.difference(arranged, attention, head)
        if wrong is None:
            break
        attempts.append(f"attention {attention!r}, head by {head!r}: {wrong}")
    else:
        over_ranks = "" if ranks == 1 else f" over {ranks} sequence ranks"
        way_on = "take sequence=1" if ranks > 1 else "its class cannot be trained here"
        if logits_alone and ranks == 1:
            way_on += ": without a mask a token sees itself and the tokens before it, and nothing of other rows"
        raise ValueError(
            f"{name}{over_ranks}: {arranged} rows do not give the numbers of the model's own eager forward of each "
            f"row; {way_on}. " + "; ".join(attempts)
        )
    notes, usable = {}, {"packed": ranks > 1}
    keeps = has_states(comparison.model)
    if (attention, head) != ways[0]:
        notes["padded"] = f"{name}: attention {attention!r}, log-probabilities by {head!r}; {attempts[0]}"
    if logits_alone:
        notes["padded"] = (
            f"{name} gives logits and no hidden states: those of a micro-batch, [N, T, V], lie in memory at once"
        )
    for saving in ("packed", "shared"):
        if not usable.get(saving):
            wrong = unlike or comparison.difference(saving, attention, head)
            if wrong is None and keeps and not comparison.shows_leaks:
                wrong = "its layers keep states, and the comparison is too rough to show a leak"
            usable[saving] = wrong is None
            if wrong is not None:
                instead = "rows are padded" if saving == "packed" else "each row has its own prefix"
                notes[saving] = f"{name}: {instead}, since {saving} rows would give other numbers: {wrong}"
    return Arrangements(attention, head, usable["packed"], usable["shared"], notes)


class _Comparison:
    """A model, its rows, and what its own forward makes of them."""

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh | None, exact: bool, *, rows: Rows | None = None
    ) -> None:
        self.model, self.mesh, self.exact = model, mesh, exact
        self.is_language_model = is_language_model(model)
        self.rows = rows_for(model) if rows is None else rows
        self.of_class: Faults = {}
        self.ranks = 1 if mesh is None else mesh.get_group(SEQUENCE).size()
        try:
            self.wanted = self._measure("eager", self._alone)
        except (TypeError, NotImplementedError, AttributeError, AssertionError, IndexError, RuntimeError) as error:
            name = class_of(without_peft(model)).__name__
            raise ValueError(
                f"{name} cannot read one row of {self.rows.ids.shape[1]} tokens without a cache, so that nothing can "
                f"be compared with its own numbers: {told(error)}"
            ) from error

    @cached_property
    def shows(self) -> bool:
        """Whether the model's own numbers would show a difference; a head of zeros without gradients would not."""
        spread = max(float(v.std()) for v in self.wanted.values)
        # Behind a head of zeros nothing but the head has gradients.
        learned = [bool(g.count_nonzero()) for g in self.wanted.gradients.values()]
        return any_worker(spread > BLIND or 2 * sum(learned) > len(learned), self.mesh)

    @property
    def shows_leaks(self) -> bool:
        return self.exact and self.shows

    def difference(self, arranged: str, attention: str, head: HeadKind) -> str | None:
        """The fault of an arrangement on any of the workers, in words; None: there is none."""
        try:
            measured = self._measure(attention, lambda: self._arranged(arranged, head))
            wrong = self._wrong(measured)
        except (ValueError, TypeError, IndexError, AttributeError, AssertionError, RuntimeError) as error:
            # A model that cannot be called so says it in words of its own.
            wrong = told(error)
            forget_pass(self.model)
        wrong = wrong or self.of_class.get(arranged)
        if not any_worker(wrong is not None, self.mesh):
            return None
        return wrong or "another worker has other numbers"

    def _measure(self, attention: str, compute: Callable[[], list[Tensor]]) -> Measured:
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        exact = torch.autocast(self.rows.ids.device.type, enabled=False)
        try:
            with with_attention(self.model, attention), torch.set_grad_enabled(bool(trained)), exact:
                values = compute()
                if trained:
                    total = sum((v * w[: len(v)]).sum() for v, w in zip(values, self.rows.weights, strict=True))
                    # Each sequence rank of a plain forward has the whole sum, and their gradients are added.
                    alone = compute == self._alone
                    cast(Tensor, total / (self.ranks if alone else 1)).backward()
            gradients = {n: local(p.grad).clone() for n, p in trained.items() if p.grad is not None}
        finally:
            for parameter in trained.values():
                parameter.grad = None
        return Measured([v.detach() for v in values], gradients)

    def _alone(self) -> list[Tensor]:
        rows = zip(self.rows.ids, self.rows.lengths.tolist(), strict=True)
        return [plain_values(self.model, row[:length]) for row, length in rows]

    def _arranged(self, arranged: str, head: HeadKind) -> list[Tensor]:
        ids, lengths = self.rows.ids, self.rows.lengths
        targets = None
        if self.is_language_model:
            ids, targets, lengths = ids[:, :-1], ids[:, 1:], lengths - 1
        if arranged == "padded":
            values = self._values(ids, targets, head, use_cache=False)
        else:
            common = self.rows.common - 1
            shared, groups = torch.tensor([common, common, 0]), torch.tensor(GROUPS)
            sharing: dict[str, Any] = {"groups": groups, "shared": shared} if arranged == "shared" else {}
            documents = Documents(lengths, self.mesh, **sharing)
            packed = documents.take(ids), None if targets is None else documents.take(targets)
            values = self._values(*packed, head, **forward_kwargs(self.model, documents))
            values = documents.put(values, ids.shape)
        return [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]

    def _values(self, ids: Tensor, targets: Tensor | None, head: HeadKind, **options: Any) -> Tensor:
        if targets is None:
            return token_values(self.model, ids, **options)
        return token_logprobs(self.model, ids, targets, entropy=False, head=head, **options)[0]

    def _wrong(self, measured: Measured) -> str | None:
        values, reference = torch.cat(measured.values).double(), torch.cat(self.wanted.values).double()
        gap, spread = values - reference, float(reference.std())
        # In rough arithmetic single tokens may be far off, such as those that go to another expert of a mixture.
        size = float(gap.abs().max() if self.exact else gap.square().mean().sqrt())
        allowed = EXACT * min(spread, 1.0) if self.exact else ROUGH_VALUES * spread
        if not size <= allowed + 2e-5:
            return f"a token's number differs by {size:.2g}"
        norm = _maximum if self.exact else _norm
        sizes = {name: float(norm(gradient)) for name, gradient in self.wanted.gradients.items()}
        largest, kinds = max(sizes.values(), default=0.0), defaultdict(list)
        for name, gradient in self.wanted.gradients.items():
            other = measured.gradients.get(name)
            scale = sizes[name] + 0.01 * largest
            size = sizes[name] if other is None else float(norm(other - gradient))
            kind, numbers = _LAYER.subn(".#.", name)
            kinds[kind].append(size / scale if scale else 0.0)
            # Of a layer's experts rounding decides which ones a token goes to.
            missing = numbers < 2 and size > 0.5 * scale and (other is None or not other.count_nonzero())
            wrong = not size <= 4 * EXACT * scale if self.exact else not math.isfinite(size)
            if missing or wrong:
                return f"the gradient of {name} differs by {size:.2g} and is of size {scale:.2g}"
        for kind, shares in kinds.items():
            if not self.exact and (share := statistics.median(shares)) > ROUGH_GRADIENTS:
                return f"the gradients of {kind} differ by {share:.2g} of their size"
        return None


def _maximum(gradient: Tensor) -> Tensor:
    return gradient.abs().max() if gradient.numel() else gradient.new_zeros(())


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.float())


def forward_kwargs(model: PreTrainedModel, documents: Documents) -> dict[str, Any]:
    """Arguments of a call with packed documents: of layers that keep states, too, where these are told apart."""
    options = documents.forward_kwargs
    return options | documents.boundaries if has_states(model) else options


def _key(model: PreTrainedModel, mesh: DeviceMesh | None, exact: bool) -> tuple[Any, ...]:
    inner = cast(PreTrainedModel, without_peft(model))
    config = inner.config.to_json_string(use_diff=False)
    adapters = json.dumps({k: v.to_dict() for k, v in getattr(model, "peft_config", {}).items()}, default=sorted)
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    layout = None if mesh is None else tuple(mesh.shape)
    return type(model), type(inner), config, adapters, hash(trained), layout, exact


def is_alone(mesh: DeviceMesh | None) -> bool:
    """Whether the other workers are made up, as in a plan of memory: what they would send is not there."""
    groups = [] if mesh is None else [mesh.get_group(axis) for axis in AXES]
    return any(group.size() > 1 and dist.get_backend(group) == "fake" for group in groups)


def any_worker(here: bool, mesh: DeviceMesh | None) -> bool:
    return bool(agree_max_over(AXES, int(here), mesh))
