"""What both ends must have in common, and what is refused before anything is overwritten."""

import re

import pytest
import torch
import torch.distributed as dist

from rl_bridge.executors.calls import is_consequence
from rl_bridge.executors.executor import worker_error
from rl_bridge.weights import WeightSyncError, replace_parameters
from rl_bridge.weights.ends import Peers
from tests.support.one_process import NAME, put, same, sync, version
from tests.support.weight_engines import model


class Wrapped(torch.nn.Module):
    """A model with another parameter, a missing one, another shape or another dtype."""

    def __init__(self, fault):
        super().__init__()
        inner = model(2)
        self.model, self.fault = inner.model, fault
        if fault == "unknown":
            del self.model.layers[1].mlp.down_proj
        if fault == "missing":
            self.extra = torch.nn.Parameter(torch.zeros(3))
        if fault == "shape":
            self.model.norm.weight = torch.nn.Parameter(torch.zeros(15))
        if fault == "dtype":
            self.model.norm.bfloat16()


MISFITS = {
    "unknown": f"unknown weight '{re.escape(NAME)}'",
    "missing": "no weights came for 1 of 27 parameters, the first: 'extra'",
    "shape": r"weight 'model.norm.weight': expected torch.float32 \(15,\), got torch.float32 \(16,\)",
    "dtype": r"weight 'model.norm.weight': expected torch.bfloat16 \(16,\), got torch.float32 \(16,\)",
}


@pytest.mark.parametrize("fault", MISFITS)
def test_ends_that_do_not_fit_are_told_before_anything_is_overwritten(executor, tmp_path, fault):
    target = put(executor, "rollout", Wrapped(fault))
    before = {name: tensor.clone() for name, tensor in target.named_parameters()}
    with pytest.raises(ValueError, match=f"nothing was overwritten: {MISFITS[fault]}"):
        sync(executor, tmp_path)
    assert version(executor) == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in target.named_parameters())


def test_many_misfits_are_counted(executor, tmp_path):
    put(executor, "rollout", torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="and 23 more"):
        sync(executor, tmp_path)


def test_an_older_version_is_refused_and_the_newer_weights_stay(executor, tmp_path):
    sync(executor, tmp_path, version=5)
    put(executor, "policy", model(3))
    with pytest.raises(ValueError, match=r"stale weights: version 4 came after version 5 \(slot 0\)"):
        sync(executor, tmp_path, version=4)
    assert version(executor) == 5
    assert not same(executor)
    sync(executor, tmp_path, version=5)
    assert same(executor)


META = torch.device("meta")


def test_freed_weights_are_neither_sent_nor_filled(executor, tmp_path):
    freed = model(1)
    replace_parameters(freed, META)
    put(executor, "policy", freed)
    with pytest.raises(ValueError, match=r"weight 'model.embed_tokens.weight' has no values to send"):
        sync(executor, tmp_path)
    assert version(executor) == 0
    put(executor, "policy", model(1))
    put(executor, "rollout", freed)
    with pytest.raises(WeightSyncError, match="has no room here: it is on the meta device"):
        sync(executor, tmp_path)
    assert version(executor) is None


def test_persistent_buffers_travel_and_others_stay(executor, tmp_path):
    class Gate(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), value))
            self.register_buffer("correction_bias", torch.full((3,), value))
            self.register_buffer("inverse_frequencies", torch.full((3,), value), persistent=False)

    put(executor, "policy", torch.nn.Sequential(Gate(1.0)))
    target = put(executor, "rollout", torch.nn.Sequential(Gate(2.0)))[0]
    assert sync(executor, tmp_path).tensors == 2
    assert target.correction_bias.tolist() == [1.0] * 3
    assert target.inverse_frequencies.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "broadcast"}, "both ends are in slot 0 alone; use 'same_slot'"),
        ({"transport": "carrier pigeon"}, "is unknown; there is: same_slot, shared_memory, broadcast, file"),
        ({"transport": "file", "folder": None}, "'file' needs one, the others none"),
        ({"folder": "somewhere"}, "'file' needs one, the others none"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"adapter": True}, "adapter=True needs a peft model, got Qwen2ForCausalLM"),
    ],
)
def test_wishes_that_cannot_be_met(executor, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sync(executor, tmp_path, **options)


def test_what_has_no_weights(executor, tmp_path):
    put(executor, "policy", object())
    with pytest.raises(TypeError, match="object sends no weights"):
        sync(executor, tmp_path)
    put(executor, "policy", model(1))
    put(executor, "rollout", object())
    with pytest.raises(TypeError, match="object takes no weights"):
        sync(executor, tmp_path)


@pytest.mark.parametrize(
    ("said", "timeout", "told"),
    [
        ("gloo/transport/tcp/pair.cc: Connection closed by peer", 600, "slot 7 is lost: .*Connection closed by peer"),
        ("gloo/transport/tcp/unbound_buffer.cc: Timed out", 0, "slot 7 did not come within 0 s$"),
    ],
)
def test_the_roll_call_says_what_ended_the_wait(monkeypatch, said, timeout, told):
    """A slot that is gone is not said to be late: its death is the cause, and the driver waits for the news."""

    class Work:
        def wait(self, limit):
            raise RuntimeError(said)

    monkeypatch.setattr(dist, "irecv", lambda *given, **options: Work())
    peers = Peers(dist.ProcessGroup, [3, 7], 3, "weights of policy", timeout)
    with pytest.raises(WeightSyncError, match=f"^weights of policy: nothing was overwritten; {told}") as raised:
        peers.roll_call()
    assert is_consequence(worker_error(3, "sync", raised.value, "")) == (timeout > 0)
