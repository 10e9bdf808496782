"""What proposes the next trial: samplers of other libraries and our own, behind one protocol."""

from rl_bridge.tuning.samplers.protocol import SAMPLERS, Result, Sampler, make_sampler

__all__ = ["SAMPLERS", "Result", "Sampler", "make_sampler"]
