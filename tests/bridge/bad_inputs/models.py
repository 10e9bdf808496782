"""Every file of a model's folder x {absent, empty, cut, of another kind}, fields of its JSON, and where it lies."""

import json
import shutil
from pathlib import Path

from tests.bridge.bad_inputs.case import POLICY, PREFERENCE, REWARD_MODEL, SFT, Case, Damage, changed, cut
from tests.bridge.bad_inputs.data import together

KIND = "model folders"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RIGHT = {("generation_config.json", "absent"), ("generation_config.json", "an object")}
"""A model can do without."""


def damages(file: str) -> dict[str, Damage]:
    def write(content):
        return lambda folder: (folder / "tinyq" / file).write_bytes(content)

    def cut_it(share):
        return lambda folder: cut(folder / "tinyq" / file, share)

    def cut_end(folder: Path) -> None:
        path = folder / "tinyq" / file
        path.write_bytes(path.read_bytes().rstrip()[:-1])

    def a_folder(folder: Path) -> None:
        (folder / "tinyq" / file).unlink()
        (folder / "tinyq" / file).mkdir()

    return {
        "absent": lambda folder: (folder / "tinyq" / file).unlink(),
        "empty": write(b""),
        "cut": cut_it(0.5),
        "without its end": cut_end,
        "a list": write(b"[1, 2]"),
        "an object": write(b"{}"),
        "a number": write(b"5"),
        "null": write(b"null"),
        "zeros": write(b"\0" * 400),
        "text": write(b"hello"),
        "not UTF-8": write(b'{"a": "\xff\xfe"}'),
        "a folder": a_folder,
        "nested deep": write(b"[" * 100_000),
    }


def field(file: str, **values) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "tinyq" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


# Field of config.json, wrong values; what has to be said is the folder and the field or its value.
CONFIG = {
    "model_type": ("nonsense", "", None, 5, ["qwen2"]),
    "hidden_size": (17, 0, -1, "many", None, 32),
    "num_hidden_layers": (0, -1, "many", 2, None),
    "num_attention_heads": (3, 0, -1, "many"),
    "num_key_value_heads": (3, 0, "many"),
    "intermediate_size": (0, -1, "many", 65),
    "vocab_size": (5, 0, -1, "many", 99999),
    "hidden_act": ("nonsense", 5),
    "rope_parameters": ({"rope_type": "nonsense"}, 5),
    "max_position_embeddings": (0, -1, "many"),
    "dtype": ("nonsense", 5),
    "rms_norm_eps": ("many", float("nan")),
    "eos_token_id": (99999, -1, "many"),
    "pad_token_id": (99999, "many"),
    "tie_word_embeddings": ("many",),
    "architectures": (["Nonsense"], 5),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, 5),
    "auto_map": ({"AutoModelForCausalLM": "evil.Model"},),
}
WORKS = {
    ("auto_map", 0),
    ("architectures", 0),
    ("architectures", 1),
    ("dtype", 1),
    ("eos_token_id", 0),
    ("eos_token_id", 1),
}
"""Nothing reads these: weights are float32, and the ends of a completion are those of generation_config.json."""


def tensors(change) -> Damage:
    """The weights with a change, by safetensors' own writer."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "tinyq" / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return damage


NORM = "model.norm.weight"


def index(**weight_map: str) -> Damage:
    """The weights in two files of which an index tells; names of the tensors are written with __ for dots."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "tinyq" / "model.safetensors"
        loaded = load_file(path)
        names = sorted(loaded)
        halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
        for name, own in halves.items():
            save_file({n: loaded[n] for n in own}, folder / "tinyq" / name)
        path.unlink()
        told = {n: file for file, own in halves.items() for n in own}
        told |= {n.replace("__", "."): file for n, file in weight_map.items()}
        (folder / "tinyq" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}))

    return damage


def index_of(content: str) -> Damage:
    return together(index(), lambda folder: (folder / "tinyq" / "model.safetensors.index.json").write_text(content))


INDEX = "model.safetensors.index.json"
WEIGHTS = [
    ("a tensor is absent", tensors(lambda w: {n: t for n, t in w.items() if n != NORM}), (NORM,)),
    ("a tensor of another name", tensors(lambda w: {n.replace("norm.weight", "norm.w"): t for n, t in w.items()}), ("model.norm.w|norm",)),
    ("a tensor too many", tensors(lambda w: w | {"extra.weight": w[NORM].clone()}), ("extra.weight",)),
    ("another shape", tensors(lambda w: w | {NORM: w[NORM][:8].clone()}), (NORM,)),
    ("another number of axes", tensors(lambda w: w | {NORM: w[NORM][None].clone()}), (NORM,)),
    ("whole numbers", tensors(lambda w: w | {NORM: w[NORM].int()}), (NORM,)),
    ("no tensors", tensors(lambda w: {}), ()),
    ("those of a scorer", lambda f: shutil.copy(f / "scorer" / "model.safetensors", f / "tinyq" / "model.safetensors"), ("score.weight|score",)),
    ("an index with a file that is absent", index(model__norm__weight="three.safetensors"), (INDEX, "three.safetensors")),
    ("an index with a file that has it not", index(model__norm__weight="one.safetensors", model__embed_tokens__weight="two.safetensors"), ("index", "two.safetensors")),
    ("an index to another folder", index(model__norm__weight="../scorer/model.safetensors"), (INDEX, "../scorer/model.safetensors")),
    ("an empty index", index_of(""), (INDEX,)),
    ("an index that is a list", index_of("[]"), (INDEX,)),
    ("an index without weight_map", index_of("{}"), (INDEX, "weight_map")),
    ("an index of numbers", index_of('{"weight_map": {"a": 5}}'), (INDEX, "weight_map")),
    ("pickled weights alone", lambda f: (f / "tinyq" / "model.safetensors").rename(f / "tinyq" / "pytorch_model.bin"), ("safetensors",)),
    ("right: in two files", index(), None),
    ("right: float64", tensors(lambda w: {n: t.double() for n, t in w.items()}), None),
    ("right: bfloat16", tensors(lambda w: {n: t.bfloat16() for n, t in w.items()}), None),
]  # fmt: skip


def run_folder(folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "tinyq").rename(folder / "old" / "model")
    (folder / "old" / "config.json").write_text("{}")
    (folder / "old" / "metrics.jsonl").write_text("")


def empty(folder: Path) -> None:
    (folder / "void").mkdir()


PATHS = [
    ("absent", changed(SFT, "--model gone"), None, ("gone",)),
    ("absent, with a path", changed(SFT, "--model ./gone/there"), None, ("./gone/there|gone/there",)),
    ("absent, absolute", changed(SFT, "--model /gone/there"), None, ("/gone/there",)),
    ("a name of the hub", changed(SFT, "--model nobody/nothing"), None, ("nobody/nothing",)),
    ("empty name", changed(SFT, "--model ''"), None, ("--model|model",)),
    ("a file", changed(SFT, "--model sums.jsonl"), None, ("sums.jsonl", "folder")),
    ("its weights", changed(SFT, "--model tinyq/model.safetensors"), None, ("tinyq/model.safetensors", "folder")),
    ("an empty folder", changed(SFT, "--model void"), empty, ("void", "config.json")),
    ("a run's folder", changed(SFT, "--model old"), run_folder, ("old", "old/model")),
    ("a scorer as a policy", changed(SFT, "--model scorer"), None, ("scorer",)),
    ("a scorer as a policy to sample", changed(POLICY, "--model scorer"), None, ("scorer",)),
    ("a scorer of preferences", changed(PREFERENCE, "--model scorer"), None, ("scorer",)),
    ("absent, of a reward model", changed(REWARD_MODEL, "--model gone"), None, ("gone",)),
    ("absent critic", changed(POLICY, "--critic.model gone") + " objective:ppo", None, ("gone",)),
    ("a critic that is a policy", changed(POLICY, "--critic.model tinyq") + " objective:ppo", None, ("tinyq",)),
    ("an absent teacher", changed(POLICY, "--teacher gone") + " objective:on-policy-distillation", None, ("gone",)),
    ("no teacher", POLICY + " objective:on-policy-distillation", None, ("teacher",)),
    (
        "a teacher that is a scorer",
        changed(POLICY, "--teacher scorer") + " objective:on-policy-distillation",
        None,
        ("scorer",),
    ),
    ("an absent reward model", changed(POLICY, "--reward model:gone"), None, ("gone",)),
    ("a reward model that is a policy", changed(POLICY, "--reward model:tinyq"), None, ("tinyq",)),
    ("a link to itself", changed(SFT, "--model loop"), lambda f: (f / "loop").symlink_to("loop"), ("loop",)),
]
LEFT = [
    ("lora on no module", changed(SFT, "--lora.rank 2", "--lora.target-modules q_porj"), ("q_porj",)),
    ("freezes nothing", changed(SFT, "--freeze model.layer.*"), ("model.layer.*|model.layer",)),
    ("freezes all", changed(SFT, "--freeze '*'"), ("freeze|--freeze",)),
    (
        "lora on the tied embeddings",
        changed(SFT, "--lora.rank 2", "--lora.target-modules embed_tokens"),
        ("embed_tokens",),
    ),
]


def cases() -> list[Case]:
    found = []
    for file in FILES:
        for name, damage in damages(file).items():
            right = (file, name) in RIGHT
            says = (
                ()
                if right
                else ("tinyq", file if "tokenizer" not in file else "tokenizer|tokenizer.json|tokenizer_config.json")
            )
            found.append(Case(kind=KIND, name=f"{file}: {name}", command=SFT, says=says, works=right, damage=damage))
    for option, values in CONFIG.items():
        for number, value in enumerate(values):
            right = (option, number) in WORKS
            says = () if right else ("tinyq", f"{option}|{option.replace('_', ' ')}|{value}|nonsense|quantised")
            found.append(
                Case(
                    kind=KIND,
                    name=f"config.json: {option} {json.dumps(value)}",
                    command=SFT,
                    says=says,
                    works=right,
                    damage=field("config.json", **{option: value}),
                )
            )
    for name, damage, says in WEIGHTS:
        right = says is None
        found.append(
            Case(
                kind=KIND,
                name=f"weights: {name}",
                command=SFT,
                says=() if right else ("tinyq", *says),
                works=right,
                damage=damage,
            )
        )
    found += [
        Case(kind=KIND, name=f"path: {name}", command=command, says=says, damage=damage)
        for name, command, damage, says in PATHS
    ]
    return found + [Case(kind=KIND, name=name, command=command, says=says) for name, command, says in LEFT]
