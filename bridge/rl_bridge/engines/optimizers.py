"""Optimisers and schedules that a module holds on to: found, moved, and saved under the names of the parameters.

Names make a state fit the same model on another mesh; torch numbers the parameters instead.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Replaced = Mapping[torch.nn.Parameter, torch.nn.Parameter]
"""Parameters that others took the place of: old → new."""
_Kind = TypeVar("_Kind", Optimizer, LRScheduler)
_places: ContextVar[set[int] | None] = ContextVar("_places", default=None)


def optimizers_of(module: torch.nn.Module) -> dict[str, Optimizer]:
    """The optimisers that are attributes of ``module`` or its sub-modules, by name; in lists and dictionaries too.

    >>> module = torch.nn.Linear(2, 1)
    >>> module.optimizers = [torch.optim.SGD(module.parameters())]
    >>> list(optimizers_of(module))
    ['optimizers.0']
    """
    return _attributes_of(module, Optimizer)


def schedules_of(module: torch.nn.Module) -> dict[str, LRScheduler]:
    """The schedules of learning rates, found as the optimisers are."""
    return _attributes_of(module, LRScheduler)


def follow(optimizers: Iterable[Optimizer], replaced: Replaced) -> None:
    """Point optimisers at the parameters that took the place of others; their states stay."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for old, new in replaced.items():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


def move_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states to ``device``; with "meta" their memory is freed.

    Step counts, which have no axes, stay where they are: on the host, as a rule.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.to(device)


def require_states(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError if a state was freed."""
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    if any(isinstance(value, torch.Tensor) and value.is_meta for state in states for value in state.values()):
        raise ValueError("the optimiser's state was freed: load a checkpoint first")


def optimizer_state(module: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``{"state": {parameter: {key: value}}, "groups": [...]}``, as it is: a parameter without an update has no state.

    Raises:
        ValueError: the optimiser has a parameter that the module does not have, or its state was freed.
        NotImplementedError: the optimiser's update needs a closure or sparse gradients, so that a new one cannot be
            given the state.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    if foreign := sum(parameter not in names for parameter in _parameters(optimizer)):
        raise ValueError(f"the optimiser has {foreign} parameters that {type(module).__name__} does not have")
    _require_plain_updates(optimizer)
    places = _places.get()
    if places is None:
        require_states([optimizer])
    else:
        _bring_back(optimizer)
        _complete(optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        places |= {id(value) for value in values if isinstance(value, torch.Tensor)}
    return {
        "state": {names[p]: dict(optimizer.state[p]) for p in _parameters(optimizer) if p in optimizer.state},
        "groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }


@contextmanager
def room_for_states() -> Iterator[set[int]]:
    """While a checkpoint is read: ``optimizer_state`` makes a place for all that a parameter can have there.

    Yields the ``id`` of each tensor in these places, which grow with each call. A checkpoint without such a tensor is
    of an optimiser that had none there.
    """
    places: set[int] = set()
    token = _places.set(places)
    try:
        yield places
    finally:
        _places.reset(token)


def load_optimizer_state(module: torch.nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take back what ``optimizer_state`` gave.

    Raises:
        ValueError: it is the state of another optimiser, or of one with other groups of parameters.
    """
    parameters = dict(module.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    before = [list(group["params"]) for group in state["groups"]]
    if groups != before:
        raise ValueError(
            f"the optimiser's parameter groups are {_short(groups)}, those of the checkpoint {_short(before)}"
        )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        if unknown := sorted(saved.keys() - group.keys() - {"initial_lr"}):
            raise ValueError(
                f"the checkpoint is of another optimiser than {type(optimizer).__name__}, which has no {unknown}"
            )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    present = {names[p]: dict(optimizer.state[p]) for p in _parameters(optimizer) if p in optimizer.state}
    optimizer.state.clear()
    for name, values in state["state"].items():
        present_values, parameter = present.get(name, {}), parameters[name]
        optimizer.state[parameter] = {
            key: value if value is present_values.get(key) else _copy(value, parameter.device)
            for key, value in values.items()
        }


def _attributes_of(module: torch.nn.Module, kind: type[_Kind]) -> dict[str, _Kind]:
    attributes: dict[int, tuple[str, _Kind]] = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            for name, attribute in _inside(f"{prefix}.{key}" if prefix else key, value, kind):
                attributes.setdefault(id(attribute), (name, attribute))
    return dict(attributes.values())


def _inside(name: str, value: Any, kind: type[_Kind]) -> Iterator[tuple[str, _Kind]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _inside(f"{name}.{place}", entry, kind)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _inside(f"{name}.{key}", entry, kind)


def _require_plain_updates(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    if required or isinstance(optimizer, torch.optim.SparseAdam):
        needs = "a closure" if required else "sparse gradients"
        raise NotImplementedError(
            f"a checkpoint cannot hold the state of {type(optimizer).__name__}, whose update needs {needs}: "
            "write a checkpoint_state and a load_checkpoint_state of the module's own"
        )


def _bring_back(optimizer: Optimizer) -> None:
    """Give a freed state memory, without values, where its parameter is."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                state[key] = torch.empty_like(value, device=parameter.device)


@torch.no_grad()
def _complete(optimizer: Optimizer) -> None:
    """Make a state for parameters without one, by a step of rate and gradient 0 that changes no bit of any weight."""
    new = {p for p in _parameters(optimizer) if p.requires_grad and p not in optimizer.state}
    if not new:
        return
    gradients = {parameter: parameter.grad for parameter in _parameters(optimizer)}
    settings = [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    try:
        for parameter in gradients:
            parameter.grad = torch.zeros_like(parameter) if parameter in new else None
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        optimizer.step()
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
            group["lr"] = rate
            if "weight_decay" in group:
                group["weight_decay"] = decay


def _copy(value: Any, device: torch.device) -> Any:
    """A copy of somebody else's tensor. Step counts, which have no axes, stay on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().to(device if value.dim() else value.device)


def _parameters(optimizer: Optimizer) -> Iterable[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _short(groups: list[list[str]]) -> str:
    return " and ".join(f"[{', '.join(names[:3])}{', …' if len(names) > 3 else ''}] ({len(names)})" for names in groups)
