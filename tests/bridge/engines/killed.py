"""Steps of a user's own classes with a checkpoint after each.

python -m tests.bridge.engines.killed FOLDER STEPS [KILL]

A second call goes on from the newest whole checkpoint. In step KILL the process ends by SIGKILL, with its update made
and not saved.
"""

import gc
import os
import pickle
import signal
import sys
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.checkpoints import Checkpointer
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.weights.manifest import full
from tests.bridge.engines import own

ROWS = 3


def weights(host, name):
    return {key: full(p.detach()).clone().numpy() for key, p in host.workers[name].module.named_parameters()}


def main(folder, steps, kill=None):
    rl_bridge.init()
    torch.manual_seed(0)
    engines = {kind: TrainEngine(own.FACTORIES[kind]).build() for kind in ("Policy", "MyQwen", "PlainQwen")}
    checkpointer = Checkpointer(Path(folder) / "checkpoints", asynchronous=False)
    done, newest = 0, checkpointer.latest()
    if newest is not None:
        done = checkpointer.load(newest, engines)["done"]
    for step in range(done, int(steps)):
        for engine in engines.values():
            engine.train_step(NeedParallel(own.tokens(ROWS + step)), (ROWS + step) * (own.WIDTH - 1))
            engine.optimizer_step()
        if kill is not None and step == int(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(step + 1, engines, {"done": step + 1})
    checkpointer.close()
    found = {kind: engine.run(weights, engine.name)[0] for kind, engine in engines.items()}
    (Path(folder) / "weights.pickle").write_bytes(pickle.dumps((done, found)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # the collections of engines that end need not look at what was imported
    main(*sys.argv[1:])
