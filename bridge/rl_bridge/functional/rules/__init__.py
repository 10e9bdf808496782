"""The lowerings, one module a family; importing them fills the table."""

from rl_bridge.functional.rules import arithmetic, control, shapes

__all__ = ["arithmetic", "control", "shapes"]
