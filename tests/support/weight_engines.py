"""Engines of one model in several layouts over gloo ranks, and an executor for them in which every rank drives."""

import traceback
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from rl_bridge.executors.executor import Slot
from rl_bridge.executors.host import Host
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from rl_bridge.weights import EngineRef

COLUMNS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "embed_tokens.weight",
)
BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
ROWS = ("o_proj.weight", "down_proj.weight")


def model(seed, dtype=torch.float32):
    """A Qwen2 whose vocabulary of 15 does not split evenly."""
    return tiny_qwen2(character_tokenizer("0123456789+-="), hidden=16, layers=2, heads=2, seed=seed).to(dtype)


class Everyone:
    """An executor whose driver runs in all ranks at once: a call runs this rank's share and shows all results."""

    def __init__(self, host, count):
        self.host = host
        self.slots = tuple(Slot(i) for i in range(count))

    def call(self, function, arguments, /, *, what, timeout):
        outcome = None
        if self.host.slot in arguments:
            try:
                outcome = (True, function(self.host, *arguments[self.host.slot]))
            except Exception as error:
                outcome = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        outcomes = [None] * len(self.slots)
        if len(self.slots) > 1:
            dist.all_gather_object(outcomes, outcome)
        else:
            outcomes = [outcome]
        failures = [value for ok, value in filter(None, outcomes) if not ok]
        if failures:
            raise RuntimeError("\n".join(failures))
        return {slot: outcomes[slot][1] for slot in arguments}


def tensor_parallel(module, mesh):
    """The parameters placed as a tensor-parallel plan places them; norms stay whole."""
    tied = {}
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner._parameters.items()):
            path = f"{owner_name}.{name}"
            dim = 0 if path.endswith(COLUMNS + BIASES) else 1 if path.endswith(ROWS) else None
            if parameter is not None and dim is not None:
                shards = distribute_tensor(parameter.data, mesh, [Shard(dim)], src_data_rank=None)
                tied[parameter] = torch.nn.Parameter(shards)
            owner._parameters[name] = tied.get(parameter, parameter)


def sharded(module, mesh):
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def placed(host, module, layout, slots):
    """The module in a layout: copies (one or more), shard, tensor, shard x tensor, replicate x shard."""
    slots = tuple(slots)
    if layout == "copies" or host.slot not in slots:
        return module
    if layout in ("shard", "tensor"):
        mesh = DeviceMesh.from_group(host.group(slots), "cpu", mesh_dim_names=(layout,))
        (sharded if layout == "shard" else tensor_parallel)(module, mesh)
        return module
    names = {"shard x tensor": ("shard", "tensor"), "replicate x shard": ("replicate", "shard")}[layout]
    grid = torch.tensor(slots).view(2, -1)
    own = [row.tolist() for row in (*grid, *grid.T) if host.slot in row]
    groups = [host.group(own[1]), host.group(own[0])]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=names)
    if layout == "shard x tensor":
        tensor_parallel(module, mesh["tensor"])
        sharded(module, mesh["shard"])
    else:
        sharded(module, mesh)
    return module


def engine(host, name, layout, slots, *, seed=0, module=None):
    """Build one engine's worker here, if this slot has one."""
    if host.slot in slots:
        made = placed(host, model(seed) if module is None else module, layout, slots)
        host.workers[name] = SimpleNamespace(module=made, name=name)
    return EngineRef(name, tuple(slots), layout)


def holds(host, ref, wanted):
    """The names of this rank's weights that are not the wanted module's; gathers, so all ranks of the engine call."""
    if host.slot not in ref.slots:
        return []
    module, wrong = host.workers[ref.name].module, []
    for (name, got), (other, want) in zip(module.named_parameters(), wanted.named_parameters(), strict=True):
        whole = got.detach().full_tensor() if hasattr(got, "full_tensor") else got.detach()
        if name != other or not torch.equal(whole, want):
            wrong.append(name)
    return wrong


def joined(rank, address, count, timeout=60.0):
    """Join the ranks' process group; gives the host and its executor."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    host = Host(rank, group_timeout=timeout)
    return host, Everyone(host, count)


__all__ = ["Everyone", "engine", "holds", "joined", "model", "placed"]
