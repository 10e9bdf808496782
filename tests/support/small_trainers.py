"""Every trained module over a tiny model, with batches that each of these learns from."""

from functools import partial
from typing import Any

import torch

from rl_bridge.algorithms.comparison_training import accumulate
from rl_bridge.common.random_numbers import generators
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.model_source import ValueSource
from rl_bridge.models.small import TinySource
from rl_bridge.modules.comparison import ComparisonLoss, PreferenceModule, RewardModule
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.modules.value import ValueModule
from rl_bridge.pipelines.objective_options import objective_options
from rl_tools.plan.workload import Workload
from tests.support.comparisons import random_comparisons
from tests.support.direct_engine import Direct

SOURCE = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
HEADED = ValueSource(SOURCE, seed=1)  # type: ignore[arg-type]
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
ROWS = Workload(prompts=5, responses=2, prompt_tokens=9, new_tokens=11)
TRAINED: dict[str, Any] = {
    "sft": partial(SupervisedModule, SOURCE, OPTIMIZER),
    "policy": partial(PolicyModule, SOURCE, OPTIMIZER, objective_options("dapo").build()),
    "critic": partial(ValueModule, HEADED, OPTIMIZER, objective_options("ppo").build()),
    "reward model": partial(RewardModule, HEADED, OPTIMIZER, ComparisonLoss(name="bradley_terry", constants={})),
    "dpo": partial(PreferenceModule, SOURCE, OPTIMIZER, ComparisonLoss(name="dpo", constants={})),
    "bco": partial(PreferenceModule, SOURCE, OPTIMIZER, ComparisonLoss(name="bco", constants={})),
}
COMPARED = ("reward model", "dpo", "bco")


def made(factory: Any, tokens: Any, mesh: Any = None, **options: Any) -> Any:
    scoring = ScoringConfig(micro_batch_tokens=tokens, share_prefixes=False)
    make = partial(factory, scoring=scoring, **options)
    return torch_worker(make, mesh, torch.device("cpu"), generators())


def batch_of(name: str, step: int) -> Any:
    if name in COMPARED:
        batch = random_comparisons(9, 2)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(step))
        return batch.rows(order)
    batch = ROWS.batch(20, seed=step)
    return batch._replace(old_values=torch.zeros(batch.mask.shape), returns=batch.mask.float())


def make_step(name: str, module, batch) -> None:
    if name in COMPARED:
        engine: Any = Direct(module)
        accumulate(engine, module.loss, batch, dict.fromkeys(module.loss.statistics, 0.1))
    else:
        module.train_step(batch, float(batch.mask.sum()))
    module.optimizer_step()
