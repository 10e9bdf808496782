"""The sending end of a sync: weights under their Hugging Face names, and transforms on their way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from rl_bridge.weights.manifest import is_peft, module_tensors
from rl_kernels import quantize_

Through = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""A map at the source: (name, whole tensor) -> the (name, tensor) pairs that are sent in their place.

It is also called with meta tensors, so that names, shapes and dtypes are known before anything is overwritten.
"""


@dataclass(frozen=True)
class Cast:
    """Send floating-point weights as ``dtype``: float32 master weights to a bfloat16 rollout.

    >>> list(Cast(torch.bfloat16)("w", torch.ones(2)))
    [('w', tensor([1., 1.], dtype=torch.bfloat16))]
    """

    dtype: torch.dtype

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The pair in the other dtype; integers stay."""
        yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def needs_whole_tensors(through: Through | None) -> bool:
    """Whether the map must see whole tensors. A cast works on shards, so that fewer bytes are gathered."""
    return through is not None and not isinstance(through, Cast)


Precision = Literal["fp32", "bf16", "int8", "fp8", "fp8_channel", "fp8_block"]
"""Numbers that the matrices of a rollout are held in."""
BLOCK = 128
"""Side of a block of "fp8_block"."""


class Layout(NamedTuple):
    """The arguments of ``quantize_``: its scheme, and the part of a matrix that shares a scale."""

    scheme: str
    granularity: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return torch.int8 if self.scheme == "int8" else torch.float8_e4m3fn

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of a weight's scales in compressed-tensors: ``[1]``, ``[out, 1]`` or ``[out/b, in/b]``."""
        out, columns = shape
        if self.granularity == "tensor":
            return (1,)
        return (out, 1) if self.granularity == "channel" else (-(-out // BLOCK), -(-columns // BLOCK))


LAYOUTS: dict[str, Layout] = {
    "int8": Layout("int8", "channel"),
    "fp8": Layout("fp8", "tensor"),
    "fp8_channel": Layout("fp8", "channel"),
    "fp8_block": Layout("fp8", "block"),
}
"""The precisions that have codes and scales."""


@dataclass(frozen=True)
class Quantize:
    """Send some weights as codes and fresh scales, ``X.weight`` and ``X.weight_scale``, and all others in ``dtype``.

    A weight is rounded to ``dtype`` first, so that the codes are of the bytes that a plain sync would send: scales of
    the trainer's float32 master weights would be of another model than the one that is scored.

    >>> send = Quantize("int8", frozenset({"up.weight"}), dtype=torch.float32)
    >>> [(name, tensor.tolist()) for name, tensor in send("up.weight", torch.tensor([[127.5, -1.0, 0.4]]))]
    [('up.weight', [[127, -1, 0]]), ('up.weight_scale', [[1.0]])]
    """

    precision: str
    names: frozenset[str]
    """Names of the weights that become codes, ``[out, in]`` each."""
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse a precision without codes, and names that no scale's name can be made from."""
        if self.precision not in LAYOUTS:
            raise ValueError(f"precision must be one of {', '.join(LAYOUTS)}, got {self.precision!r}")
        if odd := sorted(name for name in self.names if not name.endswith(".weight")):
            raise ValueError(f"only tensors named ….weight are quantised, got {odd[0]!r}")

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are sent for this one. Meta tensors give the same names, shapes and dtypes.

        Raises:
            ValueError: a weight that is not ``[out, in]``, or has numbers that are not finite.
        """
        rounded = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        if name not in self.names:
            yield name, rounded
            return
        if tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.numel():
            raise ValueError(f"weight {name!r} cannot be quantised: it is {tensor.dtype} {tuple(tensor.shape)}")
        layout = LAYOUTS[self.precision]
        codes = torch.empty(tensor.shape, dtype=layout.dtype, device=tensor.device)
        scale = torch.empty(layout.scale_shape(tensor.shape), device=tensor.device)
        if not tensor.is_meta:
            quantize_([rounded], [codes], [scale], scheme=layout.scheme, granularity=layout.granularity, block=BLOCK)
            if not bool(scale.isfinite().all()):
                raise ValueError(f"weight {name!r} has numbers that are not finite: it cannot be quantised")
        yield name, codes
        yield f"{name}_scale", scale


def precision_map(precision: Precision, model: nn.Module, *, dtype: torch.dtype) -> Through:
    """The map that a sync to a rollout of this precision needs; ``dtype`` is of everything that has no codes.

    ``model`` may lie on the meta device: its structure says what is quantised.
    """
    return Quantize(precision, linear_weights(model), dtype=dtype) if precision in LAYOUTS else Cast(dtype)


def linear_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights of all linear layers but the head, which is kept high as embeddings and norms are.

    Raises:
        ValueError: there are none.
    """
    output: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = None if output is None else output()
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    if not names:
        raise ValueError(f"{type(model).__name__} has no linear layers besides its head: nothing can be quantised")
    return frozenset(names)


_IN_CHARGE = "_rl_bridge_in_charge"


class WeightSource(Protocol):
    """The weights that an engine sends. All workers of the engine walk through them together and in the same order."""

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Names, and tensors whose shape, dtype and placement are those of the stream; their values do not count."""
        ...

    def stream(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The same names with values: plain tensors are whole and equal on all workers, DTensors are sharded."""
        ...

    def adapter_config(self) -> dict[str, Any]:
        """The configuration that travels with ``adapter=True``; a source without adapters raises ValueError."""
        ...


@runtime_checkable
class SendsWeights(Protocol):
    """A module that says itself what it sends, because its own parameters are not the Hugging Face model's."""

    def weight_source(self) -> WeightSource:
        """The weights, under the names that the other end knows."""
        ...


class ModuleSource:
    """All parameters (tied ones once, under their first name) and persistent buffers of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        """``module``: plain, or sharded by FSDP2 and DTensor tensor parallelism."""
        self._module = module

    def outline(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own tensors."""
        if adapter:
            self.adapter_config()
        return module_tensors(self._module)

    def stream(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own tensors, detached.

        Raises:
            ValueError: the weights were freed.
        """
        for name, tensor in self.outline(adapter=adapter):
            if tensor.device.type == "meta":
                raise ValueError(f"weight {name!r} has no values here: it is on the meta device")
            yield name, tensor.detach()

    def adapter_config(self) -> dict[str, Any]:
        """There is none."""
        raise ValueError(f"adapter=True needs a peft model, got {type(self._module).__name__}")


def source_of(module: Any) -> WeightSource:
    """The source of an engine's module: what the module says, a peft model's, or the module's own tensors."""
    owner = in_charge_of(module)
    if isinstance(owner, SendsWeights):
        return owner.weight_source()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{type(module).__name__} sends no weights: it is no torch module and has no weight_source()")
    return own_source(module)


def put_in_charge(owner: Any, module: torch.nn.Module) -> None:
    """Let ``owner`` say what a module sends and takes that does not say so itself."""
    vars(module)[_IN_CHARGE] = owner


def in_charge_of(module: Any) -> Any:
    """The object that was put in charge of a module, or else the module."""
    return vars(module).get(_IN_CHARGE, module) if isinstance(module, torch.nn.Module) else module


def own_source(module: torch.nn.Module) -> WeightSource:
    """A peft model's weights, or the module's own tensors."""
    if is_peft(module):
        from rl_bridge.weights.adapters import PeftSource

        return PeftSource(module)
    return ModuleSource(module)
