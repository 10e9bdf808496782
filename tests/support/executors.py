"""The executor of a process, while a test counts what the process has."""

import pytest

from rl_bridge.executors import session


@pytest.fixture(autouse=True)
def an_executor_of_its_own(monkeypatch):
    """A profiler counts all that its process has, and other tests of the process leave engines behind."""
    monkeypatch.setattr(session, "_current", [])
