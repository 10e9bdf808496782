"""Rows and options of supervised runs whose memory is measured."""

import json
from pathlib import Path
from typing import Any

from rl_bridge.models.pretrained import new_for_rows
from rl_bridge.models.small import TinySource

SUMS = [(a, b) for a in range(40, 52) for b in (10, 11)]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
# The completions of a pair have their prompt in common and no token after it, as those of a plan.
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b - 40)} for a, b in SUMS]
TOKENS = 6 + 3
"""Of a prompt and of a completion with its end of sequence."""


def common(folder: Path, rows: list[dict]) -> dict[str, Any]:
    """The options of every run here: a model and rows on disk, several micro-batches a step."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, tokenizer = new_for_rows(ROWS, seed=0)
    TinySource.for_tokenizer(tokenizer, hidden=32, layers=1, heads=2).empty().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    places = {"output": folder, "model": str(folder / "model"), "data": str(folder / "rows.jsonl")}
    return {**places, "name": "run", "held_out": 8, "memory": True, "checkpoint_every": 1}
