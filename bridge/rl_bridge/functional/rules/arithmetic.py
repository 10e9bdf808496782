"""Primitives that compute: element-wise, reductions, cumulative operations, sorting and contraction."""

import math
import string
from typing import Any

import numpy as np

from rl_bridge.functional.crossing import is_float, torch_dtype
from rl_bridge.functional.emitter import Builder, Value, broadcast_shape, literal, rule, shape_of
from rl_bridge.functional.runtime import contract

# Element-wise primitives: one torch expression each, over operands that broadcast.

# {0}, {1}: operands, as variables or numbers.
_OPERATORS = {
    "add": "{0} + {1}",
    "add_any": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "not": "~{0}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "shift_left": "{0} << {1}",
    "shift_right_arithmetic": "{0} >> {1}",
}
# Torch functions that want tensors; a number is lifted to a cached zero-dimensional tensor.
_FUNCTIONS = {
    "max": "torch.maximum",
    "min": "torch.minimum",
    "abs": "rt.absolute",
    "exp": "torch.exp",
    "exp2": "torch.exp2",
    "expm1": "torch.expm1",
    "log": "torch.log",
    "log1p": "torch.log1p",
    "logistic": "torch.sigmoid",
    "tanh": "torch.tanh",
    "sin": "torch.sin",
    "cos": "torch.cos",
    "tan": "torch.tan",
    "asin": "torch.asin",
    "acos": "torch.acos",
    "atan": "torch.atan",
    "sinh": "torch.sinh",
    "cosh": "torch.cosh",
    "asinh": "torch.asinh",
    "acosh": "torch.acosh",
    "atanh": "torch.atanh",
    "atan2": "torch.atan2",
    "sqrt": "torch.sqrt",
    "rsqrt": "torch.rsqrt",
    "cbrt": "rt.cbrt",
    "square": "torch.square",
    "erf": "torch.erf",
    "erfc": "torch.erfc",
    "erf_inv": "torch.erfinv",
    "lgamma": "torch.lgamma",
    "digamma": "torch.digamma",
    "sign": "rt.sign",
    "floor": "torch.floor",
    "ceil": "torch.ceil",
    "is_finite": "torch.isfinite",
    "nextafter": "torch.nextafter",
}


# In IEEE's total order: NaN equals itself and comes last, -0 comes before 0.
_TOTAL_ORDER = {"eq_to": "==", "le_to": "<=", "lt_to": "<"}


def _operator(b: Builder, eqn: Any, *xs: Value) -> Value:
    return b.elementwise(_OPERATORS[eqn.primitive.name], xs, eqn)


def _function(b: Builder, eqn: Any, *xs: Value) -> Value:
    template = f"{_FUNCTIONS[eqn.primitive.name]}({', '.join(f'{{{i}}}' for i in range(len(xs)))})"
    return b.elementwise(template, xs, eqn, tensors=range(len(xs)))


rule(*_OPERATORS)(_operator)
rule(*_FUNCTIONS)(_function)


@rule(*_TOTAL_ORDER)
def _total_order(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    sides = ("rt.total_order({0})", "rt.total_order({1})") if is_float(x.dtype) else ("{0}", "{1}")
    return b.elementwise(f" {_TOTAL_ORDER[eqn.primitive.name]} ".join(sides), (x, y), eqn, tensors=(0, 1))


@rule("div")
def _div(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    if is_float(x.dtype):
        return b.elementwise("{0} / {1}", (x, y), eqn)
    if y.literal and y.literal != -1:
        return b.elementwise("torch.div({0}, {1}, rounding_mode='trunc')", (x, y), eqn, tensors=(0,))
    return b.elementwise("rt.integer_divide({0}, {1})", (x, y), eqn, tensors=(0, 1))


@rule("rem")
def _rem(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    if is_float(x.dtype):
        return b.elementwise("rt.remainder({0}, {1})", (x, y), eqn, tensors=(0, 1))
    if y.literal and y.literal != -1:
        return b.elementwise("torch.fmod({0}, {1})", (x, y), eqn, tensors=(0,))
    return b.elementwise("rt.integer_remainder({0}, {1})", (x, y), eqn, tensors=(0, 1))


@rule("shift_right_logical", "population_count", "clz")
def _bits(b: Builder, eqn: Any, *xs: Value) -> Value:
    width = 8 * xs[0].dtype.itemsize
    if width == 64:
        raise NotImplementedError(f"from_jax lowers {eqn.primitive.name} up to 32 bits, got {xs[0].dtype}")
    operands = "".join(f"{{{i}}}, " for i in range(len(xs)))
    return b.elementwise(f"rt.{eqn.primitive.name}({operands}{width})", xs, eqn, tensors=range(len(xs)))


@rule("pow")
def _pow(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    return b.elementwise("torch.pow({0}, {1})", (x, y), eqn, tensors=(0,) if x.is_number else ())


@rule("integer_pow")
def _integer_pow(b: Builder, eqn: Any, x: Value) -> Value:
    power = eqn.params["y"]
    return b.elementwise("{0} * {0}" if power == 2 else f"{{0}} ** ({power})", (x,), eqn)


@rule("round")
def _round(b: Builder, eqn: Any, x: Value) -> Value:
    even = "EVEN" in str(getattr(eqn.params["rounding_method"], "name", eqn.params["rounding_method"]))
    return b.elementwise("torch.round({0})" if even else "rt.round_away({0})", (x,), eqn, tensors=(0,))


@rule("clamp")
def _clamp(b: Builder, eqn: Any, low: Value, x: Value, high: Value) -> Value:
    return b.elementwise("rt.clamp({0}, {1}, {2})", (low, x, high), eqn, tensors=(0, 1, 2))


@rule("select_n")
def _select_n(b: Builder, eqn: Any, which: Value, *cases: Value) -> Value:
    if which.literal is not None:
        return cases[int(which.literal)]
    if which.dtype != np.bool_:
        operands = (which, *cases)
        holes = ", ".join(f"{{{i}}}" for i in range(len(operands)))
        return b.elementwise(f"rt.select({holes})", operands, eqn, tensors=range(len(operands)))
    false, true = cases
    # torch.where of two numbers would have torch's default dtype.
    numbers = false.is_number and true.is_number
    return b.elementwise(
        "torch.where({0}, {2}, {1})", (which, false, true), eqn, tensors=(0, 1, 2) if numbers else (0,)
    )


@rule("convert_element_type")
def _convert(b: Builder, eqn: Any, x: Value) -> Value:
    dtype = np.dtype(eqn.params["new_dtype"])
    if dtype == x.dtype:
        return x
    if x.literal is not None:
        value = np.asarray(x.literal, x.dtype)
        to_integer = is_float(x.dtype) and dtype.kind in "iu"
        return literal(_saturated(float(value), dtype) if to_integer else value.astype(dtype), x.shape, dtype)
    if x.is_number and dtype.kind in "if":
        convert = "float" if dtype.kind == "f" else "int"
        return Value(f"torch.sym_{convert}({x.code})", x.shape, dtype, (), is_number=True)
    if is_float(x.dtype) and dtype.kind in "iu":
        call = f"rt.to_integer({b.scalar(x)}, {torch_dtype(dtype)}, {np.iinfo(dtype).min}, {np.iinfo(dtype).max})"
        return Value(b.emit(call)[0], x.shape, dtype, x.held)
    return Value(b.emit(f"{b.scalar(x)}.to({torch_dtype(dtype)})")[0], x.shape, dtype, x.held)


def _saturated(value: float, dtype: np.dtype) -> int:
    """The integer of a number as XLA converts it: the nearest that the dtype has, and 0 for NaN."""
    limits = np.iinfo(dtype)
    if math.isnan(value) or math.isinf(value):
        return 0 if math.isnan(value) else int(limits.max if value > 0 else limits.min)
    return min(max(int(value), int(limits.min)), int(limits.max))


@rule("reduce_precision")
def _reduce_precision(b: Builder, eqn: Any, x: Value) -> Value:
    formats = {(5, 10): "torch.float16", (8, 7): "torch.bfloat16", (8, 23): "torch.float32", (11, 52): "torch.float64"}
    bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
    if bits not in formats:
        raise NotImplementedError(
            f"from_jax lowers reduce_precision only to a torch dtype, got (exponent, mantissa) {bits}"
        )
    return b.elementwise(f"{{0}}.to({formats[bits]}).to({torch_dtype(x.dtype)})", (x,), eqn, tensors=(0,))


@rule("stop_gradient")
def _stop_gradient(b: Builder, eqn: Any, x: Value) -> Value:
    if x.is_number:
        return x
    return Value(b.emit(f"{x.code}.detach()")[0], x.shape, x.dtype, x.held, aliases_input=x.aliases_input)


@rule("copy", "device_put", "sharding_constraint", "optimization_barrier")
def _identity(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    return list(xs)


@rule("bitcast_convert_type")
def _bitcast(b: Builder, eqn: Any, x: Value) -> Value:
    dtype = np.dtype(eqn.params["new_dtype"])
    if dtype.itemsize != x.dtype.itemsize:
        raise NotImplementedError(
            f"from_jax lowers bitcast_convert_type between equal widths only: {x.dtype} to {dtype}"
        )
    code = b.emit(f"{b.scalar(x)}.view({torch_dtype(dtype)})")[0]
    return Value(code, x.shape, dtype, broadcast_shape(x.held), aliases_input=x.aliases_input)


# Reductions, cumulative operations, sorting and contraction.


@rule("reduce_sum")
def _sum(b: Builder, eqn: Any, x: Value) -> Value:
    axes = tuple(eqn.params["axes"])
    if not axes:
        return x
    shape = shape_of(eqn)
    return Value(b.sum(b.full(x), axes, len(x.shape), torch_dtype(x.dtype)), shape, x.dtype, shape)


@rule("reduce_prod")
def _prod(b: Builder, eqn: Any, x: Value) -> Value:
    axes = tuple(eqn.params["axes"])
    return b.out(f"rt.product({b.full(x)}, {axes})", eqn) if axes else x


@rule("reduce_max", "reduce_min")
def _extremum(b: Builder, eqn: Any, x: Value) -> Value:
    axes, largest = tuple(eqn.params["axes"]), eqn.primitive.name == "reduce_max"
    if not axes:
        return x
    if all(isinstance(x.shape[a], int) and x.shape[a] for a in axes):
        return b.out(f"torch.{'amax' if largest else 'amin'}({b.full(x)}, {axes})", eqn)
    if is_float(x.dtype):
        empty: Any = "-inf" if largest else "inf"
    elif x.dtype == np.bool_:
        empty = not largest
    else:
        empty = np.iinfo(x.dtype).min if largest else np.iinfo(x.dtype).max
    return b.out(f"rt.extremum({b.full(x)}, {axes}, {largest}, {empty})", eqn)


@rule("reduce_and", "reduce_or")
def _logical(b: Builder, eqn: Any, x: Value) -> Value:
    if x.dtype != np.bool_:
        raise NotImplementedError(f"from_jax lowers {eqn.primitive.name} for bool only, got {x.dtype}")
    axes = tuple(eqn.params["axes"])
    return (
        b.out(f"torch.{'all' if eqn.primitive.name == 'reduce_and' else 'any'}({b.full(x)}, {axes})", eqn)
        if axes
        else x
    )


@rule("argmax", "argmin")
def _argument(b: Builder, eqn: Any, x: Value) -> Value:
    (axis,) = eqn.params["axes"]
    dtype = torch_dtype(eqn.params["index_dtype"])
    return b.out(f"rt.argument({b.full(x)}, {axis}, {eqn.primitive.name == 'argmax'}, {dtype})", eqn)


@rule("cumsum", "cumprod", "cumlogsumexp")
def _cumulative(b: Builder, eqn: Any, x: Value) -> Value:
    axis, dtype = eqn.params["axis"], torch_dtype(x.dtype)
    call = {
        "cumsum": f"torch.cumsum({{}}, {axis}, dtype={dtype})",
        "cumprod": f"torch.cumprod({{}}, {axis}, dtype={dtype})",
        "cumlogsumexp": f"torch.logcumsumexp({{}}, {axis})",
    }[eqn.primitive.name]
    operand = b.full(x)
    if not eqn.params["reverse"]:
        return b.out(call.format(operand), eqn)
    flipped = b.emit(f"torch.flip({operand}, ({axis},))")[0]
    return b.out(f"torch.flip({b.emit(call.format(flipped))[0]}, ({axis},))", eqn)


@rule("cummax", "cummin")
def _cumulative_extremum(b: Builder, eqn: Any, x: Value) -> Value:
    axis, largest = eqn.params["axis"], eqn.primitive.name == "cummax"
    return b.out(f"rt.cumulative_extremum({b.full(x)}, {axis}, {largest}, {eqn.params['reverse']})", eqn)


@rule("sort")
def _sort(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    operands = "".join(f"{b.full(x)}, " for x in xs)
    return b.outs(f"rt.sort(({operands}), {eqn.params['dimension']}, {eqn.params['num_keys']})", eqn)


@rule("top_k")
def _top_k(b: Builder, eqn: Any, x: Value) -> list[Value]:
    axis = eqn.params.get("axis", len(x.shape) - 1)
    dtype = torch_dtype(eqn.outvars[1].aval.dtype)
    return b.outs(f"rt.top_k({b.full(x)}, {b.dim(eqn.params['k'])}, {axis}, {dtype})", eqn)


@rule("dot_general")
def _dot_general(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    (contract_x, contract_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    left, right = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for i, j in [*zip(contract_x, contract_y, strict=True), *zip(batch_x, batch_y, strict=True)]:
        right[j] = left[i]
    result = [left[i] for i in batch_x]
    result += [c for i, c in enumerate(left) if i not in (*contract_x, *batch_x)]
    result += [c for j, c in enumerate(right) if j not in (*contract_y, *batch_y)]
    dtype = torch_dtype(eqn.outvars[0].aval.dtype)
    operands = [b.full(v) if v.dtype == eqn.outvars[0].aval.dtype else f"{b.full(v)}.to({dtype})" for v in (x, y)]
    letters = tuple("".join(x) for x in (left, right, result))
    return b.out(f"{b.bind('contract', contract)}({letters}, {operands[0]}, {operands[1]})", eqn)
