"""A LoRA adapter that reaches real vLLM as such: each update in the place of the one before, proved, bit for bit."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.executors import LocalExecutor
from rl_bridge.rollout.inside_vllm.sampler_hooks import Draws
from rl_bridge.rollout.vllm.vllm_decoder import Outbox, VLLMDecoder
from rl_bridge.rollout.vllm.weight_copies import ADAPTER_FILE
from rl_bridge.weights import WeightSyncError
from tests.bridge.rollout.vllm.policies import (
    RUNNING,
    draw,
    ends_of,
    gap,
    make_model,
    open_vllm,
    rollout,
    start_request,
    trainer,
    worker_of,
)
from tests.bridge.rollout.vllm.samples import sampled

pytestmark = pytest.mark.vllm
NEAR = 1e-4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder, model, executor = tmp_path_factory.mktemp("model"), make_model(), LocalExecutor("cpu")
    model.save_pretrained(folder)
    draws = Draws()
    engine, worker = rollout(lambda place: open_vllm(place, draws, adapter_rank=4), folder, executor, adapter_rank=4)
    worker.outbox = Outbox(worker.client, draws)
    yield trainer(model, executor, adapter=True), engine, worker, folder
    worker.client.close()


def truncated_rows(worker, **limits):
    """A decoder with a row of top-k for each number of tokens, begun."""
    decoder = VLLMDecoder(worker.outbox, SamplingParams(max_new_tokens=60, top_k=4), stop=(), longest=96)
    for seed, (name, limit) in enumerate(limits.items()):
        decoder.add(name, RUNNING, seed=seed, limit=limit)
    assert not any(decoder.step() for _ in range(3))
    return decoder


def finished(decoder):
    """What each row drew, from which sets, and with which weights: one version, of all."""
    found = {}
    while decoder.running:
        found |= {row.key: (row.tokens, [list(ids) for ids in row.allowed], row.versions) for row in decoder.step()}
    for tokens, allowed, versions in found.values():
        assert versions == [versions[0]] * len(tokens)
        assert [len(ids) for ids in allowed] == [4] * len(tokens)
        assert all(token in ids for token, ids in zip(tokens, allowed, strict=True))
    return found


def test_an_adapter_reaches_requests_that_run(world):
    """ROLL-9: a request that begins again has the allowed sets of its new draws."""
    policy, engine, worker, _ = world
    before = draw(worker.client)
    rows = truncated_rows(worker, long=30)
    policy.advance_adapter()
    assert policy.sync_weights(engine) == engine.weights_version == 1 and worker.updated.replaced == 0
    assert finished(rows) == finished(truncated_rows(worker, long=30)), "begun without an adapter: begun again"
    start_request(worker.client, "with")
    policy.advance_adapter()
    policy.sync_weights(engine)
    [ended] = ends_of(worker.client)
    assert [span.version for span in ended.outputs[0].weight_versions] == ["1", "2"]
    after = draw(worker.client)
    assert gap(after, worker_of(policy).model) < NEAR and after.logprobs != before.logprobs
    config = json.loads((worker.updated.receiver.copies.proved.folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8.0, True)
    assert worker.client.engine.list_loras() == {1} and worker.updated.replaced == 0
    assert len(list(worker.updated.receiver.copies._root.glob("copy-*"))) == 1, "the adapter before is gone"


def test_an_update_of_a_millionth_that_is_lost_in_one_factor_is_found(world, tmp_path):
    """ROLL-7: each of the adapter's factors alone; its samples cannot tell."""
    policy, engine, worker, folder = world
    if worker.updated.receiver.copies.proved is None:  # run alone
        policy.advance_adapter()
        policy.sync_weights(engine)
    proved = worker.updated.receiver.copies.proved.folder
    sent = {name: tensor.clone() for name, tensor in load_file(proved / ADAPTER_FILE).items()}
    shutil.copyfile(proved / "adapter_config.json", tmp_path / "adapter_config.json")
    noise = torch.Generator().manual_seed(5)
    assert worker.client.held(folder, proved)[1:] == ({}, {}) and len(sent) == 28
    for name, tensor in sent.items():
        moved = tensor * (1 + 1e-6 * torch.randn(tensor.shape, generator=noise))
        save_file(sent | {name: moved}, tmp_path / ADAPTER_FILE)
        [(where, what)] = worker.client.held(folder, tmp_path).different.items()
        assert where.endswith(f", {name}") and "elements of" in what


def test_a_part_that_vllm_would_do_without_is_refused_before_anything_is_sent(world):
    policy, engine, *_ = world
    version = engine.weights_version

    def without(name, tensor):
        return [] if "layers.1.self_attn.k_proj" in name else [(name, tensor)]

    policy.advance_adapter()
    with pytest.raises(ValueError, match=r"nothing was overwritten: no weights came for 2 of 28 .*layers\.1.*k_proj"):
        policy.sync_weights(engine, through=without)
    assert engine.weights_version == version
    with pytest.raises(ValueError, match="takes adapters"):
        policy.sync_weights(engine, adapter=False)


@pytest.mark.parametrize("lost", ["the new adapter", "every adapter"])
def test_an_adapter_that_the_engine_draws_without_is_found(world, monkeypatch, lost):
    """The engine has the version, and draws without its adapter. An engine that goes back is not believed either."""
    policy, engine, worker, _ = world
    before = engine.weights_version
    adopt = worker.client._load_adapter

    def adopted(folder, version):
        if lost == "every adapter" or version != str(before):
            worker.client.engine.set_weight_version(version)
        else:
            adopt(folder, version)

    policy.advance_adapter()
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "_load_adapter", adopted)
        with pytest.raises(WeightSyncError, match=r"step 'compare what the engine holds': .*lora_A.* are not"):
            policy.sync_weights(engine)
    if lost == "the new adapter":
        assert engine.weights_version == before
    else:
        with pytest.raises(ValueError, match="has no proof"):
            _ = engine.weights_version
    policy.advance_adapter()
    assert policy.sync_weights(engine) == engine.weights_version
    assert gap(draw(worker.client), worker_of(policy).model) < NEAR


def test_after_updates_it_is_an_engine_that_begins_with_this_adapter(world, tmp_path):
    """ROLL-9: rows that ended beside the update keep their allowed sets, and those that begin again get their own."""
    policy, engine, worker, start = world
    for _ in range(2):
        policy.advance_adapter()
        policy.sync_weights(engine)
    after = sampled(worker.client)
    proved = worker.updated.receiver.copies.proved
    whole = finished(truncated_rows(worker, short=4, long=30))
    rows = truncated_rows(worker, short=4, long=30)
    draw(worker.client)
    worker.client.replace(start, str(proved.version), proved.folder)
    worker.client.resume()
    assert finished(rows) == whole
    assert sampled(worker.client) == after, "bit for bit"
    worker.client.close()
    merged = copy.deepcopy(worker_of(policy).model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    other = open_vllm(tmp_path / "merged")
    try:
        whole = sampled(other)
    finally:
        other.close()
    for name, (tokens, logprobs) in after.items():
        assert whole[name][0] == tokens
        torch.testing.assert_close(torch.tensor(whole[name][1]), torch.tensor(logprobs), atol=NEAR, rtol=0)
