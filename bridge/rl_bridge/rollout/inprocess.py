"""Generation in this process: any Hugging Face causal LM, batched, with a KV cache, also in int8; tried out once.

    arrangement = check_decoder(model)
    decoder = CachedDecoder(model, sampling, stop=stop, arrangement=arrangement)

Nothing is known of a family but its own forward pass. Some rows of unlike length, 64 tokens in all, are drawn together,
of which one joins late and one leaves early. Their log-probabilities are compared with the model's own eager forward
pass of each row alone. Where the two differ, fewer rows share a call.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.common.argument_kinds import check_argument
from rl_bridge.common.user_files import told
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines.dispatch import returns
from rl_bridge.engines.module import ParallelModule
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.row_checks import longest_sequence
from rl_bridge.models.turn_ends import stop_tokens
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.cached_model import Arrangement
from rl_bridge.rollout.decoder import Drawn
from rl_bridge.rollout.rollout_worker import Advancing, Conversing, Generating
from rl_bridge.rollout.sampling import StopTexts
from rl_bridge.weights import ModuleReceiver
from rl_bridge.weights.source import Quantize, Through, linear_weights
from rl_kernels import int8_matmul


class Int8Linear(nn.Module):
    """``x W^T + b`` with int8 codes of W, and of x made anew for each token: W8A8, summed in int32.

    The tensors have the names and shapes of a compressed-tensors checkpoint.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """The sizes and the bias of ``linear``; codes and scales have no values yet."""
        super().__init__()
        shape, device = linear.weight.shape, linear.weight.device
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=device), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(shape[0], 1, device=device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in] → […, out]``."""
        return int8_matmul(x, self.weight, self.weight_scale, self.bias)


def int8_map(source: ModelSource, dtype: torch.dtype = torch.float32) -> Quantize:
    """The map of this model's weights on their way to an int8 rollout; ``dtype`` is of weights without codes."""
    with torch.device("meta"):
        return Quantize("int8", linear_weights(source.empty()), dtype=dtype)


@torch.no_grad()
def quantize_linears(model: PreTrainedModel, send: Quantize) -> None:
    """Put an ``Int8Linear`` in the place of each linear layer that the map quantises, one after another."""
    for name in sorted(send.names):
        path = name.removesuffix(".weight")
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear), path
        layer = Int8Linear(linear)
        for (_, tensor), target in zip(send(name, linear.weight), (layer.weight, layer.weight_scale), strict=True):
            target.copy_(tensor)
        model.set_submodule(path, layer)


logger = logging.getLogger(__name__)

EXACT, CODED, ROUNDED = 1e-4, 3e-3, 5e-2
"""A log-probability may be off by this times the largest distance of a logit from their mean: in float32, where layers
make codes of few bits anew from activations, which rounding moves by a whole step, and in lower precision."""
ROUNDING = 1e-5
"""And by this."""
ARRANGEMENTS = (
    Arrangement(),
    Arrangement(read_packed=False),
    Arrangement(attention="eager", read_packed=False),
    Arrangement(attention="eager", read_packed=False, step_together=False),
    Arrangement(attention="eager", read_packed=False, step_together=False, give_positions=False),
)
"""The arrangements, in the order in which they are tried."""
LATE = 3
"""Steps after which the last row joins."""


class _Row(NamedTuple):
    prompt: Sequence[int]
    limit: int


_found: dict[tuple[object, ...], Arrangement] = {}


def check_decoder(model: PreTrainedModel) -> Arrangement:
    """The arrangement that is right for this model, which is left with the attention that belongs to it.

    A model of the same class, configuration and layers is tried once in a process. Under fake tensors, which have no
    values, nothing is tried.

    Raises:
        NotImplementedError: in no arrangement the rows draw what each draws alone.
    """
    arrangement = ARRANGEMENTS[0]
    if not any(isinstance(x, FakeTensor) or x.is_meta for x in model.parameters()):
        key = _key(model)
        if key not in _found:
            _found[key] = _first_right(model)
        arrangement = _found[key]
    model.set_attn_implementation(arrangement.attention)
    return arrangement


def _first_right(model: PreTrainedModel) -> Arrangement:
    reasons: list[str] = []
    error: Exception | None = None
    tested: set[Arrangement] = set()
    for arrangement in ARRANGEMENTS:
        model.set_attn_implementation(arrangement.attention)
        try:
            decoder = CachedDecoder(model, SamplingParams(max_new_tokens=1), stop=[], arrangement=arrangement)
            if decoder.arrangement in tested:
                continue
            tested.add(decoder.arrangement)
            rows = _rows(model)
            gap, allowed = _gap(model, rows, _drawn(decoder, rows))
        except Exception as raised:  # Whatever a model raises here: the next arrangement asks less of it.
            error, why = raised, told(raised)
        else:
            why = f"log-probabilities are {gap:.2g} nats off, allowed are {allowed:.2g}"
            if gap <= allowed:
                if reasons:
                    line = "%s is sampled by %s, since %s"
                    logger.warning(line, type(model).__name__, decoder.arrangement, "; ".join(reasons))
                if isinstance(model, GivesLogits):
                    line = "%s has no cache: each token of a row is read again for every new one"
                    logger.warning(line, type(model).__name__)
                return decoder.arrangement
        reasons.append(f"by {arrangement}: {why}")
    if isinstance(error, NotImplementedError):
        raise error
    raise NotImplementedError(
        f"cannot sample from {type(model).__name__} in this process: rows that are drawn together differ from what the "
        f"model computes of each alone ({'; '.join(reasons)})."
        + ("" if isinstance(model, GivesLogits) else " Sample with vLLM (--rollout.backend vllm)")
    ) from error


def _rows(model: PreTrainedModel) -> list[_Row]:
    """Rows of unlike length, two of them with one prompt. The last joins late, and is then as long as the first."""
    config = model.config.get_text_config(decoder=True)
    longest = longest_sequence(model) or 10**9
    vocabulary = config.vocab_size
    prompts = [[(17 * n * n + 29 * n + 7 * length) % vocabulary for n in range(length)] for length in (3, 10, 10, 1, 6)]
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        prompts[1][5] = prompts[2][5] = padding  # within a row it is a token: some models count positions by it
    limits = (9, 9, 3, 5, 8)
    rows = [_Row(prompt[: longest // 2], limit) for prompt, limit in zip(prompts, limits, strict=True)]
    return [row._replace(limit=min(row.limit, longest - len(row.prompt))) for row in rows]


@torch.no_grad()
def _drawn(decoder: CachedDecoder, rows: Sequence[_Row]) -> dict[int, Drawn]:
    """The rows as drawn together, by their number."""
    drawn: dict[int, Drawn] = {}
    early = len(rows) - 1
    for number, row in enumerate(rows[:early]):
        decoder.add(number, row.prompt, seed=number, limit=row.limit)
    for _ in range(LATE):
        drawn |= {row.key: row for row in decoder.step()}  # pyright: ignore[reportAssignmentType]
    decoder.add(early, rows[early].prompt, seed=early, limit=rows[early].limit)
    while decoder.running or decoder.waiting:
        drawn |= {row.key: row for row in decoder.step()}  # pyright: ignore[reportAssignmentType]
    return drawn


@torch.no_grad()
def _gap(model: PreTrainedModel, rows: Sequence[_Row], drawn: Mapping[int, Drawn]) -> tuple[float, float]:
    """How far the drawn log-probabilities are from those of an eager forward pass of each row alone, and may be."""
    gaps, largest = [], 0.0
    attention = str(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    for number, row in enumerate(rows):
        tokens = torch.tensor([[*row.prompt, *drawn[number].tokens]], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
        largest = max(largest, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
        logprobs = logits.log_softmax(-1).gather(1, tokens[0, len(row.prompt) :, None])[:, 0]
        gaps.append((torch.tensor(drawn[number].logprobs) - logprobs.cpu()).abs())
    model.set_attn_implementation(attention)
    coded = any(isinstance(module, Int8Linear) for module in model.modules())
    part = ROUNDED if model.dtype in (torch.bfloat16, torch.float16) else CODED if coded else EXACT
    return float(torch.cat(gaps).max()), part * largest + ROUNDING


def _key(model: PreTrainedModel) -> tuple[object, ...]:
    """The properties of a tried model: others that have the same need no trial."""
    config = {name: value for name, value in model.config.to_dict().items() if "attn_implementation" not in name}
    kinds = frozenset(type(module) for module in model.modules())
    return type(model), repr(sorted(config.items())), kinds, model.dtype, model.device.type


Precision = Literal["fp32", "int8"]
"""The precision that the linear layers of a rollout in this process compute in."""


class InProcessRollout(Advancing, Generating, Conversing):
    """The rollout worker of one device: its own copy of the weights, which a sync brings up to date."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_rows: int = 1024,
        precision: Precision = "fp32",
    ) -> None:
        """The model begins with the source's weights. Rows beyond ``max_batch_rows`` wait: that bounds the KV cache.

        With ``precision`` "int8" the linear layers but the head compute in int8, and a sync to here quantises.

        Raises:
            NotImplementedError: rows of this model that are drawn together are not what each would be alone
                (``rl_bridge.rollout.inprocess``).
            ValueError: another ``precision``.
        """
        check_argument("precision", precision, Precision)
        with torch.device("meta"):
            self._model = source.empty().eval().requires_grad_(False)
        config = self._model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # a loss of training, which transformers cannot compute beside a cache
        source.load(self._model)
        self._map: Through | None = None
        if precision == "int8":
            self._map = int8_map(source)
            quantize_linears(self._model, self._map)
        self._weights = _Weights(self._model)
        self._tokenizer = tokenizer
        self._arrangement = check_decoder(self._model)
        self._stop = stop_tokens(self._model, tokenizer)
        self.longest = longest_sequence(self._model)
        self._max_batch_rows = max_batch_rows

    def decoder(self, sampling: SamplingParams) -> CachedDecoder:
        """An empty decoder with the weights as they are; it holds good until they change."""
        texts = StopTexts(self._tokenizer, sampling.stop)
        options = {"max_rows": self._max_batch_rows, "arrangement": self._arrangement}
        return CachedDecoder(self._model, sampling, stop=self._stop, texts=texts, **options)

    def weight_receiver(self) -> ModuleReceiver:
        """The receiver that a sync to here fills."""
        return self._weights.weight_receiver()

    @returns("same")
    def weights_map(self) -> Through | None:
        """The map that weights go through on their way here."""
        return self._map

    @returns("same")
    def weights_version(self) -> int:
        """The version of the weights in use."""
        return self.weight_receiver().usable_version()

    def weights_device(self) -> torch.device:
        """The device that the weights are on."""
        return self._model.device

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights (to ``meta``: free them). A KV cache lives only during a call, so there is none to move."""
        if what == "weights":
            self._weights.move(what, device)


class _Weights(ParallelModule):
    """The model's weights as engines move, free and sync them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def exported(self) -> PreTrainedModel:
        """The model, under its own names."""
        return self.model
