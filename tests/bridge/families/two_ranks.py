"""One of two ranks: a family's numbers over a mesh, against the plain model in this process."""

import functools
import math
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from rl_bridge.common.random_numbers import generators
from rl_bridge.engines.worker import torch_worker
from rl_bridge.executors.host import Host
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import CausalLMModule
from rl_bridge.parallel.mesh import make_mesh
from tests.bridge.families import reference, zoo
from tests.bridge.families.cells import Cell, building, cell
from tests.bridge.families.columns import OPTIMIZER
from tests.bridge.families.ranks import AXES
from tests.bridge.families.reference import Numbers


class OneRank:
    """Holds one mesh for each column: groups are made once."""

    def __init__(self, host: Host, number: int) -> None:
        self._number = number
        self._meshes = {}
        for name, sizes in AXES.items():
            layout: object = SimpleNamespace(shape=sizes, size=math.prod(sizes))
            self._meshes[name] = make_mesh(host, range(2), layout)  # type: ignore[arg-type]

    def cell(self, model_type: str, column: str) -> Cell:
        """Values and gradients of the trained module over the column's mesh."""
        model = _model(model_type)
        return cell(model, lambda: self._errors(model_type, model, column))

    def _errors(self, model_type: str, model: PreTrainedModel, column: str) -> dict[str, float]:
        rows, source = reference.batch(), StateSource(model)
        mine = slice(3 * self._number, 3 * self._number + 3) if column == "shard" else slice(None)

        def factory() -> CausalLMModule:
            return CausalLMModule(source, OPTIMIZER, updates=1, scoring=ScoringConfig())

        state = generators()
        module = building(lambda: torch_worker(factory, self._meshes[column], torch.device("cpu"), state))
        part, weights = rows.rows(mine), reference.weights(rows.mask)[mine]
        values = module.token_logprobs(part)
        for micro in module.micro_batches(part):
            logprobs, _ = module(micro.batch)
            (logprobs * micro.of(weights)).sum().backward()
        gradients = {name: _whole(p.grad) for name, p in module.model.named_parameters() if p.grad is not None}
        wanted = _wanted(model_type)
        found = reference.errors(Numbers(values, gradients), Numbers(wanted.values[mine], wanted.gradients))
        return reference.within_rounding(found, model, rows)


@functools.lru_cache(maxsize=1)
def _model(model_type: str) -> PreTrainedModel:
    return zoo.tiny(model_type)


@functools.lru_cache(maxsize=1)
def _wanted(model_type: str) -> Numbers:
    """What the plain model says: once for all columns, and only after one of them was built."""
    return reference.numbers(_model(model_type), reference.batch())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
    return whole.detach().clone()
