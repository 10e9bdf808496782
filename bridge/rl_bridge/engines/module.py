"""Decisions that a torch module can take for itself in an engine, and the optimisers that it holds on to.

Names make a state fit the same model on another mesh; torch numbers the parameters instead.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_bridge.common.user_files import required_arguments
from rl_bridge.parallel.fsdp import move_weights
from rl_bridge.parallel.parallelize import parallelize_parts
from rl_bridge.weights.manifest import Manifest, class_of, is_peft
from rl_bridge.weights.receiver import ModuleReceiver, ReceivesWeights, WeightReceiver, usable
from rl_bridge.weights.source import SendsWeights, WeightSource, own_source, put_in_charge, source_of

# Optimisers and schedules that a module holds on to: found, moved, and saved under the names of the parameters.

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
        raise ValueError(f"the optimiser has {foreign} parameters that {class_of(module).__name__} does not have")
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


# Decisions that a torch module can take for itself when an engine makes, parallelises, loads, moves and syncs it.


class Lifecycle:
    """The acts of an engine with a module, each of which a module can do otherwise: see ``ParallelModule``."""

    cuts_sequences: ClassVar[bool] = False
    """Whether the module computes its own part of the tokens where a mesh has a sequence axis: it cuts its rows with
    ``Documents``, or its arguments come cut by ``NeedParallel(…, over="sequence")``. A module that does not would
    compute the whole loss on every rank of the axis, whose gradients are added. An engine refuses the axis then."""

    takes_empty_shares: ClassVar[bool] = False
    """Whether every method can be called without a row, where there are fewer rows than shares, and then joins all
    collectives of the others. An engine refuses such a call otherwise, before anything is sent."""

    device = torch.device("cpu")
    """Where the worker computes; an engine sets it before the weights come."""

    _home: torch.device | None = None
    _base_is_freed = False
    _receiver: WeightReceiver | None = None

    def _torch_module(self) -> torch.nn.Module:
        """The module itself."""
        raise NotImplementedError

    def exported(self) -> torch.nn.Module:
        """The module whose weights travel to other engines, under its own names. By default this one, as a whole.

        A module around a Hugging Face model returns that model.
        """
        return self._torch_module()

    @property
    def movable(self) -> tuple[str, ...]:
        """Names that ``move`` takes."""
        return ("weights", "optimizer") if optimizers_of(self._torch_module()) else ("weights",)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the parameters over ``mesh``; one worker has nothing to cut. By default FSDP2 of every sub-module."""
        parallelize_parts(self._torch_module(), mesh)

    def load_weights(self) -> None:
        """Give parameters and buffers their values. What is on the meta device after it gets the factory's values."""

    def on_weights_materialized(self) -> None:
        """Called once, when the weights are there."""

    def on_parameters_replaced(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Called when parameters were freed or came back: old → new. What holds on to parameters follows them here.

        By default the optimisers do that are attributes of the module or its sub-modules.
        """
        follow(optimizers_of(self._torch_module()).values(), replaced)

    def weights_device(self) -> torch.device:
        """Where the weights are; the CPU if there are none."""
        return device_of(self._torch_module())

    def require_weights(self) -> None:
        """Raise ValueError if the weights were freed, or a sync to here failed half-way."""
        usable(self.weight_receiver().version)

    def move(self, what: str, device: torch.device) -> None:
        """Move ``what`` to ``device``; weights and optimisers' states that go to ``meta`` are freed.

        Freed weights come back with a sync or a checkpoint, a freed state with a checkpoint; moved back without one
        they have no values and are refused.

        Raises:
            ValueError: there is nothing of the kind, or it was freed.
        """
        if what not in self.movable:
            raise ValueError(
                f"{class_of(self._torch_module()).__name__} has no {what!r} to move; it has {', '.join(self.movable)}"
            )
        if what == "optimizer":
            optimizers = optimizers_of(self._torch_module()).values()
            if device.type != "meta":
                require_states(optimizers)
            move_states(optimizers, device)
            return
        if device.type == "meta":
            self._base_is_freed = is_peft(self.exported())
            self.weight_receiver().version = None
            self._home = self._home or self.weights_device()
        else:
            self._home = None
        self.on_parameters_replaced(move_weights(self._torch_module(), device))

    def make_room(self) -> None:
        """Bring freed weights back, without values, to where they were, for a sync or a checkpoint to fill."""
        if self._home is not None:
            self.move("weights", self._home)
        self._base_is_freed = False

    def weight_source(self) -> WeightSource:
        """The source of a sync from here."""
        self.require_weights()
        model = self.exported()
        return own_source(model) if model is self._torch_module() else source_of(model)

    def weight_receiver(self) -> WeightReceiver:
        """The receiver of a sync to here."""
        if self._receiver is None:
            self._receiver = _OwnReceiver(self)
        return self._receiver

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next call depends on: tensors, DTensors and plain values, nested in dictionaries.

        By default parameters, persistent buffers, and the optimisers and schedules that are attributes of the module
        or its sub-modules. What else the module counts or keeps, a method of its own adds.
        """
        self.require_weights()
        return {"module": self._torch_module().state_dict(), **self.optimizer_states()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        self.make_room()
        self._torch_module().load_state_dict(state["module"])
        self.load_optimizer_states(state)
        self.weight_receiver().version = 0

    def optimizer_states(self) -> dict[str, Any]:
        """The states of optimisers and schedules, as far as there are any; a part of ``checkpoint_state``."""
        module = self._torch_module()
        optimizers = {name: optimizer_state(module, one) for name, one in optimizers_of(module).items()}
        schedules = {name: one.state_dict() for name, one in schedules_of(module).items()}
        return {key: states for key, states in {"optimizers": optimizers, "schedules": schedules}.items() if states}

    def load_optimizer_states(self, state: Mapping[str, Any]) -> None:
        """Take back what ``optimizer_states`` gave.

        Raises:
            ValueError: the checkpoint is of other optimisers or schedules than there are here.
        """
        module = self._torch_module()
        optimizers, schedules = optimizers_of(module), schedules_of(module)
        for key, present in (("optimizers", optimizers), ("schedules", schedules)):
            saved = state.get(key, {})
            if present.keys() != saved.keys():
                raise ValueError(
                    f"{class_of(module).__name__} has the {key} {sorted(present)}, the checkpoint has {sorted(saved)}"
                )
        for name, optimizer in optimizers.items():
            load_optimizer_state(module, optimizer, state["optimizers"][name])
        for name, schedule in schedules.items():
            schedule.load_state_dict(state["schedules"][name])


class ParallelModule(Lifecycle, torch.nn.Module):
    """A module with a say in its own lifecycle; a plain ``torch.nn.Module`` gets the defaults.

    In each worker, in this order: the factory makes the module on the meta device, ``parallelize`` cuts its parameters
    over the mesh, ``load_weights`` gives every parameter and buffer its value, ``on_weights_materialized`` makes what
    holds on to parameters, the optimiser above all.

    A class of transformers can be a base class too: ``class Policy(ParallelModule, Qwen2ForCausalLM)``.
    """

    def _torch_module(self) -> torch.nn.Module:
        return self

    def weight_receiver(self) -> ModuleReceiver:
        """The receiver of a sync to here."""
        receiver = super().weight_receiver()
        assert isinstance(receiver, ModuleReceiver)
        return receiver


class PlainLifecycle(Lifecycle):
    """In charge of a torch module that is no ``ParallelModule``: the defaults, and the few methods it may have.

    These are ``load_weights`` and ``on_weights_materialized`` without arguments, ``checkpoint_state`` and
    ``load_checkpoint_state``, ``weight_source`` and ``weight_receiver``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Weights, checkpoints and moves of ``module`` go through this object from now on."""
        self._module = module
        put_in_charge(self, module)

    def _torch_module(self) -> torch.nn.Module:
        return self._module

    def load_weights(self) -> None:
        """The module's own, if there is one."""
        _call_without_arguments(self._module, "load_weights")

    def on_weights_materialized(self) -> None:
        """The module's own, if there is one."""
        _call_without_arguments(self._module, "on_weights_materialized")

    def weight_source(self) -> WeightSource:
        """The module's own, or its tensors."""
        self.require_weights()
        return self._module.weight_source() if isinstance(self._module, SendsWeights) else super().weight_source()

    def weight_receiver(self) -> WeightReceiver:
        """The module's own, or its tensors."""
        return (
            self._module.weight_receiver() if isinstance(self._module, ReceivesWeights) else super().weight_receiver()
        )

    def checkpoint_state(self) -> dict[str, Any]:
        """The module's own, or the default."""
        method = getattr(self._module, "checkpoint_state", None)
        return super().checkpoint_state() if method is None else method()

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """The module's own, or the default."""
        method = getattr(self._module, "load_checkpoint_state", None)
        super().load_checkpoint_state(state) if method is None else method(state)


class _OwnReceiver(ModuleReceiver):
    """Makes room for freed weights before the first of them arrives."""

    def __init__(self, owner: Lifecycle) -> None:
        super().__init__(owner.exported())
        self._owner = owner

    def begin(self, manifest: Manifest) -> None:
        if self._owner._base_is_freed:
            # A peft model takes over adapters alone, and these would lie on weights without values.
            raise ValueError("the weights under the adapter were freed, which no sync brings: load a checkpoint")
        self._owner.make_room()
        super().begin(manifest)


def device_of(module: torch.nn.Module) -> torch.device:
    """Where the parameters are; the CPU if there are none."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _call_without_arguments(module: torch.nn.Module, name: str) -> None:
    """Call a method that is there and asks for no argument: vLLM's models have a ``load_weights`` that does."""
    method = getattr(module, name, None)
    if callable(method) and not required_arguments(method):
        method()
