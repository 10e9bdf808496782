"""Primitives that calculate in a narrow type."""

import jax


def _jaxprs(eqn):
    for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        inner = getattr(parameter, "jaxpr", parameter)
        if hasattr(inner, "eqns"):
            yield inner


MOVES = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "gather", "select_n"}
MOVES |= {"concatenate", "dynamic_slice", "copy", "pad", "split", "rev", "stop_gradient"}
# Their first operand is moved; the others are indices, which the bounds of the axis are compared with.
INDEXED = {"gather", "dynamic_slice"}


def computing_in(jaxpr, narrow) -> set[str]:
    """Primitives that calculate with `narrow` numbers, rather than move or widen them."""
    found = set()
    for eqn in jaxpr.eqns:
        inner = list(_jaxprs(eqn))
        for sub in inner:
            found |= computing_in(sub, narrow)
        if not inner and eqn.primitive.name not in MOVES - INDEXED:
            numbers = eqn.invars[1:] if eqn.primitive.name in INDEXED else eqn.invars
            found |= {eqn.primitive.name for v in numbers if getattr(v.aval, "dtype", None) == narrow}
    return found
