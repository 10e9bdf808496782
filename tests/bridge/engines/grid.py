"""The page's own code over two ranks, then its classes and RLite's on every mesh: what each arrangement gives.

torchrun --nproc_per_node=2 -m tests.bridge.engines.grid RESULT
"""

import gc
import pickle
import sys
import tempfile
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.checkpoints import Checkpointer
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine
from rl_bridge.executors.executor import WorkerError
from rl_bridge.weights.manifest import full
from tests.bridge.engines import own

MESHES = {
    "1": Mesh(),
    "2 shard": Mesh(shard=2),
    "2 replicate": Mesh(replicate=2),
    "2 tensor": Mesh(tensor=2),
    "2 sequence": Mesh(sequence=2),
}
KINDS = {"Policy": tuple(MESHES), "MyQwen": ("1", "2 shard", "2 sequence"), "PlainQwen": ("1", "2 shard")}
ROWS = 3  # they do not divide evenly


def gradients(host, name):
    named = host.workers[name].module.named_parameters()
    return {key: full(p.grad).clone().numpy() for key, p in named if p.grad is not None}


def losses(engine, steps=2):
    found = []
    for _ in range(steps):
        found.append(engine.train_step(NeedParallel(own.tokens(ROWS)), ROWS * (own.WIDTH - 1)))
        engine.optimizer_step()
    return found


def built(factory, mesh, seed=0):
    torch.manual_seed(seed)
    return TrainEngine(factory).build(mesh=mesh)


def refusal(call):
    try:
        call()
    except (ValueError, WorkerError) as error:
        return str(error.__cause__ or error)
    return None


def arrangement(factory, mesh, folder):
    """A step; then what follows it: gone on with, and after a checkpoint, freed weights, a sync and moves."""
    engine = built(factory, mesh)
    found = {"loss": engine.train_step(NeedParallel(own.tokens(ROWS)), ROWS * (own.WIDTH - 1))}
    found["gradients"] = engine.run(gradients, engine.name)[0]
    engine.optimizer_step()
    checkpointer = Checkpointer(folder, asynchronous=False)
    path = checkpointer.save(1, {"policy": engine}, {})
    found["next"] = losses(engine)
    whole, resumed = built(factory, Mesh(), seed=1), built(factory, mesh, seed=2)
    for other in (whole, resumed):
        checkpointer.load(path, {"policy": other})
    resumed.meta()
    found["freed"] = refusal(lambda: losses(resumed))
    whole.sync_weights(resumed)
    found["resumed"] = losses(resumed.cpu().cpu("optimizer"))
    found["on one worker"] = losses(whole)
    if mesh.data_parts > 1:
        found["empty"] = refusal(lambda: engine.train_step(NeedParallel(own.tokens(1)), 1))
    found["eval"] = resumed.eval() is resumed
    for one in (engine, whole, resumed):
        one.release()
    return found


def main(result):
    rl_bridge.init(timeout=60)
    page = {"__name__": "page"}
    exec(compile(own.CODE, str(own.PAGE), "exec"), page)
    assert page["workers"] == 2
    found = {}
    for kind, names in KINDS.items():
        for name in names:
            factory, mesh = own.FACTORIES[kind], MESHES[name]
            with tempfile.TemporaryDirectory() as folder:
                if name == "2 sequence":
                    found[kind, name] = refusal(lambda factory=factory, mesh=mesh: built(factory, mesh))
                else:
                    found[kind, name] = arrangement(factory, mesh, Path(folder))
    Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # the collections of engines that end need not look at what was imported
    main(sys.argv[1])
