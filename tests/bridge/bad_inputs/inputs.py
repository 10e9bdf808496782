"""The folder of right inputs that every case begins with."""

import json
import os
import shutil
from pathlib import Path

import torch

from rl_bridge.models.model_source import PretrainedSource, ValueSource
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.small import character_tokenizer, tiny_qwen2
from tests.bridge.bad_inputs.case import SFT, changed

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ m['role'][0] }}:{{ m['content'] }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
REWARD = "def score(completion, row):\n    return float(len(set(completion))) + float(row['answer']) / 100\n"
SUMS = [{"prompt": f"{n}+{n + 1}=", "response": str(2 * n + 1)} for n in range(12)]
ASKED = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(12)]
PAIRS = [{"prompt": f"{n}+{n + 1}=", "chosen": str(2 * n + 1), "rejected": str(2 * n)} for n in range(12)]


def write_rows(path: Path, rows: list) -> None:
    """One row a line; text stands as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def make_run(folder: Path) -> None:
    """``done/first``, a run that has ended."""
    from rl_tools.cli import main

    os.chdir(folder)
    if main(changed(SFT, "--output done").split()):
        raise RuntimeError("the right run failed")


def make_inputs(folder: Path) -> None:
    """``tinyq``, a model; ``scorer``, a reward model; three files of rows; a reward."""
    folder.mkdir(parents=True)
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    save_pretrained(folder / "tinyq", tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    shutil.copytree(folder / "tinyq", folder / "scorer")
    value = ValueSource(PretrainedSource(str(folder / "tinyq")), seed=1)
    with torch.device("meta"):
        model = value.empty()
    value.load(model)
    model.save_pretrained(folder / "scorer")
    write_rows(folder / "sums.jsonl", SUMS)
    write_rows(folder / "asked.jsonl", ASKED)
    write_rows(folder / "pairs.jsonl", PAIRS)
    (folder / "judged.py").write_text(REWARD)
