"""A model in two halves, in one process: structure without memory, then weights and buffers."""

import json
import pickle

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_bridge.models import model_folder
from rl_bridge.models.model_source import PretrainedSource, StateSource
from rl_bridge.models.small import TinySource
from rl_bridge.models.stored_tensors import fill_computed_buffers
from tests.support.one_step import make


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    source.load(model)
    return model


def assert_same(model, wanted):
    ours, theirs = model.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    buffers = dict(wanted.named_buffers())
    assert {name for name, _ in model.named_buffers()} == buffers.keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not model.training


def folder_of(tmp_path, model, **options):
    model.save_pretrained(tmp_path, **options)
    return tmp_path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}], ids=["one file", "index"])
def test_a_folder_gives_what_transformers_loads(tmp_path, tied, options):
    folder = folder_of(tmp_path, make("Qwen2", tied=tied), **options)
    assert (folder / "model.safetensors.index.json").is_file() == bool(options)
    model = loaded(PretrainedSource(str(folder)))
    assert_same(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_half_precision_files_are_trained_in_float32(tmp_path):
    folder = folder_of(tmp_path, make("Llama").bfloat16())
    model = loaded(PretrainedSource(str(folder)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_the_generation_settings_of_the_folder_stay(tmp_path):
    model = make("Llama")
    model.generation_config.max_new_tokens = 7
    with torch.device("meta"):
        assert PretrainedSource(str(folder_of(tmp_path, model))).empty().generation_config.max_new_tokens == 7


def test_a_model_in_hand_is_copied():
    wanted = make("Qwen3")
    model = loaded(StateSource(wanted))
    assert_same(model, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() != wanted.lm_head.weight.data_ptr()


def test_a_tiny_model_is_a_function_of_its_seed():
    state = torch.random.get_rng_state()
    source = TinySource(vocabulary=20, hidden=16, heads=2, layers=1, seed=3)
    model = loaded(pickle.loads(pickle.dumps(source)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(model, source.whole())
    other = TinySource(vocabulary=20, hidden=16, heads=2, layers=1, seed=4).whole()
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_weights_of_a_model_that_is_not_on_meta_are_overwritten():
    wanted, model = make("Llama"), make("Llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parameter = model.lm_head.weight
    StateSource(wanted).load(model)
    assert model.lm_head.weight is parameter
    assert_same(model, wanted)


def spoil(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rename(old, new):
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 are not stored.*model\.norm\.weight.*0 are not of the model"),
        (lambda t: t.__setitem__("extra", torch.ones(1)), r"0 are not stored.*1 are not of the model.*extra"),
        (rename("model.norm.weight", "model.norm.gain"), r"model\.norm\.weight.*model\.norm\.gain"),
        (
            lambda t: t.__setitem__("model.norm.weight", torch.ones(5)),
            r"model\.norm\.weight.*\(16,\), stored is \(5,\)",
        ),
        (lambda t: t.__setitem__("lm_head.weight", torch.ones(40, 16)), r"lm_head\.weight.*differ where stored"),
    ],
    ids=["missing", "unknown", "renamed", "shape", "tied names that differ"],
)
def test_files_that_do_not_fit_the_model_are_refused_by_name(tmp_path, change, message):
    folder = folder_of(tmp_path, make("Llama"))
    spoil(folder, change)
    with pytest.raises(ValueError, match=message):
        loaded(PretrainedSource(str(folder)))


def test_equal_values_under_both_tied_names_and_old_rotary_frequencies_are_accepted(tmp_path):
    folder = folder_of(tmp_path, make("Llama"))
    spoil(folder, lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"].clone()))
    spoil(folder, lambda t: t.__setitem__("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)))
    assert_same(loaded(PretrainedSource(str(folder))), make("Llama"))


def test_folders_without_readable_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no model can be loaded from"):
        PretrainedSource(str(tmp_path)).empty()
    folder = folder_of(tmp_path, make("Llama"), max_shard_size="4KB")
    source = PretrainedSource(str(folder))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["model.norm.weight"]
    (folder / lost).rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=rf"names {lost}, which is not there"):
        source.load(make("Llama"))
    (folder / "elsewhere").rename(folder / lost)
    index["weight_map"]["model.norm.bias"] = lost
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks 1 tensors of its index.*model\.norm\.bias"):
        source.load(make("Llama"))
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        source.load(make("Llama"))


@pytest.mark.parametrize("lost", [False, True], ids=["both", "shards gone"])
def test_a_folder_with_weights_twice_is_refused_with_both_names(tmp_path, lost):
    """transformers reads the one file, whatever the index says."""
    folder = folder_of(tmp_path, make("Llama"), max_shard_size="4KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    folder_of(tmp_path / "whole", make("Llama", seed=1))
    (tmp_path / "whole" / "model.safetensors").rename(folder / "model.safetensors")
    for shard in shards if lost else ():
        shard.unlink()
    with pytest.raises(ValueError, match=rf"weights twice: model\.safetensors, .* with {shards[0].name} and \d+ more"):
        loaded(PretrainedSource(str(folder)))


def test_an_index_of_the_one_file_there_is_changes_nothing(tmp_path):
    folder = folder_of(tmp_path, make("Llama"))
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(loaded(PretrainedSource(str(folder))), make("Llama"))


def test_a_hub_id_is_downloaded_and_a_failure_names_it(tmp_path, monkeypatch):
    folder, asked = folder_of(tmp_path, make("Llama")), []
    monkeypatch.setattr(model_folder, "snapshot_download", lambda name, **_: asked.append(name) or str(folder))
    assert_same(loaded(PretrainedSource("someone/a-model")), make("Llama"))
    assert set(asked) == {"someone/a-model"}

    def fail(name, **_):
        raise OSError("no network")

    monkeypatch.setattr(model_folder, "snapshot_download", fail)
    said = "'someone/a-model': there is no folder 'someone/a-model' here, and it cannot be had from the hub: no network"
    with pytest.raises(ValueError, match=said):
        PretrainedSource("someone/a-model").empty()


def test_a_hub_that_is_not_asked_says_nothing(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot be had from the hub: ") as error:
        PretrainedSource("someone/no-such-model").empty()
    assert isinstance(error.value.__cause__, LocalEntryNotFoundError) and "hub says" not in str(error.value)


def test_a_buffer_that_nothing_computes_is_refused():
    with torch.device("meta"):
        model = StateSource(make("Llama")).empty()
        model.model.norm.register_buffer("scale", torch.ones(3), persistent=False)
    with pytest.raises(ValueError, match=r"model\.norm\.scale of LlamaForCausalLM is not stored"):
        fill_computed_buffers(model, torch.device("cpu"))
