"""A sync's plan and its ends: buckets as full as they can be, who gives what, what is told, and whose memory it is."""

import gc
import re
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_bridge.weights import Cast, ModuleReceiver, WeightSyncError, replace_parameters
from rl_bridge.weights.ends import Description, Sender
from rl_bridge.weights.manifest import Entry, Manifest, TensorSpec, compare, described, module_tensors, plan_buckets
from rl_bridge.weights.sync import Outcome, _givers, _raise_failures
from rl_bridge.weights.transports import check_transport, choose_transport
from tests.support.one_process import sync

NODES = {0: "a", 1: "a", 2: "b"}
META = torch.device("meta")


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), limit=st.integers(1, 400))
@example(sizes=[16, 16], limit=128)
@example(sizes=[16, 16], limit=127)
def test_a_bucket_ends_where_the_next_tensor_has_no_room(sizes, limit):
    tensors = [(f"w{i}", TensorSpec((size,), torch.float32), i) for i, size in enumerate(sizes)]
    buckets = plan_buckets(tensors, limit)
    for bucket, following in pairwise(buckets):
        assert bucket.nbytes % 64 == 0 and bucket.nbytes + following.entries[0].spec.nbytes > limit


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7])
def test_four_misfits_are_named_and_the_rest_counted(count):
    spec = TensorSpec((1,), torch.float32)
    sent, expected = Manifest({f"w{i}": spec for i in range(count)}), Manifest({})
    with pytest.raises(ValueError, match="nothing was overwritten") as raised:
        compare(sent, expected, "a → b")
    named = re.findall(r"unknown weight '(\w+)'", str(raised.value))
    assert named == [f"w{i}" for i in range(min(count, 4))]
    assert re.findall(r"and (\d+) more", str(raised.value)) == ([str(count - 4)] if count > 4 else [])


def test_the_same_tensors_of_another_adapter_do_not_fit():
    tensors = {"w": TensorSpec((1,), torch.float32)}
    compare(Manifest(tensors, {"r": 2}), Manifest(tensors, {"r": 2}), "a → b")
    for other in ({"r": 3}, None):
        with pytest.raises(ValueError, match="adapter: expected"):
            compare(Manifest(tensors, {"r": 2}), Manifest(tensors, other), "a → b")


@pytest.mark.parametrize(
    ("source", "target", "on_gpus", "transport"),
    [
        ([0, 1], [1], True, "same_slot"),
        ([0], [0, 1], False, "shared_memory"),
        ([0], [1], True, "broadcast"),
        ([0, 1], [2], False, "broadcast"),
    ],
)
def test_the_cheapest_transport_is_one_that_serves(source, target, on_gpus, transport):
    assert choose_transport(source, target, NODES, on_gpus=on_gpus) == transport
    check_transport(transport, source, target, NODES, None)


@pytest.mark.parametrize(
    ("name", "source", "target", "message"),
    [
        ("same_slot", [0], [1, 0, 2], r"no worker of the source is in the target's slots \[1, 2\]"),
        ("shared_memory", [0], [2], r"the slots are on 2 nodes: \['a', 'b'\]"),
        ("broadcast", [1], [1], "both ends are in slot 1 alone"),
        ("file", [0], [1], "'file' needs one, the others none"),
    ],
)
def test_a_transport_that_cannot_serve_is_never_replaced(name, source, target, message):
    with pytest.raises(ValueError, match=message):
        check_transport(name, source, target, NODES, None)


def test_workers_that_hold_the_same_part_take_turns_and_each_part_is_given_once():
    spec = TensorSpec((4,), torch.float32)
    tensors = [(f"w{origin}", spec, origin) for origin in range(6)]
    manifest, halves = Manifest({name: spec for name, spec, _ in tensors}), (((0, 2),), ((2, 2),))
    descriptions = {slot: Description(manifest, (), (halves[slot % 2],) * 6, 0) for slot in range(4)}
    gives = _givers(descriptions, tensors)
    for first in (0, 1):
        origins = [*gives[first], *gives[first + 2]]
        assert sorted(origins) == list(range(6)) and len(gives[first]) == 3
    with pytest.raises(ValueError, match="do not make the whole"):
        _givers({0: descriptions[0]}, tensors)


def test_a_failure_is_told_by_its_causes_and_by_consequences_where_there_is_nothing_else():
    cause, consequence = Outcome("the disk is full"), Outcome("the source failed", consequence=True)
    _raise_failures("sync", {0: Outcome(None), 1: Outcome(None)})
    with pytest.raises(WeightSyncError, match=r"sync: failed in slots \[2\]; .*\nslot 2: the disk is full$"):
        _raise_failures("sync", {0: consequence, 1: Outcome(None), 2: cause})
    with pytest.raises(WeightSyncError, match=r"failed in slots \[0\]; .*\nslot 0: the source failed$"):
        _raise_failures("sync", {0: consequence, 1: Outcome(None)})


class Tied(torch.nn.Module):
    """A parameter and a buffer under two names, one of each that takes no part in gradients or files."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(2))
        self.other = self.one
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("first", torch.ones(3))
        self.register_buffer("again", self.first)
        self.register_buffer("own", torch.ones(3), persistent=False)


def test_tied_tensors_travel_once_and_stay_tied_and_frozen_ones_frozen():
    module = Tied()
    assert [name for name, _ in module_tensors(module)] == ["one", "frozen", "first"]
    replaced = replace_parameters(module, META)
    assert len(replaced) == 2 and module.one is module.other and module.one.is_meta and not module.first.is_meta
    assert (module.one.requires_grad, module.frozen.requires_grad) == (True, False)
    again = replace_parameters(module, torch.device("cpu"))
    assert len(again) == 2 and module.one is module.other and not module.one.is_meta
    assert replace_parameters(module, torch.device("cpu")) == {}, "what has values keeps them"


def test_the_latest_version_is_the_highest_that_there_was():
    receiver = ModuleReceiver(torch.nn.Linear(1, 1), version=3)
    for version, latest in ((None, 3), (5, 5), (None, 5), (4, 5)):
        receiver.version = version
        assert (receiver.version, receiver.latest) == (version, latest)


def test_lent_memory_is_the_source_s_until_the_next_weights_come_and_then_its_own_for_good():
    source, target = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))
    receiver, manifest = ModuleReceiver(target), Manifest(described(module_tensors(source), "source"))
    receiver.begin(manifest)
    receiver.lend("weight", source.weight)
    receiver.finish()
    assert target.weight.data_ptr() == source.weight.data_ptr()
    receiver.begin(manifest)
    own = target.weight.data_ptr()
    assert own != source.weight.data_ptr() and torch.equal(target.weight, source.weight)
    receiver.begin(manifest)
    assert target.weight.data_ptr() == own, "a copy is made once"
    with pytest.raises(ValueError, match="no weights came for 1 of 1 parameters"):
        receiver.finish()


def test_weights_that_were_freed_after_a_sync_are_not_kept_by_their_receiver():
    module = torch.nn.Linear(2, 1, bias=False)
    receiver = ModuleReceiver(module)
    receiver.begin(Manifest(described(module_tensors(module), "source")))
    receiver.lend("weight", torch.zeros(1, 2))
    receiver.finish()
    weight = weakref.ref(module.weight)
    replace_parameters(module, META).clear()
    gc.collect()
    assert weight() is None


class Stream:
    """A source whose stream gives these tensors, or raises them."""

    def __init__(self, *tensors):
        self.tensors, self.asked = list(tensors), 0

    def stream(self, *, adapter):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        self.asked += 1
        if isinstance(tensor := self.tensors.pop(0), Exception):
            raise tensor
        return "w", tensor


def sender_of(source):
    return Sender(source, None, adapter=False, pieces=False, gives=None)


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(2, 1)])
def test_what_a_source_gives_is_what_it_promised_in_name_shape_and_dtype(tensor):
    entry = Entry("w", TensorSpec((2,), torch.float32), 0, 0)
    for values, is_promised in ((torch.zeros(2), True), (tensor, False)):
        sender = sender_of(Stream(values))
        assert (sender.take(entry) is not None) == (sender.failure is None) == is_promised


def test_a_source_that_failed_is_not_asked_again_and_its_first_error_stays():
    source = Stream(OSError("the disk is gone"), RuntimeError("asked again"), torch.zeros(2))
    sender = sender_of(source)
    for origin in range(3):
        assert sender.take(Entry("w", TensorSpec((2,), torch.float32), origin, 0)) is None
    assert isinstance(sender.failure, OSError) and source.asked == 1


def test_memory_is_shared_only_of_weights_that_go_as_they_are(executor, tmp_path):
    with pytest.raises(ValueError, match="share=True needs transport 'same_slot', equal layouts and no map"):
        sync(executor, tmp_path, transport="same_slot", folder=None, share=True, through=Cast(torch.float32))


def test_the_driver_waits_longer_for_a_transfer_than_its_slots_for_each_other(executor, tmp_path, monkeypatch):
    """The message of a slot says more: which slot was waited for, and for what."""
    waits, call = {}, executor.call

    def recorded(function, arguments, *, what, timeout=None, together=None):
        waits[function.__name__] = timeout, [one.timeout for (one, *_) in arguments.values() if hasattr(one, "timeout")]
        return call(function, arguments, what=what, timeout=timeout, together=together)

    monkeypatch.setattr(executor, "call", recorded)
    sync(executor, tmp_path, timeout=30.0)
    assert waits["describe"][0] == 30.0
    of_driver, of_slots = waits["transfer"]
    assert of_slots == [30.0] and of_driver > 30.0
