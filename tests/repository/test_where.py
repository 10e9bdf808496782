"""docs/where.md: the folders are there, at most two a question, and hold the words that the page promises."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (.+\?) \| (.+) \| (.+) \|$", (ROOT / "docs/where.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)


def texts(folder: Path) -> str:
    """All of a folder's text, its sub-folders included."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".json", ".md")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_a_newcomer_has_twelve_questions():
    assert len(ROWS) >= 12
    assert len({question for question, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "where", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_the_folder_holds_what_is_promised(question, where, words):
    folders = [ROOT / folder for folder in re.findall(r"`([^`]+/)`", where)]
    assert 1 <= len(folders) <= 2
    assert [folder for folder in folders if not folder.is_dir()] == []
    searched = re.findall(r"`([^`]+)`", words)
    found = "\n".join(texts(folder) for folder in folders)
    assert searched and [word for word in searched if word not in found] == []
