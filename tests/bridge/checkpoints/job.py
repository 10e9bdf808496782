"""What the ranks of a job do: training that is killed and resumed, and states that move from mesh to mesh."""

import gc
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_bridge.checkpoints import Checkpointer, CheckpointError, load_optimizer_state, optimizer_state, writing
from rl_bridge.data.rows import RowStream
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine, returns
from rl_bridge.engines.module import ParallelModule
from rl_bridge.executors.session import init
from rl_bridge.parallel.mesh import clip_grad_norm
from rl_bridge.parallel.parallelize import parallelize
from rl_bridge.run.run import Run

VOCABULARY, ROWS, LENGTH = 24, 4, 5
SIZES = {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4}


class Learner(ParallelModule):
    """A tied language model, AdamW, a schedule. ``noise`` scales each rank's loss by a random number of its own."""

    cuts_sequences = True  # it does not, and is not updated on such a mesh

    def __init__(self):
        super().__init__()
        config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
        self.model = LlamaForCausalLM(config).eval()
        self.mesh, self.updates, self.die = None, 0, False

    def parallelize(self, mesh):
        self.mesh = mesh
        parallelize(self.model, mesh)

    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    @returns("sum")
    def update(self, ids, noise=False):
        logprobs = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[:, :-1], -1)
        loss = -logprobs.gather(-1, ids[:, 1:, None]).sum() / (ROWS * (LENGTH - 1))
        (loss * (1 + torch.rand(())) if noise else loss).backward()
        clip_grad_norm(self.model.parameters(), 0.5, self.mesh)
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
        self.updates += 1
        return float(loss.detach())

    def checkpoint_state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "updates": self.updates,
        }

    def load_checkpoint_state(self, state):
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.updates = state["updates"]


def ids_of(rows):
    return torch.tensor([row["ids"] for row in rows])


def stream():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (7, LENGTH), generator=generator).tolist()
    return RowStream([{"ids": row} for row in rows], seed=0)


@dataclass
class Config:
    steps: int = 7


def train(folder, resume, where, rank, step):
    """Seven steps with a checkpoint every two. Rank ``rank`` kills itself: in step ``step``, or in its checkpoint.

    ``where`` is "nowhere" if none is to die, "slowly" if there has to be time for a signal.
    """
    executor = init()
    executor.call(seed, {slot.index: () for slot in executor.slots}, what="seed")
    policy = TrainEngine(Learner).build(mesh=Mesh(shard=len(executor.slots)))
    reference = TrainEngine(lambda: torch.nn.Sequential(torch.nn.Linear(3, 1))).build(
        mesh=Mesh(shard=len(executor.slots))
    )
    rows = stream()
    state = {"policy": policy, "reference": reference, "stream": rows}
    with Run(Path(folder), Config(), resume=resume == "resume", checkpoint_every=2) as run:
        for number in run.steps("train", Config().steps, state=state):
            if where == "slowly":
                time.sleep(0.3)
            elif where != "nowhere" and number == int(step):
                run._checkpointer.wait()  # the kill is to hit this step's checkpoint, not the one before
                executor.call(arm, {int(rank): (where, policy.name)}, what="arm")
            loss = policy.update(NeedParallel(ids_of(rows.take(ROWS))), noise=True)
            run.log(number, {"nll": loss, "noise": float(torch.rand(()))})
    executor.stop()


def seed(host):
    torch.manual_seed(100 + host.slot), np.random.seed(host.slot), random.seed(host.slot)
    torch.set_num_threads(1)


def arm(host, where, name):
    """Let the process of this slot die: in the middle of the step, before its shard, or before the commit."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "step":
        host.workers[name].module.die = True
    elif where == "shard":
        writing.save_file = die
    else:
        writing.step_folders.commit = die


MESHES = {
    2: [Mesh(), Mesh(shard=2), Mesh(replicate=2), Mesh(tensor=2), Mesh(sequence=2), Mesh()],
    # Three workers divide neither the rows of a batch nor most tensors.
    4: [Mesh(), Mesh(shard=2, tensor=2), Mesh(shard=3), Mesh(replicate=2, shard=2), Mesh(shard=4), Mesh()],
}


def layouts(folder):
    """A state goes from mesh to mesh, saved again on each; ``losses.json`` has the next two losses on each."""
    executor = init()
    executor.call(seed, {slot.index: () for slot in executor.slots}, what="seed")
    checkpointer = Checkpointer(Path(folder), keep=20, asynchronous=False)
    meshes = MESHES[len(executor.slots)]
    ids, losses = NeedParallel(ids_of(stream().take(ROWS))), {}
    path = None
    for number, mesh in enumerate(meshes):
        engine = TrainEngine(Learner).build(mesh=mesh)
        line = TrainEngine(lambda: torch.nn.Sequential(torch.nn.Linear(3, 1))).build(mesh=Mesh(shard=mesh.size))
        engines = {"policy": engine, "line": line}
        if path is None:
            for _ in range(3):
                engine.update(ids)
        else:
            checkpointer.load(path, engines)
        path = checkpointer.save(number, engines, {"mesh": str(mesh)})
        losses[number] = [engine.update(ids) for _ in range(2)] if mesh.sequence == 1 else None
        engine.release(), line.release()
    (Path(folder) / "losses.json").write_text(json.dumps(losses))
    again(executor, Path(folder) / "again")
    failures(executor, Path(folder) / "failures")
    executor.stop()


def again(executor, folder):
    """The same mesh: saved in the middle, gone on, loaded, gone on once more."""
    checkpointer = Checkpointer(folder, keep=20)
    ids = NeedParallel(ids_of(stream().take(ROWS)))
    path = None
    for number in (2, 4):
        engine = TrainEngine(Learner).build(mesh=Mesh(shard=2))
        if path is None:
            engine.update(ids, noise=True)
            path = checkpointer.save(1, {"policy": engine}, {})
        else:
            checkpointer.load(path, {"policy": engine})
        losses = [engine.update(ids, noise=True) for _ in range(3)]
        checkpointer.save(number, {"policy": engine}, {"losses": losses})
        checkpointer.wait()
        engine.release()


def under_ray(folder):
    executor = init("ray", slots=[{"CPU": 1}, {"CPU": 1}])
    executor.call(seed, {slot.index: () for slot in executor.slots}, what="seed")
    again(executor, Path(folder) / "again")
    failures(executor, Path(folder) / "failures")
    executor.stop()


def failures(executor, folder):
    """An error of one rank ends the checkpoint of all, by name, and the next one is written."""
    engine = TrainEngine(Learner).build(mesh=Mesh(shard=2))
    checkpointer, messages = Checkpointer(folder), []
    for spoil in (full_disk, own_opinion, no_state):
        executor.call(spoil, {1: (engine.name,)}, what=spoil.__name__)
        try:
            checkpointer.save(1, {"policy": engine}, {})
            checkpointer.wait()
        except (CheckpointError, ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        executor.call(restore, {1: (engine.name,)}, what="restore")
    checkpointer.save(2, {"policy": engine}, {})
    checkpointer.wait()
    (folder / "messages.json").write_text(json.dumps(messages))
    engine.release()


SAVE_FILE = writing.save_file


def full_disk(host, name):
    def full(*_):
        raise OSError(28, "No space left on device")

    writing.save_file = full


def own_opinion(host, name):
    host.workers[name].module.updates = 77


def no_state(host, name):
    def fails():
        raise ValueError("rank 1 has no state")

    host.workers[name].module.checkpoint_state = fails


def restore(host, name):
    writing.save_file = SAVE_FILE
    host.workers[name].module.updates = 0
    vars(host.workers[name].module).pop("checkpoint_state", None)


if __name__ == "__main__":
    gc.freeze()  # the collections of engines that end need not look at what was imported
    globals()[sys.argv[1]](*sys.argv[2:])
