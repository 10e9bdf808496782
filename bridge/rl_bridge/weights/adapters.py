"""Weights of peft models: merged while they are sent, never in place, or the adapter's own tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch.distributed.tensor import DTensor

from rl_bridge.weights.manifest import full, inside, local, module_tensors, part_of, plain_name, reshard, whole

_OF_ALL = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "bias",
    "fan_in_fan_out",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
)
"""Fields that each adapter's configuration travels with; others go with those that set them."""
_CHOOSE_AMONG_TARGETS = ("exclude_modules", "layers_to_transform")
_NAMED_BY_TENSORS = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
_WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",  # of training alone
    "runtime_config",  # where factors lie
    "megatron_core",  # a name that megatron_config puts to use
    "qalora_group_size",  # a size that use_qalora puts to use
)
_OF_ADAPTER = re.compile(r"\.(lora_|modules_to_save\.|trainable_tokens_)")
_PLAIN_STARTS = (True, False, None, "gaussian")
"""Starts of A and B alone. Others, such as "pissa", take their part out of the base model's weights as well."""


class PeftSource:
    """A peft model's weights under the names of the model that it wraps.

    Each weight with an active LoRA adapter goes out as W + scaling · B A, computed from the gathered A and B. The model
    is left as it is: merging and unmerging in place changes a tenth of bfloat16 base weights within twenty rounds.
    """

    def __init__(self, model: PeftModel) -> None:
        """``model``: plain or sharded by FSDP2, its adapters not merged."""
        self._model = model

    def outline(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Names, shapes and placements."""
        if adapter:
            yield from adapter_tensors(self._model)
            return
        for name, tensor, _ in self._merging():
            yield name, tensor

    def stream(self, *, adapter: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The values: merged weights, or the adapter's own."""
        if adapter:
            yield from adapter_tensors(self._model)
            return
        for name, tensor, layer in self._merging():
            yield name, tensor.detach() if layer is None else merged(tensor, layer)

    def adapter_config(self) -> dict[str, Any]:
        """The part of the active adapter's configuration that its effect depends on."""
        return adapter_config(self._model)

    def _merging(self) -> Iterator[tuple[str, torch.Tensor, LoraLayer | None]]:
        """(name in the wrapped model, its tensor, the LoRA layer whose delta is to be added)."""
        reshard(self._model)
        wrapped = self._model.get_base_model()
        layers = _lora_layers(wrapped)
        saved = {n: m for n, m in wrapped.named_modules() if isinstance(m, AuxiliaryTrainingWrapper)}
        for path, tensor in module_tensors(wrapped):
            around = _around(path, layers)
            if around:
                name, rest = _unwrapped(path, around)
                if name is not None:
                    adapting = [x for x in around.values() if _parameter_name(x) == rest and _active(x)]
                    yield name, tensor, adapting[0] if adapting else None
                continue
            owner, wrapper = _owner(path, saved)
            if wrapper is None:
                yield path, tensor, None
                continue
            if not isinstance(wrapper, ModulesToSaveWrapper):
                raise NotImplementedError(f"{owner!r} is a {type(wrapper).__name__}, whose weights cannot be merged")
            chosen = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
            used = f"modules_to_save.{chosen[0]}." if chosen and not wrapper.disable_adapters else "original_module."
            rest = path.removeprefix(f"{owner}.")
            if rest.startswith(used):
                yield f"{owner}.{rest.removeprefix(used)}", tensor, None


def merged(weight: torch.Tensor, layer: LoraLayer) -> torch.Tensor:
    """W + Σ scaling · B A over the active adapters, placed as W is. A and B are gathered by all of their mesh."""
    shard = local(weight)
    total = shard
    for adapter in _active(layer):
        delta_of = _Delta(layer)
        factors = {n: full(p) for n, p in delta_of.named_parameters() if _is_factor(n, adapter)}
        delta = torch.func.functional_call(delta_of, factors, (adapter,))
        total = total + inside(delta.to(shard.device), whole(weight.shape), part_of(weight))
    total = total.to(shard.dtype)
    if not isinstance(weight, DTensor):
        return total
    return DTensor.from_local(
        total, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def effective_weight(layer: Any) -> torch.Tensor:
    """The weight that a layer's output has, W + Σ scaling · B A, with its graph; of a plain layer W.

    For code that takes a layer's weight instead of calling the layer.

    Raises:
        NotImplementedError: an active adapter that is no plain LoRA, has dropout at work, or lies in shards.
    """
    weight, training = layer.weight, layer.training
    if not isinstance(layer, LoraLayer) or layer.merged or not (active := _active(layer)):
        return weight
    special = [a for a in active if a in layer.lora_variant or layer.lora_bias.get(a)]
    dropping = [a for a in active if training and getattr(layer.lora_dropout[a], "p", 0.0)]
    if special or dropping or isinstance(weight, DTensor):
        raise NotImplementedError(
            f"a {type(layer).__name__} whose weight is taken has adapters {active}: they need to be plain LoRA, "
            "without dropout (use eval()) and without tensor parallelism; or leave this layer out of the targets"
        )
    with torch.autocast(weight.device.type, enabled=False):
        deltas = [layer.get_delta_weight(adapter) for adapter in active]  # type: ignore[operator]
        return weight + sum(delta.to(weight.dtype) for delta in deltas)


def _is_factor(name: str, adapter: str) -> bool:
    """Whether a parameter of ``_Delta`` is the adapter's A or B, such as ``layer.lora_A.default.weight``."""
    _, kind, owner = name.split(".")[:3]
    return kind.startswith("lora_") and owner == adapter


class _Delta(torch.nn.Module):
    """peft's own ``get_delta_weight`` as a forward, so that it can be called with other tensors than the layer's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, adapter: str) -> torch.Tensor:
        return self.layer.get_delta_weight(adapter)


def adapter_tensors(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The active adapter's tensors under peft's names, which do not have the adapter's own name.

    Raises:
        ValueError: several adapters are active, or a weight that is no adapter's is trained, as a value model's head.
    """
    reshard(model)
    state = get_peft_model_state_dict(model, adapter_name=_adapter(model), save_embedding_layers=False)
    of_adapter = {plain_name(name) for name in state}
    trained = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if beside := [name for name in trained if name not in of_adapter and not _OF_ADAPTER.search(name)]:
        raise ValueError(
            f"adapter=True sends the adapter alone, and {', '.join(beside)} is trained besides: sync_weights(…, "
            "adapter=False) sends all of it, merged"
        )
    for name, tensor in state.items():
        yield plain_name(name), tensor


def adapter_config(model: PeftModel) -> dict[str, Any]:
    """The part of the active adapter's configuration that its effect depends on, as plain values."""
    config = model.peft_config[_adapter(model)].to_dict()
    special, plain = deciding(config), deciding({})
    chosen = {name: config.get(name) for name in _OF_ALL}
    chosen |= {name: config[name] for name in _CHOOSE_AMONG_TARGETS if config.get(name) not in (None, [], set())}
    chosen |= {name: value for name, value in special.items() if name not in chosen and value != plain.get(name)}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in chosen.items()}


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that an adapter's effect depends on besides its tensors and the weights that these name.

    Empty values are given as None. Every field counts that is not known to change no number: a field of a later
    peft, too.

    Args:
        config: of peft, as it is stored. A field that it lacks has peft's own value.
    """
    fields = {**LoraConfig().to_dict(), "peft_type": None, **config}
    if fields["init_lora_weights"] in _PLAIN_STARTS:
        fields["init_lora_weights"] = None
    without = {*_NAMED_BY_TENSORS, *_WITHOUT_EFFECT}
    return {name: value or None for name, value in fields.items() if name not in without}


def _adapter(model: PeftModel) -> str:
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ValueError(f"adapter=True sends one adapter, {len(active)} are active: {active}")
    return active[0]


def _lora_layers(wrapped: torch.nn.Module) -> dict[str, LoraLayer]:
    """The LoRA layers by name.

    Raises:
        NotImplementedError: an adapter that is no plain LoRA.
        ValueError: an adapter is merged already, or its weight is tied to another module's.
    """
    layers: dict[str, LoraLayer] = {}
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, layer in wrapped.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not isinstance(layer, LoraLayer):
            raise NotImplementedError(f"{name!r} is a {type(layer).__name__}: only LoRA can be merged")
        active = _active(layer)
        if special := [a for a in active if a in layer.lora_variant or layer.lora_bias.get(a)]:
            raise NotImplementedError(f"{name!r}: adapters {special} are no plain LoRA (DoRA, a bias, or the like)")
        if layer.merged:
            raise ValueError(f"{name!r}: adapters {layer.merged_adapters} are merged into the base: unmerge them")
        base: Any = layer.get_base_layer()
        weight = getattr(base, _parameter_name(layer), None)
        if weight is None or (active and getattr(base, "groups", 1) > 1):
            raise NotImplementedError(f"{name!r}: an adapter of a {type(base).__name__} cannot be merged")
        if active and len(tied := names[weight]) > 1:
            raise ValueError(f"{name!r} has an adapter and a tied weight, merged all would change: {tied}")
        layers[plain_name(name)] = layer
    return layers


def _active(layer: LoraLayer) -> list[str]:
    if layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def _parameter_name(layer: LoraLayer) -> str:
    """The weight of the base layer that the adapter is for."""
    return layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"


def _around(path: str, layers: dict[str, LoraLayer]) -> dict[str, LoraLayer]:
    """The LoRA layers that a tensor lies in, the outermost first: those of several weights of one module are nested."""
    places = [place for place, character in enumerate(path) if character == "."]
    return {path[:place]: layers[path[:place]] for place in places if path[:place] in layers}


def _unwrapped(path: str, around: Iterable[str]) -> tuple[str | None, str]:
    """A tensor's name in the model without LoRA layers, and within its own module; None for an adapter's factor."""
    plain, passed = "", 0
    for owner in around:
        if not f"{path}.".startswith(f"{owner}.base_layer."):
            return None, ""
        plain += path[passed : len(owner)]
        passed = len(owner) + len(".base_layer")
    return plain + path[passed:], path[passed + 1 :]


def _owner(path: str, modules: dict[str, Any]) -> tuple[str, Any]:
    """The module among ``modules`` that the tensor ``path`` belongs to, and its name."""
    while "." in path:
        path = path.rpartition(".")[0]
        if path in modules:
            return path, modules[path]
    return "", None
