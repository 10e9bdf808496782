"""The backend in Gluon with its kernels in the emulator."""

import importlib

import pytest

from tests.kernels.experimental.gluon_emulator import PROGRAMS, Emulated
from tests.kernels.linear_logprobs import inputs

pytest.importorskip("triton.experimental.gluon")
backend = importlib.import_module("rl_kernels.experimental.gluon.linear_logprobs")


def emulate(monkeypatch, name, kernel=None):
    """Give the backend this architecture's kernel, or another in its place, in the emulator."""
    found = backend.KERNELS[name]
    running = Emulated(kernel or found.kernel, PROGRAMS[name])
    monkeypatch.setitem(backend.KERNELS, name, found._replace(kernel=running))
    monkeypatch.setattr(backend, "architecture", lambda device: name)
    monkeypatch.setattr("rl_kernels.backends.refusal", lambda name, device: None)
    # Rows of 32 half-precision numbers begin where any of the kernels can read them.
    monkeypatch.setattr(inputs, "H", 32)
    return running
