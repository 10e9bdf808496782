"""One signature for all backends of ``int8_matmul``."""

import torch
from torch import Tensor

from rl_kernels.backends import implementation


def int8_matmul(
    x: Tensor,
    weight_q: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    half_range: float = 127.5,
    backend: str | None = None,
) -> Tensor:
    """A linear layer with int8 weights and, a token at a time, int8 activations (W8A8).

    q, s = quantize_int8(x);  y = (Σ q·weight_q) · s · weight_scale + bias

    The sum is exact (int32); what follows is float32, rounded to x's dtype at the end. A token's result therefore does
    not depend on its batch. A token with NaN or infinity gives NaN.

    Args:
        x: ``[…, K]`` in float32, bfloat16 or float16; K from 1 to 131071, so that no sum overflows.
        weight_q: int8 ``[N, K]``, as ``quantize_`` writes it.
        weight_scale: float32, one scale for each of the N rows (``[N]`` or ``[N, 1]``), or one for all.
        bias: ``[N]``, in any float dtype.
        half_range: of the activations, as in ``rl_fn.quantize_int8``.
        backend: ``"torch"``, ``"triton"`` or ``"reference"`` (rl_fn's codes, XLA's matmul). None takes the best.

    Returns:
        ``[…, N]`` in x's dtype. Rounding has no gradient: a backward through it raises.

    Raises:
        ValueError: shapes, dtypes and devices that do not fit.
        NotImplementedError: a backend that does not exist or cannot run here; a gradient.

    >>> codes, scale = torch.tensor([[127, 0], [-64, 64]], dtype=torch.int8), torch.tensor([0.5, 1.0])
    >>> int8_matmul(torch.tensor([[127.0, -254.0]]), codes, scale, half_range=127.0).tolist()
    [[8128.0, -24448.0]]
    """
    if not x.dim() or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"x must be float32, bfloat16 or float16 with at least one axis, got {x.dtype} {tuple(x.shape)}"
        )
    if weight_q.dtype != torch.int8 or weight_q.dim() != 2 or weight_q.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight_q must be int8 [N, {x.shape[-1]}] for x {tuple(x.shape)}, "
            f"got {weight_q.dtype} {tuple(weight_q.shape)}"
        )
    out_features, in_features = weight_q.shape
    if not 1 <= in_features < 1 << 17:
        raise ValueError(f"x must have a last axis from 1 to 131071, got {in_features}")
    if weight_scale.dtype != torch.float32 or weight_scale.shape not in (
        (out_features,),
        (out_features, 1),
        (1,),
        (1, 1),
        (),
    ):
        raise ValueError(
            f"weight_scale must be float32 {(out_features,)}, {(out_features, 1)} or one number, "
            f"got {weight_scale.dtype} {tuple(weight_scale.shape)}"
        )
    if bias is not None and (bias.shape != (out_features,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be floats {(out_features,)}, got {bias.dtype} {tuple(bias.shape)}")
    for name, tensor in (("weight_q", weight_q), ("weight_scale", weight_scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got {tensor.device}")
    if not 127 <= half_range <= 128:
        raise ValueError(f"half_range must be within [127, 128], got {half_range}")
    scale = weight_scale.reshape(-1).expand(out_features).contiguous()
    added = None if bias is None else bias.float()
    y = _int8_matmul(x.reshape(-1, in_features), weight_q, scale, added, half_range, backend)
    return y.view(*x.shape[:-1], out_features)


@torch.library.custom_op("rl_kernels::int8_matmul", mutates_args=())
def _int8_matmul(
    x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, half_range: float, backend: str | None
) -> Tensor:
    y = x.new_empty(len(x), len(weight_q))
    if y.numel():
        implementation("int8_matmul", x.device.type, backend).forward(x, weight_q, weight_scale, bias, half_range, y)
    return y


@_int8_matmul.register_fake
def _(x, weight_q, weight_scale, bias, half_range, backend):
    return x.new_empty(len(x), len(weight_q))


def _no_gradient(ctx, cotangent):
    raise NotImplementedError(
        "int8_matmul is for inference: rounding to int8 has no gradient. Call it under torch.no_grad(), and train with "
        "the weights that were quantised"
    )


_int8_matmul.register_autograd(_no_gradient)
