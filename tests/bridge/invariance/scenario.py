"""One training step under every arrangement of workers, rows and micro-batches: what it computes, to be compared.

python -m tests.bridge.invariance.scenario local OUTPUT [thorough]
torchrun --nproc_per_node=2 -m tests.bridge.invariance.scenario torchrun OUTPUT [thorough]
python -m tests.bridge.invariance.scenario ray OUTPUT [thorough]
"""

import gc
import itertools
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import rl_bridge
import rl_fn
from rl_bridge.algorithms.comparison_training import accumulate
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine
from rl_bridge.models.model_source import ValueSource
from rl_bridge.models.small import TinySource
from rl_bridge.modules.comparison import REWARD_LOSSES, ComparisonLoss, PreferenceModule, RewardModule
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.modules.value import ValueModule
from rl_fn import components
from rl_train.sft import SFTPipeline, run_sft
from tests.support.comparisons import random_comparisons

NUMBER, COLUMNS, VOCABULARY, COMMON = 11, 24, 20, 6
SOURCE = TinySource(vocabulary=VOCABULARY, hidden=16, layers=2, heads=4, key_value_heads=2, seed=3)
# Adam's first update divides each entry of the gradient by itself: where that is near Adam's ε, its rounding is a share
# of the learning rate. A small rate keeps this share below float32's own; it still moves log-probabilities by 0.1.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup=0, max_grad_norm=0.05)
ROWS = ("padded", "packed", "shared")
LAYOUTS = {
    "1": Mesh(),
    "2 shard": Mesh(shard=2),
    "2 replicate": Mesh(replicate=2),
    "2 tensor": Mesh(tensor=2),
    "2 sequence": Mesh(sequence=2),
}
OBJECTIVES = {
    "grpo": rl_fn.recipes.grpo().replace(kl=components.KL("k3", 0.1), entropy=components.EntropyBonus(0.01)),
    "gspo": rl_fn.recipes.gspo(),
    "dapo": rl_fn.recipes.dapo(),
    "critic": rl_fn.recipes.ppo(),
}
# One of log-probabilities, one that sorts the batch, one of rewards.
LOSSES = {name: ComparisonLoss(name=name, constants={}) for name in ("dpo", "aot", "bradley_terry")}


@dataclass(frozen=True)
class Case:
    trainer: str
    layout: str
    rows: str
    """padded, packed, or shared: packed with a group's common beginning once."""
    micro_batches: int

    def scoring(self):
        # One micro-batch holds everything; eight hold two rows at most, of the longest.
        tokens = NUMBER * COLUMNS if self.micro_batches == 1 else 2 * COLUMNS
        rows = {"packing": self.rows == "packed", "share_prefixes": self.rows == "shared"}
        return ScoringConfig(temperature=0.7, micro_batch_tokens=tokens, **rows)

    def factory(self):
        if self.trainer in LOSSES:
            kind = RewardModule if self.trainer in REWARD_LOSSES else PreferenceModule
            source = ValueSource(SOURCE, seed=1) if kind is RewardModule else SOURCE
            return kind(source, OPTIMIZER, LOSSES[self.trainer], updates=4, scoring=self.scoring())
        if self.trainer == "sft":
            return SupervisedModule(SOURCE, OPTIMIZER, updates=4, scoring=self.scoring())
        if self.trainer == "critic":
            source = ValueSource(SOURCE, seed=4)
            return ValueModule(source, OPTIMIZER, OBJECTIVES["critic"], updates=4, scoring=self.scoring())
        return PolicyModule(SOURCE, OPTIMIZER, OBJECTIVES[self.trainer], updates=4, scoring=self.scoring())


def cases(executor, extent):
    """The grid of an executor; of several workers the fast part has eight micro-batches alone."""
    layouts = ["1"] if executor == "local" else [name for name in LAYOUTS if name != "1"]
    trainers = ["sft", *OBJECTIVES, *LOSSES] if extent == "thorough" else ["grpo", "critic"]
    micro_batches = (1, 8) if executor == "local" or extent == "thorough" else (8,)
    grid = [Case(*values) for values in itertools.product(trainers, layouts, ROWS, micro_batches)]
    if extent == "thorough":
        return grid
    # The critic's rows are arranged by the code that arranges the policy's: one kind of them shows it.
    grid = [case for case in grid if case.trainer == "grpo" or case.rows == "shared"]
    grid += [Case("critic", "1", "padded", 1)] if executor == "local" else []
    if executor == "local":
        return [*grid, *(Case(name, "1", "padded", 1) for name in LOSSES)]
    others = {"dpo": "2 shard", "aot": "2 replicate", "bradley_terry": "2 sequence"}
    return [*grid, *(Case(name, layout, "shared", 8) for name, layout in others.items())]


def batch():
    """Rows of very different lengths, a mask with holes, a row in which nothing counts. Two and two begin alike."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([24, 3, 7, 2, 19, 5, 24, 11, 4, 2, 16])
    columns = torch.arange(COLUMNS)
    inside = columns < lengths[:, None]
    mask = inside & (columns > 0) & (torch.rand(NUMBER, COLUMNS, generator=generator) < 0.8)
    mask[1::2, :COMMON] = mask[:-1:2, :COMMON] & inside[1::2, :COMMON]
    mask[3] = False

    def per_token(scale, shift=0.0):
        return torch.where(mask, scale * torch.randn(NUMBER, COLUMNS, generator=generator) + shift, 0.0)

    tokens = torch.randint(1, VOCABULARY, (NUMBER, COLUMNS), generator=generator)
    tokens[1::2, :COMMON] = tokens[:-1:2, :COMMON]
    return TokenBatch(
        torch.where(inside, tokens, 0),
        mask,
        lengths,
        torch.arange(NUMBER) // 2,
        rollout_logprobs=per_token(0.3, -3.0),
        old_logprobs=per_token(0.3, -3.0),
        ref_logprobs=per_token(0.3, -3.0),
        advantages=per_token(1.0),
        old_values=per_token(0.5),
        returns=per_token(1.0),
    )


def gradients(host, name):
    """Whole gradients by name, from the first rank."""
    worker = host.workers[name]
    found = {}
    for parameter_name, parameter in worker.module.exported().named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[parameter_name] = whole.clone()
    return found if worker.rank == 0 else None


def spoil(host, name, rank):
    """A loss that is not finite, on one rank alone and without a gradient."""
    if host.workers[name].rank == rank:
        host.workers[name].module.backward(torch.tensor(float("inf"), requires_grad=True))


def plain(metrics):
    """Metrics as Python numbers; a Ratio as its two."""
    return {name: [float(x) for x in value] for name, value in metrics.items()}


def run_comparisons(case):
    """One step on pairs."""
    engine = TrainEngine(case.factory, name=f"{case}").build(mesh=LAYOUTS[case.layout])
    loss, data = LOSSES[case.trainer], random_comparisons(NUMBER)
    result = {"first step": accumulate(engine, loss, data, {}), "gradients": engine.run(gradients, engine.name)[0]}
    result["update"] = engine.optimizer_step()
    score = engine.completion_rewards if case.trainer in REWARD_LOSSES else engine.completion_logprobs
    # A completion's log-probability is a sum, which grows with its tokens, and its rounding with it: taken a token.
    result["log-probabilities"] = score(NeedParallel(data)) / (1 if case.trainer in REWARD_LOSSES else data.counted())
    result["second step"] = accumulate(engine, loss, data, {})
    engine.release()
    return result


def run(case, data):
    if case.trainer in LOSSES:
        return run_comparisons(case)
    engine = TrainEngine(case.factory, name=f"{case}").build(mesh=LAYOUTS[case.layout])
    denominator = float(data.mask.sum())
    if case.trainer != "sft":
        denominator = float(OBJECTIVES[case.trainer].denominator(data.mask.numpy()))
    first = plain(engine.train_step(NeedParallel(data), denominator))
    result = {"first step": first, "gradients": engine.run(gradients, engine.name)[0]}
    result["update"] = engine.optimizer_step()
    # A critic's values have the place of log-probabilities.
    scores = engine.values if case.trainer == "critic" else engine.token_logprobs
    result["log-probabilities"] = scores(NeedParallel(data))
    result["second step"] = plain(engine.train_step(NeedParallel(data), denominator))
    engine.run(spoil, engine.name, engine.mesh.size - 1)
    result["skipped"] = engine.optimizer_step()
    engine.release()
    return result


def supervised_run(folder):
    """The metrics of a whole run of supervised fine-tuning on all workers of this job."""
    pipeline = SFTPipeline(
        steps=4,
        rows_per_step=8,
        evaluate_every=2,
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup=0),
        micro_batch_tokens=24,
        held_out=7,
        output=folder,
        seed=3,
    )
    run_sft(pipeline)
    lines = (folder / "sft" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(executor, output, extent="fast"):
    torch.set_num_threads(1)
    gc.freeze()  # the collections of engines that end need not look at what was imported
    rl_bridge.init(executor, workers=2) if executor == "ray" else rl_bridge.init(executor)
    data = batch()
    results = {case: run(case, data) for case in cases(executor, extent)}
    Path(output).write_bytes(pickle.dumps(results))
    if executor != "ray":
        metrics = supervised_run(Path(output).with_suffix(".run"))
        Path(output).with_suffix(".sft").write_text(json.dumps(metrics))
    rl_bridge.current_executor().stop()


if __name__ == "__main__":
    # By its name: what is pickled here is unpickled by whoever compares.
    from tests.bridge.invariance import scenario

    scenario.main(*sys.argv[1:])
