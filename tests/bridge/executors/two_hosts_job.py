"""What a job of two hosts does: python -m tests.bridge.executors.two_hosts_job WHAT ..."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine, returns
from rl_bridge.executors import WorkerDied
from rl_bridge.run.run import Run
from tests.bridge.executors.registry import every, total


@dataclass
class Config:
    steps: int = 1


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 2)

    @returns("sum")
    def update(self, rows):
        loss = self.line(rows).square().sum()
        loss.backward()
        return float(loss.detach())


def train(executor, folder):
    """One step with a checkpoint in this folder, or why there is none."""
    policy = TrainEngine(Line, executor=executor).build(mesh=Mesh(shard=2))
    try:
        with Run(Path(folder), Config()) as run:
            for step in run.steps("train", 1, state={"policy": policy}):
                run.log(step, {"loss": policy.update(NeedParallel(torch.ones(4, 4)))})
    except ValueError as error:
        return str(error)
    finally:
        policy.release()
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


def whole(executor, shared):
    slots = [slot.index for slot in executor.slots]
    found = {
        "nodes": [slot.node for slot in executor.slots],
        "total": list(executor.call(total, every(executor, slots, 1.5), what="total").values()),
        "interfaces": list(executor.call(interface, every(executor), what="interface").values()),
        "own folders": train(executor, "own/run"),
        "shared folder": train(executor, f"{shared}/run"),
    }
    Path(shared, "found.json").write_text(json.dumps(found))


def interface(host):
    return os.environ.get("GLOO_SOCKET_IFNAME")


def lost(executor, shared):
    """Wait in a step until the cable is cut; how long until the cause is there."""
    Path(shared, "ready").touch()
    began = time.monotonic()
    try:
        executor.call(stays, every(executor), what="policy.train_step")
    except WorkerDied as death:
        Path(shared, "found.json").write_text(json.dumps([time.monotonic() - began, str(death)]))
    os._exit(3)  # the thread of slot 0 stays in its step


def stays(host):
    time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    {"whole": whole, "lost": lost}[what](rl_bridge.init(timeout=100), *arguments)
    rl_bridge.current_executor().stop()
