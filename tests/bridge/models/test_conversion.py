"""Folders whose weights transformers converts when it loads them (ENG-15, USR-2): names, parts, and what is refused."""

import re
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GemmaConfig,
    GPTNeoXConfig,
    MixtralConfig,
    OlmoHybridConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from rl_bridge.models import conversion
from rl_bridge.models.conversion import ConvertedTensors
from rl_bridge.models.model_source import PretrainedSource, PretrainedValueSource, ValueSource
from rl_bridge.models.stored_tensors import SafetensorsFolder, fill_computed_buffers
from tests.bridge.families import zoo

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES = {
    "experts": MixtralConfig(**SIZES, num_local_experts=4),
    "renamed": GPTNeoXConfig(
        **{name: size for name, size in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    ),
    "stacked": OlmoHybridConfig(**SIZES, **LINEAR, layer_types=["linear_attention", "full_attention"]),
    "a buffer beside a parameter": GemmaConfig(**SIZES),
    "buffers that the parent computes": FalconH1Config(**SIZES, **MAMBA, ssm_multipliers=[1.1, 0.9, 0.8, 1.2, 0.7]),
}


def made(kind) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[kind], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@pytest.fixture
def folder(request, tmp_path):
    made(request.param).save_pretrained(tmp_path)
    return tmp_path


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
        if isinstance(source, PretrainedSource):
            source.check(model)
    source.load(model)
    return model


def everything(model):
    return model.state_dict() | dict(model.named_buffers())


def assert_same(model, wanted):
    ours, theirs = everything(model), everything(wanted)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_folder_gives_what_transformers_loads(folder):
    """ENG-14, ENG-15: parameters, stored buffers and computed ones, bit for bit, and no random number is drawn."""
    state = torch.get_rng_state()
    model = loaded(PretrainedSource(str(folder)))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_the_cases_are_what_their_names_say(tmp_path):
    found = {}
    for kind in FAMILIES:
        made(kind).save_pretrained(tmp_path / kind)
        source = PretrainedSource(str(tmp_path / kind))
        stored = source.stored()
        renamed = stored.shapes.keys() != SafetensorsFolder.of_folder(tmp_path / kind).shapes.keys()
        found[kind] = (len(stored.converted), renamed)
    assert found["experts"][0] == 4 and found["stacked"][0] > 0
    assert found["renamed"] == (0, True)


@pytest.mark.parametrize("folder", ["experts"], indirect=True)
def test_a_part_of_the_experts_is_read_from_its_own_files(folder):
    """A worker that holds the experts 1 and 2 of 4 reads half the bytes; one that holds none reads next to nothing."""
    source = PretrainedSource(str(folder))
    with torch.device("meta"):
        model = source.empty()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for part in (slice(1, 3), slice(0, 4), slice(4, 4), slice(0, 0)):
        files = SafetensorsFolder.of_folder(folder)
        stored = ConvertedTensors(files, model)
        whole = made("experts").state_dict()[name]
        index = (part, slice(0, 24), slice(3, 9))
        assert torch.equal(stored.read(name, index), whole[index])
        experts = max(1, part.stop - part.start)
        assert files.bytes_read == whole.nbytes * experts // 4


@pytest.mark.parametrize("folder", ["stacked"], indirect=True)
def test_parts_of_what_is_computed_as_a_whole(folder):
    source = PretrainedSource(str(folder))
    stored, wanted = source.stored(), made("stacked").state_dict()
    for name in stored.converted:
        index = (slice(1, 5), *(slice(None) for _ in wanted[name].shape[1:]))
        for _ in range(2):  # read again, as a neighbour whose values were let go
            assert torch.equal(stored.read(name, index), wanted[name][index])


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


W1 = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


def drop(*experts, weights=("w1", "w2", "w3")):
    def change(tensors):
        for expert in experts:
            for weight in weights:
                tensors.pop(W1.format(expert).replace("w1", weight))

    return change


@pytest.mark.parametrize("folder", ["experts"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(3), r"gate_up_proj': the model's shape is \(4, 24, 16\), stored is \(3, 24, 16\)"),
        (
            drop(1),
            r"gate_up_proj' of MixtralForCausalLM is made from 3 .* numbers are not 0 to 2: the first is .*0\.w1",
        ),
        (drop(3, weights=["w1"]), r"7 stored tensors \(the first: .*\) cannot be made into .*gate_up_proj"),
        (drop(*range(4)), r"2 are not stored \(the first: \['model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (
            lambda t: t.__setitem__("model.layers.9.block_sparse_moe.experts.0.w1.weight", torch.ones(1)),
            r"0 are not stored.*1 are not of the model \(the first: \['model\.layers\.9\.mlp\.experts\.gate_up_proj",
        ),
        (
            lambda t: t.__setitem__("norm.weight", torch.ones(16)),
            r"'model\.norm\.weight' and 'norm\.weight' are both stored, and both are 'model\.norm\.weight'",
        ),
        (
            lambda t: t.__setitem__(W1.format(2), t[W1.format(2)].to(torch.int8)),
            r"1 weights of .* are quantised or whole numbers.*gate_up_proj",
        ),
    ],
    ids=["the last", "a hole", "one of a pair", "all", "a layer too many", "twice", "codes"],
)
def test_experts_that_do_not_fit_are_refused_by_name(folder, change, message):
    spoil(folder, change)
    source = PretrainedSource(str(folder))
    with torch.device("meta"):
        model = source.empty()
    with pytest.raises(ValueError, match=message):
        source.check(model)
    with pytest.raises(ValueError, match=message):
        source.load(model)


HUB = {
    # Without the prefix of the language model, and with the masks and positions that were once stored.
    "gpt2": (
        lambda name: name.removeprefix("transformer."),
        {"h.0.attn.bias": (1, 1, 4, 4), "position_ids": (1, 4), "h.0.attn.rotary_emb.inv_freq": (4,)},
    ),
    # The layer that predicts a second token, whose experts are stored one by one, too.
    "deepseek_v3": (str, {f"model.layers.61.mlp.experts.{n}.gate_proj.weight": (4, 4) for n in range(2)}),
    "qwen3_next": (str, {"mtp.layers.0.mlp.experts.0.up_proj.weight": (4, 4), "mtp.fc.weight": (4, 4)}),
    "bert": (lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"), {}),
}


@pytest.mark.parametrize("kind", HUB)
def test_names_that_the_hub_has(kind, tmp_path):
    """ENG-15: prefixes, legacy names, and what transformers drops or ignores by the family's own rules."""
    rename, more = HUB[kind]
    wanted = zoo.tiny(kind)
    wanted.save_pretrained(tmp_path)
    tensors = {rename(name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert more or tensors.keys() != load_file(tmp_path / "model.safetensors").keys()
    tensors |= {name: torch.full(shape, 9.0) for name, shape in more.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(loaded(PretrainedSource(str(tmp_path))), wanted)


@pytest.mark.parametrize("own_names", [False, True], ids=["as transformers writes it", "under the model's names"])
@pytest.mark.parametrize("kind", ["axk1", "deepseek_v4", "laguna"])
def test_a_name_of_the_model_that_a_rule_of_its_family_would_spoil_stays(kind, own_names, tmp_path):
    """As ``model.norm.weight`` where every other norm was renamed."""
    wanted = zoo.tiny(kind)
    wanted.save_pretrained(tmp_path)
    names, rules = wanted.state_dict(), get_model_conversion_mapping(wanted)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    assert any(
        rename_source_key(name, renamings, [], wanted.base_model_prefix, names)[0] not in names for name in names
    )
    if own_names:
        tensors = {name: tensor.clone() for name, tensor in names.items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(loaded(PretrainedSource(str(tmp_path))), wanted)


@pytest.mark.parametrize("folder", ["experts", "a buffer beside a parameter"], indirect=True)
def test_the_trunk_of_a_value_model(folder, tmp_path):
    model = loaded(ValueSource(PretrainedSource(str(folder)), seed=1))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same(model.base_model, wanted.base_model)
    model.save_pretrained(tmp_path / "critic")
    assert_same(loaded(PretrainedValueSource(str(tmp_path / "critic"))), model)


def test_a_version_of_transformers_that_converts_otherwise_is_named(monkeypatch):
    monkeypatch.setattr(
        conversion, "importlib", types.SimpleNamespace(import_module=lambda path: types.SimpleNamespace())
    )
    with pytest.raises(
        ImportError, match=r"transformers \d.*get_model_conversion_mapping.* in transformers\.conversion_"
    ):
        conversion._internals()


def test_stored_values_are_not_touched_when_buffers_are_computed():
    """ENG-14: a module's own rule would draw its weights and clear its stored buffers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["experts"])
    model.to_empty(device="cpu")
    gate = model.model.layers[0].mlp.gate
    gate.register_buffer("seen", torch.full((3,), 7.0))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    before = dict(model.named_parameters())
    fill_computed_buffers(model, torch.device("cpu"))
    assert dict(model.named_parameters()) == before and all(bool((p == 5).all()) for p in model.parameters())
    assert gate.seen.tolist() == [7, 7, 7]
    assert float(model.model.rotary_emb.inv_freq[0]) == 1.0


def test_rotary_base_of_a_folder(tmp_path):
    """MUSB: bases and scalings other than the default, through a folder, equal transformers' own frequencies."""
    scalings = [
        {"rope_type": "default", "rope_theta": 77777.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ]
    found = []
    for number, scaling in enumerate(scalings):
        config = MixtralConfig(**SIZES, num_local_experts=2, rope_parameters=scaling)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(number))
        model = loaded(PretrainedSource(str(tmp_path / str(number))))
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype=torch.float32)
        assert_same(model, wanted)
        tokens = torch.arange(12)[None]
        assert torch.equal(model(tokens).logits, wanted(tokens).logits)
        found.append(tuple(model.model.rotary_emb.inv_freq.tolist()))
    default = loaded(PretrainedSource(str(default_folder(tmp_path / "default")))).model.rotary_emb.inv_freq
    assert len({*found, tuple(default.tolist())}) == len(scalings) + 1


def default_folder(path):
    AutoModelForCausalLM.from_config(FAMILIES["experts"]).save_pretrained(path)
    assert re.search(r'"rope_theta": \d', (path / "config.json").read_text())
    return path
