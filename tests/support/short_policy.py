"""Words of a run of the policy's trainer that takes seconds."""

import json

TINY = {"sft.steps": 1, "sft.rows-per-step": 4, "policy.steps": 1, "policy.prompts-per-step": 2, "held-out": 4}
TINY |= {"policy.sampling.n": 2, "policy.evaluate-every": 1, "checkpoint-every": 1}
SHORT = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 15) for b in range(10, 15)]


def short_words(folder):
    """``SHORT`` with a file of few rows in ``folder``: to check 8100 problems takes longer than the run."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return ["--data", str(file), *SHORT]
