"""The page for those who come from another library, section by section."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
OURS = ("--", "objective:", "loss:")


def section(library):
    """What a library's section has in code, without our own options."""
    text = PAGE.partition(f"## {library}\n")[2].partition("\n## ")[0]
    return " ".join(code for code in re.findall(r"`([^`]+)`", text) if not code.startswith(OURS))
