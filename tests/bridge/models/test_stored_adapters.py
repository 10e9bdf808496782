"""A stored adapter, whatever its configuration says: peft's own numbers, or a refusal by the field's name."""

import dataclasses
import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rl_bridge.models.lora import LoRASource
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.weights.adapters import adapter_config

BASE = TinySource.for_tokenizer(character_tokenizer("0123456789+="), hidden=16, layers=2, heads=2)
TARGETS = ["q_proj", "down_proj"]
OTHER = {
    "task_type": ["CAUSAL_LM"],
    "peft_type": ["LOHA", None],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM"}],
    "peft_version": ["0.4.0"],
    "base_model_name_or_path": ["somewhere/else"],
    "revision": ["main"],
    "inference_mode": [False],  # what is stored is True
    "r": [2],
    "target_modules": [["self_attn.q_proj", "mlp.down_proj"], ["q_proj"]],
    "exclude_modules": [["lm_head"]],
    "lora_alpha": [4],
    "lora_dropout": [0.5],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        *(False, "gaussian", "pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "orthogonal", "mica"),
        *("lora_ga", "a start of a later peft"),
    ],
    "layers_to_transform": [[0, 1]],
    "layers_pattern": [["layers"]],
    "rank_pattern": [{"q_proj": 2}],
    "alpha_pattern": [{"q_proj": 64}],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "megatron_core": ["megatron.other"],
    "trainable_token_indices": [[3, 4]],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 2}],
    "alora_invocation_tokens": [[5, 7]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{"num_samples": 2}],
    "layer_replication": [[[0, 2], [0, 2]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [["lm_head.weight"]],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 1e-4}],
    "ensure_weight_tying": [True],
    "a_field_of_a_later_peft": [True],
}
"""Field → values that are not peft's default, as JSON has them."""
CHANGES_NOTHING = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
    *("qalora_group_size", "runtime_config"),
}


def plain(**options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(BASE.whole(), LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS, **options))


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    model, generator = plain(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    return folder


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.arange(10)[None]).logits


def own_logits(folder):
    source = LoRASource(BASE, 4, 16, TARGETS, adapter=str(folder))
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return logits_of(model)


def peft_logits(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits_of(PeftModel.from_pretrained(BASE.whole(), str(folder)))


def test_the_table_has_every_field_of_peft():
    assert {field.name for field in dataclasses.fields(LoraConfig)} <= OTHER.keys()


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OTHER.items() for value in values])
def test_each_field_is_followed_or_refused_by_name(plain_folder, tmp_path, field, value):
    folder = shutil.copytree(plain_folder, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config.get(field) != value
    more = {"layers_to_transform": [0, 1]} if field == "layers_pattern" else {}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more, field: value}))
    read = field in CHANGES_NOTHING or value in (False, "gaussian") or field == "target_modules"
    if read and value != ["q_proj"]:
        torch.testing.assert_close(own_logits(folder), peft_logits(folder), rtol=0, atol=1e-5)
    elif field not in ("target_parameters", "target_modules"):
        with pytest.raises(ValueError, match=rf"the adapter in .* has \{{'{field}': .*and this source"):
            own_logits(folder)
    else:  # the tensors say which weights they are for
        torch.testing.assert_close(own_logits(folder), own_logits(plain_folder), rtol=0, atol=0)


def test_an_adapter_without_a_configuration_is_refused(plain_folder, tmp_path):
    folder = shutil.copytree(plain_folder, tmp_path / "adapter")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        own_logits(folder)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_peft_took_out_of_its_base_is_refused_with_the_way_on(tmp_path, start):
    plain(init_lora_weights=start).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"'init_lora_weights': '{start}'.*no plain LoRA.*convert.*merge"):
        own_logits(tmp_path)


def test_what_a_sync_compares_has_every_field_that_decides():
    usual = adapter_config(plain())
    assert adapter_config(plain(init_lora_weights="gaussian", lora_dropout=0.5)) == usual
    assert adapter_config(plain(init_lora_weights="olora")) == {**usual, "init_lora_weights": "olora"}
    for chosen in ({"layers_to_transform": [0]}, {"exclude_modules": ["q_proj"]}):
        assert adapter_config(plain(**chosen)) == {**usual, **chosen}
    assert adapter_config(plain(use_rslora=True)) == {**usual, "use_rslora": True}
    special = adapter_config(plain(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 7]))
    assert special == {**usual, "alora_invocation_tokens": [5, 7]}
