"""vLLM as it comes, updated as its documentation says, with one thing wrong. `python -m ... FILE` writes what happens.

In a process of its own, in which nothing of rl_bridge is plugged into vLLM.
"""

# pyright: reportMissingImports=false

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_bridge.executors import LocalExecutor
from rl_bridge.rollout.inside_vllm.plugin import PROTOCOL
from rl_bridge.rollout.vllm.client import InProcessEngine
from rl_bridge.rollout.vllm.vllm_engine import close_engine, open_engine
from rl_bridge.weights import source_of
from tests.bridge.rollout.vllm.faults import FAULTS, NOT_DELIVERED, TIED, shorten
from tests.bridge.rollout.vllm.policies import (
    RUNNING,
    draw,
    ends_of,
    gap,
    make_model,
    options,
    start_request,
    trainer,
    worker_of,
)
from tests.bridge.rollout.vllm.starts import quick_starts

BACKEND = "bare"
EQUAL = 1e-4


@dataclass
class Init(WeightTransferInitInfo):
    protocol: int = PROTOCOL


@dataclass
class Update(WeightTransferUpdateInfo):
    pairs: list = field(default_factory=list)
    file: str | None = None


class BareTransfer(WeightTransferEngine):
    """What vLLM's own transfer engines do once the tensors are here (``ipc_engine.py``, ``nccl_engine.py``)."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        pairs = update_info.pairs if update_info.file is None else list(load_file(update_info.file).items())
        self.model.load_weights(pairs)

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


def open_bare(folder, options, **arguments):
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, BareTransfer)

    def opened(folder):
        return open_engine(folder, options, weight_transfer_config={"backend": BACKEND}, **arguments)

    return InProcessEngine(opened, close_engine, folder)


class Call:
    """The calls of an update, one by one, and which of them was the last."""

    def __init__(self, client):
        self.client, self.last = client, ""

    def update(self, pairs=(), *, file=None, version="1", pause=True, reset=True, until="finish"):
        """A documented update; ``until`` "update" leaves it there, as a trainer does that dies."""
        core, engine = self.client._core, self.client.engine
        if pause:
            self.last = "pause"
            core.pause_scheduler("keep", clear_cache=reset)
        self.last = "start"
        engine.collective_rpc("start_weight_update")
        self.last = "update"
        info = {"pairs": list(pairs), "file": file}
        engine.collective_rpc("update_weights", kwargs={"update_info": info})
        if until == "update":
            return
        self.last = "finish"
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(version)
        if reset:
            engine.reset_prefix_cache()
        if pause:
            core.resume_scheduler()


def bare_outcome(policy, bare, fault, folder):
    get, broken = bare
    model, call = worker_of(policy).model, Call(get())
    policy.advance()
    call.update(sent(policy))
    assert gap(draw(call.client), model) < EQUAL  # a right update, and the probe's prompt is in the cache
    policy.advance()
    with pytest.MonkeyPatch.context() as patch:
        if fault.adapter:
            fault.here(None, patch)
        pairs = [pair for name, tensor in sent(policy) for pair in (fault.through or kept)(name, tensor)]
    try:
        drawn = BARE_UPDATES[fault.bare](call, pairs, folder)
    except Exception as error:
        found = f"{type(error).__name__} in {call.last}"
        if call.last == "generate":
            found = f"no error, then {type(error).__name__} while it generates"
        try:
            call.update(sent(policy))
            right = gap(draw(call.client), model) < EQUAL
        except Exception:
            right = False
        if not right:
            broken()
        return found + ("; the next right update works" if right else "; no later update works")
    nan = any(value != value for value in drawn.logprobs)
    if fault.left and (nan or gap(drawn, model) > EQUAL):
        return "no error; samples of another policy, or NaN: as memory was"
    if nan:
        return "no error; log-probabilities are NaN"
    if gap(drawn, model) > EQUAL:
        return "no error; samples of another policy"
    assert drawn.version != "right"
    return "no error; samples stamped with the wrong version"


def kept(name, tensor):
    return [(name, tensor)]


def sent(policy):
    """What a sync of the policy sends."""
    return [(name, tensor.clone()) for name, tensor in source_of(worker_of(policy)).stream(adapter=False)]


def plain(call, pairs, folder):
    call.update(pairs, version="right")
    call.last = "generate"
    return draw(call.client)._replace(version=None)


def truncated(call, pairs, folder):
    file = folder / "model.safetensors"
    save_file(dict(pairs), file)
    shorten(file)
    call.update(file=str(file))
    return draw(call.client)


def running(call, pairs, folder):
    """The request's later tokens, against the new weights."""
    start_request(call.client, "bare")
    call.update(pairs, pause=False)
    call.last = "generate"
    [ended] = ends_of(call.client)
    drawn = call.client._drawn(RUNNING, ended)
    first = ended.outputs[0].weight_versions[-1].start if ended.outputs[0].weight_versions else 5
    return drawn._replace(
        prompt=(*RUNNING, *drawn.tokens[:first]), tokens=drawn.tokens[first:], logprobs=drawn.logprobs[first:]
    )


def cached(call, pairs, folder):
    call.update(pairs, reset=False)
    return draw(call.client)


def crashed(call, pairs, folder):
    call.update(pairs[: len(pairs) // 2], until="update")
    call.client._core.resume_scheduler()
    call.last = "generate"
    return draw(call.client)


def stamped(call, pairs, folder):
    call.update(pairs, version="0")
    return draw(call.client)


BARE_UPDATES = {
    "": plain,
    "truncated": truncated,
    "running": running,
    "cached": cached,
    "crashed": crashed,
    "version": stamped,
}


def tied_outcome(folder):
    """Nothing is wrong with the update, and the head shares the embeddings' weights."""
    model = make_model(tied=True)
    model.save_pretrained(folder / "tied")
    client = open_bare(folder / "tied", options())
    policy = trainer(model, LocalExecutor("cpu"), name="tied")
    policy.advance()
    try:
        Call(client).update(sent(policy))
        stale = gap(draw(client), worker_of(policy).model) > EQUAL
        return "no error; samples of another policy" if stale else "works"
    finally:
        client.close()


def adapter_outcome(folder):
    """A second adapter under the number of the first: vLLM loads each number once."""
    from vllm.lora.request import LoRARequest

    model = make_model()
    model.save_pretrained(folder / "base")
    client = open_bare(folder / "base", options(), enable_lora=True)
    policy = trainer(model, LocalExecutor("cpu"), name="adapter", adapter=True)
    try:
        for number in (1, 2):
            policy.advance_adapter()
            worker_of(policy).model.save_pretrained(folder / f"adapter-{number}")
            client._adapter = LoRARequest("policy", 1, str(folder / f"adapter-{number}"))
            client.engine.add_lora(client._adapter)
            client.engine.reset_prefix_cache()
            wrong = gap(draw(client), worker_of(policy).model) > EQUAL
            assert number == 2 or not wrong, "the first one arrives"
        return "no error; samples of another policy" if wrong else "works"
    finally:
        client.close()


def main(target):
    outcomes = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes[TIED] = tied_outcome(folder)
        outcomes[NOT_DELIVERED] = adapter_outcome(folder)
        model = make_model()
        model.save_pretrained(folder / "model")
        executor, opened = LocalExecutor("cpu"), []

        def get():
            if not opened:
                opened.append(open_bare(folder / "model", options()))
            return opened[0]

        for fault in FAULTS:
            policy = trainer(model, executor, name=fault.name, adapter=fault.adapter)
            outcomes[fault.name] = bare_outcome(policy, (get, lambda: opened.pop().close()), fault, folder)
        get().close()
    Path(target).write_text(json.dumps(outcomes), "utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with quick_starts():
        main(sys.argv[1])
