"""Operations that generated code calls: the few that are not one torch operation."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rl_bridge.functional.crossing import torch_dtype

# dot_general as torch.einsum, which torch.autocast leaves alone in the forward and in the backward.


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """A region in which operations compute in the precision of their arguments, as JAX's do."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


class _Contraction(torch.autograd.Function):
    """An einsum of two operands. Its gradients run after the program, so each turns autocast off by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(letters: tuple[str, str, str], x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right, result = letters
        with without_autocast(x.device.type):
            return torch.einsum(f"{left},{right}->{result}", x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[tuple[str, str, str], Tensor, Tensor], output: Tensor) -> None:
        ctx.letters, x, y = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right, result = ctx.letters
        x, y = ctx.saved_tensors
        _, for_x, for_y = ctx.needs_input_grad
        return (
            None,
            contract((result, right, left), cotangent, y) if for_x else None,
            contract((left, result, right), x, cotangent) if for_y else None,
        )


def contract(letters: tuple[str, str, str], x: Tensor, y: Tensor) -> Tensor:
    """einsum of the letters of the two operands and of the result; each letter stands in two of the three."""
    return _Contraction.apply(letters, x, y)  # pyright: ignore[reportReturnType]


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


def to_integer(x: Tensor, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """The integers of numbers as XLA converts them: the nearest of ``low`` … ``high``, and 0 for NaN."""
    # float64 has every value of the narrower floats, and both comparisons are with a power of two or with 0.
    x = x.detach().double()
    inside = (x >= low) & (x < float(high + 1))
    if high > torch.iinfo(torch.int64).max:  # torch compares and selects hardly any uint64
        shift = 2.0**63
        upper = inside & (x >= shift)
        # The bits of the upper half are those of the negative int64.
        bits = torch.where(upper, x - 2.0 * shift, torch.where(inside, x, 0.0)).to(torch.int64)
        return torch.where(x >= float(high + 1), -1, bits).view(dtype)
    whole = torch.where(inside, x, 0.0).to(torch.int64)
    return torch.where(x >= float(high + 1), high, torch.where(x < low, low, whole)).to(dtype)


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
    result = _scan_forward(pick, x, axis)
    return torch.flip(result, (axis,)) if reverse else result


def _scan_forward(pick: Callable[[Tensor, Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
    size = x.shape[axis]
    if size < 2:
        return x

    def cut(x: Tensor, start: int, stop: int, step: int = 1) -> Tensor:
        return x[(slice(None),) * axis + (slice(start, stop, step),)]

    pairs = size // 2
    odd = _scan_forward(pick, pick(cut(x, 0, 2 * pairs, 2), cut(x, 1, size, 2)), axis)
    even = cut(x, 0, 1)
    later = (size + 1) // 2 - 1  # even positions after the first
    if later:
        even = torch.cat([even, pick(cut(odd, 0, later), cut(x, 2, size, 2))], axis)
    woven = torch.stack([even.narrow(axis, 0, pairs), odd], axis + 1).flatten(axis, axis + 1)
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


# Nested functions as generated code calls them: custom derivatives, cond, scan, while.

_ONCE = "from_jax: create_graph=True through a jax.custom_vjp or custom_jvp function, whose rule is differentiated once"
Function = Callable[..., Sequence[Tensor]]


class _Custom(torch.autograd.Function):
    """A function whose derivative JAX code defines. Its residuals are not differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, forward: Function, backward: Function, results: int, floats: int, wanted: Any, *arguments: Tensor
    ) -> Any:
        values = forward(*arguments)
        outputs, residuals = values[:results], values[results:]
        ctx.rule, ctx.floats, ctx.wanted = backward, floats, wanted
        ctx.mark_non_differentiable(*[x for x in outputs if not x.is_floating_point()])
        ctx.save_for_backward(*residuals)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            # Not once_differentiable: it looks at the cotangents alone, and loses what depends on the residuals.
            raise RuntimeError(_ONCE)
        gradients = iter(ctx.rule(*ctx.saved_tensors, *cotangents[: ctx.floats]))
        return (None,) * 5 + tuple(next(gradients) if needed else None for needed in ctx.wanted)


def custom(
    forward: Function, backward: Function, results: int, floats: int, wanted: tuple[bool, ...], *arguments: Tensor
) -> Sequence[Tensor]:
    """`forward` returns the results, floating ones first, then the residuals.

    `backward` takes the residuals and the cotangents; `wanted` says which arguments have a gradient.
    """
    return _Custom.apply(forward, backward, results, floats, wanted, *arguments)  # pyright: ignore[reportReturnType]


def cond(which: Tensor, branches: Sequence[Function], *operands: Tensor) -> list[Tensor]:
    """Runs every branch and selects by number, so that the number never leaves the device. JAX has brought it in range.

    A branch not taken gets no gradient: its operands pass through a `where` whose backward drops what it computed, NaN
    included (0 * NaN would survive a plain select).
    """
    results: list[Tensor] = []
    for number, branch in enumerate(branches):
        is_branch = which == number
        guarded = [torch.where(is_branch, x, x.detach()) if x.is_floating_point() else x for x in operands]
        outputs = branch(*guarded)
        results = [torch.where(is_branch, new, old) for new, old in zip(outputs, results or outputs, strict=True)]
    return results


def scan(
    body: Function, length: int, reverse: bool, counts: tuple[int, int], shapes: Sequence[Any], *arguments: Tensor
) -> list[Tensor]:
    """lax.scan as a Python loop. `counts`: constants and carries among the arguments; `shapes`: of what is stacked."""
    constants, carry = arguments[: counts[0]], list(arguments[counts[0] : sum(counts)])
    rows = [x.unbind(0) for x in arguments[sum(counts) :]]
    stacked: list[list[Tensor]] = [[] for _ in shapes]
    for step in range(length - 1, -1, -1) if reverse else range(length):
        results = body(*constants, *carry, *(row[step] for row in rows))
        carry = list(results[: counts[1]])
        for column, value in zip(stacked, results[counts[1] :], strict=True):
            column.append(value)
    device = arguments[0].device if arguments else None
    columns = [
        torch.stack(column[::-1] if reverse else column) if column else torch.empty(shape, dtype=dtype, device=device)
        for column, (shape, dtype) in zip(stacked, shapes, strict=True)
    ]
    return [*carry, *columns]


def while_loop(condition: Function, body: Function, counts: tuple[int, int], *arguments: Tensor) -> list[Tensor]:
    """lax.while_loop with a data-dependent end. Asking for the condition waits for the device."""
    if tracing():
        raise NotImplementedError(
            "lax.while_loop with a data-dependent condition cannot be traced by torch.compile; "
            "use lax.fori_loop with fixed bounds, lax.scan, or call it outside of the compiled region"
        )
    for_condition, for_body = arguments[: counts[0]], arguments[counts[0] : sum(counts)]
    carry = list(arguments[sum(counts) :])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*for_body, *carry)):
        raise NotImplementedError("lax.while_loop has no reverse-mode derivative in JAX, so from_jax gives it none")
    while bool(condition(*for_condition, *carry)[0]):
        carry = list(body(*for_body, *carry))
    return carry
