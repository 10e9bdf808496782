"""What is exported is what came in: configuration, settings of generation, dtypes; read back before training."""

import json
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rl_bridge.models import pretrained as models_pretrained
from rl_bridge.models.export_rehearsal import rehearse_export
from rl_bridge.models.exported_files import ExportTypes, export_types, with_older_names
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import FreezingSource, PretrainedSource, StateSource, ValueSource
from rl_bridge.models.pretrained import save_pretrained, save_sharded_model, tokenizer_of
from rl_bridge.models.small import TinySource, character_tokenizer, tiny_qwen2
from rl_bridge.models.tokenizer_files import write_tokenizer
from rl_bridge.weights.source import source_of
from tests.bridge.families import zoo

# GPT-BigCode's file uses what torch gives up.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

TOKENIZER = character_tokenizer("0123456789+=")
TINY = {"hidden": 16, "layers": 1, "heads": 2}
FAMILIES = [kind for kind in zoo.FAMILIES if zoo.reason(kind) is None]
QUICK = ("deepseek_v3", "gemma3_text", "gpt_oss", "mixtral", "phi3")
BIDIRECTIONAL = ("xlm",)


def of(kinds, quick):
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in kinds]


@pytest.fixture(autouse=True)
def quiet():
    """Tiny configurations have ids of special tokens that transformers warns of."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


@pytest.fixture
def folder(tmp_path):
    """A model of random numbers."""
    save_pretrained(tmp_path / "model", tiny_qwen2(TOKENIZER, **TINY), TOKENIZER)
    return tmp_path / "model"


def change(folder, file, **fields):
    content = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps(content))


# config.json: names that transformers 4 reads beside those of transformers 5.

PART = "partial_rotary_factor"
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
]


def configurations(kind):
    """The family's own, and with other bases and scalings of its rotary frequencies."""
    yield zoo.config(kind)
    parameters = getattr(zoo.config(kind), "rope_parameters", None) or {}
    if "rope_theta" not in parameters or zoo.config(kind).sub_configs:
        return
    part = {name: value for name, value in parameters.items() if name == PART}
    rotaries = [part | scaling for scaling in [{"rope_type": "default"}, *SCALINGS]]
    for rotary in rotaries + ([{PART: one, "rope_type": "default"} for one in (0.25, 0.5, 1.0)] if part else []):
        config = zoo.config(kind)
        config.rope_parameters = {"rope_theta": 12345.0, **rotary}
        yield config


def fields_of(config):
    fields = json.loads(config.to_json_string(use_diff=False))
    if isinstance(rotary := fields.get("rope_parameters"), dict):
        rotary.pop("type", None)  # an older name of rope_type, which is there too
        # transformers 5 computes with the rotary parameters; Cohere's class has older fields beside them.
        for older in ("rope_theta", "rope_scaling", *({PART} & rotary.keys())):
            fields.pop(older, None)
    return fields


@pytest.mark.parametrize("kind", of(FAMILIES, [*FAMILIES[::8], "gemma3_text", "gpt_neox", "olmo3", "phi3"]))
def test_older_names_change_nothing_that_transformers_5_reads(kind, tmp_path):
    for config in configurations(kind):
        written = json.loads(config.to_json_string())
        older = with_older_names(written)
        # Older names may stand there with another number; older words for infinity and for types of layers may, too.
        names = written.keys() - {"rope_theta", "rope_scaling", PART, "time_step_limit"}
        names -= {"layer_types", "layers_block_type"}
        assert all(older[name] == written[name] for name in names if not isinstance(written[name], dict))
        (tmp_path / "config.json").write_text(json.dumps(written))
        try:
            expected = AutoConfig.from_pretrained(tmp_path)
        except (StrictDataclassError, KeyError, AttributeError):
            continue  # a scaling that the family has not
        (tmp_path / "config.json").write_text(json.dumps(older))
        assert fields_of(AutoConfig.from_pretrained(tmp_path)) == fields_of(expected), config.rope_parameters


FULL = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 2e4}
LAYERS = {"full_attention": FULL, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}


@pytest.mark.parametrize(
    ("kind", "parameters", "older"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
        (
            "llama",
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "phi",
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            "gpt_neox",
            {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
            {"rotary_emb_base": 2e4, "rotary_pct": 0.25, "rope_scaling": None},
        ),
        *(
            (
                kind,
                {"rope_type": "default", "rope_theta": 2e4, PART: 1.0},
                {base: 2e4, part: 1.0, "rope_scaling": None},
            )
            for kind, base, part in (
                ("gpt_neox", "rotary_emb_base", "rotary_pct"),
                *((kind, "rope_theta", PART) for kind in ("phi", "stablelm", "glm", "nemotron")),
            )
        ),
        (
            "phi3",
            {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0], "rope_theta": 1e4}
            | {"original_max_position_embeddings": 16},
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]},
            },
        ),
        (
            "gemma3_text",
            LAYERS,
            {
                "rope_theta": 2e4,
                "rope_local_base_freq": 5e3,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
        ),
        ("modernbert-decoder", LAYERS, {"global_rope_theta": 2e4, "local_rope_theta": 5e3}),
        ("a_family_of_5", LAYERS, {}),
        ("gpt2", None, {}),
    ],
)
def test_the_older_names_of_rotary_frequencies(kind, parameters, older):
    config = {"model_type": kind} | ({} if parameters is None else {"rope_parameters": parameters})
    assert with_older_names(config) == config | older


def test_names_of_a_part_and_of_the_dtype():
    text = {"model_type": "llama", "dtype": "float16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    config = with_older_names({"dtype": "bfloat16", "text_config": text})
    assert config["torch_dtype"] == "bfloat16"
    assert config["text_config"] == text | {"torch_dtype": "float16", "rope_theta": 1e6, "rope_scaling": None}


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "phi", "stablelm"])
@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_part_of_the_rotary_frequencies_is_rehearsed(kind, part, tmp_path):
    """Written under an older name too, which the configuration in hand may lack or have with another number."""
    written = json.loads(zoo.config(kind).to_json_string())
    written["rope_parameters"] |= {PART: part}
    written.pop(PART, None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters[PART] == part
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rehearse_export(StateSource(model), TOKENIZER, ExportTypes())


# generation_config.json: settings that transformers reads, it may refuse to write.


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05},
        {"eos_token_id": [1, 2], "pad_token_id": 0, "max_new_tokens": 7},
        {"num_beams": 1, "early_stopping": True, "length_penalty": 0.5},
        {"a_field": [1, {"of": "its own"}]},
        {},
    ],
)
def test_settings_of_generation_are_exported_as_they_were_read(settings, folder, tmp_path):
    """The end of a turn is named where the file names no token to stop at."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    source, out = PretrainedSource(str(folder)), tmp_path / "out"
    rehearse_export(source, TOKENIZER, export_types(source))
    save_pretrained(out, SimpleNamespace(save_pretrained=lambda to: save_sharded_model(loaded(source), to)), TOKENIZER)
    written, ended = json.loads((out / "generation_config.json").read_text()), {"eos_token_id": TOKENIZER.eos_token_id}
    assert {name: value for name, value in written.items() if name != "transformers_version"} == ended | settings
    read, again = (GenerationConfig.from_pretrained(place).to_dict() for place in (folder, out))
    assert again == (read if "eos_token_id" in settings else read | ended)


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model


# Dtypes: those of the folder, weight by weight, or the one that is asked for.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SOURCES = {
    "plain": lambda source: source,
    "frozen": lambda source: FreezingSource(source, ("*.mlp.*",)),
    "values": lambda source: ValueSource(source, seed=0, pad_token=0),
    "adapters": lambda source: LoRASource(source, 2, 4.0),
    "adapters of values": lambda source: LoRASource(ValueSource(source, seed=0, pad_token=0), 2, 4.0),
}


def exported(source, folder, dtype="input"):
    """Types of the tensors in the export of a model, and what its configuration says."""
    types = export_types(source, dtype)
    rehearse_export(source, TOKENIZER, types)
    save_sharded_model(loaded(source), str(folder), types)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"]
    return {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}, config["dtype"]


@pytest.mark.parametrize("arranged", SOURCES)
@pytest.mark.parametrize("name", DTYPES)
def test_weights_are_exported_in_the_dtype_that_they_came_in(name, arranged, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: tensor.to(DTYPES[name]) for key, tensor in tensors.items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtypes, says = exported(SOURCES[arranged](PretrainedSource(str(folder))), tmp_path / "out")
    expected = dict.fromkeys(dtypes, DTYPES[name]) | {"model.norm.weight": torch.float32}
    assert (dtypes, says) == (expected, name)
    if arranged == "plain":
        again = load_file(tmp_path / "out" / "model.safetensors")
        assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", DTYPES)
def test_weights_are_exported_in_the_dtype_that_is_asked_for(name, folder, tmp_path):
    dtypes, says = exported(PretrainedSource(str(folder)), tmp_path / "out", name)
    assert set(dtypes.values()) == {DTYPES[name]} and says == name
    assert loaded(PretrainedSource(str(tmp_path / "out"))).config.vocab_size == len(TOKENIZER)


def test_new_models_are_exported_in_float32(tmp_path):
    dtypes, says = exported(TinySource.for_tokenizer(TOKENIZER, **TINY), tmp_path)
    assert set(dtypes.values()) == {torch.float32} and says == "float32"


def test_a_number_that_float16_has_not_is_named():
    types = ExportTypes(torch.float16)
    assert types.cast("w", torch.tensor([65504.0, float("inf")])).tolist() == [65504.0, float("inf")]
    with pytest.raises(ValueError, match="weight 'w' has numbers beyond float16's 65504: take --export-dtype float32"):
        types.cast("w", torch.tensor([1e6]))
    assert types.cast("n", torch.tensor([1])).dtype == torch.int64


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_refused_weight_is_named_when_all_are_gathered(place, monkeypatch, tmp_path):
    """Each weight is gathered from all workers, and the one that writes would leave the others waiting."""
    model, gathered = tiny_qwen2(TOKENIZER, **TINY), []
    parameters = list(dict(model.named_parameters()).items())
    for _, parameter in (parameters[place], parameters[-1]):
        parameter.data.fill_(1e6)
    monkeypatch.setattr(models_pretrained, "full", lambda tensor: gathered.append(tensor) or tensor)
    with pytest.raises(ValueError, match=f"weight '{parameters[place][0]}' has numbers beyond float16's"):
        save_sharded_model(model, str(tmp_path), ExportTypes(torch.float16))
    assert len(gathered) == len(list(source_of(model).stream(adapter=False)))
    assert not list(tmp_path.iterdir())


# The rehearsal: what could not be exported after the training is refused before.


@pytest.mark.parametrize("kind", of([kind for kind in FAMILIES if kind not in BIDIRECTIONAL], QUICK))
def test_no_family_is_refused_and_its_export_is_read_again(kind, tmp_path):
    source = StateSource(zoo.tiny(kind))
    rehearse_export(source, TOKENIZER, ExportTypes())
    rehearse_export(source, TOKENIZER, ExportTypes(torch.bfloat16))
    save_sharded_model(source.model, str(tmp_path), ExportTypes())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    fields, read = fields_of(source.model.config), fields_of(again.config)
    differing = {name for name in fields if fields[name] != read[name]}
    # Moshi's language model has no depth decoder, whose configuration is derived anew.
    assert differing <= {"_name_or_path", "architectures", "dtype", "transformers_version", "depth_decoder_config"}


def test_a_template_that_transformers_does_not_write_is_refused(folder):
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "long/rag", "template": "{{ documents }}"}]
    change(folder, "tokenizer_config.json", chat_template=named)
    source = PretrainedSource(str(folder))
    with pytest.raises(ValueError, match=r"could not be exported.*long/rag"):
        rehearse_export(source, tokenizer_of(str(folder)), export_types(source))


TEMPLATES = {
    "lines of Windows": "{{ messages }}\r\n{{ bos_token }}\r{{ eos_token }}\n",
    "one by name": [{"name": "default", "template": "{{ messages }}"}],
    "two by name": [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "rag", "template": "{{ documents }}\r\n"},
    ],
    "no default": [{"name": "rag", "template": "{{ documents }}"}],
    "none": None,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_the_same_in_another_form(name, folder, tmp_path):
    change(folder, "tokenizer_config.json", chat_template=TEMPLATES[name])
    source, tokenizer = PretrainedSource(str(folder)), tokenizer_of(str(folder))
    rehearse_export(source, tokenizer, export_types(source))
    write_tokenizer(tokenizer, tmp_path)
    if name in ("lines of Windows", "one by name"):
        talk = [{"role": "user", "content": "1+1"}]
        texts = [
            one.apply_chat_template(talk, tokenize=False)
            for one in (tokenizer, tokenizer_of(str(tmp_path), alone=True))
        ]
        assert texts[0] == texts[1]


def test_a_template_that_is_read_back_as_another_is_refused_by_the_place():
    tokenizer, long = character_tokenizer("0123456789+="), "{{ messages }}" * 100
    tokenizer.chat_template = f"{long}{{{{ bos_token }}}}{long}"
    other = character_tokenizer("0123456789+=")
    other.chat_template = long + long
    tokenizer.save_pretrained = lambda folder: other.save_pretrained(folder)
    place = r"the tokenizer's chat template 'default' is read back with '.{40}'… from character \d+ on, not '.{40}'…"
    with pytest.raises(ValueError, match=place) as refusal:
        rehearse_export(TinySource.for_tokenizer(TOKENIZER, **TINY), tokenizer, ExportTypes())
    assert len(str(refusal.value)) < 400


def test_a_folder_with_code_of_its_own_is_exported_without_its_name(folder, tmp_path):
    change(folder, "config.json", auto_map={"AutoModel": "own.Own"})
    exported(PretrainedSource(str(folder)), tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


FAULTS = {
    "add_older_names": (
        lambda folder: change(folder, "config.json", rms_norm_eps=0.5),
        "config.json is read back with rms_norm_eps 0.5, which is 1e-06",
    ),
    "write_generation_config": (
        lambda generation, folder: change(folder, "generation_config.json", eos_token_id=7),
        "generation_config.json is read back with eos_token_id 7, which is 1",
    ),
}


@pytest.mark.parametrize("writer", FAULTS)
def test_what_is_read_back_as_something_else_is_refused(writer, monkeypatch):
    fault, message = FAULTS[writer]
    monkeypatch.setattr(models_pretrained, writer, fault)
    with pytest.raises(ValueError, match=message):
        rehearse_export(TinySource.for_tokenizer(TOKENIZER, **TINY), TOKENIZER, ExportTypes())


def test_weights_that_the_written_configuration_has_not_are_refused():
    class Larger:
        def empty(self):
            model = TinySource.for_tokenizer(TOKENIZER, **TINY).empty()
            model.model.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
            return model

    with pytest.raises(ValueError, match=r"its weights would not be read again: .*model\.extra"):
        rehearse_export(Larger(), TOKENIZER, ExportTypes())


def test_a_tokenizer_that_is_read_back_as_another_is_refused():
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained = lambda folder: character_tokenizer("0123456789").save_pretrained(folder)
    with pytest.raises(ValueError, match="the tokenizer is read back with 12 tokens, which has 14, or with other ids"):
        rehearse_export(TinySource.for_tokenizer(TOKENIZER, **TINY), tokenizer, ExportTypes())


def test_a_rehearsal_makes_no_numbers():
    """The tensors of this model would be 260 GB."""
    sizes = {"hidden_size": 65536, "intermediate_size": 65536, "num_hidden_layers": 1, "vocab_size": 500_000}

    class Huge:
        def empty(self):
            return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=8))

    rehearse_export(Huge(), TOKENIZER, ExportTypes(torch.bfloat16))
