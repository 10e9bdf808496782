"""One engine's share in one slot: made on the meta device, parallelised, loaded. These functions run in the workers."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl_bridge.common.random_numbers import Generators, drawing_from
from rl_bridge.engines.dispatch import Join, declared, handed_out
from rl_bridge.engines.module import Lifecycle, ParallelModule, PlainLifecycle
from rl_bridge.executors.host import Host
from rl_bridge.memory.garbage_collection import collect_all, one_phase
from rl_bridge.parallel import fsdp
from rl_bridge.parallel.mesh import Mesh
from rl_bridge.weights.manifest import class_of, plain_name
from rl_bridge.weights.source import in_charge_of

# The object that the factory made, and its place among the engine's workers.

DATA_RANK: ContextVar[int] = ContextVar("DATA_RANK", default=0)
"""While an engine's factory makes a worker: which share of the rows that worker will get."""

TENSOR_PARALLEL_SIZE: ContextVar[int] = ContextVar("TENSOR_PARALLEL_SIZE", default=1)
"""Likewise: what ``InferenceEngine.build`` was given."""


@dataclass
class Worker:
    """``module`` is what the factory made. One worker, or no torch module: ``mesh`` and ``group`` (of all) are None."""

    name: str
    """The engine's name."""
    module: Any
    rank: int
    """Within the engine."""
    slots: Sequence[int]
    """Slot of every rank of the engine."""
    layout: Mesh
    mesh: DeviceMesh | None
    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def size(self) -> int:
        """Workers of the engine."""
        return self.layout.size

    @property
    def data_rank(self) -> int:
        """Which share of the rows this worker gets."""
        return self.layout.data_rank(self.rank)


# Making a worker: meta device → parallelise → load → optimiser.

_LIBRARIES = ("builtins", "torch", "transformers", "peft")


class Description(NamedTuple):
    """A description of the workers' object for the driver."""

    kind: str = "worker"
    """Its class."""
    methods: Mapping[str, Join | None] = MappingProxyType({})
    """Its public methods, and how each declares its results."""
    own: frozenset[str] = frozenset()
    """The methods that no library gave it."""
    takes_empty_shares: bool = True
    """Whether it can be called without a row."""


def build_worker(
    host: Host,
    name: str,
    factory: Callable[[], Any],
    rank: int,
    slots: Sequence[int],
    layout: Mesh,
    start: Generators,
    torch_module: bool,
) -> Description:
    """Make the engine's worker of this slot; returns what it is. All workers of the engine run this together.

    Raises:
        ValueError: the slot has such a worker, or the module does not cut sequences and the mesh has an axis for them.
    """
    if name in host.workers:
        raise ValueError(f"slot {host.slot} has a worker of an engine {name!r} already")
    mesh, group = None, None
    token = DATA_RANK.set(layout.data_rank(rank))
    try:
        module = torch_module_of(factory, start) if torch_module else factory()
        if torch_module and layout.size > 1:
            from rl_bridge.parallel.mesh import make_mesh

            require_sequence_cut(module, layout)
            mesh, group = make_mesh(host, slots, layout), host.group(slots)
        if torch_module:
            fill(module, factory, mesh, host.device, start)
    finally:
        DATA_RANK.reset(token)
    host.workers[name] = Worker(name, module, rank, tuple(slots), layout, mesh, group, host.device)
    return described(module)


def torch_worker(factory: Callable[[], Any], mesh: Any, device: torch.device, start: Generators) -> torch.nn.Module:
    """The module of a ``TrainEngine``, parallelised and loaded. Raises as ``torch_module_of`` and ``fill``."""
    module = torch_module_of(factory, start)
    fill(module, factory, mesh, device, start)
    return module


def torch_module_of(factory: Callable[[], Any], start: Generators) -> torch.nn.Module:
    """The factory's module on the meta device.

    NumPy draws there, too: the generators go back to where they were, so that a second engine begins as the first one.

    Raises:
        TypeError: the factory makes something else than a torch module.
    """
    with torch.device("meta"), drawing_from(start):
        module = factory()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"a TrainEngine's factory makes a torch.nn.Module, got {type(module).__name__}")
    return module


def fill(
    module: torch.nn.Module, factory: Callable[[], Any], mesh: Any, device: torch.device, start: Generators
) -> None:
    """Parallelise a module, load it, and tell it."""
    owner = module if isinstance(module, ParallelModule) else PlainLifecycle(module)
    owner.device = device
    if mesh is not None:
        owner.parallelize(mesh)
    with _writes_of_values():
        owner.load_weights()
    if without_value := {name for name, tensor in named_tensors(module) if tensor.is_meta}:
        materialize(module, without_value, factory, device, start)
    owner.on_weights_materialized()


@contextmanager
def _writes_of_values() -> Iterator[None]:
    """Refuse ``load_state_dict`` into parameters without values, which torch leaves out with a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"for .*: copying from a non-meta parameter", UserWarning)
        try:
            yield
        except UserWarning as warning:
            name = str(warning).partition(":")[0].removeprefix("for ")
            raise ValueError(
                f"load_weights copies values into {name}, which is on the meta device and has none: "
                "load_state_dict(…, assign=True) gives a module without a mesh its values"
            ) from warning


def require_sequence_cut(module: torch.nn.Module, layout: Mesh) -> None:
    """Raise ValueError where ranks would compute the same tokens, whose gradients are then added."""
    if layout.sequence > 1 and not (isinstance(module, ParallelModule) and module.cuts_sequences):
        raise ValueError(
            f"{type(module).__name__} does not say that it cuts sequences: each of the {layout.sequence} sequence "
            f"ranks of {layout} would compute the whole loss, and the gradients are added. Train it with sequence=1. A "
            "ParallelModule that cuts its rows with Documents, or takes arguments cut by NeedParallel(..., "
            'over="sequence"), declares cuts_sequences = True'
        )


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, tied ones once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def materialize(
    module: torch.nn.Module,
    names: Collection[str],
    factory: Callable[[], Any],
    device: torch.device,
    start: Generators,
) -> None:
    """Give ``names`` on the meta device the values that the factory makes on the CPU from the driver's random states.

    The factory runs once more and whole: for modules too large for that, ``ParallelModule.load_weights`` is the way.
    """
    with drawing_from(start), torch.device("cpu"):
        values = dict(named_tensors(factory()))
    fsdp.materialize(module, device)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                owner._buffers[key] = torch.empty_like(buffer, device=device)
    for name, tensor in named_tensors(module):
        if name in names:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.copy_(values[plain_name(name)][fsdp.part_of(tensor)])


def described(module: Any) -> Description:
    """A description of the object for the driver."""
    kind = class_of(module) if isinstance(module, torch.nn.Module) else type(module)
    names = (name for name in dir(kind) if not name.startswith("_"))
    methods: dict[str, Join | None] = {
        name: declared(method) for name in names if callable(method := getattr(kind, name, None))
    }
    owners = {name: next((owner for owner in kind.__mro__ if name in vars(owner)), kind) for name in methods}
    own_methods = frozenset(
        n for n, owner in owners.items() if owner not in _OURS and _package(owner) not in _LIBRARIES
    )
    plain = isinstance(module, torch.nn.Module) and not isinstance(module, ParallelModule)
    empty = not plain and getattr(module, "takes_empty_shares", True)
    return Description(kind.__name__, methods, own_methods, empty)


_OURS = (ParallelModule, Lifecycle)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def call_worker(host: Host, name: str, method: str, args: tuple, kwargs: dict, speakers: Sequence[int] | None) -> Any:
    """Call a method of a worker; only the ranks among ``speakers`` (None: all) send their result back.

    Raises:
        ValueError: a torch module whose weights were freed, or of which a sync failed half-way.
        TypeError: a result that holds modules or parts of tensors, or that only this process can go through.
    """
    worker = worker_of(host, name)
    owner = in_charge_of(worker.module)
    if isinstance(owner, Lifecycle) and not hasattr(Lifecycle, method):
        owner.require_weights()
    with one_phase():
        result = getattr(worker.module, method)(*args, **kwargs)
    if isinstance(owner, Lifecycle):
        # By all workers: what is refused is refused by each of them, and they stay in step.
        result = handed_out(result, worker.module, f"{class_of(worker.module).__name__}.{method}")
    return result if speakers is None or worker.rank in speakers else None


def worker_of(host: Host, name: str) -> Worker:
    """The worker of an engine in this slot.

    Raises:
        ValueError: it is gone, or was never made.
    """
    if name not in host.workers:
        raise ValueError(f"slot {host.slot} holds no worker of {name!r} (any more): build() the engine again")
    return host.workers[name]


def forget_worker(host: Host, name: str) -> None:
    """Let go of a worker and its memory; one that has a method ``close`` is closed."""
    worker = host.workers.pop(name, None)
    if worker is not None:
        getattr(worker.module, "close", lambda: None)()
        # Layers whose forward was exchanged refer to themselves: until a collection they would keep their weights.
        del worker
        collect_all()


def move_worker(host: Host, name: str, what: str, device: str, named: bool = True) -> None:
    """Move a part of a worker. ``cuda`` is the slot's own device; a part not ``named`` by the caller may be missing."""
    owner = in_charge_of(worker_of(host, name).module)
    if named or not isinstance(owner, Lifecycle) or what in owner.movable:
        owner.move(what, host.device if device == "cuda" else torch.device(device))


def device_of_worker(host: Host, name: str) -> torch.device:
    """Where a worker's weights are."""
    return in_charge_of(worker_of(host, name).module).weights_device()
