"""Making a worker in its slot: meta device → parallelise → load → optimiser. These functions run in the workers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rl_bridge.engines.mesh import Mesh
from rl_bridge.engines.module import ParallelModule, device_of, move_weights
from rl_bridge.engines.results import Join, declared
from rl_bridge.engines.worker import DATA_RANK, Worker
from rl_bridge.executors.host import Host
from rl_bridge.memory.collecting import collect_all, one_phase
from rl_bridge.parallel import moving
from rl_bridge.parallel.parts import parallelize_parts

Description = dict[str, Join | None]
"""Public methods of a worker's object, and how each declares its results."""


def build_worker(
    host: Host,
    name: str,
    factory: Callable[[], Any],
    rank: int,
    slots: Sequence[int],
    layout: Mesh,
    random_state: torch.Tensor,
    torch_module: bool,
) -> Description:
    """Make the engine's worker of this slot; returns its methods. All workers of the engine run this together."""
    if name in host.workers:
        raise ValueError(f"slot {host.slot} has a worker of an engine {name!r} already")
    mesh, group = None, None
    if torch_module and layout.size > 1:
        from rl_bridge.parallel.mesh import make_mesh

        mesh, group = make_mesh(host, slots, layout), host.group(slots)
    token = DATA_RANK.set(layout.data_rank(rank))
    try:
        module = torch_worker(factory, mesh, host.device, random_state) if torch_module else factory()
    finally:
        DATA_RANK.reset(token)
    host.workers[name] = Worker(name, module, rank, tuple(slots), layout, mesh, group, host.device)
    return methods_of(module)


def torch_worker(
    factory: Callable[[], Any], mesh: Any, device: torch.device, random_state: torch.Tensor
) -> torch.nn.Module:
    """The module of a ``TrainEngine``, parallelised and loaded.

    Raises:
        TypeError: the factory makes something else than a torch module.
    """
    with torch.device("meta"):
        module = factory()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"a TrainEngine's factory makes a torch.nn.Module, got {type(module).__name__}")
    own = isinstance(module, ParallelModule)
    if own:
        module.device = device
    if mesh is not None:
        module.parallelize(mesh) if own else parallelize_parts(module, mesh)
    if own:
        module.load_weights()
    if next(on_meta(module), None) is not None:
        materialize(module, factory, device, random_state)
    if own:
        module.on_weights_materialized()
    return module


def on_meta(module: torch.nn.Module) -> Iterator[str]:
    """Names of parameters and buffers that have no value yet."""
    for name, tensor in named_tensors(module):
        if tensor.device.type == "meta":
            yield name


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, tied ones once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def materialize(
    module: torch.nn.Module, factory: Callable[[], Any], device: torch.device, random_state: torch.Tensor
) -> None:
    """Give what is on the meta device the values that the factory makes on the CPU from the driver's random state.

    The factory runs once more and whole: for modules too large for that, ``ParallelModule.load_weights`` is the way.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.set_rng_state(random_state)
        values = dict(named_tensors(factory()))
    moving.materialize(module, device)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                owner._buffers[key] = torch.empty_like(buffer, device=device)
    for name, tensor in named_tensors(module):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.copy_(values[name][moving.part_of(tensor)])


def methods_of(module: Any) -> Description:
    """Public methods of the object's class."""
    names = (name for name in dir(type(module)) if not name.startswith("_"))
    return {name: declared(method) for name in names if callable(method := getattr(type(module), name, None))}


def call_worker(host: Host, name: str, method: str, args: tuple, kwargs: dict, speakers: Sequence[int] | None) -> Any:
    """Call a method of a worker; only the ranks among ``speakers`` (None: all) send their result back."""
    worker = worker_of(host, name)
    with one_phase():
        result = getattr(worker.module, method)(*args, **kwargs)
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


def move_worker(host: Host, name: str, what: str, device: str) -> None:
    """Move a part of a worker. ``cuda`` is the slot's own device."""
    module = worker_of(host, name).module
    target = host.device if device == "cuda" else torch.device(device)
    if not isinstance(module, torch.nn.Module) or isinstance(module, ParallelModule):
        module.move(what, target)
    elif what == "weights":
        move_weights(module, target)


def device_of_worker(host: Host, name: str) -> torch.device:
    """Where a worker's weights are."""
    module: Any = worker_of(host, name).module
    if isinstance(module, torch.nn.Module) and not isinstance(module, ParallelModule):
        return device_of(module)
    return module.weights_device()
