"""A run in a process of its own, which dies before the n-th call that changes what is on the disk."""

import functools
import itertools
import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_bridge.common.files import replacing
from rl_bridge.engines import TrainEngine
from rl_bridge.run import recorder
from rl_bridge.run.run import Run
from tests.support.ranks import forking

CALLS = ("rename", "replace", "fsync", "mkdir", "unlink", "ftruncate", "rmdir")
STEPS = 6


@dataclass(frozen=True)
class Options:
    seed: int = 0


class Walker(torch.nn.Module):
    """A weight that walks at random: what comes next depends on the weight and on the generator."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def walk(self):
        with torch.no_grad():
            self.weight += torch.rand(3)
        return self.weight.sum().item()

    def values(self):
        return self.weight.tolist()


def session(folder, moment, resume):
    """Steps with a checkpoint every two, the best kept, and an export, as a pipeline makes them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder.draw_curves = lambda *_, **__: None  # matplotlib would take longer than all the rest
    counter = itertools.count()

    def dying(function):
        @functools.wraps(function)
        def call(*arguments, **options):
            if next(counter) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    engine = TrainEngine(Walker).build()
    with Run(folder, Options(), resume=resume, checkpoint_every=2) as run:
        run.keep_best("reward", "min")
        for step in run.steps("walk", STEPS, state={"policy": engine}):
            run.log(step, {"reward": engine.walk()})
        with replacing(folder / "model") as temporary:
            temporary.mkdir()
            (temporary / "weights").write_text(json.dumps(engine.values()))
        run.finish({"weights": engine.values()})


def result(folder):
    """What must not depend on when a run was killed."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "model": (folder / "model" / "weights").read_text(),
        "summary": json.loads((folder / "summary.json").read_text()),
        "records": [(record["step"], record["reward"]) for record in records],
        "names": sorted(path.name for path in folder.iterdir()),
        # One that was to be removed when the kill came may still be there.
        "checkpoints": [path.name for path in sorted((folder / "checkpoints").iterdir()) if path.name[-1] != "2"],
    }


def status_of(folder: Path, moment: int, *, resume: bool) -> int | None:
    """The exit code of a process that has its torch already."""
    process = forking().Process(target=session, args=(folder, moment, resume))
    process.start()
    process.join(300)
    return process.exitcode


def killed_and_resumed(folder: Path, moment: int) -> tuple[bool, dict]:
    """(Whether the run was killed at the moment, its result after it was taken up again)."""
    first = status_of(folder, moment, resume=False)
    if first == -signal.SIGKILL and not folder.exists():
        return True, {}
    assert first in (0, -signal.SIGKILL)
    if first:
        assert status_of(folder, -1, resume=True) == 0
    found = result(folder)
    shutil.rmtree(folder)
    return first != 0, found
