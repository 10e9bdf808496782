"""Reward models of a policy's run. They score in the driver's process, which is the first worker's or beside it."""

from collections.abc import Sequence

import torch

from rl_bridge.data.micro_batches import micro_batches
from rl_bridge.memory.live import LiveBytes
from rl_bridge.memory.places import REWARD
from rl_bridge.memory.rehearsal import Rehearsal
from rl_bridge.memory.sources import beside
from rl_bridge.memory.workload import Largest, Workload
from rl_bridge.parallel.values import token_values
from rl_bridge.rewards.model import MICRO_BATCH_TOKENS


class PlannedRewards:
    """The weights of these reward models, and a pass over the completions of a step."""

    def __init__(self, names: Sequence[str], live: LiveBytes) -> None:
        """``names``: folders or hub ids, of which a rehearsal reads config.json alone."""
        self._rehearsed = isinstance(live, Rehearsal)
        self._models = []
        for name in names:
            source = beside(name, rehearsed=self._rehearsed, values=True)
            with torch.device("meta"):
                model = source.empty()
            source.load(model, torch.device("cpu"))
            live.watch(model, REWARD)
            self._models.append(model)

    def score(self, workload: Workload) -> None:
        """As ``RewardModel`` does; a conversation in the model's own template may be longer than a row."""
        for model in self._models:
            parts = list(micro_batches(workload.batch(model.config.get_text_config().vocab_size), MICRO_BATCH_TOKENS))
            with torch.no_grad():
                for part in Largest(parts) if self._rehearsed else parts:
                    token_values(model, part.batch.tokens)
