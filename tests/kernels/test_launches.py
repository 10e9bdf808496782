"""What every launch and every call on a GPU needs, seen on a CPU: the tensors' device is current at each launch of a
Triton kernel, nothing is copied from the host, and the host does not wait.
"""

import contextlib
import importlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rl_kernels.backends import interpreting
from tests.kernels.cases import N, V, ids, masked, normal
from tests.kernels.launches import CALLS, H, linear, logits, sampled, top_k_of_hidden
from tests.kernels.operations import (
    linear_logprobs,
    linear_topk_logprobs,
    logits_logprobs,
)
from tests.kernels.registry import each_backend


def launcher():
    """What every launch of a Triton kernel goes through, in the interpreter and compiled: a class and its method."""
    if interpreting():
        return importlib.import_module("triton.runtime.interpreter").GridExecutor, "__call__"
    return importlib.import_module("triton.runtime.jit").JITFunction, "run"


@each_backend(*CALLS)
def test_the_tensors_device_is_current_at_every_launch(monkeypatch, operation, backend):
    """A kernel launched for a tensor on cuda:1 while cuda:0 is current reads another device's memory."""
    guarded, launches = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        guarded.append(tensor.device)
        yield
        guarded.pop()

    whole = getattr(*launcher())

    def launched(self, *arguments, **options):
        launches.append((self.fn.__name__, list(guarded)))
        return whole(self, *arguments, **options)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(*launcher(), launched)
    CALLS[operation](backend)
    assert bool(launches) == backend.startswith("triton")
    assert not [name for name, devices in launches if not devices]


# Of the torch operations: a tensor made of a Python number is a copy from the host, the others wait for the device.
COPIES, WAITS = {"aten::lift_fresh"}, {"aten::nonzero", "aten::item", "aten::_local_scalar_dense"}


@pytest.mark.parametrize("call", [linear, logits, top_k_of_hidden, sampled])
def test_nothing_is_copied_from_the_host_and_nothing_waited_for(call):
    """Without a mask, in the backend that a GPU takes. Triton's interpreter copies arguments: kernels are left out."""
    with kernels_left_out(), profile(activities=[ProfilerActivity.CPU]) as seen:
        call("triton")
    assert {event.key for event in seen.key_averages()} & (COPIES | WAITS) == set()


def linear_with_a_mask(backend):
    hidden, weight = (x.float().requires_grad_() for x in (normal(N, H, scale=1.0), normal(V, H, seed=1)))
    linear_logprobs(hidden, weight, ids(N), mask=masked(), backend=backend).logprobs.sum().backward()


def logits_with_a_mask(backend):
    leaf = normal(N, V).float().requires_grad_()
    logits_logprobs(leaf, ids(N), mask=masked(), backend=backend).entropy.sum().backward()


def top_k_of_hidden_with_a_mask(backend):
    linear_topk_logprobs(normal(N, H).float(), normal(V, H, seed=1).float(), 3, mask=masked(), backend=backend)


@pytest.mark.parametrize("call", [linear_with_a_mask, logits_with_a_mask, top_k_of_hidden_with_a_mask])
def test_a_cuda_graph_captures_no_operation_that_waits_with_a_mask(call):
    """A custom operation that waits says so to ``torch.compile(mode="reduce-overhead")``, and the others do not."""
    with kernels_left_out(), profile(activities=[ProfilerActivity.CPU]) as seen:
        call("triton")
    keys = {event.key for event in seen.key_averages()}
    names = [key.removeprefix("rl_kernels::") for key in keys if key.startswith("rl_kernels::")]
    tagged = [torch.Tag.cudagraph_unsafe in getattr(torch.ops.rl_kernels, name).default.tags for name in names]
    assert tagged and set(tagged) == {bool(keys & WAITS)}


@contextlib.contextmanager
def kernels_left_out():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*launcher(), lambda *arguments, **options: None)
        yield


def test_the_copies_and_waits_are_seen():
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.as_tensor(0.7).item()
        torch.ones(3).nonzero()
    assert {event.key for event in seen.key_averages()} >= COPIES | WAITS
