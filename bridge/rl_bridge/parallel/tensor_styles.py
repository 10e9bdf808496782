"""The styles of tensor-parallel plans: the part of a module that a rank holds, what it computes, its collectives.

Between modules an activation is either whole, the same on every rank, with a gradient that is whole and the same, or
cut along its last axis (its heads, for attention) with a gradient of that part. A style says which of the two a module
takes and returns. Every collective of a style is one that all ranks make, whatever the values are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

# Collectives of tensor parallelism that gradients flow through.


class SumValues(torch.autograd.Function):
    """The sum of the ranks' parts; every rank's part gets the gradient of the sum, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class SumGradients(torch.autograd.Function):
    """The value itself, which all ranks have and each uses for its own part: the ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Concatenate(torch.autograd.Function):
    """The ranks' equal parts of the last axis side by side; every rank keeps the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.start = part.shape[-1], dist.get_rank(group) * part.shape[-1]
        return _side_by_side(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.narrow(-1, ctx.start, ctx.width).contiguous(), None


class Split(torch.autograd.Function):
    """This rank's equal part of the last axis of a value that all ranks have; the gradients are put side by side."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, width = group, whole.shape[-1] // dist.get_world_size(group)
        return whole.narrow(-1, dist.get_rank(group) * width, width).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _side_by_side(gradient, ctx.group), None


def _side_by_side(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, -1)


# The styles by their names in transformers' plans: the part that a rank holds, and what the rank computes.

EXPERTS = "moe_tp_experts"
# By style and name of a parameter, the dimension along which it is cut.
CUTS: dict[str, dict[str, int]] = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather_output": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "rowwise_split_input": {"weight": 1},
    "replicated_with_grad_allreduce": {},
    "mla_kv_a_proj": {},
}


class SharedInput:
    """The input of several cut matrices: one sum of its gradients for all that read it, instead of one each."""

    def __init__(self, reader: nn.Module, group: dist.ProcessGroup) -> None:
        """``reader`` holds the matrices; what is kept during its forward pass is let go after it."""
        self._group = group
        self._shared: tuple[Tensor, Tensor] | None = None
        reader.register_forward_hook(self._let_go, always_call=True)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` for a cut matrix."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._shared is None or self._shared[0] is not x:
            self._shared = x, SumGradients.apply(x, self._group)
        return self._shared[1]

    def _let_go(self, *_: Any) -> None:
        self._shared = None


def apply_style(style: str, module: nn.Module, mesh: DeviceMesh, shared: SharedInput, rotary: int) -> None:
    """Cut ``module``'s parameters and have its forward pass exchange what the style says.

    Args:
        style: one of ``CUTS``, or ``EXPERTS``.
        module: a linear layer, a norm, or a mixture's experts.
        mesh: the tensor ranks.
        shared: of the module that holds this one.
        rotary: how many last columns of "mla_kv_a_proj" go to the heads without another matrix.
    """
    group = mesh.get_group()
    if style == EXPERTS:
        cut_parameters(module, mesh, dict.fromkeys(module._parameters, 0))
        experts: Any = module
        experts.num_experts //= mesh.size()
        experts._is_expert_parallel = True
        run(module, partial(_experts, group=group, forward=module.forward))
        return
    cut_parameters(module, mesh, CUTS[style])
    forwards: dict[str, Callable[..., Any]] = {
        "colwise": partial(_columns, shared=shared),
        "colwise_gather_output": partial(_gathered_columns, shared=shared, group=group),
        "rowwise": partial(_rows, group=group),
        "rowwise_split_input": partial(_rows_of_whole, group=group),
        "replicated_with_grad_allreduce": partial(_for_own_heads, group=group, forward=module.forward),
        "mla_kv_a_proj": partial(_latents, group=group, forward=module.forward, rotary=rotary),
    }
    run(module, forwards[style])


def cut_parameters(module: nn.Module, mesh: DeviceMesh, dims: dict[str, int]) -> None:
    """Replace parameters by DTensors that are cut along a dimension; every rank has the whole value already."""
    for name, dim in dims.items():
        parameter = getattr(module, name, None)
        if parameter is not None and not isinstance(parameter, DTensor):
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def run(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have ``forward(module, …)`` in place of the module's own."""
    module.forward = partial(forward, module)


def with_local_parameters(module: Any, *args: Any, forward: Callable[..., Any], **kwargs: Any) -> Any:
    """A module's own forward pass, for which its cut parameters are this rank's parts."""
    with _parameters(module, local):
        return forward(*args, **kwargs)


def embed(module: Any, ids: Tensor, *args: Any, group: dist.ProcessGroup, forward: Callable[..., Tensor]) -> Tensor:
    """Vectors of the tokens whose rows this rank holds, zero for the others; summed over the ranks."""
    rows = len(local(module.weight))
    local_ids = ids - dist.get_rank(group) * rows
    others = (local_ids < 0) | (local_ids >= rows)
    whole = module.padding_idx
    padding = None if whole is None else whole % module.num_embeddings - dist.get_rank(group) * rows
    module.padding_idx = padding if padding is not None and 0 <= padding < rows else None
    try:
        with _parameters(module, local):
            vectors = forward(local_ids.masked_fill(others, 0), *args)
    finally:
        module.padding_idx = whole
    return SumValues.apply(vectors.masked_fill(others[..., None], 0.0), group)


def logits(module: Any, hidden: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Logits of the whole vocabulary on every rank."""
    return Concatenate.apply(_linear(module, SumGradients.apply(hidden, group)), group)


def local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def _parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The module's own parameters are changed ones for a while; those that it has not (a bias) stay None."""
    whole = dict(module._parameters)
    changed: Any = {name: change(p) for name, p in whole.items() if p is not None}
    module._parameters.update(changed)
    try:
        yield
    finally:
        module._parameters.update(whole)


def _linear(module: Any, x: Tensor) -> Tensor:
    return functional.linear(x, local(module.weight), None if module.bias is None else local(module.bias))


def _columns(module: Any, x: Tensor, *, shared: SharedInput) -> Tensor:
    """This rank's outputs of a whole input."""
    return _linear(module, shared(x))


def _gathered_columns(module: Any, x: Tensor, *, shared: SharedInput, group: dist.ProcessGroup) -> Tensor:
    """All outputs of a whole input, of which each rank computes a part."""
    return Concatenate.apply(_linear(module, shared(x)), group)


def _rows(module: Any, x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All outputs, of which this rank's inputs make a part."""
    total = SumValues.apply(functional.linear(x, local(module.weight)), group)
    return total if module.bias is None else total + module.bias


def _rows_of_whole(module: Any, x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All outputs of a whole input, of which each rank uses a part."""
    return _rows(module, Split.apply(x, group), group=group)


def _for_own_heads(module: Any, *args: Any, group: dist.ProcessGroup, forward: Callable[..., Any]) -> Any:
    """A module whose whole parameters work on this rank's heads."""
    with _parameters(module, lambda p: SumGradients.apply(p, group)):
        return forward(*args)


def _latents(
    module: Any, x: Tensor, *, group: dist.ProcessGroup, forward: Callable[..., Tensor], rotary: int
) -> Tensor:
    """The whole projection of multi-head latent attention: its last columns go to this rank's heads as they are."""
    latents = forward(x)
    return torch.cat([latents[..., :-rotary], SumGradients.apply(latents[..., -rotary:], group)], -1)


def _experts(
    module: Any,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    group: dist.ProcessGroup,
    forward: Callable[..., Any],
) -> Tensor:
    """A mixture's outputs [N, H] of rows [N, H], their experts [N, K] and weights [N, K], summed over the ranks.

    Each rank has equally many experts. A foreign one has the weight 0, and the number that transformers leaves out.
    """
    count = module.num_experts
    index = index - dist.get_rank(group) * count
    foreign = (index < 0) | (index >= count)
    # transformers' own loop over experts knows no number to leave out in some families: the first one, times 0.
    left_out = 0 if module.config._experts_implementation == "eager" else count
    weights = SumGradients.apply(weights, group).masked_fill(foreign, 0.0)
    with _parameters(module, local):
        part = forward(SumGradients.apply(hidden, group), index.masked_fill(foreign, left_out), weights)
    return SumValues.apply(part, group)
