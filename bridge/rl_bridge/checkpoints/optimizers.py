"""An optimiser's state under the names of its parameters, so that it fits the same model on another mesh."""

from collections.abc import Iterable
from typing import Any

import torch


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {parameter: {key: value}}, "groups": [...]}``; torch numbers the parameters instead.

    A parameter that has had no update yet gets the state of zero updates, so that a new optimiser has a place for all
    that a checkpoint holds.

    Raises:
        ValueError: the optimiser has a parameter that the module does not have.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    if foreign := sum(parameter not in names for parameter in _parameters(optimizer)):
        raise ValueError(f"the optimiser has {foreign} parameters that {type(module).__name__} does not have")
    _complete(optimizer)
    return {
        "state": {names[p]: dict(optimizer.state[p]) for p in _parameters(optimizer) if p in optimizer.state},
        "groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take back what ``optimizer_state`` gave.

    Raises:
        ValueError: it is the state of an optimiser with other groups of parameters.
    """
    parameters = dict(module.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    now = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    before = [list(group["params"]) for group in state["groups"]]
    if now != before:
        raise ValueError(
            f"the optimiser's parameter groups are {_short(now)}, those of the checkpoint {_short(before)}"
        )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    present = {names[p]: dict(optimizer.state[p]) for p in _parameters(optimizer) if p in optimizer.state}
    optimizer.state.clear()
    for name, values in state["state"].items():
        here, parameter = present.get(name, {}), parameters[name]
        optimizer.state[parameter] = {
            key: value if value is here.get(key) else _own(value, parameter.device) for key, value in values.items()
        }


@torch.no_grad()
def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of parameters without one, by a step of rate and gradient 0 that changes no bit of any weight."""
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
    for parameter in new:
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                optimizer.state[parameter][key] = type(value)(0)


def _own(value: Any, device: torch.device) -> Any:
    """A copy of somebody else's tensor. Step counts, which have no axes, stay on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().to(device if value.dim() else value.device)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _short(groups: list[list[str]]) -> str:
    return " and ".join(f"[{', '.join(names[:3])}{', …' if len(names) > 3 else ''}] ({len(names)})" for names in groups)
