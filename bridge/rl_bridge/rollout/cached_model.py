"""A model with a cache of rows that join and leave, and the calls that rows may share.

Layers of Mamba 2's kind clamp their time steps (``time_step_limit``) where they read a sequence. Where they add one
token transformers' layers do not: a row's values would depend on which of the two calls had computed its state. So the
limits are put on the output of the layer's projection.
"""

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_bridge.parallel.attention import AttentionPlan
from rl_bridge.parallel.attention.plan import segments_of
from rl_bridge.parallel.attention.register import NAME
from rl_bridge.parallel.layer_kinds import counts_columns
from rl_bridge.rollout.packed_step import PackedStep, packs
from rl_bridge.rollout.row_cache import RowCache


@contextlib.contextmanager
def _limited_time_steps(layers: Iterable[Any]) -> Iterator[None]:
    """Calls of a model that clamp the time steps of these layers, whatever the layers do."""
    handles = [layer.in_proj.register_forward_hook(partial(_clamped, layer)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _clamped(layer: Any, _: nn.Module, inputs: Any, projected: torch.Tensor) -> torch.Tensor:
    """softplus(dt + bias) is held between the limits, where dt are the last columns of the projection."""
    low, high = (_before_softplus(float(limit)) for limit in layer.time_step_limit)
    bias = layer.dt_bias.to(projected.dtype)
    before, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
    return torch.cat([before, (dt + bias).clamp(low, high) - bias], -1)


def _has_limits(module: nn.Module) -> bool:
    limits = getattr(module, "time_step_limit", None)
    projected = hasattr(module, "in_proj") and isinstance(getattr(module, "dt_bias", None), torch.Tensor)
    return limits is not None and projected and tuple(limits) != (0.0, math.inf)


def _before_softplus(x: float) -> float:
    """y with softplus(y) = x."""
    if x <= 0:
        return -math.inf
    return x + math.log(-math.expm1(-x)) if x < 30 else x


FULL, SLIDING = "full_attention", "sliding_attention"
STATES = ("linear_attention", "conv", "mlp", "moe")
"""Kinds of layers without attention: they keep rows apart by themselves."""
CACHES = ("past_key_values", "cache_params")
"""Names that models have for their cache."""


class Arrangement(NamedTuple):
    """The attention that the model is called with, and which rows of unlike length share a call.

    The fewer rows share a call, the fewer ways there are to be wrong.
    """

    attention: str = NAME
    read_packed: bool = True
    """Sequences are read as one packed row. If not, those of one length are read together."""
    step_together: bool = True
    """All rows get their token in one call, with a mask a row. If not, rows of one length get theirs together."""
    give_positions: bool = True
    """If not, the model counts positions itself, which is right for rows of one length alone."""


class CachedModel:
    """A causal LM with a ``RowCache``: the logits after the last token of rows that have lengths of their own.

    Sequences are read into rows, and rows get one more token each.
    """

    def __init__(self, model: PreTrainedModel, arrangement: Arrangement | None = None) -> None:
        """The cache is empty.

        ``arrangement``: one that the model is known to compute right in; None: the one that its signature and its
        layers promise.

        Raises:
            NotImplementedError: for a model that has no cache of transformers' kind, or whose attention takes no mask a
                row.
        """
        self._model, self._cache = model, RowCache()
        self._implementation = str(model.config._attn_implementation)
        if self._implementation not in (NAME, "sdpa", "eager"):
            raise NotImplementedError(
                f"decoding needs the attention {NAME}, sdpa or eager, and the model has {self._implementation}"
            )
        takes = inspect.signature(model.forward).parameters
        cache = next((name for name in CACHES if name in takes), None)
        if cache is None or model.config.is_encoder_decoder:
            why = "is no decoder" if cache else f"takes no {' or '.join(CACHES)}"
            raise _refused(model, why)
        self._cache_name, self._takes = cache, takes
        self._windows = _windows(model)
        self._limited_layers = [module for module in model.modules() if _has_limits(module)]
        arrangement = arrangement or Arrangement()
        self._give_positions = arrangement.give_positions and "position_ids" in takes
        apart = not self._windows or (self._give_positions and (self._implementation == NAME or _is_plain(model)))
        of_columns = counts_columns(model)  # of the longest row beside it, if rows of unlike length share a call
        self._together = arrangement.step_together and apart and not of_columns
        self._read_packed = arrangement.read_packed and self._can_read_packed() and not of_columns
        self._packed: PackedStep | Literal[False] | None = None

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement that the model is called in."""
        return Arrangement(self._implementation, self._read_packed, self._together, self._give_positions)

    def read(self, sequences: Sequence[Sequence[int]], of_rows: Sequence[int], first: int, room: int) -> torch.Tensor:
        """Logits [rows, V] of new rows after their sequences, whose numbers are ``of_rows``; each is computed once.

        The rows lie from ``first`` on, with room for this many tokens each.

        Raises:
            NotImplementedError: for a model that keeps states elsewhere than in its cache.
        """
        self._cache.reserve(first + len(of_rows), room)
        # Sequences of one length beside each other share a call of attention.
        order = sorted(range(len(sequences)), key=lambda n: len(sequences[n]))
        logits = self._read_in_one_row(order, sequences, of_rows, first)
        if logits is None:
            parts = _of_one_length(order, sequences)
            logits = torch.cat([self._read(part, sequences, of_rows, first)[:, -1] for part in parts])
        if getattr(self._model, "_is_stateful", False) and not self._cache.has_states:
            raise _refused(self._model, "keeps its states elsewhere than in its cache")
        place = torch.tensor(order).argsort()
        return logits[place[torch.tensor(of_rows)].to(self._model.device)]

    def add(self, tokens: torch.Tensor, columns: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] after one more token of each of the first B rows, at these columns.

        ``lengths``: of the rows with the token, on the host.
        """
        self._cache.reserve(len(lengths), max(lengths))
        with _limited_time_steps(self._limited_layers):
            return self._add(tokens, columns, lengths)

    def move(self, to: Sequence[int], rows: Sequence[int], used: int) -> None:
        """Copy rows to the places of others."""
        device = self._model.device
        self._cache.move(torch.tensor(to, device=device), torch.tensor(rows, device=device), used)

    def _add(self, tokens: torch.Tensor, columns: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """All rows in one call, or those of one length."""
        if min(lengths) == max(lengths) or self._together:
            return self._add_together(tokens, columns, lengths)
        logits = None
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        for _, run in itertools.groupby(order, key=lambda row: lengths[row]):
            rows = torch.tensor(list(run), device=tokens.device)
            self._cache.adding(rows, columns[rows], lengths[int(rows[0])])
            some = self._forward(tokens[rows, None], columns[rows, None], attention_mask=None)[:, -1]
            self._cache.finish()
            logits = some.new_empty((len(lengths), some.shape[-1])) if logits is None else logits
            logits[rows] = some
        assert logits is not None
        return logits

    def _add_together(self, tokens: torch.Tensor, columns: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """All rows in one call."""
        used, unlike = max(lengths), min(lengths) < max(lengths)
        # With the attention "rl_fn" the model makes masks from the offsets in the cache; the others get masks.
        is_rl_fn = self._implementation == NAME
        self._cache.adding(len(lengths), columns, used, columns if unlike and is_rl_fn else None)
        if self._packed is None:
            # The packed weights are made here, because a row that ends with its first token needs none.
            able = self._together and packs(self._model)
            self._packed = PackedStep(self._model, len(lengths), list(self._windows)) if able else False
        if self._packed:
            return self._packed.logits(tokens, columns, self._cache, self._masks(columns, used))
        masks = self._masks(columns, used) if unlike and not is_rl_fn and self._windows else None
        return self._forward(tokens[:, None], columns[:, None], attention_mask=masks)[:, -1]

    def _can_read_packed(self) -> bool:
        """Whether the model may be one that holds sequences in one row apart, by an attention plan."""
        options = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in self._takes.values())
        stateless = {FULL, SLIDING} >= set(_kinds(self._model)) and not getattr(self._model, "_is_stateful", False)
        return self._implementation == NAME and options and stateless and self._give_positions

    def _read_in_one_row(
        self, order: Sequence[int], sequences: Sequence[Sequence[int]], of_rows: Sequence[int], first: int
    ) -> torch.Tensor | None:
        """Logits [sequences, V] of sequences of unlike length, one behind another; None: the model cannot read so."""
        shortest, longest = len(sequences[order[0]]), len(sequences[order[-1]])
        if not self._read_packed or shortest == longest:
            return None
        lengths = [len(sequences[n]) for n in order]
        plan = AttentionPlan(segments_of(lengths, [None] * len(order)), self._model.device, None)
        logits = self._read(order, sequences, of_rows, first, plan)[0]
        if self._cache.mixed or len(plan.layers) < self._cache.written:
            # A layer has seen all sequences as one. Its keys and values are written again.
            self._read_packed = False
            return None
        return logits

    def _read(
        self,
        part: Sequence[int],
        sequences: Sequence[Sequence[int]],
        of_rows: Sequence[int],
        first: int,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Logits [sequences of the part, 1, V], or [1, sequences, V] with a plan; keys and values go to their rows."""
        lengths = torch.tensor([len(sequences[n]) for n in part])
        starts = lengths.cumsum(0) - lengths
        tokens = torch.tensor([token for n in part for token in sequences[n]], device=self._model.device)
        positions = _counted(lengths).to(tokens.device)
        number = {n: place for place, n in enumerate(part)}
        rows = torch.tensor([(number[n], first + row) for row, n in enumerate(of_rows) if n in number])
        of_row, row = rows.T
        columns = _counted(lengths[of_row])
        source = starts[of_row].repeat_interleave(lengths[of_row]) + columns
        row = row.repeat_interleave(lengths[of_row])
        states = None if plan else rows.to(tokens.device)
        source, row, columns = (x.to(tokens.device) for x in (source, row, columns))
        self._cache.reading(source, row, columns, states)
        if plan is None:
            shape = len(part), int(lengths[0])
            return self._forward(tokens.view(shape), positions.view(shape), attention_mask=None)
        last = (starts + lengths - 1).to(tokens.device)
        options = {"attention_mask": None, "attention_plan": plan}
        return self._forward(tokens[None], positions[None], keep=last, **options)

    def _masks(self, columns: torch.Tensor, used: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks of the first ``used`` columns for each row's new token, [B, 1, 1, used], for each kind of layer."""
        column, place = torch.arange(used, device=columns.device), columns[:, None]
        masks = {}
        for kind, window in self._windows.items():
            visible = column <= place
            if window is not None:
                visible &= column > place - window
            mask = visible[:, None, None]
            if self._implementation == "eager":
                lowest = torch.finfo(self._model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self._model.dtype, device=mask.device).masked_fill(~mask, lowest)
            masks[kind] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: int | torch.Tensor = 1, **options: Any
    ) -> torch.Tensor:
        """Logits [N, kept tokens, V]."""
        options |= {self._cache_name: self._cache, "use_cache": True}
        if self._give_positions:
            options["position_ids"] = positions
        if "logits_to_keep" in self._takes:
            return self._model(input_ids=tokens, logits_to_keep=keep, **options).logits
        logits = self._model(input_ids=tokens, **options).logits
        return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


def _counted(lengths: torch.Tensor) -> torch.Tensor:
    """0 … length − 1 of each, one behind another."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def _of_one_length(order: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of sequences, given by length, in runs of one length."""
    return [list(run) for _, run in itertools.groupby(order, key=lambda n: len(sequences[n]))]


def _refused(model: PreTrainedModel, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"cannot sample from {type(model).__name__} in this process, since it {why}: sample with vLLM "
        "(--rollout.backend vllm)"
    )


def _kinds(model: PreTrainedModel) -> Iterable[str]:
    """The kind of each layer; a layer with attention beside its states is of the attention's kind."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]
    return [FULL if kind == "hybrid" else kind for kind in kinds]


def _windows(model: PreTrainedModel) -> dict[str, int | None]:
    """The window of each kind of attention layer. A token without a window sees all before it."""
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    return {kind: window if kind == SLIDING else None for kind in sorted({*_kinds(model)} - {*STATES})}


def _is_plain(model: PreTrainedModel) -> bool:
    """Whether every token sees all before it in every layer, as far as the configuration says."""
    fields = vars(model.config.get_text_config(decoder=True))
    return {*_kinds(model)} <= {FULL, *STATES} and not any("window" in name and fields[name] for name in fields)
