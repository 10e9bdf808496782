"""One step of GRPO enters few files of the library: who reads what a step does has so many to open."""

import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import rl_bridge
from rl_bridge.common.splitmix64 import signed
from rl_bridge.loop.loop_run import Run
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart

LIBRARY = Path(rl_bridge.__file__).parent
FILES = 70
"""Files that a step may enter. This number only shrinks."""


@contextmanager
def entering():
    """Files of the library whose functions are called in the block, in its thread and those that it starts."""
    entered, files = set(), set()

    # A tracer that returns None is called once a function; a profiler for what is built in, too, which takes longer.
    def see(frame, event, argument):
        entered.add(frame.f_code.co_filename)

    before = sys.gettrace()
    threading.settrace(see)
    sys.settrace(see)
    try:
        yield files
    finally:
        sys.settrace(before)
        threading.settrace(before)
    # Threads that go on see their own calls still: a copy is taken at once.
    paths = map(Path, entered.copy())
    files |= {path.relative_to(LIBRARY).as_posix() for path in paths if path.is_relative_to(LIBRARY)}


@pytest.mark.long
def test_a_step_of_the_quickstart_enters_few_files(tmp_path, monkeypatch):
    entered, steps = set(), Run.steps

    def counted(run, total, state):
        if state[0].kind != "policy":
            yield from steps(run, total, state)
            return
        with entering() as files:
            yield from steps(run, total, state)
        entered.update(files)

    monkeypatch.setattr(Run, "steps", counted)
    start = quickstart()
    sizes = replace(start.policy, steps=1, prompts_per_step=4, evaluate_every=1)
    warm = replace(start.sft, steps=1, rows_per_step=4)
    for _ in range(2):  # the first run traces the formulas, unless another test has
        entered.clear()
        run_policy(replace(start, output=tmp_path, policy=sizes, sft=warm, held_out=8, threads=1))
    assert {"algorithms/policy_training.py", "functional/runtime.py", "rollout/decoder.py"} <= entered
    assert len(entered) <= FILES, sorted(entered)


def test_files_of_other_threads_count():
    def call_elsewhere():
        thread = threading.Thread(target=signed, args=(1,))
        thread.start()
        thread.join()

    with entering() as files:
        call_elsewhere()
    assert "common/splitmix64.py" in files
