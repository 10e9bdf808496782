"""Syncs between engines under torchrun, 2 or 4 ranks: torchrun -m tests.bridge.weights.torchrun_suite RESULT.json"""

import gc
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import rl_bridge
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, Mesh, ParallelModule, TrainEngine, returns
from rl_bridge.executors import WorkerError
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.rollout import InProcessRollout
from rl_bridge.weights import Cast, WeightSyncError, checksum
from rl_bridge.weights.manifest import full
from tests.support.weight_engines import model

TOKENIZER, PROMPTS = character_tokenizer("0123456789+-="), ["1+1=", "22-3="]


class Net(ParallelModule):
    """A few parameters that do not split evenly."""

    def __init__(self, value, dtype=torch.float32):
        super().__init__()
        values = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) if value is None else torch.full((7, 5), value)
        self.layer = torch.nn.Linear(5, 7)
        self.layer.weight = torch.nn.Parameter(values.to(dtype))
        self.layer.bias = torch.nn.Parameter(values[:, 0].clone().to(dtype))

    @returns("same")
    def fingerprint(self):
        """A checksum of the whole weights; of unusable ones none."""
        self.require_weights()
        return [checksum(full(p)) for p in self.parameters()]


def refuses(name, tensor):
    if tensor.device.type != "meta" and name == "layer.bias":
        raise ArithmeticError("refused")
    yield name, tensor


def outcomes():
    """Name → what was found; the lists are fingerprints."""
    found = {}
    policy = TrainEngine(partial(Net, None), name="policy").build(mesh=Mesh(shard=2))
    found["wanted"] = policy.fingerprint()
    places = {"whole": Mesh(), "shards": Mesh(shard=2), "copies": Mesh(replicate=2)}
    for place, mesh in places.items():
        target = TrainEngine(partial(Net, 1.0), name=place).build(mesh=mesh)
        for transport in ("same_slot", "shared_memory", "broadcast", "file"):
            with tempfile.TemporaryDirectory() as folder:
                where = folder if transport == "file" else None
                policy.sync_weights(target, transport=transport, folder=where)
            found[f"{place} by {transport}"] = target.fingerprint()
        try:
            policy.sync_weights(target, transport="shared_memory", through=refuses)
        except WeightSyncError as error:
            found[f"{place} refused"] = "ArithmeticError: refused" in str(error)
        try:
            target.fingerprint()
        except WorkerError as error:
            found[f"{place} unusable"] = "sync them first" in str(error)
        policy.sync_weights(target)
        found[f"{place} again"] = target.fingerprint()
    low = TrainEngine(partial(Net, 1.0, torch.bfloat16), name="low").build()
    policy.sync_weights(low, through=Cast(torch.bfloat16))
    found["cast"] = low.fingerprint() == Net(None, torch.bfloat16).fingerprint()
    return found


def language_models():
    """Layout and transport → whether a rollout draws from the weights that a sharded language model sent."""
    rollout, reference = (
        InferenceEngine(partial(InProcessRollout, StateSource(model(seed)), TOKENIZER), name=f"rollout {seed}").build()
        for seed in (2, 1)
    )
    sampling = SamplingParams(max_new_tokens=5)
    wanted = [trajectory.tokens for trajectory in reference.generate(PROMPTS, sampling)]
    found = {}
    for mesh in (Mesh(tensor=2), Mesh(shard=2, tensor=2), Mesh(replicate=2, shard=2), Mesh(sequence=2, tensor=2)):
        policy = TrainEngine(partial(TokenScorer, StateSource(model(1)))).build(mesh=mesh)
        other = TrainEngine(partial(TokenScorer, StateSource(model(3)))).build()
        for transport in ("shared_memory", "broadcast"):
            other.sync_weights(rollout, transport="shared_memory")
            found[f"{mesh} {transport}: others before"] = rollout.generate(PROMPTS, sampling)[0].tokens != wanted[0]
            policy.sync_weights(rollout, transport=transport)
            got = [trajectory.tokens for trajectory in rollout.generate(PROMPTS, sampling)]
            found[f"{mesh} {transport}"] = got == wanted
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # the collections of engines that end need not look at what was imported
    executor = rl_bridge.init(timeout=60)
    Path(sys.argv[1]).write_text(json.dumps(outcomes() if len(executor.slots) == 2 else language_models()))
