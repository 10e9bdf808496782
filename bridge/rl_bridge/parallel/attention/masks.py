"""A layer's mask as transformers describes it: made when an operation reads it, else only asked what it says.

Transformers guesses documents from position_ids and would make their [T, T] mask before any layer could say that a plan
holds the documents apart.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import eager_mask, sdpa_mask

Function = Callable[..., Any]
OPS: Any = torch.ops.aten
PAD = "pad the rows: packing=False and share_prefixes=False (--no-packing --no-share-prefixes), one rank a sequence"
"""The way on where a plan cannot say what a layer's mask says."""


class LayerMask(torch.Tensor):
    """The mask of eager attention, [N, 1, Tq, Tk], which is added to scores. Any operation on it makes it.

    Models that compute with their mask compute what they do in eager attention: a mask for SDPA is boolean, and None
    where SDPA needs none.
    """

    options: dict[str, Any]
    # Operations go straight to where they are dispatched.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, **options: Any) -> "LayerMask":
        """``options``: what transformers calls a function that makes masks with."""
        queries = options["q_length"] if "q_length" in options else len(options["cache_position"])
        shape = (options["batch_size"], 1, int(queries), int(options["kv_length"]))
        kind = {"dtype": options.get("dtype", torch.float32), "device": torch.device(options.get("device", "cpu"))}
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, **kind)  # type: ignore[attr-defined]
        mask.options = options
        return mask

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Compute with masks that are made. A copy of another dtype, as FSDP makes it, or none, is not."""
        options = options or {}
        if function in (OPS.detach.default, OPS._to_copy.default) and set(options) <= {"dtype"}:
            return LayerMask(**arguments[0].options | options)
        arguments, options = tree_map_only(LayerMask, lambda mask: mask.made(), (arguments, options))
        return function(*arguments, **options)

    def __repr__(self, **_: Any) -> str:
        """The mask's size and rules, without its values."""
        return f"LayerMask({tuple(self.shape)}, {', '.join(self.says())})"

    @functools.cached_property
    def for_sdpa(self) -> torch.Tensor | None:
        """The mask as SDPA takes it: boolean, or None where it is causal or all is seen."""
        return _mask_by(sdpa_mask, self.options)

    def made(self) -> torch.Tensor:
        """The mask's values."""
        return _mask_by(eager_mask, self.options | {"allow_is_bidirectional_skip": False})

    @functools.cached_property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return "causal_mask_function" in self.says()

    def says(self) -> list[str]:
        """The names of the rules that a key that is seen keeps, all of them."""
        return [_name(function) for function in _conjuncts(self.options["mask_function"])]

    def window(self, longest: int) -> int | None:
        """The sliding window of a causal mask: what it says of documents of at most ``longest`` tokens.

        That neighbours in different documents do not see each other is not asked.

        Raises:
            ValueError: for padding, or for any other rule.
        """
        if self.options.get("attention_mask") is not None:
            raise ValueError("pass attention_mask=None with an attention plan: documents and padding are in the plan")
        window = None
        for function in _conjuncts(self.options["mask_function"]):
            name = _name(function)
            if name == "sliding_window_overlay":
                window = int(inspect.getclosurevars(function).nonlocals["sliding_window"])
            elif name == "chunked_overlay" and longest <= inspect.getclosurevars(function).nonlocals["chunk_size"]:
                continue
            elif name not in ("causal_mask_function", "packed_sequence_mask_function"):
                raise ValueError(f"attention by a plan has no {name}, and a document has {longest} tokens: {PAD}")
        if not self.causal:
            raise ValueError(f"attention by a plan is causal, and this layer's is {', '.join(self.says())}: {PAD}")
        return window


def _mask_by(make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A mask of transformers. Where ``q_offset`` is a tensor [N], each row's one query has a position of its own."""
    offset = options.get("q_offset")
    if not isinstance(offset, torch.Tensor) or offset.dim() == 0:
        return make(**options)
    rows = len(offset)
    # The rows' queries as those of one row: what a query sees is a matter of its position and the keys'.
    single_row = {"batch_size": 1, "q_length": rows, "q_offset": offset - torch.arange(rows, device=offset.device)}
    return make(**options | single_row | {"allow_is_causal_skip": False}).transpose(0, 2)


def _conjuncts(function: Function) -> Iterator[Function]:
    """The rules that a mask function of transformers joins by "and"."""
    if _name(function) != "and_masks":
        yield function
        return
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        yield from _conjuncts(part)


def _name(function: Function) -> str:
    """The name of the function of transformers that made this one, or its own."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.split(".<locals>")[0]
