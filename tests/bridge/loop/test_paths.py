"""A path in place of its text is the same place, and what is no place is refused by the argument's name."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

import rl_fn
from rl_bridge import NLL, load_model, load_rows, preference_loss

PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": "2", "rejected": "3"} for n in range(4)]
MODEL = """import torch
class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 32)
    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.head(self.table(input_ids))
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """A path of another library."""

    text: str

    def __fspath__(self):
        return self.text


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A model's folder, a class of one's own, and rows in a file, a folder and a reader."""
    folder = tmp_path_factory.mktemp("places")
    model.source.whole().save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    (folder / "own.py").write_text(MODEL)
    (folder / "rows").mkdir()
    for name, rows in (("prompts", PROMPTS), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows" / "prompts.jsonl").write_text((folder / "prompts.jsonl").read_text())
    (folder / "reader.py").write_text(f"def rows():\n    return {PROMPTS}\n")
    return folder


CALLS = {
    "model": ("model", lambda model, place, tokenizer: load_model(place)),
    "class": ("own.py:Tiny", lambda model, place, tokenizer: load_model(place, tokenizer=model.tokenizer)),
    "tokenizer": ("model", lambda model, place, tokenizer: load_model(f"{tokenizer}/own.py:Tiny", tokenizer=place)),
    "prompts": ("prompts.jsonl", lambda model, place, tokenizer: load_rows(place)),
    "prompts for a model": ("prompts.jsonl", lambda model, place, tokenizer: load_rows(place, model)),
    "a folder of rows": ("rows", lambda model, place, tokenizer: load_rows(place)),
    "a part": ("prompts.jsonl@train[1:3]", lambda model, place, tokenizer: load_rows(place)),
    "a reader": ("reader.py:rows", lambda model, place, tokenizer: load_rows(place)),
    "rows to imitate": ("prompts.jsonl", lambda model, place, tokenizer: load_rows(place, model, NLL())),
    "comparisons": ("pairs.jsonl", lambda model, place, tokenizer: load_rows(place, model, preference_loss("dpo"))),
}


@pytest.mark.parametrize("kind", [Path, Place])
@pytest.mark.parametrize("call", CALLS)
def test_a_path_is_its_text(folder, model, call, kind):
    place, load = CALLS[call]
    text = os.path.join(folder, place)
    by_path, by_text = (load(model, value, folder) for value in (kind(text), text))
    assert type(by_path) is type(by_text) and by_path.fingerprints() == by_text.fingerprints()


@pytest.mark.parametrize("wrong", [None, 3, 0.5], ids=str)
def test_what_is_no_place_is_refused_by_its_name(folder, model, wrong):
    got = f"got {type(wrong).__name__} {wrong}"
    with pytest.raises(TypeError, match=f"^model is a folder, .*, {got}$"):
        load_model(wrong)
    with pytest.raises(TypeError, match=f"^data is a file, .*, {got}$"):
        load_rows(wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=f"^tokenizer is a tokenizer, .*, {got}$"):
            load_model(f"{folder}/own.py:Tiny", tokenizer=wrong)


def test_a_model_and_a_loss_of_another_kind(folder, model):
    place = folder / "prompts.jsonl"
    for wrong in ("model", model.source, NLL()):
        with pytest.raises(TypeError, match=r"^model is one of load_model\(…\), got "):
            load_rows(place, wrong)
    for wrong in ("dpo", rl_fn.recipes.dapo(), rl_fn.recipes.dapo, NLL, preference_loss):
        with pytest.raises(TypeError, match=r"^loss is NLL\(\) or preference_loss\(\"dpo\"\), none for prompts, got "):
            load_rows(place, model, wrong)
