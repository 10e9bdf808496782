"""What a sync carries: copies, casts, maps, shared memory, to receivers of any kind."""

from types import SimpleNamespace

import pytest
import torch

from rl_bridge.weights import Cast, ModuleReceiver, checksum, sync_weights
from rl_bridge.weights.receiver import prove
from tests.support.one_process import POLICY, ROLLOUT, TRANSPORTS, module_of, put, same, sync, version
from tests.support.weight_engines import model


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sync_reports_what_it_did(executor, tmp_path, transport):
    addresses = [p.data_ptr() for p in module_of(executor, "rollout").parameters()]
    report = sync(executor, tmp_path, transport)
    assert same(executor)
    assert version(executor) == report.version == 1
    assert report.nbytes == 4 * sum(p.numel() for p in model(1).parameters())
    assert (report.transport, report.tensors) == (transport, 26)
    assert addresses == [p.data_ptr() for p in module_of(executor, "rollout").parameters()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cast_is_made_at_the_source(executor, tmp_path, transport):
    put(executor, "rollout", model(2, torch.bfloat16))
    report = sync(executor, tmp_path, transport, through=Cast(torch.bfloat16))
    assert report.nbytes == 2 * sum(p.numel() for p in model(1).parameters())
    pairs = zip(module_of(executor, "policy").parameters(), module_of(executor, "rollout").parameters(), strict=True)
    assert all(torch.equal(a.bfloat16(), b) for a, b in pairs)


def quantised(name, tensor):
    """Two tensors for each matrix, none for biases, other names for norms."""
    if tensor.dim() == 2:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        yield f"{name}.int8", (tensor / scale).round().to(torch.int8)
        yield f"{name}.scale", scale
    elif not name.endswith("bias"):
        yield f"norms.{name}", tensor


class Recording(ModuleReceiver):
    """A receiver of another kind than a module: it sees whole tensors, in order, and proves them itself."""

    def __init__(self, expected):
        super().__init__(torch.nn.Module())
        self.expected, self.got, self.calls = expected, {}, []

    def outline(self, *, adapter):
        return self.expected.items()

    def begin(self, manifest):
        self.version = None
        self.calls.append("begin")

    def receive(self, arrivals):
        self.calls.append("receive")
        for name, tensor, part, claims in arrivals:
            [claim] = claims
            assert claim.part == part == tuple((0, n) for n in tensor.shape)
            prove(name, tensor, claim)
            self.got[name] = tensor.clone()

    def finish(self):
        assert self.version is None
        self.calls.append("finish")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_map_over_the_stream_and_a_receiver_of_one_s_own(executor, tmp_path, transport):
    wanted = {n: t for name, p in model(1).named_parameters() for n, t in quantised(name, p.detach())}
    receiver = Recording({name: torch.empty_like(tensor, device="meta") for name, tensor in wanted.items()})
    put(executor, "rollout", SimpleNamespace(weight_receiver=lambda: receiver))
    sync(executor, tmp_path, transport, through=quantised, version=3)
    assert list(receiver.got) == list(wanted)
    assert all(checksum(receiver.got[name]) == checksum(wanted[name]) for name in wanted)
    assert receiver.calls[0] == "begin" and receiver.calls[-1] == "finish" and receiver.calls.count("finish") == 1
    assert receiver.version == 3


def test_shared_memory_of_both_engines(executor, tmp_path):
    policy, rollout = module_of(executor, "policy"), module_of(executor, "rollout")
    sync(executor, tmp_path, share=True)
    assert [p.data_ptr() for p in policy.parameters()] == [p.data_ptr() for p in rollout.parameters()]
    with torch.no_grad():
        policy.model.norm.weight.add_(1)
    assert same(executor)
    # A copy from a third model does not reach the model that lent its memory.
    put(executor, "policy", model(3))
    sync(executor, tmp_path, version=2)
    assert same(executor)
    wanted = model(1)
    wanted.model.norm.weight.data.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"through": Cast(torch.float32)}, {"transport": "shared_memory"}])
def test_memory_is_shared_only_as_it_is(executor, tmp_path, options):
    with pytest.raises(ValueError, match="share=True needs transport 'same_slot'"):
        sync(executor, tmp_path, share=True, **options)


def test_a_folder_alone_asks_for_files(executor, tmp_path):
    report = sync_weights(executor, POLICY, ROLLOUT, version=1, folder=tmp_path)
    assert report.transport == "file"
    assert sync_weights(executor, POLICY, ROLLOUT, version=1).transport == "same_slot"
