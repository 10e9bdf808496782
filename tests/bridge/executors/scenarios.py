"""What every executor does: each scenario takes an executor and asserts. The same ones run on all kinds and sizes."""

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rl_bridge.executors import DeadlineExceeded, WorkerError

SCENARIOS: dict[str, Callable[[Any], None]] = {}
IN_OTHER_PROCESSES: set[str] = set()
"""Scenarios about what only an executor with processes of its own can do."""


def scenario(check):
    SCENARIOS[check.__name__] = check
    return check


def remote(check):
    IN_OTHER_PROCESSES.add(check.__name__)
    return scenario(check)


def scenarios(executor) -> list[str]:
    """Names of those that hold for this executor."""
    return [name for name in SCENARIOS if executor.name != "local" or name not in IN_OTHER_PROCESSES]


def outcomes(executor) -> dict[str, str | None]:
    """What went wrong in each scenario, None where nothing did."""
    found: dict[str, str | None] = {}
    for name in scenarios(executor):
        try:
            SCENARIOS[name](executor)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def every(executor, *args) -> dict[int, tuple]:
    return {slot.index: args for slot in executor.slots}


def last(executor) -> int:
    return len(executor.slots) - 1


def raised(run) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def add(host, x, y=0):
    return host.slot, x + y


def fail(host, what):
    raise what


def pid(host):
    return os.getpid()


@scenario
def results_by_slot_in_the_order_asked_for(executor):
    asked = [slot.index for slot in reversed(executor.slots)]
    found = executor.call(add, {slot: (10 * slot, 1) for slot in asked}, what="add")
    assert list(found.items()) == [(slot, (slot, 10 * slot + 1)) for slot in asked]


@scenario
def every_slot_is_a_process_with_a_device(executor):
    found = executor.call(pid, every(executor), what="pid")
    assert len(set(found.values())) == len(executor.slots)
    assert [slot.index for slot in executor.slots] == list(range(len(executor.slots)))
    assert {torch.device(slot.device).type for slot in executor.slots} <= {"cpu", "cuda"}
    assert executor.call(lambda host: str(host.device), every(executor), what="device") == {
        slot.index: slot.device for slot in executor.slots
    }


@scenario
def an_exception_arrives_with_its_class_slot_and_traceback(executor):
    slot = last(executor)
    error = raised(lambda: executor.call(fail, {slot: (KeyError("no such prompt"),)}, what="rollout.generate"))
    assert isinstance(error, KeyError)
    if executor.name != "local":
        assert isinstance(error, WorkerError) and (error.slot, error.what) == (slot, "rollout.generate")
        assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("no such prompt",)
        for words in (f"slot {slot}", "rollout.generate", "in fail", "raise what", "no such prompt"):
            assert words in str(error)
    assert executor.call(add, {slot: (1,)}, what="add") == {slot: (slot, 1)}


@scenario
def the_first_of_several_errors_is_raised_and_the_others_go_on(executor):
    arguments = {slot.index: (ValueError(f"share {slot.index}"),) for slot in executor.slots}
    assert isinstance(raised(lambda: executor.call(fail, arguments, what="step")), ValueError)
    assert set(executor.call(add, every(executor, 1), what="add")) == set(arguments)


class Unpicklable(Exception):
    def __init__(self, lock, *, code):
        super().__init__("holds a lock")
        self.lock, self.code = lock, code


class NeedsTwo(Exception):
    """Pickled by its one argument and made again from two."""

    def __init__(self, a, b):
        super().__init__(a)


@remote
def an_exception_that_cannot_travel_is_described(executor):
    slot = last(executor)

    def locked(host):
        raise Unpicklable(threading.Lock(), code=3)

    def two(host):
        raise NeedsTwo(1, 2)

    for function in (locked, two):
        error = raised(lambda f=function: executor.call(f, {slot: ()}, what="step"))
        assert isinstance(error, WorkerError) and f"in {function.__name__}" in str(error)
        assert error.__cause__ is not None


@scenario
def a_slot_runs_its_calls_one_at_a_time_in_order(executor):
    def note(host, number):
        seen = host.workers.setdefault("notes", [])
        seen.append(("begin", number))
        time.sleep(0.001)
        seen.append(("end", number))

    futures = [executor.submit(note, every(executor, number), what="note") for number in range(20)]
    wait(futures, 30)
    seen = executor.call(lambda host: host.workers.pop("notes"), every(executor), what="notes")
    in_order = [(word, number) for number in range(20) for word in ("begin", "end")]
    assert all(notes == in_order for notes in seen.values())


@scenario
def calls_from_several_threads_come_to_every_slot_in_one_order(executor):
    def note(host, number):
        host.workers.setdefault("notes", []).append(number)

    def drive(start):
        for number in range(start, start + 20):
            executor.submit(note, every(executor, number), what="note")

    threads = [threading.Thread(target=drive, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = list(executor.call(lambda host: host.workers.pop("notes"), every(executor), what="notes").values())
    assert len(seen[0]) == 80 and all(notes == seen[0] for notes in seen)


@remote
def slots_run_at_the_same_time_and_the_driver_goes_on(executor):
    # Each slot's own call ends when all of them are inside: one after another, they would never.
    slots = [slot.index for slot in executor.slots]

    def meet(host):
        return float(total(host, slots, 1.0))

    futures = [executor.submit(meet, {slot: ()}, what="meet") for slot in slots]
    assert [f.result(60)[slot] for f, slot in zip(futures, slots, strict=True)] == [len(slots)] * len(slots)
    future = executor.submit(lambda host: time.sleep(0.3), {last(executor): ()}, what="sleep")
    assert not future.done() and not future.cancel()
    assert future.result(30) == {last(executor): None}


def total(host, slots, value):
    tensor = torch.full((2,), value)
    group = host.group(slots)
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor[0].item()


@remote
def a_deadline_names_the_call_the_slots_and_where_they_are(executor):
    slot = last(executor)

    def reward_judge(host):
        time.sleep(1.5)

    error = raised(lambda: executor.call(reward_judge, {slot: ()}, what="reward.score", timeout=0.3))
    assert isinstance(error, DeadlineExceeded) and isinstance(error, TimeoutError)
    for words in ("reward.score", f"slots [{slot}]", "in 0.3 s", "reward_judge"):
        assert words in str(error)
    behind = raised(lambda: executor.call(add, {slot: (1,)}, what="policy.add", timeout=0.2))
    assert "policy.add" in str(behind) and "reward.score comes first" in str(behind)
    # The slot is late, not lost.
    assert executor.call(add, {slot: (1,)}, what="add", timeout=30) == {slot: (slot, 1)}


@remote
def a_result_that_cannot_be_sent_is_an_error_of_its_call(executor):
    slot = last(executor)
    if slot:  # slot 0 is the driver's own process under torchrun: nothing is sent
        error = raised(lambda: executor.call(lambda host: threading.Lock(), {slot: ()}, what="step"))
        assert isinstance(error, TypeError) and "cannot be sent" in str(error) and "lock" in str(error)
    assert executor.call(add, {slot: (1,)}, what="add") == {slot: (slot, 1)}


@remote
def arguments_that_cannot_be_sent_reach_no_slot(executor):
    arguments = every(executor, 1) | {last(executor): (threading.Lock(),)}
    if last(executor):
        error = raised(lambda: executor.call(add, arguments, what="step"))
        assert isinstance(error, TypeError) and "step" in str(error) and f"slot {last(executor)}" in str(error)
    assert set(executor.call(add, every(executor, 1), what="add")) == set(arguments)


@scenario
def a_slot_that_does_not_exist_is_refused(executor):
    for slots in ({99: (1,)}, {-1: (1,)}, {}):
        assert isinstance(raised(lambda s=slots: executor.call(add, s, what="policy.add")), ValueError)


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


@scenario
def idle_for_longer_than_every_timeout(executor):
    time.sleep(2.5)
    assert set(executor.call(add, every(executor, 1), what="add", timeout=5)) == set(every(executor))


@scenario
def a_function_of_the_script_travels_by_value(executor):
    factor = 3
    found = executor.call(lambda host, x: factor * x, every(executor, 2), what="lambda")
    assert set(found.values()) == {6}
