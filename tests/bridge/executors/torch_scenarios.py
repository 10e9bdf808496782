"""What travels between processes, and collectives between them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.bridge.executors.registry import every, last, raised, remote, scenario, total


@scenario
def tensors_and_arrays_arrive_as_they_were(executor):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(300, 200, generator=generator),
        "strided": torch.randn(300, 200, generator=generator)[::2, 1:].T,
        "bfloat16": torch.randn(64, 65, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.int32),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(3)),
        "history": nn.Parameter(torch.ones(3)) * 2,
    }
    arrays = {"array": np.arange(5000.0), "fortran": np.asfortranarray(np.arange(6).reshape(2, 3))}

    def double(host, data):
        return {key: value * 2 if key != "bool" else ~value for key, value in data.items()}

    slot = last(executor)
    doubled = executor.call(double, {slot: (tensors | arrays,)}, what="double")[slot]
    for name, value in tensors.items():
        want = ~value if name == "bool" else value * 2
        assert doubled[name].dtype == want.dtype and torch.equal(doubled[name], want), name
    for name, value in arrays.items():
        np.testing.assert_array_equal(doubled[name], value * 2)
    same = executor.call(lambda host, data: data, {slot: (tensors,)}, what="same")[slot]
    assert type(same["parameter"]) is nn.Parameter and same["parameter"].requires_grad
    same["large"][0, 0] = 1  # writable


@remote
def groups_are_made_by_their_members_in_any_order(executor):
    count = len(executor.slots)
    for size in range(1, count + 1):
        for first in range(count - size + 1):
            slots = list(range(first, first + size))
            found = executor.call(total, {slot: (slots, float(slot)) for slot in slots}, what="total")
            assert set(found.values()) == {float(sum(slots))}

    # A slot that belongs to many groups and one that belongs to few make one together.
    def named(host, slots, purpose):
        group = host.group(slots, purpose=purpose)
        again = host.group(slots, purpose=purpose)
        return None if group is None else (dist.get_process_group_ranks(group), again is group)

    everyone = list(range(count))
    for slots in (everyone, everyone[::-1]):
        found = executor.call(named, every(executor, slots, "checkpoint"), what="named")
        assert set(map(str, found.values())) == {str((slots, True)) if count > 1 else "None"}
    assert isinstance(raised(lambda: executor.call(lambda host: host.group([]), {0: ()}, what="group")), ValueError)


class Held(NamedTuple):
    weight: object


@dataclass
class Report:
    weight: object


HOLDERS = {
    "itself": lambda weight: weight,
    "dictionary": lambda weight: {"layers": [{"weight": weight}]},
    "named tuple": Held,
    "dataclass": lambda weight: (1, Report([weight])),
    "parameter": nn.Parameter,
}


def sharded_weight(host, slots, holder):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(host.group(slots), host.device.type)
    weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    if holder == "full":
        return weight.full_tensor()
    # The driver's own slot hands its result over without a message: there it is alone with the first rank's.
    if holder == "first":
        whole = weight.redistribute(mesh, [Replicate()])
        return {"weight": whole} if host.slot == slots[0] else None
    return HOLDERS[holder](weight)


@remote
def a_dtensor_is_refused_by_name_with_the_way_on(executor):
    """ENG-18: the driver compared such results with a collective that nobody else joined, and hung."""
    slots = [slot.index for slot in executor.slots]
    if len(slots) == 1:
        return
    for holder in (*HOLDERS, "first"):
        step = lambda h=holder: executor.call(sharded_weight, every(executor, slots, h), what="step", timeout=60)  # noqa: E731
        error = raised(step)
        assert isinstance(error, TypeError) and not isinstance(error, TimeoutError), (holder, error)
        for words in ("DTensor of shape [4, 2]", "full_tensor()", "to_local()"):
            assert words in str(error), (holder, error)
    found = executor.call(sharded_weight, every(executor, slots, "full"), what="step")
    assert all(torch.equal(weight, torch.arange(8.0).view(4, 2)) for weight in found.values())


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def gradients(host, slots, rows):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = Layers()
    group = host.group(slots)
    if group is not None:
        mesh = DeviceMesh.from_group(group, host.device.type)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    (model(rows) ** 2).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


@scenario
def a_sharded_module_has_the_gradients_of_one_process(executor):
    rows = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    slots = [slot.index for slot in executor.slots]
    parts = rows.tensor_split(len(slots))
    found = executor.call(gradients, {s: (slots, part) for s, part in zip(slots, parts, strict=True)}, what="step")
    model = Layers()
    (model(rows) ** 2).sum().backward()
    for name, parameter in model.named_parameters():
        for grads in found.values():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-5)
