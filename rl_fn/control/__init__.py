"""Controllers of a KL coefficient or an entropy bonus, schedules, and constraints."""

from rl_fn.control.constraints import Lagrangian, LagrangianState, lagrangian
from rl_fn.control.entropy import EntropyState, adaptive_entropy
from rl_fn.control.kl import CoefState, Controller, PIDState, exponential_kl, fixed_kl, linear_kl, pid_kl
from rl_fn.control.schedules import ScheduleState, scheduled_kl

__all__ = [
    "CoefState",
    "Controller",
    "EntropyState",
    "Lagrangian",
    "LagrangianState",
    "PIDState",
    "ScheduleState",
    "adaptive_entropy",
    "exponential_kl",
    "fixed_kl",
    "lagrangian",
    "linear_kl",
    "pid_kl",
    "scheduled_kl",
]
