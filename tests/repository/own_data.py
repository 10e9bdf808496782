"""A reader's own data, reward and environment, for the documented commands that take them.

The reward and the environment are the examples of docs/training.md. Writes into the working folder.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for file, name in {"my_reward.py": "def score(", "my_tools.py": "class Adder"}.items():
        (example,) = [text for text in examples if name in text]
        Path(file).write_text(example, encoding="utf-8")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 30)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1] + "0"} for row in rows]
    Path("preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    ranked = [{"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]]} for row in pairs]
    Path("ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked), encoding="utf-8")
