"""LoRA: merged weights on the way, or the adapter alone; the base is never touched."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rl_bridge.executors import LocalExecutor
from rl_bridge.parallel.heads import token_logprobs
from rl_bridge.weights import EngineRef, WeightSyncError, checksum, receiver_of, source_of, sync_weights
from tests.bridge.weights.adapters import adapted, untied
from tests.support.weight_engines import model

# peft asks transformers under the property's old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

POLICY, ROLLOUT = EngineRef("policy", (0,)), EngineRef("rollout", (0,))
CONFIGS = {
    "alpha / r": {"target_modules": "all-linear"},
    "alpha / sqrt(r)": {"target_modules": "all-linear", "use_rslora": True},
    "some layers": {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}},
    "modules to save": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
}


def run(policy, rollout, **options):
    executor = LocalExecutor("cpu")
    workers = executor._host.workers
    workers["policy"], workers["rollout"] = SimpleNamespace(module=policy), SimpleNamespace(module=rollout)
    return sync_weights(executor, POLICY, ROLLOUT, **{"version": 1, "bucket_bytes": 4096} | options)


def logits(module):
    with torch.no_grad():
        return module(torch.arange(10)[None], use_cache=False).logits


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_peft_s_own_merge(config, dtype):
    policy, rollout = adapted(0, dtype, **CONFIGS[config]), model(2, dtype)
    assert run(policy, rollout).tensors == 26
    expected = adapted(0, dtype, **CONFIGS[config]).merge_and_unload()
    for (name, wanted), (other, got) in zip(expected.named_parameters(), rollout.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(wanted, got), name
    if dtype == torch.float32:
        torch.testing.assert_close(logits(rollout), logits(policy), atol=2e-6, rtol=0)
    assert not torch.equal(logits(rollout), logits(model(1, dtype)))


@pytest.mark.parametrize("transport", ["same_slot", "shared_memory"])
def test_twenty_syncs_leave_the_base_bit_for_bit(transport):
    policy, rollout = adapted(0, torch.bfloat16, target_modules="all-linear"), model(2, torch.bfloat16)
    before = {name: checksum(tensor) for name, tensor in policy.state_dict().items()}
    for version in range(20):
        run(policy, rollout, version=version, transport=transport)
    assert before == {name: checksum(tensor) for name, tensor in policy.state_dict().items()}


def test_a_disabled_adapter_is_not_merged():
    policy, rollout = adapted(0, target_modules="all-linear"), model(2)
    with policy.disable_adapter():
        run(policy, rollout)
    assert torch.equal(logits(rollout), logits(model(1)))


def test_two_active_adapters_are_both_merged():
    policy, rollout = adapted(0, target_modules="all-linear"), model(2)
    policy.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", init_lora_weights=False))
    policy.base_model.set_adapter(["default", "other"])
    run(policy, rollout)
    torch.testing.assert_close(logits(rollout), logits(policy), atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match="sends one adapter, 2 are active"):
        run(policy, adapted(1, target_modules="all-linear"), adapter=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_adapter_alone(config):
    policy, rollout = adapted(0, **CONFIGS[config]), adapted(1, **CONFIGS[config])
    report = run(policy, rollout, adapter=True)
    assert torch.equal(logits(rollout), logits(policy))
    assert report.nbytes < sum(4 * p.numel() for p in rollout.parameters())
    names = [name for name, _ in source_of(policy).outline(adapter=True)]
    assert report.tensors == len(names)
    assert all(name.startswith("base_model.model.model.") and "default" not in name for name in names)


def scores_are_its_own(policy):
    ids = torch.arange(10)[None]
    expected = policy(ids[:, :-1], use_cache=False).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(token_logprobs(policy, ids[:, :-1], ids[:, 1:])[0], expected, atol=2e-6, rtol=0)


HEADS = {
    "adapter": {"target_modules": ["lm_head", "v_proj"]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "trunk alone": {"target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("config", HEADS)
def test_an_adapted_head_is_in_the_scores(config):
    """MUSB-1, of a peft model that a user made."""
    policy, rollout = adapted(0, **HEADS[config], untied=True), untied(2)
    scores_are_its_own(policy)
    run(policy, rollout)
    torch.testing.assert_close(logits(rollout), logits(policy), atol=2e-6, rtol=0)
    with policy.disable_adapter():
        scores_are_its_own(policy)


def test_an_adapted_head_that_no_weight_stands_for_is_refused():
    for config in ({"use_dora": True}, {"lora_dropout": 0.5}):
        policy = adapted(0, target_modules=["lm_head"], **config, untied=True).train()
        with pytest.raises(
            NotImplementedError, match=r"whose weight is taken has adapters \['default'\]: .*plain LoRA"
        ):
            scores_are_its_own(policy)


class Convolved(torch.nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 6, 3, groups=groups)

    def forward(self, x):
        return self.conv(x)


def test_convolutions_are_merged_or_refused():
    torch.manual_seed(0)
    plain, x = Convolved(1), torch.randn(2, 4, 9)
    policy = get_peft_model(plain, LoraConfig(r=2, target_modules=["conv"], init_lora_weights=False))
    expected = policy(x)
    merged = dict(source_of(policy).stream(adapter=False))
    torch.testing.assert_close(torch.func.functional_call(Convolved(1), merged, (x,)), expected, atol=2e-6, rtol=0)
    with pytest.warns(UserWarning, match="groups > 1"):
        grouped = get_peft_model(Convolved(2), LoraConfig(r=2, target_modules=["conv"]))
    with pytest.raises(NotImplementedError, match="'conv': an adapter of a Conv1d cannot be merged"):
        list(source_of(grouped).stream(adapter=False))


@pytest.mark.parametrize("other", [{"lora_alpha": 8}, {"r": 2}, {"target_modules": ["v_proj"]}, {"use_rslora": True}])
def test_an_adapter_of_another_configuration_is_refused(other):
    base = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    policy, rollout = (get_peft_model(model(1), LoraConfig(**base | change)) for change in ({}, other))
    with pytest.raises(ValueError, match=r"nothing was overwritten"):
        run(policy, rollout, adapter=True)
    assert receiver_of(rollout).version == 0


def test_merged_weights_do_not_go_into_a_peft_model():
    with pytest.raises(ValueError, match="a peft model takes over an adapter"):
        run(adapted(0, target_modules="all-linear"), adapted(1, target_modules="all-linear"))


def refused(**config):
    return adapted(0, **{"target_modules": "all-linear"} | config)


def test_what_cannot_be_merged_is_named():
    with pytest.raises(NotImplementedError, match=r"q_proj': adapters \['default'\] are no plain LoRA"):
        run(refused(use_dora=True), model(2))
    with pytest.raises(NotImplementedError, match=r"are no plain LoRA"):
        run(refused(target_modules=["q_proj"], lora_bias=True), model(2))
    merged = refused()
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"adapters \['default'\] are merged into the base: unmerge them"):
        run(merged, model(2))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_an_adapter_on_a_tied_weight_is_refused():
    with pytest.raises(ValueError, match="has an adapter and a tied weight"):
        run(refused(target_modules=["embed_tokens"]), model(2))


def test_damage_to_an_adapter_is_named(monkeypatch):
    from rl_bridge.weights import receiver

    policy, rollout = adapted(0, target_modules="all-linear"), adapted(1, target_modules="all-linear")
    monkeypatch.setattr(receiver, "checksum", lambda tensor: checksum(tensor) ^ 1)
    with pytest.raises(WeightSyncError, match=r"weight 'base_model.model.*lora_A.weight' was damaged"):
        run(policy, rollout, adapter=True)
    assert receiver_of(rollout).version is None
