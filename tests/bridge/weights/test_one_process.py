"""What a sync promises wherever its ends are, shown in one process."""

import re
from types import SimpleNamespace

import pytest
import torch

from rl_bridge.executors import LocalExecutor
from rl_bridge.weights import (
    Arrival,
    Cast,
    EngineRef,
    ModuleReceiver,
    WeightSyncError,
    receiver_of,
    replace_parameters,
    sync_weights,
)
from rl_bridge.weights.bits import checksum
from rl_bridge.weights.receiver import prove
from rl_bridge.weights.transports import file, same_slot, shared_memory
from tests.bridge.weights.engines import model

POLICY, ROLLOUT = EngineRef("policy", (0,)), EngineRef("rollout", (0,))
TRANSPORTS = ["same_slot", "shared_memory", "file"]
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def executor():
    made = LocalExecutor("cpu")
    put(made, "policy", model(1))
    put(made, "rollout", model(2))
    return made


def put(executor, name, module):
    executor._host.workers[name] = SimpleNamespace(module=module)
    return module


def module_of(executor, name):
    return executor._host.workers[name].module


def sync(executor, tmp_path, transport="same_slot", **options):
    """A sync in several buckets."""
    folder = tmp_path if transport == "file" else None
    options = {"version": 1, "bucket_bytes": 4096, "timeout": 5, "folder": folder} | options
    return sync_weights(executor, POLICY, ROLLOUT, transport=transport, **options)


def same(executor):
    pairs = zip(module_of(executor, "policy").parameters(), module_of(executor, "rollout").parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def version(executor):
    return receiver_of(module_of(executor, "rollout")).version


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


def damaged(tensor):
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


def damage_same_slot(patch):
    def arrival(name, tensor, part, claims):
        return Arrival(name, damaged(tensor) if name == NAME else tensor, part, claims)

    patch.setattr(same_slot, "Arrival", arrival)


def damage_shared_memory(patch):
    def frame(self, bucket, frame=shared_memory.SharedMemory.frame):
        made = frame(self, bucket)
        claims = made.claims

        def damaging():
            for entry in bucket.entries:
                if entry.name == NAME:
                    made.tensor(entry).copy_(damaged(made.tensor(entry)))
            return claims()

        made.claims = damaging
        return made

    patch.setattr(shared_memory.SharedMemory, "frame", frame)


def damage_file(patch):
    def read(path, version, bucket, taker, read=file._read):
        if bucket.entries[-1].name == NAME:
            octets = bytearray(path.read_bytes())
            octets[-1] ^= 1
            path.write_bytes(octets)
        return read(path, version, bucket, taker)

    patch.setattr(file, "_read", read)


DAMAGE = {"same_slot": damage_same_slot, "shared_memory": damage_shared_memory, "file": damage_file}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_flipped_bit_on_the_way_is_named_and_the_target_refused_until_a_sync_succeeds(
    executor, tmp_path, transport
):
    options = {"bucket_bytes": 1} if transport == "file" else {}
    with pytest.MonkeyPatch.context() as patch:
        DAMAGE[transport](patch)
        with pytest.raises(WeightSyncError, match=f"weight '{re.escape(NAME)}' was damaged on the way"):
            sync(executor, tmp_path, transport, **options)
    receiver = receiver_of(module_of(executor, "rollout"))
    assert receiver.version is None
    with pytest.raises(ValueError, match="incomplete"):
        receiver.usable_version()
    assert list(tmp_path.iterdir()) == []
    sync(executor, tmp_path, transport, version=0)
    assert same(executor)
    assert receiver.usable_version() == 0


def test_a_truncated_file_is_named(executor, tmp_path, monkeypatch):
    def read(path, version, bucket, taker, read=file._read):
        path.write_bytes(path.read_bytes()[:-9])
        return read(path, version, bucket, taker)

    monkeypatch.setattr(file, "_read", read)
    with pytest.raises(WeightSyncError, match=r"model-00001-of-000\d\d.safetensors"):
        sync(executor, tmp_path, "file")
    assert version(executor) is None


def test_a_full_disk_leaves_nothing_behind(executor, tmp_path, monkeypatch):
    def save(tensors, path, metadata, save=file.save_file):
        if "00003" in path.name:
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(file, "save_file", save)
    with pytest.raises(WeightSyncError, match="No space left on device"):
        sync(executor, tmp_path, "file")
    assert version(executor) is None
    assert list(tmp_path.iterdir()) == []


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


def test_a_target_that_can_makes_room_for_weights(executor, tmp_path):
    freed = model(2)
    replace_parameters(freed, META)
    receiver = ModuleReceiver(freed, version=None, make_room=lambda: replace_parameters(freed, torch.device("cpu")))
    put(executor, "rollout", SimpleNamespace(weight_receiver=lambda: receiver))
    sync(executor, tmp_path)
    assert receiver.usable_version() == 1
    assert all(torch.equal(a, b) for a, b in zip(freed.parameters(), model(1).parameters(), strict=True))


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


class Breaks:
    """A map that fails on values, at one tensor."""

    def __call__(self, name, tensor):
        if name == NAME and tensor.device.type != "meta":
            raise ArithmeticError("scale is 0")
        yield name, tensor


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_map_that_fails_half_way(executor, tmp_path, transport):
    with pytest.raises(WeightSyncError, match="ArithmeticError: scale is 0"):
        sync(executor, tmp_path, transport, through=Breaks())
    assert version(executor) is None
    sync(executor, tmp_path, transport)
    assert same(executor)
    assert version(executor) == 1


def test_a_map_whose_values_are_not_what_it_promised(executor, tmp_path):
    def shrinking(name, tensor):
        yield name, tensor if tensor.device.type == "meta" else tensor[:-1]

    with pytest.raises(WeightSyncError, match=r"the source promised 'model.embed_tokens.weight' .*then gave"):
        sync(executor, tmp_path, through=shrinking)


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


def test_a_folder_alone_asks_for_files(executor, tmp_path):
    report = sync_weights(executor, POLICY, ROLLOUT, version=1, folder=tmp_path)
    assert report.transport == "file"
    assert sync_weights(executor, POLICY, ROLLOUT, version=1).transport == "same_slot"
