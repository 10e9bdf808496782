r"""An exported folder is the same model, tokenizer and settings for transformers 4.

Needs a folder with that version alone, which ``RL_FN_TRANSFORMERS4`` names:
pip install --target DIR --no-deps transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0 requests urllib3 \
    certifi idna charset-normalizer
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from rl_bridge.models.exported_files import ExportTypes
from rl_bridge.models.pretrained import save_pretrained, save_sharded_model, tokenizer_of
from tests.bridge.families import zoo
from tests.support import transformers4
from tests.support.chat_templates import bytes_tokenizer

OTHER = os.environ.get("RL_FN_TRANSFORMERS4")
pytestmark = [
    pytest.mark.skipif(OTHER is None, reason="RL_FN_TRANSFORMERS4 names no folder with transformers 4"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = [kind for kind in zoo.FAMILIES if zoo.reason(kind) is None]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    "whole": {"rope_type": "default", "partial_rotary_factor": 1.0},
    "half": {"rope_type": "default", "partial_rotary_factor": 0.5},
}
PARTS = ("glm", "gpt_neox", "nemotron", "phi", "stablelm")
"""Families that turn a part of a head's numbers, by default another part than all."""
SCALED = [(kind, name) for kind in ("llama", "qwen2") for name in ("linear", "dynamic", "yarn", "llama3")]
SCALED += [("gpt_neox", "linear"), ("phi", "linear"), *((kind, part) for kind in PARTS for part in ("whole", "half"))]


def export(model, folder, tokenizer=None):
    if tokenizer is None:
        save_sharded_model(model, str(folder), ExportTypes())
    else:
        policy = SimpleNamespace(save_pretrained=lambda to, types: save_sharded_model(model, to, types))
        save_pretrained(folder, policy, tokenizer, ExportTypes())
    return str(folder)


def scaled(kind, scaling):
    """The tiny model with other rotary frequencies."""
    config = zoo.config(kind)
    part = {n: value for n, value in config.rope_parameters.items() if n == "partial_rotary_factor"}
    config.rope_parameters = {"rope_theta": 12345.0, **part, **scaling}
    return drawn(config)


def drawn(config):
    """A model of this configuration with random numbers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    zoo.draw(model, torch.Generator().manual_seed(0))
    return model.eval()


def without_windows(kind):
    """The tiny model whose layers read all tokens."""
    config = zoo.config(kind)
    config.use_sliding_window, config.layer_types = False, ["full_attention"] * config.num_hidden_layers
    return drawn(config)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Name → what transformers 5 and 4 read of an exported folder."""
    place = tmp_path_factory.mktemp("exports")
    logging.set_verbosity_error()
    folders = {kind: export(zoo.tiny(kind), place / kind) for kind in FAMILIES}
    for kind, name in SCALED:
        folders[f"{kind} {name}"] = export(scaled(kind, SCALINGS[name]), place / f"{kind}-{name}")
    folders["qwen2_moe without windows"] = export(without_windows("qwen2_moe"), place / "qwen2_moe-without-windows")
    for kind in ("chatml", "llama3"):
        written = place / f"written-{kind}"
        model = scaled("qwen2", {"rope_type": "default"})
        model.generation_config = GenerationConfig(eos_token_id=[1, 2], temperature=0.6, top_p=0.9)
        export(model, written, bytes_tokenizer(kind))
        folders[f"tokenizer {kind}"] = export(model, place / f"again-{kind}", tokenizer_of(str(written)))
        for name, about in BUILT_ANEW.items():
            folder = place / f"{kind}-{name}"
            shutil.copytree(written, folder)
            config = json.loads((folder / "tokenizer_config.json").read_text()) | about
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            folders[f"{kind} {name}"] = export(model, place / f"again-{kind}-{name}", tokenizer_of(str(folder)))
    requests, out = place / "list.json", place / "out.json"
    requests.write_text(json.dumps(list(folders.values())))
    environment = {**os.environ, "PYTHONPATH": str(OTHER), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, transformers4.__file__, str(requests), str(out)]
    subprocess.run(command, check=True, env=environment)
    older = json.loads(out.read_text())
    results = {}
    for name, folder in folders.items():
        try:
            # The file's own ids: transformers 5 builds tokenizers of some families anew (test_tokenizer_files.py).
            newer = transformers4.read(folder, tokenizer_of)
        except Exception as error:
            newer = {"error": str(error)}
        results[name] = (newer, older[folder])
    Path(place / "results.json").write_text(json.dumps(results))
    return results


def test_the_other_version_is_another(both):
    newer, older = both["llama"]
    assert newer["version"].startswith("5.") and older["version"].startswith("4.")


BUILT_ANEW = {
    "begins": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<|im_start|>"},
    "ends": {"tokenizer_class": "GemmaTokenizerFast", "add_eos_token": True},
    "space": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True},
    "qwen": {"tokenizer_class": "Qwen2Tokenizer"},
    "general": {"tokenizer_class": "PreTrainedTokenizerFast"},
}
"""Classes and settings with which transformers 4 changes what a tokenizer.json says, and others."""
NOT_COMPARED = "does not recognize this architecture"
OTHERWISE = {
    "bigbird_pegasus": "the number of layers is the encoder's",
    "camembert": "loading leaves tensors without numbers",
    "cpmant": "the vocabulary has the prompt's tokens besides",
    "got_ocr2": "the output embeddings are tied by the text's configuration",
    "modernbert-decoder": "a sliding window has one token less",
    "moshi": "a sliding window is not read",
    "qwen2_moe": "a sliding window is of other layers; without windows both are the same",
    "recurrent_gemma": "other logits of the same weights",
    "reformer": "other logits of the same weights",
    "xlm-roberta": "loading leaves tensors without numbers",
    "xlstm": "a text has whole chunks",
    "zamba2": "other logits of the same weights",
}
"""Families that transformers 4 computes otherwise, or does not load, by code that no file changes."""


NAMES = [*FAMILIES, *(f"{kind} {name}" for kind, name in SCALED), "qwen2_moe without windows"]


def of_reason(name):
    """The name, and of which families a failure is expected."""
    if name not in OTHERWISE:
        return name
    return pytest.param(name, marks=pytest.mark.xfail(reason=OTHERWISE[name], strict=True))


@pytest.mark.parametrize("name", [of_reason(name) for name in NAMES])
def test_a_model_is_the_same_in_both(name, both):
    newer, older = both[name]
    if NOT_COMPARED in older.get("error", ""):
        pytest.skip("a family of transformers 5")
    assert older.get("error") == newer.get("error")
    torch.testing.assert_close(torch.tensor(older["logits"]), torch.tensor(newer["logits"]), rtol=1e-3, atol=1e-3)
    assert older["dtype"] == newer["dtype"] == "torch.float32"


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
@pytest.mark.parametrize("name", BUILT_ANEW)
def test_a_class_that_transformers_4_builds_anew_reads_the_file(kind, name, both):
    newer, older = both[f"{kind} {name}"]
    assert older.get("error") == newer.get("error")
    assert older["ids"] == newer["ids"] == both[f"tokenizer {kind}"][0]["ids"]
    assert older["fields"] == newer["fields"] == ["attention_mask", "input_ids"]


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
def test_tokenizer_and_settings_are_the_same_in_both(kind, both):
    newer, older = both[f"tokenizer {kind}"]
    for what in ("ids", "template", "stop"):
        assert older[what] == newer[what]
    names = ("bos_token", "eos_token", "pad_token")
    assert [older["special"].get(name) for name in names] == [newer["special"].get(name) for name in names]
