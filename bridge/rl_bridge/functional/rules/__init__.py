"""The lowerings, one module a family; importing them fills the table."""

from rl_bridge.functional.rules import control, elementwise, indexing, reductions, shapes

__all__ = ["control", "elementwise", "indexing", "reductions", "shapes"]
