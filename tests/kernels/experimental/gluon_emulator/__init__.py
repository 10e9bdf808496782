"""The Gluon operations that our kernels use, in NumPy: their own source runs here, program by program.

Layouts must be given and are ignored. What is asynchronous happens as late as it may: a copy lands when it is waited
for, a product is taken when it is waited for. `Hazard` is raised where something would be read before it is there, or
overwritten before it was read, and where a wait would not end. One program is one thread here, so that what threads and
the hardware's units owe to each other is not emulated, but for what a barrier between them has to separate: sums in
tensor memory that are read from those that replace them, tiles in the LDS that are read from copies that replace them.
"""

from tests.kernels.experimental.gluon_emulator.blackwell import Blackwell
from tests.kernels.experimental.gluon_emulator.cdna4 import CDNA4
from tests.kernels.experimental.gluon_emulator.hopper import Hopper
from tests.kernels.experimental.gluon_emulator.program import Emulated
from tests.kernels.experimental.gluon_emulator.values import Hazard

PROGRAMS = {"sm_90": Hopper, "sm_100": Blackwell, "gfx950": CDNA4}

__all__ = ["PROGRAMS", "Emulated", "Hazard"]
