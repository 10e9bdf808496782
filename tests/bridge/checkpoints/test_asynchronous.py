"""Training goes on while a snapshot is written: what is on the disk is what was, and errors come out."""

import copy
import threading
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge.checkpoints import Checkpointer, CheckpointError, writing
from rl_bridge.checkpoints import checkpointer as hosts
from rl_bridge.checkpoints.writing import HostBuffers, checksum_of, has_checksum
from tests.bridge.checkpoints.modules import engine_of, names


class Slow:
    """``write`` of a checkpoint that waits until it is told to go on."""

    def __init__(self):
        self.may, self.began, self.write = threading.Event(), threading.Event(), hosts.write

    def __call__(self, share):
        self.began.set()
        assert self.may.wait(30)
        self.write(share)


@pytest.fixture
def slow():
    slow = Slow()
    with patch.object(hosts, "write", slow):
        yield slow
        slow.may.set()


def saver_of(engine):
    return hosts._savers[engine.executor._host]


def test_training_goes_on_while_the_snapshot_is_written(tmp_path, slow):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):  # the second is copied to the buffers of the first
        policy.update()
        kept = copy.deepcopy(policy.checkpoint_state())
        slow.may.clear(), slow.began.clear()
        path = checkpointer.save(step, {"policy": policy}, {})
        assert slow.began.wait(30)
        for _ in range(5):
            policy.update()
        assert not path.exists()
        slow.may.set()
        checkpointer.wait()
        found = {key.split("@")[0]: tensor for key, tensor in load_file(path / "policy/rank-00000.safetensors").items()}
        wanted = {f"module/{name}": value for name, value in kept["module"].items()}
        for name, values in kept["optimizer"]["state"].items():
            wanted |= {f"optimizer/state/{name}/{key}": value for key, value in values.items()}
        assert found.keys() == wanted.keys() and len(wanted) == 5 + 2 * 3
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert not torch.equal(found["module/row"], policy.checkpoint_state()["module"]["row"])


def test_buffers_are_used_again():
    engine, buffers = engine_of(), HostBuffers()
    module = engine.executor._host.workers[engine.name].module
    first, second = (
        {index: piece.values.data_ptr() for index, piece in buffers.snapshot("policy", module).pieces.items()}
        for _ in range(2)
    )
    assert first == second
    live = {value.data_ptr() for value in module.state_dict().values()}
    assert not live & set(first.values())


@pytest.mark.parametrize(
    "others",
    [
        (torch.arange(6.0), torch.arange(3.0)),
        (torch.arange(3.0), torch.arange(6.0)),
        (torch.arange(6.0), torch.arange(6)),
        (torch.arange(6.0), torch.arange(6.0).bfloat16() / 7),
        (torch.arange(3.0), torch.arange(3.0).expand(2, 3)),
        (torch.arange(3.0).expand(2, 3), torch.arange(3.0)[None]),
    ],
    ids=["fewer", "more", "integers", "rounded", "more rows", "fewer rows"],
)
def test_a_snapshot_of_another_form_under_the_same_name_is_exact_and_leaves_nothing_of_the_one_before(others):
    class Holds:
        def __init__(self, values):
            self.values = values

        def checkpoint_state(self):
            return {"values": self.values}

    buffers = HostBuffers()
    for values in others:
        [piece] = buffers.snapshot("policy", Holds(values)).pieces.values()
        assert piece.values.dtype == values.dtype and torch.equal(piece.values, values)
        assert has_checksum(piece.values, piece.checksum) and not piece.parameter


def test_other_values_than_the_snapshot_read_are_no_checkpoint(tmp_path, slow):
    """The memory is changed under the writer, as it is when a buffer is shared with something that goes on."""
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(4, {"policy": policy}, {})
    next(iter(saver_of(policy).share.snapshots["policy"].pieces.values())).values.add_(1)
    slow.may.set()
    with pytest.raises(CheckpointError, match=r"safetensors holds other values of .* than the snapshot read"):
        checkpointer.wait()
    assert names(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_the_checksum_sees_one_bit(dtype):
    values = torch.arange(6).reshape(2, 3).to(dtype)[:, 1:]
    seen = checksum_of(values)
    assert has_checksum(values.clone(), seen)
    changed = values.clone()
    changed.view(-1).view(torch.uint8)[3] ^= 1
    assert not has_checksum(changed, seen)
    assert has_checksum(torch.tensor(2.5), checksum_of(torch.tensor(2.5))) and has_checksum(values[:0], "crc32:0")


def test_the_next_save_waits_for_the_one_before(tmp_path, slow):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"policy": policy}, {})
    timer = threading.Timer(0.2, slow.may.set)
    timer.start()
    checkpointer.save(2, {"policy": policy}, {})
    assert slow.may.is_set() and (tmp_path / "step-00000001").exists()
    checkpointer.wait(), timer.join()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def full(*_):
    raise OSError(28, "No space left on device")


def test_an_error_of_the_writer_is_raised_at_the_next_save(tmp_path):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"policy": policy}, {})
    checkpointer.wait()
    with patch.object(writing, "save_file", full):
        checkpointer.save(2, {"policy": policy}, {})
        with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*No space .*; the newest is .*01$"):
            checkpointer.save(3, {"policy": policy}, {})
    assert names(tmp_path) == ["step-00000001"]
    checkpointer.save(3, {"policy": policy}, {})
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_writer_that_hangs_is_named(tmp_path, slow):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path, timeout=0.1)
    checkpointer.save(1, {"policy": policy}, {})
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written within 0.1 s; there is no older one"):
        checkpointer.wait()
    slow.may.set()
    hosts.finish(policy.executor._host, 30)


def test_the_driver_state_is_of_the_moment_of_the_save(tmp_path, slow):
    values, inner = torch.zeros(2), [1]
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, {}, {"values": values, "inner": inner})
    values.add_(1), inner.append(2)
    slow.may.set()
    checkpointer.wait()
    state = checkpointer.read(path)
    assert torch.equal(state["values"], torch.zeros(2)) and state["inner"] == [1]
