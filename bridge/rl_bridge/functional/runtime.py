"""Operations that generated code calls: the few that are not one torch operation."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rl_bridge.functional.dtypes import torch_dtype


def tracing() -> bool:
    """Whether operations are being recorded (torch.compile, torch.export) rather than run."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


@functools.lru_cache(maxsize=4096)
def _cached_scalar(value: bool | int | float, text: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    del text  # tells 0.0 from -0.0 and True from 1 in the cache's key
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def scalar(value: bool | int | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero-dimensional constant; cached per device, so that the call launches nothing."""
    if tracing():
        return torch.full((), value, dtype=dtype, device=device)
    return _cached_scalar(value, repr(value), dtype, device)


class Constant:
    """A captured array, copied once to each device that it is used on."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self._copies: dict[torch.device, Tensor] = {}

    def _build(self, device: torch.device) -> Tensor:
        # Via float64 lists: NumPy has no bfloat16 or float8 that torch would read.
        dtype = torch_dtype(self._array.dtype)
        wide = self._array.astype(np.float64) if dtype.is_floating_point else self._array
        return torch.tensor(wide.tolist(), dtype=dtype, device=device).reshape(self._array.shape)

    def on(self, device: torch.device) -> Tensor:
        if tracing():  # a cached copy would be a fake tensor, and would outlive its mode
            return self._build(device)
        if device not in self._copies:
            with torch.inference_mode(False):
                self._copies[device] = self._build(device)
        return self._copies[device]


# -- element-wise ----------------------------------------------------------------------------------------------------
def absolute(x: Tensor) -> Tensor:
    # The derivative of |x| at 0 is 1 in JAX, and 0 in torch.
    if x.is_floating_point() and x.requires_grad and torch.is_grad_enabled():
        return torch.where(x >= 0, x, -x)
    return torch.abs(x)


def sign(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), x.detach(), torch.sign(x)) if x.is_floating_point() else torch.sign(x)


def round_away(x: Tensor) -> Tensor:
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


def cbrt(x: Tensor) -> Tensor:
    # sign(x) * |x| ** (1/3) would have the derivative 0 * inf at 0; JAX's is inf.
    root = torch.where(x < 0, -x, x) ** (1 / 3)
    return torch.where(x < 0, -root, root)


def remainder(x: Tensor, y: Tensor) -> Tensor:
    """fmod, whose float32 form for vectors on the CPU is NaN where x / y overflows; in float64 no digit is lost."""
    if x.device.type == "cpu":
        return torch.fmod(x.double(), y.double()).to(x.dtype)
    return torch.fmod(x, y)


def clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    result = torch.minimum(torch.maximum(x, low), high)
    if not x.is_floating_point():
        return result
    # At a bound torch gives the gradient to x or shares it; lax.clamp drops it, and that of bounds that are equal too.
    outside = torch.where((x < low) & (low < high), low, torch.where(x > high, high, result.detach()))
    return torch.where((x > low) & (x < high), x, outside)


def integer_divide(a: Tensor, b: Tensor) -> Tensor:
    """Truncating. By 0 it is -1 as in XLA; neither 0 nor -1 is left to the CPU, where min / -1 ends the process."""
    quotient = torch.div(a, b.masked_fill((b == 0) | (b == -1), 1), rounding_mode="trunc")
    return torch.where(b == 0, torch.full_like(b, -1), torch.where(b == -1, -quotient, quotient))


def integer_remainder(a: Tensor, b: Tensor) -> Tensor:
    """The sign is a's; by 0 it is a, as in XLA."""
    remainder = torch.fmod(a, b.masked_fill((b == 0) | (b == -1), 1))
    return torch.where(b == 0, a, remainder)


def select(which: Tensor, *cases: Tensor) -> Tensor:
    result = cases[-1]
    for number in range(len(cases) - 2, -1, -1):
        result = torch.where(which <= number, cases[number], result)
    return result


def total_order(x: Tensor) -> Tensor:
    """Integers in the order of the numbers: the bits of a float, those under the sign flipped where it is negative."""
    width = 8 * x.element_size()
    bits = x.detach().view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    return torch.where(bits < 0, bits ^ (2 ** (width - 1) - 1), bits)


def _unsigned(x: Tensor, width: int) -> Tensor:
    """The bits as a non-negative int64: torch shifts signed integers arithmetically, and unsigned ones not at all."""
    return x.to(torch.int64) & (2**width - 1)


def shift_right_logical(x: Tensor, by: Tensor, width: int) -> Tensor:
    distance = _unsigned(by, width)
    return torch.where(distance < width, _unsigned(x, width) >> distance.clamp(max=width), 0).to(x.dtype)


def population_count(x: Tensor, width: int) -> Tensor:
    bits = _unsigned(x, width)
    return sum(((bits >> i) & 1 for i in range(width)), start=torch.zeros_like(bits)).to(x.dtype)


def clz(x: Tensor, width: int) -> Tensor:
    bits = _unsigned(x, width)
    return sum((bits < 2**i for i in range(width)), start=torch.zeros_like(bits)).to(x.dtype)


# -- reductions and scans along an axis ------------------------------------------------------------------------------
def product(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, dtype=x.dtype)
    return x


def extremum(x: Tensor, axes: tuple[int, ...], largest: bool, empty: bool | int | float) -> Tensor:
    if any(x.shape[axis] == 0 for axis in axes):
        shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
        return torch.full(shape, empty, dtype=x.dtype, device=x.device)
    return torch.amax(x, axes) if largest else torch.amin(x, axes)


def argument(x: Tensor, axis: int, largest: bool, dtype: torch.dtype) -> Tensor:
    x = x.to(torch.uint8) if x.dtype == torch.bool else x
    return (torch.argmax(x, axis) if largest else torch.argmin(x, axis)).to(dtype)


def cumulative_extremum(x: Tensor, axis: int, largest: bool, reverse: bool) -> Tensor:
    """In JAX's order of operations, which decides how a tie shares its gradient (torch.cummax gives all to one)."""
    pick = torch.maximum if largest else torch.minimum
    x = torch.flip(x, (axis,)) if reverse else x
    (result,) = _scan_forward(lambda a, b: (pick(a, b),), [x], axis)
    return torch.flip(result, (axis,)) if reverse else result


def _scan_forward(combine: Callable[..., Sequence[Tensor]], elements: list[Tensor], axis: int) -> list[Tensor]:
    size = elements[0].shape[axis]
    if size < 2:
        return elements

    def cut(x: Tensor, start: int, stop: int, step: int = 1) -> Tensor:
        return x[(slice(None),) * axis + (slice(start, stop, step),)]

    pairs = size // 2
    left, right = [cut(e, 0, 2 * pairs, 2) for e in elements], [cut(e, 1, size, 2) for e in elements]
    odd = _scan_forward(combine, list(combine(*left, *right)), axis)
    later = (size + 1) // 2 - 1  # even positions after the first
    if later:
        even = combine(*[cut(o, 0, later) for o in odd], *[cut(e, 2, size, 2) for e in elements])
        even = [torch.cat([cut(e, 0, 1), tail], axis) for e, tail in zip(elements, even, strict=True)]
    else:
        even = [cut(e, 0, 1) for e in elements]
    return [_interleave(e, o, axis, size) for e, o in zip(even, odd, strict=True)]


def _interleave(even: Tensor, odd: Tensor, axis: int, size: int) -> Tensor:
    pairs = size // 2
    head = even.narrow(axis, 0, pairs)
    woven = torch.stack([head, odd], axis + 1).flatten(axis, axis + 1)
    return torch.cat([woven, even.narrow(axis, pairs, 1)], axis) if size % 2 else woven


# -- order -----------------------------------------------------------------------------------------------------------
def sort(operands: Sequence[Tensor], axis: int, keys: int) -> tuple[Tensor, ...]:
    """Stable and lexicographic in the first `keys` operands, NaN last."""
    if keys == 1 and len(operands) == 1:
        return (torch.sort(operands[0], dim=axis, stable=True).values,)
    order: Tensor | None = None
    for key in reversed(operands[:keys]):
        key = key.detach() if order is None else torch.gather(key.detach(), axis, order)
        step = torch.sort(key, dim=axis, stable=True).indices
        order = step if order is None else torch.gather(order, axis, step)
    assert order is not None
    return tuple(torch.gather(x, axis, order) for x in operands)


def top_k(x: Tensor, k: int, axis: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By a stable sort: torch.topk leaves open which of several equal entries it returns."""
    values, indices = torch.sort(x, dim=axis, descending=True, stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k).to(dtype)


# -- padding ---------------------------------------------------------------------------------------------------------
def pad(x: Tensor, config: Sequence[tuple[int, int, int]], fill: bool | int | float | Tensor) -> Tensor:
    """lax.pad: `(low, high, interior)` per axis, negative amounts cut."""
    if isinstance(fill, Tensor):
        outside = pad(torch.zeros(x.shape, dtype=torch.bool, device=x.device), config, True)
        return torch.where(outside, fill, pad(x, config, 0))
    for axis, (_, _, interior) in enumerate(config):
        size = x.shape[axis]
        if interior and size > 1:
            rest = list(x.shape)
            rest.insert(axis + 1, interior)
            gaps = torch.full(rest, fill, dtype=x.dtype, device=x.device)
            spread = torch.cat([x.unsqueeze(axis + 1), gaps], axis + 1).flatten(axis, axis + 1)
            x = spread.narrow(axis, 0, size + (size - 1) * interior)
    for axis, (low, high, _) in enumerate(config):
        if low < 0 or high < 0:
            start = max(-low, 0)
            x = x.narrow(axis, start, max(x.shape[axis] - start - max(-high, 0), 0))
        low, high = max(low, 0), max(high, 0)
        if low or high:
            ends = [[*x.shape[:axis], width, *x.shape[axis + 1 :]] for width in (low, high)]
            before, after = (torch.full(end, fill, dtype=x.dtype, device=x.device) for end in ends)
            x = torch.cat([part for part, width in ((before, low), (x, 1), (after, high)) if width], axis)
    return x


# -- arguments -------------------------------------------------------------------------------------------------------
def narrow(x: Tensor, position: int) -> Tensor:
    """int64 to the int32 that JAX computes in, refusing what does not fit."""
    small = x.to(torch.int32)
    fits = (small == x).all()
    message = (
        f"from_jax: traced argument {position} has int64 values beyond int32, in which JAX computes; see docs/bridge.md"
    )
    if tracing() or x.device.type != "cpu":
        torch.ops.aten._assert_async.msg(fits, message)  # raises on the device, without waiting for it
    elif not fits:
        raise ValueError(message)
    return small
