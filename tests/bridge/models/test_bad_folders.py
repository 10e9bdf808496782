"""Model folders that cannot be: one line that names the folder (USR-16, 17), whatever transformers raises."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import PretrainedSource, PretrainedValueSource, ValueSource
from rl_bridge.models.pretrained import new_for_rows, pretrained
from rl_bridge.models.small import TinySource
from rl_bridge.models.stored_tensors import INDEX, ONE_FILE


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    source, tokenizer = new_for_rows(arithmetic_rows(["+"])[:8], seed=0)
    model = source.empty()
    assert isinstance(source, TinySource)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def changed(name, **fields):
    def change(folder):
        found = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(json.dumps(found))

    return change


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def adapter(kind, base, *lost):
    about = json.dumps({"peft_type": kind, "base_model_name_or_path": base})

    def change(folder):
        written("adapter_config.json", about.encode())(folder)
        without(*lost)(folder)

    return change


CASES = {
    "activation": (
        changed("config.json", hidden_act="no-such"),
        "hidden_act of its config.json is nothing that transf",
    ),
    "dtype": (changed("config.json", dtype="float5"), "float5"),
    "rope": (
        changed("config.json", rope_parameters={"rope_type": "no-such", "rope_theta": 1e4}),
        "rope_parameters.rope_type of its config.json is nothing that transformers knows: 'no-such'",
    ),
    "family": (changed("config.json", model_type="no-such"), "no-such"),
    "heads": (changed("config.json", num_attention_heads="x"), "config.json has num_attention_heads 'x'"),
    "no heads": (changed("config.json", num_attention_heads=0), "config.json has num_attention_heads 0"),
    "a kind that is a list": (changed("config.json", model_type=["qwen2"]), "model_type ['qwen2']"),
    "not a number": (changed("config.json", rms_norm_eps=float("nan")), "rms_norm_eps nan"),
    "a pad token": (changed("config.json", pad_token_id=99999), "pad_token_id 99999, and its vocab_size is"),
    "another width": (changed("config.json", intermediate_size=65), "model: 'model.layers.0.mlp.gate_proj.weight'"),
    "no JSON": (written("config.json", b"{"), "config.json"),
    "an adapter": (
        adapter("LORA", "org/Small-1B", "config.json", ONE_FILE),
        "is a LoRA adapter of org/Small-1B",
    ),
    "an adapter and a config": (adapter("LORA", "base", ONE_FILE), "is a LoRA adapter of base, which is not applied"),
    "an adapter and a whole model": (adapter("LORA", "base"), "train its weights without the adapter"),
    "an adapter of another kind": (adapter("IA3", None), "is a IA3 adapter of a model that is not named, which"),
    "an adapter without JSON": (written("adapter_config.json", b"{"), "adapter_config.json says that it is a LoRA"),
    "a list": (written("config.json", b"[]"), "config.json must hold a JSON object, got list"),
    "no config": (without("config.json"), "has no config.json"),
    "a tokenizer's list": (written("tokenizer_config.json", b"[]"), "tokenizer_config.json must hold a JSON object"),
    "a cut tokenizer": (written("tokenizer.json", b'{"a'), "tokenizer.json is not valid JSON"),
    "nested deep": (written("tokenizer.json", b"[" * 100_000), "tokenizer.json is nested too deep"),
    "a template in Latin-1": (
        written("chat_template.jinja", b"\xe9"),
        "chat template chat_template.jinja is not UTF-8",
    ),
    "no tokenizer": (without("tokenizer.json"), "model"),
    "a broken tokenizer": (written("tokenizer.json", b"{}"), "its tokenizer: "),
    "empty weights": (written(ONE_FILE, b""), ONE_FILE),
    "foreign weights": (written(ONE_FILE, b"PK\x03\x04 not these"), ONE_FILE),
    "no weights": (without(ONE_FILE), ONE_FILE),
    "an index without a map": (written(INDEX, b"{}"), INDEX),
    "an index of a list": (written(INDEX, b'{"weight_map": []}'), INDEX),
    "an index that is cut": (written(INDEX, b'{"weight'), INDEX),
    "a stop token": (changed("generation_config.json", eos_token_id=99999), "eos_token_id 99999 is no token"),
    "a run": (written("metrics.jsonl", b""), "it is the folder of a run"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_loaded_is_named_usr_16_17_18(case, saved, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert pretrained(str(folder))
    change, message = CASES[case]
    change(folder)
    with pytest.raises(ValueError, match="model") as refused:
        pretrained(str(folder))
    assert str(folder) in str(refused.value) and message in str(refused.value), str(refused.value)


def test_code_of_a_folder_is_named_and_not_run(saved, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    pretrained(str(folder))
    assert capsys.readouterr().out == ""
    changed("config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit('it was run')")
    pretrained(str(folder))
    line = f"{folder}: the code that its config.json names (modeling_mine.Mine) is not run: the model is transformers' "
    assert capsys.readouterr().out.startswith(line)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a folder: one with its model and a checkpoint, one that has no model yet."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first/model", "first/checkpoints/step-00000001/policy", "second/checkpoints"):
        (folder / name).mkdir(parents=True)
    for name in ("first", "second"):
        (folder / name / "metrics.jsonl").touch()
    return folder


@pytest.mark.parametrize(
    "inside",
    ["", "first", "first/checkpoints", "first/checkpoints/step-00000001", "first/checkpoints/step-00000001/policy"],
)
def test_a_folder_of_runs_or_in_one_says_which_folder_is_the_model(inside, runs):
    with pytest.raises(ValueError, match="no model can be loaded from") as refused:
        pretrained(str(runs / inside))
    assert str(runs / "first" / "model") in str(refused.value) and "second/model" not in str(refused.value)


@pytest.mark.parametrize("inside", ["second", "second/checkpoints"])
def test_a_run_without_a_model_says_so(inside, runs):
    with pytest.raises(ValueError, match=f"the run.* {runs / 'second'}.*has no model yet|run, and has no model yet"):
        pretrained(str(runs / inside))


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_is_empty_is_no_folder_of_here(name, saved, monkeypatch):
    monkeypatch.chdir(saved)
    with pytest.raises(ValueError, match=r"the name is empty"):
        pretrained(name)


def test_a_family_of_a_folders_own_code_is_refused_with_the_way_on(saved, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    code = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    changed("config.json", model_type="mine", auto_map=code)(folder)
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=r"mine\.Mine.*is not run.*--model FILE\.py:Class --tokenizer") as refused:
        pretrained(str(folder))
    assert "trust_remote_code" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize("name", ["runs/no/model", "./none", "/no/such", "README.md", "docs/none"])
def test_a_place_without_a_model_is_no_hub_id_usr_17(name):
    with pytest.raises(ValueError, match=r"there is no such folder|it is a file") as refused:
        pretrained(name)
    assert "Repo id" not in str(refused.value)


def test_a_language_model_as_a_reward_model_is_called_one_usr_17(saved):
    with pytest.raises(ValueError, match="it is a language model, and `rl-fn train reward-model` makes a reward model"):
        PretrainedValueSource(str(saved)).empty()


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model


KINDS = {
    "a policy": lambda base, folder: (PretrainedSource(str(base)), PretrainedSource(str(folder))),
    "a value model": lambda base, folder: (
        ValueSource(PretrainedSource(str(base)), seed=0),
        PretrainedValueSource(str(folder)),
    ),
    "an adapter": lambda base, folder: (
        LoRASource(PretrainedSource(str(base)), 2, 4),
        LoRASource(PretrainedSource(str(base)), 2, 4, adapter=str(folder)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_file_that_are_not_finite_are_named_usr_5(kind, saved, tmp_path):
    made, given = KINDS[kind](saved, tmp_path / "given")
    loaded(made).save_pretrained(tmp_path / "given")
    loaded(given)
    (file,) = (tmp_path / "given").glob("*.safetensors")
    whole = load_file(file)
    for name in (min(whole), max(whole)):
        for number in (float("nan"), float("inf"), -float("inf"), 1e39):
            # What float32 has no room for becomes infinite when it is loaded.
            tensors = {key: tensor.clone() for key, tensor in whole.items()}
            tensors[name] = tensors[name].double() if number == 1e39 else tensors[name]
            tensors[name].view(-1)[-1] = number
            save_file(tensors, file, {"format": "pt"})
            with pytest.raises(ValueError, match=r"has 1 of \d+ numbers that are NaN or infinite") as refused:
                loaded(given)
            assert f"{file}: {name!r}" in str(refused.value)
