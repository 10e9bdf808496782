"""One process: what a checkpoint gives back, what its folder holds, what is refused."""

import copy
import pickletools
import random
import threading
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_bridge.checkpoints import Checkpointer, CheckpointError, load_optimizer_state, optimizer_state, restoring
from rl_bridge.checkpoints import checkpointer as hosts
from rl_bridge.checkpoints.checkpointer import random_states, set_random_states
from rl_bridge.common import step_folders
from rl_bridge.engines import TrainEngine
from rl_bridge.engines.module import room_for_states
from tests.bridge.checkpoints.modules import Trained, draw, engine_of, names


def test_a_run_goes_on_bit_for_bit(tmp_path):
    policy, reference = engine_of(), TrainEngine(lambda: torch.nn.Linear(2, 1)).build()
    for _ in range(3):
        policy.update()
    checkpointer = Checkpointer(tmp_path)
    random.gauss(0, 1), np.random.normal()
    path = checkpointer.save(3, {"policy": policy, "reference": reference}, {"stage": "a", "values": torch.ones(2)})
    checkpointer.wait()
    before = copy.deepcopy(reference.state_dict())
    wanted = [policy.update() for _ in range(4)], draw()
    other = engine_of(seed=1), TrainEngine(lambda: torch.nn.Linear(2, 1)).build()
    draw()
    state = Checkpointer(tmp_path).load(path, dict(zip(("policy", "reference"), other, strict=True)))
    assert state["stage"] == "a" and torch.equal(state["values"], torch.ones(2))
    assert ([other[0].update() for _ in range(4)], draw()) == wanted
    ours, theirs = (engine.checkpoint_state() for engine in (other[0], policy))
    assert str(ours) == str(theirs)
    assert ours["module"]["tied"].data_ptr() == ours["module"]["first"].data_ptr()  # still one parameter
    assert float(ours["optimizer"]["state"]["first"]["step"]) == 7
    assert all(torch.equal(before[name], value) for name, value in other[1].state_dict().items())


def test_the_folder_holds_no_pickle(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": engine_of()}, {"x": 1})
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {
        "manifest.json",
        "driver/state.json",
        "policy/index.json",
        "policy/rank-00000.safetensors",
        "random/slot-00000.json",
    }
    for file in path.rglob("*.*"):
        with pytest.raises(ValueError), file.open("rb") as stream:
            list(pickletools.genops(stream))


def test_copies_of_an_earlier_stage_and_of_a_run_that_is_over_are_let_go_of(tmp_path):
    checkpointer, first, second = Checkpointer(tmp_path), engine_of(), engine_of()
    host = first.executor._host

    def held():
        return {name for name, _ in hosts._savers[host].buffers._buffers}

    checkpointer.save(1, {"supervised": first}, {})
    checkpointer.wait()
    assert held() == {"supervised"}
    checkpointer.save(2, {"policy": second}, {})
    assert held() == {"policy"}
    checkpointer.close()
    assert host not in hosts._savers
    assert checkpointer.latest() == checkpointer.path(2)


def test_copies_of_tensors_that_a_module_has_no_more_are_let_go_of(tmp_path):
    checkpointer, engine = Checkpointer(tmp_path), engine_of()
    buffers = hosts._savers.setdefault(engine.executor._host, hosts._Saver()).buffers._buffers
    buffers["policy", MetadataIndex("module/gone")] = buffers["other", MetadataIndex("module/gone")] = torch.zeros(2)
    checkpointer.save(1, {"policy": engine, "other": engine_of()}, {})
    checkpointer.wait()
    kept = hosts._savers[engine.executor._host].buffers._buffers
    assert {name for name, _ in kept} == {"policy", "other"} and not [i for _, i in kept if i.fqn == "module/gone"]


def test_memory_is_copied_to_again_by_the_next_checkpoint_of_the_same_engine_alone(tmp_path):
    """A snapshot costs its memory once, pinned where the tensors are on CUDA: pinning takes longer than the copy."""
    checkpointer, policy, critic = Checkpointer(tmp_path), engine_of(), engine_of(seed=1)
    host = policy.executor._host

    def copied_to(step, **engines):
        checkpointer.save(step, engines, {})
        checkpointer.wait()
        return {key: buffer.data_ptr() for key, buffer in hosts._savers[host].buffers._buffers.items()}

    both = copied_to(1, policy=policy, critic=critic)
    assert copied_to(2, policy=policy, critic=critic) == both and len({*both.values()}) == len(both)
    alone = copied_to(3, critic=critic)
    assert alone == {key: place for key, place in both.items() if key[0] == "critic"} and len(both) == 2 * len(alone)


def test_a_place_for_what_a_checkpoint_may_hold_changes_neither_weights_nor_gradients():
    module = Trained()
    module.on_weights_materialized()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.row.grad = torch.ones_like(module.row)
    assert optimizer_state(module, module.optimizer)["state"] == {}
    with room_for_states() as places:
        state = copy.deepcopy(optimizer_state(module, module.optimizer)["state"])
    assert state.keys() == {"first", "row"} and len(places) == 6
    assert torch.equal(module.row.grad, torch.ones_like(module.row)) and module.first.grad is None
    assert (module.optimizer.param_groups[0]["lr"], module.optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.01)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    module.row.grad = None
    load_optimizer_state(module, module.optimizer, {**optimizer_state(module, module.optimizer), "state": {}})
    fresh, losses = Trained(), []
    fresh.on_weights_materialized()
    for one in (module, fresh):
        torch.manual_seed(0)
        losses.append([one.update() for _ in range(3)])
    assert losses[0] == losses[1]


def test_another_optimiser_is_refused():
    module, other = Trained(), Trained()
    module.on_weights_materialized()
    other.optimizer = torch.optim.AdamW([{"params": [other.first]}, {"params": [other.row]}], lr=0.1)
    state = optimizer_state(module, module.optimizer)
    with pytest.raises(ValueError, match=r"are \[first\] \(1\) and \[row\] \(1\), those of the checkpoint \[first"):
        load_optimizer_state(other, other.optimizer, state)
    with pytest.raises(ValueError, match="the optimiser has 2 parameters that Linear does not have"):
        optimizer_state(torch.nn.Linear(1, 1), other.optimizer)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": policy}, {})
    policy.executor._host.workers[policy.name].module.row.data[0, 1] = value
    with pytest.raises(CheckpointError, match=rf"policy: values of module/row are not finite; the newest is {path}"):
        checkpointer.save(2, {"policy": policy}, {})
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("factory", [Trained, lambda: torch.nn.Linear(3, 2)])
def test_freed_weights_are_not_saved_and_come_back_with_a_checkpoint(tmp_path, factory):
    policy = TrainEngine(factory).build()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": policy}, {})
    before = copy.deepcopy(policy.state_dict())
    policy.meta()
    with pytest.raises(ValueError, match="were freed"):
        checkpointer.save(2, {"policy": policy}, {})
    assert names(tmp_path) == [path.name]
    checkpointer.load(path, {"policy": policy})
    assert before.keys() == policy.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    checkpointer.save(2, {"policy": policy}, {})


def test_weights_that_were_read_in_part_are_not_used(tmp_path):
    policy = engine_of()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": policy}, {})
    reads = iter(range(100))

    def read(reader, item):
        if next(reads) == 2:
            raise OSError("the disk is gone")
        return torch.zeros(item.lengths)

    with patch.object(restoring, "_read", read), pytest.raises(OSError, match="the disk is gone"):
        checkpointer.load(path, {"policy": policy})
    with pytest.raises(ValueError, match="the weights here are incomplete"):
        checkpointer.save(2, {"policy": policy}, {})
    checkpointer.load(path, {"policy": policy})
    checkpointer.save(2, {"policy": policy}, {})


@pytest.mark.parametrize("fails", [False, True], ids=["written", "not written"])
def test_a_wait_that_ctrl_c_ends_is_waited_again(tmp_path, monkeypatch, fails):
    """The run's folder is given up only when nothing is being written to it."""
    policy, goes_on, real = engine_of(), threading.Event(), hosts.write

    def write(share):
        assert goes_on.wait(30)
        if fails:
            raise OSError("the disk is gone")
        real(share)

    def ended(thread, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(hosts, "write", write)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"policy": policy}, {})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "join", ended)
        checkpointer.wait()
    assert names(tmp_path) != ["step-00000001"]
    goes_on.set()
    for _ in range(2):  # the end is told to whoever asks first, and not again
        with pytest.raises(CheckpointError, match="the disk is gone") if fails and _ == 0 else nullcontext():
            checkpointer.wait()
    assert names(tmp_path) == ([] if fails else ["step-00000001"])


def test_damage_is_named_and_an_older_one_taken(tmp_path):
    policy, said = engine_of(), []
    checkpointer = Checkpointer(tmp_path, keep=3, asynchronous=False)
    assert checkpointer.latest() is None
    paths = [checkpointer.save(step, {"policy": policy}, {"step": step}) for step in (1, 2, 3)]
    shard = paths[2] / "policy" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    (paths[1] / "policy" / "rank-00000.safetensors").unlink()
    resumed = Checkpointer(tmp_path, keep=3, asynchronous=False, report=said.append)
    assert resumed.latest() == paths[0] and resumed.read(paths[0]) == {"step": 1}
    assert said == [
        f"going on from {paths[0]}, because {shard} has another checksum than was written; "
        f"{paths[1] / 'policy' / 'rank-00000.safetensors'} is missing"
    ]
    for call in (lambda: resumed.load(paths[2], {"policy": policy}), lambda: resumed.read(paths[2])):
        with pytest.raises(ValueError, match=r"step-00000003 cannot be read: .*00000.safetensors has another checksum"):
            call()
    resumed.save(2, {"policy": policy}, {"step": "again"})
    assert names(tmp_path) == [paths[0].name, paths[1].name, "step-00000002.damaged", "step-00000003.damaged"]
    assert "step-00000003 is now step-00000003.damaged" in said[1]
    assert Checkpointer(tmp_path).latest() == paths[1]
    for path in paths[:2]:
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of .* is whole: .*manifest.json is missing; .*json is"):
        Checkpointer(tmp_path).latest()


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    path = checkpointer.save(1, {"policy": TrainEngine(lambda: torch.nn.Linear(3, 2)).build()}, {})
    for factory, message in (
        (
            lambda: torch.nn.Linear(3, 4),
            r"module/weight was saved as \(\[2, 3\], 'float32'\), .* has \(\[4, 3\]",
        ),
        (lambda: torch.nn.Linear(3, 2, dtype=torch.float64), "the model has .*float64"),
        (lambda: torch.nn.Linear(3, 2, bias=False), "the model lacks module/bias"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(3, 2)), "the checkpoint lacks module/0.bias, module/0.weight"),
    ):
        other = TrainEngine(factory).build()
        with pytest.raises(ValueError, match=message):
            checkpointer.load(path, {"policy": other})
    with pytest.raises(ValueError, match=r"has no state of 'critic'; it has policy"):
        checkpointer.load(path, {"critic": other})
    for name in ("driver", "random", "../x", ""):
        with pytest.raises(ValueError, match="cannot be an engine's name"):
            checkpointer.save(2, {name: other}, {})


@pytest.mark.parametrize("more", [4, 5, 6, 8])
def test_what_a_model_lacks_is_named_as_far_as_a_line_goes_and_counted(tmp_path, more):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    saved, asked = (
        TrainEngine(lambda count=count: torch.nn.ParameterList([torch.zeros(1)] * count)).build()
        for count in (1, 1 + more)
    )
    path = checkpointer.save(1, {"policy": saved}, {})
    named = ", ".join(f"module/{number}" for number in range(1, 1 + min(more, 5)))
    counted = f" and {more - 5} more" if more > 5 else ""
    with pytest.raises(ValueError, match=f"the checkpoint lacks {named}{counted}$"):
        checkpointer.load(path, {"policy": asked})


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(1, {}, {"x": 1})
    with pytest.raises(TypeError, match="got generator at state/x"):
        checkpointer.save(2, {}, {"x": (i for i in range(3))})
    assert names(tmp_path) == ["step-00000001"] and Checkpointer(tmp_path).read(tmp_path / "step-00000001") == {"x": 1}
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpointer(tmp_path, keep=0)


def test_random_states_come_back():
    draw()
    states = random_states()
    wanted = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    set_random_states(states)
    assert draw() == wanted and states["cuda"] is None


def test_files_are_on_the_disk_before_the_name_is(tmp_path):
    """Every file and folder is synchronised, and the rename comes after."""
    events = []
    fsync, rename = step_folders.os.fsync, step_folders.os.rename

    def seen_fsync(descriptor):
        events.append(step_folders.os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def seen_rename(*arguments):
        events.append("rename")
        rename(*arguments)

    with patch.object(step_folders.os, "fsync", seen_fsync), patch.object(step_folders.os, "rename", seen_rename):
        path = Checkpointer(tmp_path, asynchronous=False).save(1, {"policy": engine_of()}, {})
    written = {str(p).replace(path.name, f"{path.name}.tmp") for p in [path, *path.rglob("*")]}
    assert written <= set(events[: events.index("rename")])
    assert events[-1] == str(tmp_path)
