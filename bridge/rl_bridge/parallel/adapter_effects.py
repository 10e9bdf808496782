"""One comparison of adapters of a class of the user's own: the trained model against the one with them merged.

What reads the weight of a layer in place of calling it, or calls the layer inside an adapter, computes without the
adapter. Such a model trains without it, and is another one once its weights are merged for a sync or an export.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rl_bridge.parallel.fsdp import forget_pass, part_of, reshard
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.parallel.probe import any_worker, is_alone, plain_values, rows_for
from rl_bridge.weights.manifest import local, without_peft

_TOGETHER, _EACH = 1e-3, 2e-2
"""Largest difference in float32, of the adapters' effect: of all at once, and of one alone, which is then named."""
_ROUGH, _ROUGH_SPREAD = 0.3, 0.15
"""In lower precisions, of one adapter's effect and of the spread of the numbers: a weight that is read past has 1."""
_SMALL = 1e-3
"""Parameters whose values are all below hide what lies before them: a new model's last layer, or its scales."""


def require_effect(model: PreTrainedModel, mesh: DeviceMesh | None = None, *, exact: bool = True) -> None:
    """Refuse adapters that act otherwise than they will merged, in a model of a class of the user's own.

    Random adapters stand in for the model's while three rows are computed. Values and random state are afterwards as
    they were. All workers of the mesh call the function.

    Args:
        model: with its weights, in evaluation mode; nothing is done without adapters or for a class of transformers.
        mesh: of ``make_mesh``.
        exact: whether the model computes in float32 or float64. In less, each adapter is looked at alone.

    Raises:
        ValueError: with the names of the targets.
    """
    inner: Any = without_peft(model)
    if not isinstance(inner, GivesLogits) or not hasattr(model, "peft_config"):
        return
    if any(isinstance(p, FakeTensor) or p.is_meta for p in model.parameters()) or is_alone(mesh):
        return
    reshard(model)
    effects = _Effects(model, mesh, exact)
    with effects.temporary_values():
        if exact and not effects.differ(list(effects.layers), _TOGETHER):
            return
        wrong = [name for name in effects.layers if effects.differ([name], _EACH)]
    if wrong:
        targets = ", ".join(repr(name) for name in wrong)
        raise ValueError(
            f"the LoRA targets {targets} of {type(inner).__name__} are read past their modules (the weight alone, a "
            "second way to the layer, a hook or a forward of its own): an adapter there would act otherwise than once "
            "merged; take other target_modules (--lora.target-modules), or call the module"
        )


class _Effects:
    """The LoRA layers of a model, and its numbers with adapters and with merged weights."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, exact: bool) -> None:
        from peft.tuners.lora import LoraLayer

        self.model, self.mesh, self.exact, self.rows = model, mesh, exact, rows_for(model)
        inner: Any = without_peft(model)
        self.layers: dict[str, Any] = {
            name.replace(".base_layer", ""): layer
            for name, layer in inner.named_modules()
            if isinstance(layer, LoraLayer)
        }
        factors = {id(p) for layer in self.layers.values() for p in _own_factors(layer)}
        self.factors = {n: p for n, p in model.named_parameters() if id(p) in factors}
        self.weights = {name: _base_weight(layer) for name, layer in self.layers.items()}

    @contextmanager
    def temporary_values(self) -> Iterator[None]:
        """Put values in the place of small ones, and everything back in the end."""
        others = [p for n, p in self.model.named_parameters() if n not in self.factors and p.is_floating_point()]
        small = [p for p in others if p.numel() and bool((local(p).abs() < _SMALL).all())]
        changed = {id(p): p for p in [*self.factors.values(), *self.weights.values(), *small]}
        # In host memory: of all targets the weights are a second copy of the model.
        saved = {key: local(p).to("cpu", copy=True) for key, p in changed.items()}
        try:
            for place, parameter in enumerate(small):
                _put(parameter, 0.1 * _normal(parameter, place))
            self.bases = {name: local(weight).to("cpu", copy=True) for name, weight in self.weights.items()}
            self._set_factors([])
            self.plain = self._values()
            yield
        except BaseException:
            forget_pass(self.model)
            raise
        finally:
            reshard(self.model)
            for key, parameter in changed.items():
                _put(parameter, saved[key], whole=False)

    def differ(self, names: Sequence[str], share: float) -> bool:
        """Whether the model with adapters at ``names`` alone is another one than with these merged, on any worker."""
        from rl_bridge.weights.adapters import merged

        self._set_factors(names)
        adapted = self._values()
        reshard(self.model)
        for name in names:
            weight = self.weights[name]
            _put(weight, local(merged(weight, self.layers[name])), whole=False)
        self._set_factors([])
        target = self._values()
        reshard(self.model)
        for name in names:
            _put(self.weights[name], self.bases[name], whole=False)
        gap, effect = adapted - target, target - self.plain
        if self.exact:
            wrong = not float(gap.abs().max()) <= share * float(effect.abs().max()) + 2e-5
        else:
            size, spread = (float(x.square().mean().sqrt()) for x in (gap, self.plain - self.plain.mean()))
            wrong = size > max(_ROUGH * float(effect.square().mean().sqrt()), _ROUGH_SPREAD * spread)
        return any_worker(wrong, self.mesh)

    def _set_factors(self, names: Sequence[str]) -> None:
        """Random factors at ``names``, of which B A is as large as a new layer's weight; zeros elsewhere."""
        reshard(self.model)
        chosen = {id(p): self.layers[name] for name in names for p in _own_factors(self.layers[name])}
        for number, (name, parameter) in enumerate(self.factors.items()):
            if id(parameter) not in chosen:
                local(parameter).zero_()
                continue
            layer, values = chosen[id(parameter)], _normal(parameter, number)
            if ".lora_A." in name:
                values /= max(1, parameter[0].numel()) ** 0.5
            elif ".lora_embedding_A." not in name:
                values /= next(iter(layer.scaling.values())) * next(iter(layer.r.values())) ** 0.5
            _put(parameter, values)

    def _values(self) -> Tensor:
        """The model's own numbers of each row alone; what a forward draws is the same each time."""
        ids, lengths = self.rows.ids, self.rows.lengths
        devices = [ids.device.index or 0] if ids.device.type == "cuda" else []
        values = []
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False), torch.random.fork_rng(devices=devices):
            for row, length in zip(ids, lengths.tolist(), strict=True):
                torch.manual_seed(0)
                values.append(plain_values(self.model, row[:length]))
        return torch.cat(values).double()


def _base_weight(layer: Any) -> nn.Parameter:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def _own_factors(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The factors of a LoRA layer, without those of one nested inside, which adapts another weight of the module."""
    for name, parameter in layer.named_parameters():
        if name.startswith("lora_"):
            yield parameter


def _normal(parameter: nn.Parameter, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu")


def _put(parameter: nn.Parameter, values: Tensor, *, whole: bool = True) -> None:
    """Write this worker's part: of ``values`` that are those of the whole parameter, or of the part already."""
    local(parameter).copy_(values[part_of(parameter)] if whole else values)
