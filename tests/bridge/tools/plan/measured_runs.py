"""Files of a run whose memory is measured, and the peaks in its record."""

import json
from pathlib import Path

import torch

from rl_bridge.models.pretrained import new_for_rows
from rl_bridge.models.small import TinySource

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 22) for b in (10, 11)]
REWARD = "def even_digits(completion, row):\n    return sum(c in '02468' for c in completion)\n"


def written(folder: Path, hidden: int = 32) -> None:
    """Rows, a reward, and a model whose end-of-sequence token is never among the three likeliest."""
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "reward.py").write_text(REWARD)
    _, tokenizer = new_for_rows(ROWS, seed=0)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    torch.manual_seed(0)
    model = TinySource.for_tokenizer(tokenizer, hidden=hidden, layers=1, heads=2).empty()
    with torch.no_grad():
        model.model.embed_tokens.weight[end] = 0  # its logit is 0, and the three highest are above
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def peaks(lines: Path) -> dict[str, int]:
    """The highest of each phase of a run."""
    found: dict[str, int] = {}
    for line in map(json.loads, lines.read_text().splitlines()):
        if "peak" in line:
            found[line["phase"]] = max(found.get(line["phase"], 0), line["peak"])
    return found
