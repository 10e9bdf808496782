"""Which weights of a model get an adapter: those that are asked for, if an adapter there acts as it will merged."""

import ast
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from rl_bridge.models.own_model import OwnModel

ALL_LINEAR = "all-linear"
_SHOWN = 6
# Of a weight that a forward looks at without computing with the numbers.
_HARMLESS = {"dtype", "device", "shape", "ndim", "size", "dim", "data_ptr", "is_meta", "element_size", "stride"}
# Methods that run before or beside the forward.
_NO_FORWARD = {"__init__", "_init_weights", "reset_parameters", "tie_weights", "extra_repr"}
_ROUTER = re.compile(r"Router|TopKGating|MoE\w*Gate$")


class Targets(NamedTuple):
    """Full names, in the model's order."""

    modules: list[str]
    parameters: list[str]
    """Weights of modules that compute with several, such as stacks of experts."""

    def widest(self, model: nn.Module) -> int:
        """The largest size of a weight, of one expert of a stack."""
        modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        shapes = [modules[name].weight.shape for name in self.modules]
        shapes += [model.get_parameter(name).shape[-2:] for name in self.parameters]
        return max(size for shape in shapes for size in shape)


def targets_of(model: PreTrainedModel, asked: str | Sequence[str]) -> Targets:
    """The modules and parameters that ``asked`` names.

    Args:
        model: without adapters, on any device.
        asked: "all-linear", or ends of the names of modules (linear layers, embeddings, convolutions) and of
            parameters together with their module ("experts.down_proj", "gate.weight").

    Raises:
        ValueError: a name that nothing in the model ends with; a module that takes no adapter; a tied weight; a weight
            that the model's code reads past the layer, where an adapter acts only once it is merged.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if asked == ALL_LINEAR and isinstance(model, OwnModel):
        raise ValueError(
            f"{type(model).__name__} is a class of your own, whose output embeddings are not known: in place of "
            f'"{ALL_LINEAR}" name target_modules'
        )
    if asked == ALL_LINEAR:
        return Targets(_all_linear(model, modules), [])
    matches = Targets([], [])
    for end in [asked] if isinstance(asked, str) else asked:
        if end == ALL_LINEAR:
            raise ValueError(f"the LoRA target {ALL_LINEAR} stands alone: leave the others out, or it")
        hits = [name for name in modules if _ends(name, end)]
        if hits:
            matches.modules.extend(hits)
        else:
            matches.parameters.extend(_parameters(model, modules, end))
    targets = Targets([x for x in modules if x in matches.modules], list(dict.fromkeys(matches.parameters)))
    _require_adaptable(model, modules, targets)
    return targets


def routers(model: nn.Module) -> set[str]:
    """Names of the modules that choose or weigh the experts of a mixture, and of all modules inside of these."""
    roots = set()
    for name, module in model.named_modules():
        if _ROUTER.search(type(module).__name__):
            roots.add(name)
        if not _holds_experts(module):
            continue
        for child, layer in module.named_children():
            # A number for each expert, or one for the expert that all tokens share.
            if isinstance(layer, nn.Linear) and re.search("gate$|router|^wg$", child):
                roots.add(f"{name}.{child}")
    return {name for name, _ in model.named_modules() if any(f"{name}.".startswith(f"{root}.") for root in roots)}


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes x @ W.T + b: a subclass of a linear layer may do anything else."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)


def _adaptable(module: nn.Module) -> bool:
    # peft knows the factor that some embeddings are scaled by.
    embedding = isinstance(module, nn.Embedding) and (
        type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
    )
    return is_linear(module) or embedding or type(module).forward is nn.Conv1d.forward


def _all_linear(model: PreTrainedModel, modules: dict[str, nn.Module]) -> list[str]:
    head, left_out, tied = model.get_output_embeddings(), routers(model), _tied(model)
    layers = [
        name
        for name, module in modules.items()
        if is_linear(module)
        and module is not head
        and name not in left_out
        and name not in tied
        and not is_parametrized(module)
    ]
    layers = [name for name in layers if not _read_past(modules, name)]
    if not layers:
        raise ValueError(f'{type(model).__name__} has no linear layer for "{ALL_LINEAR}": name the modules')
    return layers


def _parameters(model: PreTrainedModel, modules: dict[str, nn.Module], end: str) -> list[str]:
    names = [name for name, parameter in model.named_parameters() if parameter.dim() in (2, 3)]
    stacks = [name for name in names if not _adaptable(modules[name.rpartition(".")[0]])]
    hits = [name for name in stacks if _ends(name, end)]
    if hits and "." in end:
        return hits
    kind, ends = type(model).__name__, sorted({".".join(name.split(".")[-2:]) for name in hits or stacks})
    if hits:
        raise ValueError(f"the LoRA target {end!r} is no module of {kind}, but a weight of one: name it as {ends}")
    layers = sorted({name.rpartition(".")[2] for name, module in modules.items() if is_linear(module)})
    more = f", and weights {ends[:_SHOWN]}" if ends else ""
    near = difflib.get_close_matches(end, [ALL_LINEAR, *layers], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"no module of {kind} ends with the LoRA target {end!r}{hint}: it has linear layers {layers}{more}"
    )


def _require_adaptable(model: PreTrainedModel, modules: dict[str, nn.Module], targets: Targets) -> None:
    tied, kind = _tied(model), type(model).__name__
    for name in targets.modules:
        module = modules[name]
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ValueError(
                f"the LoRA target {name!r} of {kind} is an embedding with max_norm, which shortens merged vectors and "
                "not those of an adapter: leave it out of target_modules"
            )
        if not _adaptable(module):
            weights = [f"{name.rpartition('.')[2]}.{p}" for p, _ in module.named_parameters(recurse=False)]
            more = f"; of its weights, name {weights}" if weights else ""
            raise ValueError(f"the LoRA target {name!r} of {kind} is a {type(module).__name__}, no layer{more}")
        if isinstance(module, nn.Conv1d) and module.groups > 1:
            raise ValueError(f"the LoRA target {name!r} of {kind} is a convolution in groups, which peft cannot merge")
        if reader := _read_past(modules, name):
            raise ValueError(
                f"the LoRA target {name!r}: {reader} reads its weight itself, so that an adapter would act only once "
                "it is merged: leave it out of target_modules"
            )
    for name in [*targets.modules, *(name.rpartition(".")[0] for name in targets.parameters)]:
        if is_parametrized(modules[name]) or isinstance(modules[name], ParametrizationList):
            raise ValueError(
                f"the LoRA target {name!r} of {kind} computes its weight from others (torch.nn.utils.parametrize), so "
                "that no adapter can be merged into it: leave it out of target_modules"
            )
        if name in tied:
            raise ValueError(
                f"the LoRA target {name!r} has the weight of {tied[name]}, which a merged adapter would change too: "
                "leave it out of target_modules"
            )


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Modules that share a weight with another module: name → the others' names."""
    owners: dict[int, list[str]] = {}
    # A module with two names is adapted under one of them.
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    shared = [names for names in owners.values() if len(names) > 1]
    return {name: [other for other in names if other != name] for names in shared for name in names}


def _holds_experts(module: nn.Module) -> bool:
    return any("expert" in name for name, _ in module.named_children())


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _read_past(modules: dict[str, nn.Module], name: str) -> str | None:
    """The class of the module around ``name``, if its code computes with the weight instead of calling the layer."""
    parent, _, child = name.rpartition(".")
    owner = modules[parent]
    kind = type(owner.own if isinstance(owner, OwnModel) else owner)
    return kind.__name__ if child in _weights_read(kind) else None


@functools.cache
def _weights_read(kind: type[nn.Module]) -> frozenset[str]:
    """Children whose ``weight`` the methods of a class read: X of each ``….X.weight``."""
    return frozenset(name for base in kind.__mro__ if _of_a_model(base) for name in _weights_in(base))


def _of_a_model(base: type) -> bool:
    return issubclass(base, nn.Module) and base not in (nn.Module, PreTrainedModel)


@functools.cache
def _weights_in(base: type) -> tuple[str, ...]:
    try:
        source = inspect.getsource(base)
    except (OSError, TypeError):
        return ()  # a class that was typed at a prompt
    [tree] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(tree, ast.ClassDef)
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in _NO_FORWARD]
    return tuple(name for method in methods for name in _reads(method))


def _reads(method: ast.FunctionDef) -> Iterator[str]:
    looked_at = {
        id(node.value) for node in ast.walk(method) if isinstance(node, ast.Attribute) and node.attr in _HARMLESS
    }
    for node in ast.walk(method):
        # ….X.weight
        match node:
            case ast.Attribute(value=ast.Attribute(attr=child), attr="weight") if id(node) not in looked_at:
                yield child
