"""A reader's own data and reward, for the documented command that takes them.

The reward is the example of docs/training.md. Writes into the working folder.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    (reward,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    Path("my_reward.py").write_text(reward, encoding="utf-8")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 30)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
