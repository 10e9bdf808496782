"""What can go wrong between ranks, and must be told, by whom, without leaving half of the weights in use."""

import os
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rl_bridge.weights import Cast, EngineRef, checksum, receiver_of, sync, sync_weights, transports
from tests.support.one_process import NAME
from tests.support.weight_engines import engine, holds, joined, model

ONE, BOTH = (1,), (0, 1)
SHARDS, COPY, COPIES = ("shard", BOTH), ("copies", ONE), ("copies", BOTH)


class World:
    """Two ranks and their engines."""

    def __init__(self, host, executor, folder):
        self.host, self.executor, self.folder = host, executor, folder

    def sync(self, source, target, transport, *, seeds=(1, 2), **options):
        refs = engine(self.host, "policy", *source, seed=seeds[0]), engine(self.host, "rollout", *target, seed=seeds[1])
        return self.again(*refs, transport, **options)

    def again(self, source, target, transport, **options):
        folder = self.folder if transport == "file" else None
        options = {"version": 1, "bucket_bytes": 4096, "timeout": 120, "folder": folder} | options
        return sync_weights(self.executor, source, target, transport=transport, **options)

    def ref(self, name, slots):
        return EngineRef(name, slots)

    def version(self, slots):
        """The rollout's version here; "elsewhere" where it has no worker."""
        if self.host.slot not in slots:
            return "elsewhere"
        return receiver_of(self.host.workers["rollout"].module).version

    def recovers(self, source, target, transport):
        """A sync between the same engines succeeds, and the weights are the source's."""
        refs = self.ref("policy", source[1]), self.ref("rollout", target[1])
        self.again(*refs, transport, version=2)
        assert holds(self.host, refs[1], model(1)) == []
        assert self.version(target[1]) in (2, "elsewhere")


def damage_in_a_broadcast(world):
    def arrived(self, number, arrived=transports.Broadcast.arrived):
        arrived(self, number)
        if number >= 0 and self.writer is None:
            for bucket in buckets:
                for entry in bucket.entries:
                    if entry.name == NAME and bucket.number == number:
                        self.frame(bucket).tensor(entry).view(-1)[-1].mul_(-1)

    def init(self, *args, init=transports.Broadcast.__init__, **options):
        buckets.extend(options["buckets"])
        init(self, *args, **options)

    buckets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports.Broadcast, "arrived", arrived)
        patch.setattr(transports.Broadcast, "__init__", init)
        with pytest.raises(RuntimeError, match=f"slot 1: (.|\n)*weight '{NAME}' was damaged on the way"):
            world.sync(SHARDS, COPY, "broadcast")
    assert world.version(ONE) in (None, "elsewhere")
    world.recovers(SHARDS, COPY, "broadcast")


def a_receiver_that_fails_in_the_middle(world):
    for transport in ("broadcast", "shared_memory", "file", "same_slot"):
        source = ("shard", BOTH) if transport == "same_slot" else ("copies", (0,))
        engine(world.host, "policy", *source, seed=1)
        engine(world.host, "rollout", *COPIES, seed=2)
        receiver = receiver_of(world.host.workers["rollout"].module)
        calls = []

        def receive(arrivals, receive=receiver.receive, calls=calls):
            calls.append(arrivals)
            if world.host.slot == 1 and len(calls) == 3:
                raise MemoryError("slot 1 is full")
            receive(arrivals)

        receiver.receive = receive
        with pytest.raises(RuntimeError, match=r"failed in slots \[1\](.|\n)*MemoryError: slot 1 is full"):
            world.again(world.ref("policy", source[1]), world.ref("rollout", BOTH), transport)
        assert world.version(BOTH) is None, transport
        del receiver.receive
        world.recovers(source, COPIES, transport)


def a_map_that_fails_in_the_middle(world):
    def breaks(name, tensor):
        if name == NAME and tensor.device.type != "meta":
            raise ArithmeticError("scale is 0")
        yield name, tensor

    for transport, target in (("broadcast", COPY), ("shared_memory", COPY), ("file", COPIES), ("same_slot", COPIES)):
        with pytest.raises(RuntimeError, match="ArithmeticError: scale is 0"):
            world.sync(SHARDS, target, transport, through=breaks)
        assert world.version(target[1]) in (None, "elsewhere"), transport
        world.recovers(SHARDS, target, transport)


def a_cast_before_the_gathering(world):
    policy = engine(world.host, "policy", *SHARDS, seed=1)
    rollout = engine(world.host, "rollout", *COPIES, module=model(2, torch.bfloat16))
    for version, transport in enumerate(("broadcast", "shared_memory", "same_slot")):
        report = world.again(policy, rollout, transport, through=Cast(torch.bfloat16), version=version)
        assert report.nbytes == 2 * sum(p.numel() for p in model(1).parameters())
        assert holds(world.host, rollout, model(1, torch.bfloat16)) == []


def fsdp_after_a_forward_pass(world):
    """Its root keeps gathered bfloat16 copies, which are neither what is sent nor what is written."""
    mesh = DeviceMesh.from_group(world.host.group(BOTH), "cpu", mesh_dim_names=("shard",))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    tokens = torch.arange(10)[None]

    def low_precision(seed):
        made = model(seed)
        fully_shard(made, mesh=mesh, mp_policy=low, reshard_after_forward=False)
        return made

    modules = low_precision(1), low_precision(2)
    wanted = modules[0](tokens, use_cache=False).logits
    assert not torch.equal(modules[1](tokens, use_cache=False).logits, wanted)
    for name, module in zip(("policy", "rollout"), modules, strict=True):
        world.host.workers[name] = SimpleNamespace(module=module)
    for transport in ("same_slot", "shared_memory"):
        world.again(world.ref("policy", BOTH), world.ref("rollout", BOTH), transport)
        assert holds(world.host, world.ref("rollout", BOTH), model(1)) == []
        assert torch.equal(modules[1](tokens, use_cache=False).logits, wanted)


def adapters_on_sharded_models(world):
    from tests.bridge.weights.adapters import adapted

    def put(name, seed, shards):
        made = adapted(seed, target_modules="all-linear")
        if shards:
            mesh = DeviceMesh.from_group(world.host.group(BOTH), "cpu", mesh_dim_names=("shard",))
            for layer in made.get_base_model().model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(made, mesh=mesh)
        world.host.workers[name] = SimpleNamespace(module=made)
        return made

    policy = put("policy", 0, shards=True)
    before = {name: checksum(tensor.to_local()) for name, tensor in policy.state_dict().items()}
    merged = adapted(0, target_modules="all-linear").merge_and_unload()
    cases = [("same_slot", COPIES), ("same_slot", SHARDS), ("broadcast", COPY), ("shared_memory", SHARDS)]
    for version, (transport, target) in enumerate([*cases, *cases]):
        rollout = engine(world.host, "rollout", *target, seed=2)
        world.again(world.ref("policy", BOTH), rollout, transport, version=version)
        assert holds(world.host, rollout, merged) == [], (transport, target)
    assert before == {name: checksum(tensor.to_local()) for name, tensor in policy.state_dict().items()}
    for transport, shards in (("broadcast", False), ("same_slot", True)):
        rollout = put("rollout", 1, shards=shards)
        world.again(world.ref("policy", BOTH), world.ref("rollout", BOTH), transport, adapter=True)
        logits = [m(torch.arange(10)[None], use_cache=False).logits for m in (policy, rollout)]
        torch.testing.assert_close(*logits, atol=1e-6, rtol=0)


def shards_are_not_lent(world):
    with pytest.raises(RuntimeError, match="is sharded: only plain tensors can be lent"):
        world.sync(SHARDS, SHARDS, "same_slot", share=True)


def slots_that_disagree(world):
    engine(world.host, "policy", "copies", BOTH, module=model(1) if world.host.slot == 0 else torch.nn.Linear(2, 2))
    engine(world.host, "rollout", *COPIES)
    with pytest.raises(ValueError, match=r"source policy: slots 1 and 0: nothing was overwritten: unknown weight 'wei"):
        world.again(world.ref("policy", BOTH), world.ref("rollout", BOTH), "same_slot")
    with pytest.raises(ValueError, match=r"transport 'same_slot': no worker of the source is in .* slots \[1\]"):
        world.sync(("copies", (0,)), COPIES, "same_slot")


def memory_that_another_process_cannot_map(world):
    real = os.open

    def refused(path, *args):
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(RuntimeError, match=r"no shared memory between these slots (.|\n)*Permission denied"):
            world.sync(SHARDS, COPY, "shared_memory")


def nothing_is_left_of_shared_memory(world):
    """After all the failures above, no memory is mapped and no file is open."""
    assert "rl_bridge weights" not in Path("/proc/self/maps").read_text()
    links = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
    ]
    assert not any("rl_bridge" in link for link in links)
    assert list(world.folder.glob("**/*")) == []


def a_peer_that_does_not_come(world):
    """The last one: the process group is of no use afterwards."""

    def transfer(host, job, transfer=sync.transfer):
        return transfer(host, job) if host.slot == 0 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_bridge.weights.sync.transfer", transfer)
        message = "policy copies → rollout copies, version 1: nothing was overwritten; slot 1 did not come within 1 s"
        with pytest.raises(RuntimeError, match=message):
            world.sync(("copies", (0,)), COPIES, "broadcast", timeout=1)
    assert world.version(BOTH) == 0


SCENARIOS = [
    damage_in_a_broadcast,
    a_receiver_that_fails_in_the_middle,
    a_map_that_fails_in_the_middle,
    a_cast_before_the_gathering,
    fsdp_after_a_forward_pass,
    adapters_on_sharded_models,
    shards_are_not_lent,
    slots_that_disagree,
    memory_that_another_process_cannot_map,
    nothing_is_left_of_shared_memory,
    a_peer_that_does_not_come,
]


def run(rank, address, queue):
    """All scenarios in two ranks; puts what went wrong."""
    host, executor = joined(rank, address, 2)
    folder = Path(address.removeprefix("file://")).parent / "weights"
    world, faults = World(host, executor, folder), {}
    for scenario in SCENARIOS:
        try:
            scenario(world)
        except BaseException:
            faults[scenario.__name__] = traceback.format_exc()
            break
    queue.put((rank, faults))


def killed_half_way(rank, address, queue):
    """Rank 1 dies in the middle of a broadcast; rank 0 puts what it was told, and how long that took."""
    host, executor = joined(rank, address, 2)
    world = World(host, executor, None)

    def arrived(self, number, arrived=transports.Broadcast.arrived):
        if host.slot == 1 and number == 2:
            queue.put((1, "killed", 0.0))
            queue.close()
            queue.join_thread()
            os._exit(0)
        arrived(self, number)

    transports.Broadcast.arrived = arrived
    source, target = engine(host, "policy", "copies", (0,), seed=1), engine(host, "rollout", "copies", (0, 1), seed=2)
    outcome = []

    def call(function, arguments, /, *, what, timeout, call=executor.call):
        if function is not sync.transfer:
            return call(function, arguments, what=what, timeout=timeout)
        began = time.monotonic()
        try:
            function(host, *arguments[rank])
        except Exception as error:
            outcome.append((str(error), time.monotonic() - began))
        return {}

    executor.call = call
    world.again(source, target, "broadcast", bucket_bytes=512)
    queue.put((0, *outcome[0], receiver_of(host.workers["rollout"].module).version))
