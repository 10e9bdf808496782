"""The flax decoder is the torch Qwen2: same logits, same folders, same gradient of the same objective."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers import Qwen2Config as TorchQwen2Config

import rl_fn
from experiments.flax_qwen2 import Qwen2, Qwen2Config, load_pretrained, save_pretrained
from experiments.flax_qwen2.huggingface import _name, _transposed
from experiments.flax_qwen2.learner import Rollout, policy_loss
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.functional import from_jax
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.ready import ready

SHAPES = {
    "tied": {},
    "grouped-query": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "untied": {"tie_word_embeddings": False},
    "wide heads": {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


def torch_model(**options) -> Qwen2ForCausalLM:
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True} | options
    config = TorchQwen2Config(
        vocab_size=15,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(config).float()
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, where a missing term would not show.
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model.eval()


forward = nnx.jit(lambda model, tokens, valid=None: model(tokens, valid))


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_logits_equal_torch_left_padding_included(tmp_path, options):
    reference = torch_model(**options)
    reference.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(2, 15, (3, 9)).astype(np.int32)
    valid = np.arange(9) >= np.array([0, 2, 5])[:, None]
    with torch.no_grad():
        ids, attended = torch.tensor(tokens).long(), torch.tensor(valid)
        positions = (attended.long().cumsum(1) - 1).clamp(min=0)
        expected = reference(input_ids=ids, attention_mask=attended, position_ids=positions).logits.numpy()
    logits = forward(load_pretrained(tmp_path), jnp.asarray(tokens), jnp.asarray(valid))
    np.testing.assert_allclose(np.asarray(logits)[valid], expected[valid], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_written_folder_loads_in_transformers(tmp_path, tied):
    source, target = tmp_path / "source", tmp_path / "target"
    torch_model(tie_word_embeddings=tied, num_attention_heads=4, num_key_value_heads=2).save_pretrained(source)
    config = Qwen2Config.from_huggingface(json.loads((source / "config.json").read_text()))
    model = nnx.jit(lambda: Qwen2(config, nnx.Rngs(3)))()
    save_pretrained(model, target)
    tokens = np.arange(2, 12, dtype=np.int32)[None]
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(target)
        expected = loaded(input_ids=torch.tensor(tokens).long()).logits.numpy()
    assert isinstance(loaded, Qwen2ForCausalLM)
    np.testing.assert_allclose(np.asarray(forward(model, jnp.asarray(tokens))), expected, atol=1e-4)
    # Over an old folder, and in bfloat16 storage: the same numbers as far as that storage holds them.
    AutoModelForCausalLM.from_pretrained(target).bfloat16().save_pretrained(source)
    again = load_pretrained(source)
    save_pretrained(again, target, like=source)
    copied, original = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (load_pretrained(target), again))
    jax.tree.map(np.testing.assert_array_equal, copied, original)
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"


def test_folder_that_does_not_fit_is_refused(tmp_path):
    torch_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | {"model.extra.weight": norm}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['model.extra.weight'\]"):
        load_pretrained(tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:5]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(5,\)"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"eos_token_id": [1, 2]},
    ],
)
def test_architecture_that_is_not_computed_is_refused(tmp_path, change):
    config = torch_model().config.to_dict() | {"model_type": "qwen2"}
    Qwen2Config.from_huggingface(config)
    with pytest.raises(NotImplementedError):
        Qwen2Config.from_huggingface(config | change)


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [rl_fn.recipes.dapo(), rl_fn.recipes.grpo(kl_coef=0.1).replace(entropy=rl_fn.components.EntropyBonus(0.01))],
    ids=lambda objective: objective.name,
)
def test_gradient_equals_the_torch_trainers(tmp_path, objective):
    reference = torch_model(num_attention_heads=4, num_key_value_heads=2)
    reference.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts, size, width, length = 3, 4, 5, 4
    prompt_ids = rng.integers(2, 15, (prompts, width)).astype(np.int32)
    prompt_mask = np.arange(width) >= np.array([0, 1, 3])[:, None]
    prompt_ids[~prompt_mask] = 0
    tokens = rng.integers(2, 15, (prompts * size, length)).astype(np.int32)
    mask = np.arange(length) < rng.integers(1, length + 1, prompts * size)[:, None]
    tokens[~mask] = 0
    old, ref = (-rng.exponential(2.0, (2, *mask.shape)).astype(np.float32)) * mask
    rewards = rng.integers(0, 2, (prompts, size)).astype(np.float32)
    advantages = np.asarray(
        objective.advantages(
            rl_fn.Rollouts(jnp.asarray(rewards), jnp.asarray(mask.reshape(prompts, size, length)))
        ).advantages
    )
    advantages = advantages.reshape(mask.shape)
    assert (advantages != 0).any()

    graph, parameters = nnx.split(model, nnx.Param)
    rollout = Rollout(*map(jnp.asarray, (prompt_ids, prompt_mask, tokens, mask, old, advantages, ref)))
    gradient, metrics = jax.jit(jax.grad(lambda p: policy_loss(nnx.merge(graph, p), objective, rollout), has_aux=True))(
        parameters
    )
    ours = {
        _name(path): np.asarray(leaf[...]).T if _transposed(path) else np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(gradient)
    }

    prompt_of_row = np.repeat(np.arange(prompts), size)
    rows = zip((prompt_ids[i][prompt_mask[i]] for i in prompt_of_row), tokens, mask, strict=True)
    batch = collate([single_turn(prompt.tolist(), row[counted].tolist()) for prompt, row, counted in rows], 0)
    for name, values in {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}.items():
        placed = torch.zeros(batch.mask.shape)
        placed[batch.mask] = torch.tensor(values[mask])
        batch = batch._replace(**{name: placed})
    scoring = ScoringConfig(micro_batch_tokens=40)
    module = ready(PolicyModule, reference, OptimizerConfig(learning_rate=1e-3), objective, updates=1, scoring=scoring)
    parts = module.train_step(batch, float(from_jax(objective.denominator)(batch.mask)))
    theirs = {name: parameter.grad.numpy() for name, parameter in module.model.named_parameters()}
    assert set(ours) == set(theirs)
    scale = max(np.abs(value).max() for value in theirs.values())
    for name, expected in theirs.items():
        # The key bias has no gradient but rounding: softmax does not see it. The whole gradient's size is the scale.
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    for name in ("clip_fraction", "approx_kl", "entropy", "kl"):
        total, denominator = parts[name]
        assert float(metrics[name]) == pytest.approx(float(total) / float(denominator), rel=1e-4)
