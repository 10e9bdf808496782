"""A LoRA adapter that reaches real vLLM as such: each update in the place of the one before, proved, bit for bit."""

import copy
import json

import pytest
import torch

from rl_bridge.executors import LocalExecutor
from rl_bridge.weights import WeightSyncError
from tests.bridge.rollout.vllm.policies import (
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
from tests.bridge.rollout.vllm.test_oracle import sampled

pytestmark = pytest.mark.vllm
NEAR = 1e-4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder, model, executor = tmp_path_factory.mktemp("model"), make_model(), LocalExecutor("cpu")
    model.save_pretrained(folder)
    engine, worker = rollout(lambda place: open_vllm(place, adapter_rank=4), folder, executor, adapter_rank=4)
    yield trainer(model, executor, adapter=True), engine, worker, folder
    worker.client.close()


def test_an_adapter_reaches_requests_that_run(world):
    policy, engine, worker, _ = world
    before = draw(worker.client)
    start_request(worker.client, "without")
    policy.advance_adapter()
    assert policy.sync_weights(engine) == engine.weights_version == 1 and worker.updated.replaced == 0
    [ended] = ends_of(worker.client)
    assert [span.version for span in ended.outputs[0].weight_versions] == ["1"], "begun without an adapter: begun again"
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
    adopt = worker.client.adopt

    def adopted(folder, version):
        if lost == "every adapter" or version != str(before):
            worker.client.engine.set_weight_version(version)
        else:
            adopt(folder, version)

    policy.advance_adapter()
    with monkeypatch.context() as patch:
        patch.setattr(worker.client, "adopt", adopted)
        with pytest.raises(WeightSyncError, match=r"step 'proof': .* nats from the trainer's"):
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
    policy, engine, worker, start = world
    for _ in range(2):
        policy.advance_adapter()
        policy.sync_weights(engine)
    after = sampled(worker.client)
    proved = worker.updated.receiver.copies.proved
    worker.client.replace(start, str(proved.version), proved.folder)
    worker.client.resume()
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
        torch.testing.assert_close(torch.tensor(whole[name][1]), torch.tensor(logprobs), atol=2e-5, rtol=0)
