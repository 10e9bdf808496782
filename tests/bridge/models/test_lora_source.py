"""A LoRA source: a frozen base, adapters that start as peft's do, and weights that leave merged."""

import math
import pickle
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import ValueSource
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.rollout import InProcessRollout
from rl_bridge.weights import WeightSyncError, source_of

TOKENIZER = character_tokenizer("0123456789+=")
BASE = TinySource.for_tokenizer(TOKENIZER, hidden=16, layers=2, heads=2)
BATCH = collate([single_turn([2, 3, 4], [4, 5, 1]), single_turn([6], [7, 1])], 0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=0)


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model


def adapters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def policy_of(source, name):
    return TrainEngine(lambda: SupervisedModule(source, OPTIMIZER, updates=4), name=name).build()


@pytest.fixture
def folder(tmp_path):
    """An adapter that peft itself wrote, and its model."""
    with warnings.catch_warnings():
        # What peft reads is deprecated from transformers 5.20 on.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = get_peft_model(BASE.whole(), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter"), model


def test_the_base_is_frozen_and_the_adapters_start_as_peft_s_do():
    state = torch.get_rng_state()
    model = loaded(LoRASource(BASE, 4, 16, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(model, PeftModel) and not model.training
    assert len(adapters(model)) == 2 * 7 * 2 and all(".lora_" in name for name in adapters(model))
    for name, parameter in adapters(model).items():
        parameter = parameter.detach()
        assert parameter.dtype == torch.float32
        if ".lora_B." in name:
            assert not parameter.any()
        else:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert float(parameter.abs().max()) <= bound
            assert float(parameter.std()) == pytest.approx(bound / math.sqrt(3), rel=0.25)
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, BASE.whole()(tokens).logits)


def test_a_head_of_values_without_an_adapter_is_trained_and_travels_merged_alone():
    model = loaded(LoRASource(ValueSource(BASE), 2, 4.0, ("q_proj",)))
    assert [name for name in adapters(model) if ".lora_" not in name] == ["base_model.model.score.weight"]
    assert "score.weight" in dict(source_of(model).outline(adapter=False))
    with pytest.raises(ValueError, match=r"score\.weight is trained besides: sync_weights\(…, adapter=False\)"):
        list(source_of(model).outline(adapter=True))
    assert all(".lora_" in name for name in adapters(loaded(LoRASource(ValueSource(BASE), 2, 4.0))))


def test_the_start_is_a_function_of_the_seed():
    one, same, other = (adapters(loaded(LoRASource(BASE, 4, 16, seed=seed))) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == (".lora_B." in name) for name in one)
    assert len({float(p.detach().flatten()[0]) for name, p in one.items() if ".lora_A." in name}) == 14


def test_it_travels():
    source = LoRASource(BASE, 4, 16, ["q_proj"], use_rslora=True)
    model = loaded(pickle.loads(pickle.dumps(source)))
    assert len(adapters(model)) == 4
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling == {"default": 8.0}


def test_an_adapter_of_peft_s_is_taken_up(folder):
    path, wanted = folder
    model, tokens = loaded(LoRASource(BASE, 4, 16, ["q_proj", "down_proj"], adapter=path)), torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, wanted(tokens).logits)
    assert not torch.equal(model(tokens).logits, BASE.whole()(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, r"has \{'r': 4\}, and this source \{'r': 2\}"),
        ({"alpha": 8}, r"has \{'lora_alpha': 16\}, and this source \{'lora_alpha': 8\}"),
        ({"target_modules": ["q_proj"]}, r"does not fit the model: 4 differ, first .*down_proj"),
        ({"adapter": "nowhere"}, r"nowhere has no adapter_model.safetensors"),
    ],
)
def test_another_adapter_is_refused(folder, changes, message):
    options = {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "down_proj"], "adapter": folder[0]}
    with pytest.raises(ValueError, match=message):
        loaded(LoRASource(BASE, **options | changes))


def test_what_has_no_effect_is_refused():
    with pytest.raises(ValueError, match="need rank ≥ 1 and alpha > 0, got rank=0, alpha=0"):
        LoRASource(BASE, 0, 0)


TARGETS = ["all-linear", ("q_proj",), ("down_proj", "k_proj")]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_a_rank_beyond_every_targeted_layer_is_refused_with_the_largest(targets):
    """The sizes are the model's own, on the meta device: nothing is loaded for it."""
    with torch.device("meta"):
        weights = LoRASource(BASE, 1, 2, targets).empty().base_model.targeted_module_names
        modules = dict(BASE.empty().named_modules())
        widest = max(max(modules[name].weight.shape) for name in weights)
        assert adapters(LoRASource(BASE, widest, 2, targets).empty())
        for rank in (widest + 1, 100000):
            with pytest.raises(ValueError, match=f"a LoRA rank of {rank} is more .* the widest has {widest}: give a"):
                LoRASource(BASE, rank, 2, targets).empty()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("all_linear",), r"ends with the LoRA target 'all_linear' \(did you mean all-linear\?\)"),
        (("ALL-LINEAR",), "no module of .* ends with the LoRA target 'ALL-LINEAR'"),
        (("q_porj",), r"ends with the LoRA target 'q_porj' \(did you mean q_proj\?\)"),
        (("q_proj", "all-linear"), "the LoRA target all-linear stands alone: leave the others out, or it"),
    ],
)
def test_a_slip_in_a_target_is_refused_with_the_nearest(targets, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        LoRASource(BASE, 4, 8, targets).empty()


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'LoRA needs peft: pip install "\.\[lora\]"'):
        LoRASource(BASE, 4, 16).empty()


def test_engines_train_merge_and_send(tmp_path):
    """Before the first update all is the base; after it, all ends that a sync reaches agree with the policy."""
    source = LoRASource(BASE, 4, 16, seed=1)
    policy, plain, twin, frozen, rollout = (
        policy_of(source, "policy"),
        TrainEngine(lambda: TokenScorer(BASE), name="plain").build(),
        policy_of(LoRASource(BASE, 4, 16, seed=2), "twin"),
        TrainEngine(lambda: TokenScorer(source), name="frozen").build(),
        InferenceEngine(lambda: InProcessRollout(BASE, TOKENIZER), name="rollout").build(),
    )
    engines = [policy, plain, twin, frozen, rollout]
    try:
        scores = [engine.token_logprobs(NeedParallel(BATCH)) for engine in (policy, plain, frozen)]
        assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])
        for _ in range(2):
            policy.train_step(NeedParallel(BATCH), 5.0)
            policy.optimizer_step()
        trained = policy.token_logprobs(NeedParallel(BATCH))
        assert float((trained - scores[0]).abs().max()) > 1e-3
        policy.sync_weights(plain)
        policy.sync_weights(twin, adapter=True)
        policy.sync_weights(frozen, adapter=True)
        policy.sync_weights(rollout)
        torch.testing.assert_close(plain.token_logprobs(NeedParallel(BATCH)), trained, atol=5e-6, rtol=0)
        assert torch.equal(twin.token_logprobs(NeedParallel(BATCH)), trained)
        assert torch.equal(frozen.token_logprobs(NeedParallel(BATCH)), trained)
        twin.meta()
        twin.cpu("weights")
        with pytest.raises(WeightSyncError, match="weights under the adapter were freed"):
            policy.sync_weights(twin, adapter=True)
        policy.save_pretrained(str(tmp_path))
        completion = rollout.generate(["1+1="], SamplingParams(max_new_tokens=3, temperature=0))[0]
    finally:
        for engine in engines:
            engine.release()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    logits = merged(BATCH.tokens).logits[:, :-1].log_softmax(-1).gather(-1, BATCH.tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(logits * BATCH.mask[:, 1:], trained[:, 1:], atol=5e-6, rtol=0)
    ids = TOKENIZER("1+1=", add_special_tokens=False, return_tensors="pt").input_ids
    first = merged(ids).logits[0, -1].argmax()
    assert int(first) == int(completion.tokens[completion.loss_mask.index(True)])
