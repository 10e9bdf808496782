"""docs/models.md, from the results that ``python -m tests.bridge.families.table`` wrote."""

import json
import re
from pathlib import Path
from typing import Any

from tests.bridge.families.cells import NONE, PADDED, REFUSED, RIGHT, WRONG

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "experiments" / "results" / "families" / "table.json"
VLLM = RESULTS.with_name("vllm.json")
"""What ``tests/bridge/rollout/vllm/families.py`` measured."""
PAGE = ROOT / "docs" / "models.md"
PROSE = Path(__file__).with_name("models.md")
"""The page without its table."""

HEADS = {
    "load": "folder",
    "padded": "padded",
    "packed": "packed",
    "shared": "shared prefixes",
    "decoder": "in-process rollout",
    "lora": "LoRA",
    "export": "export",
    "classifier": "reward model",
    "shard": "shard=2",
    "tensor": "tensor=2",
    "sequence": "sequence=2",
    "vllm": "vLLM",
}
"""Columns of the results and what the page calls them."""

CLASS = re.compile(
    r"'?\b(FSDP)?[A-Za-z]+\w*(ForCausalLM|LMHeadModel|ModelWithLMHead|ForConditionalGeneration|Model|DecoderWrapper"
    r"|Encoder|ForSequenceClassification|Attention\w*)\b'?"
)
"""Names of models' classes."""


def results() -> dict[str, Any]:
    """What was measured last; empty before the first time."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}


def markdown(found: dict[str, Any]) -> str:
    """The whole page."""
    notes: dict[str, int] = {}
    of_vllm = json.loads(VLLM.read_text("utf-8"))["families"] if VLLM.is_file() else {}
    lines = [f"| model type | {' | '.join(HEADS.values())} |", "|---|" + ":-:|" * len(HEADS)]
    for kind, cells in found["families"].items():
        cells = cells | {"vllm": of_vllm.get(kind, ["", ""])}
        lines.append(f"| `{kind}` | {' | '.join(_shown(kind, cells[column], notes) for column in HEADS)} |")
    reasons = [f"{number}. {note}" for note, number in notes.items()]
    not_made = [f"- `{kind}`: {why}" for kind, why in found["not made"].items()]
    counts = _counts(found, of_vllm)
    text = PROSE.read_text("utf-8")
    for name, value in {
        "table": "\n".join(lines),
        "reasons": "\n".join(reasons),
        "not made": "\n".join(not_made),
        "counts": counts,
        "date": found["date"],
        "versions": ", ".join(f"{package} {number}" for package, number in found["versions"].items()),
    }.items():
        text = text.replace(f"<!-- {name} -->", value)
    return text


def _counts(found: dict[str, Any], of_vllm: dict[str, Any]) -> str:
    """How many families are right, padded and refused, by column."""
    rows = ["| | right | padded | refused |", "|---|:-:|:-:|:-:|"]
    for column, head in HEADS.items():
        cells = [row[column] for row in found["families"].values() if column in row]
        verdicts = [verdict for verdict, _ in (of_vllm.values() if column == "vllm" else cells)]
        if verdicts:
            numbers = " | ".join(str(verdicts.count(verdict)) for verdict in (RIGHT, PADDED, REFUSED))
            rows.append(f"| {head} | {numbers} |")
    return "\n".join(rows)


def _shown(kind: str, cell: list[str], notes: dict[str, int]) -> str:
    verdict, why = cell
    if verdict in (NONE, "", WRONG) or (verdict == RIGHT and not why):
        return verdict
    number = notes.setdefault(essence(kind, why), len(notes) + 1)
    return f"{verdict} <sup>{number}</sup>"


def essence(kind: str, why: str) -> str:
    """What families have in common in a message: without classes' names, numbers and what was tried besides.

    >>> essence("lfm2", "NotImplementedError: cannot sample from Lfm2ForCausalLM: its layers are conv")
    'cannot sample from the model: its layers are conv'
    """
    text = re.split(r"since (?:packed|shared) rows would give other numbers: ", why)[-1]
    text = re.sub(r"^\w+Error: ", "", text)
    text = CLASS.sub("the model", text)
    text = re.sub(r"differs? by [-+.\de]+( of its largest number)?", "differs", text)
    text = re.sub(r"the gradient of \S+ differs", "a gradient differs", text)
    text = re.sub(r"'\S+ is a " + re.escape(repr(kind)), "a model of the family", text)
    text = re.sub(r"\(\d+(, \d+)+\)|\b\d+ tokens", "…", text)
    return re.split(r"; |\. | \(by |: call |: pad |: AssertionError", text)[0].replace("|", "\\|").strip()
