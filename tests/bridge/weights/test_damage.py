"""Weights that do not arrive as they were sent: told by name, and the target refused."""

import re

import pytest
import torch

from rl_bridge.weights import (
    Arrival,
    WeightSyncError,
    receiver_of,
    transports,
)
from tests.support.one_process import NAME, TRANSPORTS, module_of, same, sync, version


def damaged(tensor):
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


def damage_same_slot(patch):
    def arrival(name, tensor, part, claims):
        return Arrival(name, damaged(tensor) if name == NAME else tensor, part, claims)

    patch.setattr(transports, "Arrival", arrival)


def damage_shared_memory(patch):
    def frame(self, bucket, frame=transports.SharedMemory.frame):
        made = frame(self, bucket)
        claims = made.claims

        def damaging():
            for entry in bucket.entries:
                if entry.name == NAME:
                    made.tensor(entry).copy_(damaged(made.tensor(entry)))
            return claims()

        made.claims = damaging
        return made

    patch.setattr(transports.SharedMemory, "frame", frame)


def damage_file(patch):
    def read(path, version, bucket, taker, read=transports._read):
        if bucket.entries[-1].name == NAME:
            octets = bytearray(path.read_bytes())
            octets[-1] ^= 1
            path.write_bytes(octets)
        return read(path, version, bucket, taker)

    patch.setattr(transports, "_read", read)


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
    def read(path, version, bucket, taker, read=transports._read):
        path.write_bytes(path.read_bytes()[:-9])
        return read(path, version, bucket, taker)

    monkeypatch.setattr(transports, "_read", read)
    with pytest.raises(WeightSyncError, match=r"model-00001-of-000\d\d.safetensors"):
        sync(executor, tmp_path, "file")
    assert version(executor) is None


def test_a_full_disk_leaves_nothing_behind(executor, tmp_path, monkeypatch):
    def save(tensors, path, metadata, save=transports.save_file):
        if "00003" in path.name:
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(transports, "save_file", save)
    with pytest.raises(WeightSyncError, match="No space left on device"):
        sync(executor, tmp_path, "file")
    assert version(executor) is None
    assert list(tmp_path.iterdir()) == []


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
