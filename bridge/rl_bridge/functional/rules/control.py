"""Nested jaxprs: calls are inlined; loops, branches and custom derivatives become nested functions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from rl_bridge.functional import runtime
from rl_bridge.functional.associative_scan import associative_scan, restricted
from rl_bridge.functional.crossing import is_float, torch_dtype
from rl_bridge.functional.emitter import Builder, Value, rule


def closed(jaxpr: Any) -> Any:
    """A closed jaxpr, from one or from an open one without constants."""
    return jaxpr if hasattr(jaxpr, "consts") else jex_core.ClosedJaxpr(jaxpr, ())


@rule("jit", "remat2")
def _call(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    return b.run(closed(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]), xs)


def _passed(b: Builder, xs: Sequence[Value]) -> str:
    return "".join(f", {b.full(x)}" for x in xs)


@rule("custom_jvp_call", "custom_vjp_call")
def _custom(b: Builder, eqn: Any, *xs: Value) -> Sequence[Value]:
    """The rule is JAX code: jax.vjp applies it, and its forward and backward are lowered like any other function."""
    if b.inside_rule or all(x.is_number for x in xs):  # torch will not differentiate this
        return b.run(closed(eqn.params["call_jaxpr"]), xs)
    passed = [i for i, x in enumerate(xs) if not x.is_number]
    active = [i for i in passed if is_float(xs[i].dtype)]
    floats = [i for i, var in enumerate(eqn.outvars) if is_float(var.aval.dtype)]
    numbers = {i: np.asarray(x.literal, x.dtype) for i, x in enumerate(xs) if x.literal is not None}
    for i, x in enumerate(xs):  # a number that depends on a symbolic dimension is unknown to JAX
        if x.is_number and x.literal is None:
            passed.append(i)
    passed.sort()
    # A jaxpr of this one equation: evaluating it is JAX's own way to bind a primitive with functions in its parameters.
    variables = {var: i for i, var in enumerate(eqn.invars) if not isinstance(var, jex_core.Literal)}
    body = closed(eqn.params["call_jaxpr"]).jaxpr
    single = body.replace(constvars=[], invars=list(variables), outvars=list(eqn.outvars), eqns=[eqn])
    call = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(single, ()))

    def bind(arguments: dict[int, Any]) -> list[Any]:
        operands = {i: jax.numpy.broadcast_to(number, xs[i].shape) for i, number in numbers.items()} | arguments
        return call(*(operands[i] for i in variables.values()))

    spec: dict[str, Any] = {}

    def forward(*arguments: Any) -> Any:
        operands = dict(zip(passed, arguments, strict=True))

        def split(*differentiated: Any) -> Any:
            results = bind(operands | dict(zip(active, differentiated, strict=True)))
            return [results[i] for i in floats], [r for i, r in enumerate(results) if i not in floats]

        outputs, pullback, rest = jax.vjp(split, *(operands[i] for i in active), has_aux=True)
        residuals, spec["tree"] = jax.tree.flatten(pullback)
        spec["residuals"] = [jax.ShapeDtypeStruct(np.shape(r), jax.numpy.result_type(r)) for r in residuals]
        return [*outputs, *rest, *residuals]

    def backward(*arguments: Any) -> Any:
        count = len(spec["residuals"])
        pullback = jax.tree.unflatten(spec["tree"], arguments[:count])
        return pullback(list(arguments[count:]))

    struct = jax.ShapeDtypeStruct
    forward_jaxpr = jax.make_jaxpr(forward)(*(struct(xs[i].shape, xs[i].dtype) for i in passed))
    cotangents = [struct(eqn.outvars[i].aval.shape, eqn.outvars[i].aval.dtype) for i in floats]
    backward_jaxpr = jax.make_jaxpr(backward)(*spec["residuals"], *cotangents)
    order = [*floats, *(i for i in range(len(eqn.outvars)) if i not in floats)]
    functions = [
        b.function(forward_jaxpr, [None] * len(passed), fresh=len(order), inside_rule=True),
        b.function(backward_jaxpr, [None] * len(backward_jaxpr.in_avals), inside_rule=True),
    ]
    flags = tuple(i in active for i in passed)
    code = f"{b.bind('custom', runtime.custom)}({functions[0]}, {functions[1]}, {len(order)}, {len(floats)}, {flags}"
    avals = [eqn.outvars[i].aval for i in order]
    names = b.emit(f"{code}{_passed(b, [xs[i] for i in passed])})", len(order))
    values = [Value(n, tuple(a.shape), np.dtype(a.dtype), tuple(a.shape)) for n, a in zip(names, avals, strict=True)]
    return [values[order.index(i)] for i in range(len(order))]


def _contains_while(jaxpr: Any) -> bool:
    body = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        eqn.primitive.name == "while" or any(_contains_while(sub) for sub in jex_core.jaxprs_in_params(eqn.params))
        for eqn in body.eqns
    )


@rule("cond")
def _cond(b: Builder, eqn: Any, which: Value, *xs: Value) -> list[Value]:
    branches = [closed(branch) for branch in eqn.params["branches"]]
    if which.literal is not None:
        return b.run(branches[int(which.literal)], xs)
    if any(map(_contains_while, branches)):
        raise NotImplementedError("from_jax runs every branch of lax.cond: a lax.while_loop in one might never end")
    functions = "".join(f"{b.function(branch, xs)}, " for branch in branches)
    passed = _passed(b, [x for x in xs if not x.is_number])
    return b.outs(f"{b.bind('cond', runtime.cond)}({b.full(which)}, ({functions}){passed})", eqn, alias=True)


@rule("scan")
def _scan(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    p = eqn.params
    constants, carries = p["num_consts"], p["num_carry"]
    baked_constants = [x if i < constants and x.is_number else None for i, x in enumerate(xs)]
    body = b.function(closed(p["jaxpr"]), baked_constants)
    passed = [x for x, baked in zip(xs, baked_constants, strict=True) if baked is None]
    counts = (constants - (len(xs) - len(passed)), carries)
    shapes = "".join(
        f"({b.shape(tuple(var.aval.shape))}, {torch_dtype(var.aval.dtype)}), " for var in eqn.outvars[carries:]
    )
    call = f"{b.bind('scan', runtime.scan)}({body}, {b.dim(p['length'])}, {p['reverse']}, {counts}, ({shapes})"
    # A loop that never runs returns what it was given.
    return b.outs(f"{call}{_passed(b, passed)})", eqn, alias=True)


@rule("while")
def _while(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    p = eqn.params
    counts = (p["cond_nconsts"], p["body_nconsts"])
    carry = [None] * (len(xs) - sum(counts))
    condition = b.function(closed(p["cond_jaxpr"]), [None] * counts[0] + carry)
    body = b.function(closed(p["body_jaxpr"]), [None] * counts[1] + carry)
    code = f"{b.bind('loop', runtime.while_loop)}({condition}, {body}, {counts}{_passed(b, xs)})"
    return b.outs(code, eqn, alias=True)


@rule("associative_scan")
def _associative_scan(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    combine, axis, reverse = (eqn.params[name] for name in ("combine", "axis", "reverse"))
    needed_results, last = restricted(combine, [i for i, var in enumerate(eqn.outvars) if var in b.used])
    functions = [b.function(closed, [None] * len(closed.jaxpr.invars)) for closed in (combine, last)]
    elements = "".join(f"{b.full(x)}, " for x in xs)
    run = b.bind("scan", associative_scan)
    names = b.emit(
        f"{run}({functions[0]}, ({elements}), {axis}, {reverse}, {needed_results}, {functions[1]})", len(needed_results)
    )
    results = list(xs)  # nothing reads what is not wanted
    for i, name in zip(needed_results, names, strict=True):
        results[i] = Value(name, xs[i].shape, xs[i].dtype, xs[i].shape, aliases_input=True)
    return results
