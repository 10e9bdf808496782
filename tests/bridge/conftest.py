import signal
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tyro import _docstrings

from rl_bridge.models.small import character_tokenizer, tiny_qwen2


def remembered(make):
    """tyro forgets the sources of all options after a command: reading them again was a third of a command's time."""
    results = {}

    def once(kind):
        if kind not in results:
            try:
                results[kind] = make(kind), None
            except OSError as error:  # a class that is made by a call has no source
                results[kind] = None, error
        tokens, error = results[kind]
        if error is not None:
            raise OSError(*error.args)
        return tokens

    return staticmethod(once)


# The name is a private one: where tyro has it no more, tyro is left as it is.
OF_CLASSES: Any = getattr(_docstrings, "_ClassTokenization", None)
if hasattr(OF_CLASSES, "make"):
    OF_CLASSES.make = remembered(OF_CLASSES.make)


@pytest.fixture(autouse=True, scope="session")
def interrupts():
    """A shell's background jobs ignore Ctrl-C, jobs of nohup a hang-up, and so would the runs of these tests."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def process_group():
    """A world of one that a model's mesh begins here ends with the file: others have groups of their own (CORE-14)."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Drawing takes longer than a tiny run: the tests that ask for the fixture ``curves`` draw."""
    recorder = sys.modules.get("rl_bridge.run.recorder")
    if recorder is not None and "curves" not in request.fixturenames:
        monkeypatch.setattr(recorder, "draw_curves", lambda *_, **__: None)


@pytest.fixture
def curves():
    """Asked for by a test whose runs draw their curves."""


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer("0123456789+-=")


@pytest.fixture
def new_model(tokenizer):
    """A fresh two-layer model of width 16; the same seed gives the same weights."""
    small = {"hidden": 16, "layers": 2, "heads": 2}
    return lambda seed=0, **options: tiny_qwen2(tokenizer, **small | options, seed=seed)
