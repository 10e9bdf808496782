"""Every command of the documents is in the table of what `make documented` runs, and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import documented
from tests.repository.commands import COMMANDS
from tests.repository.documents import Command, commands_in, documents

NAMED = {command: path.name for path in documents() for command in commands_in(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("command", NAMED)
def test_a_named_command_is_run(command):
    assert command in {c.text for c in COMMANDS}, f"{NAMED[command]} names it; tests/repository/commands.py does not"


def test_the_table_has_nothing_else():
    texts = [command.text for command in COMMANDS]
    assert len(set(texts)) == len(texts)
    assert [text for text in texts if text not in NAMED] == []


def test_another_setting_has_its_reason():
    assert [c.text for c in COMMANDS if (c.run is None) == bool(c.why)] == []
    assert [c.text for c in COMMANDS if c.run is not None and not c.run.strip("true: ")] == []


def test_commands_are_found_in_blocks_and_in_sentences():
    text = "Run `make x`, not `y`.\n```\n.venv/bin/a b   # why\n```\n\n    make z\n\n```python\nmake = 1\n```\n"
    assert commands_in(text) == [".venv/bin/a b", "make z", "make x"]


def test_a_failure_is_reported(tmp_path):
    """Commands run in the clone, by bash, and a status other than 0 is a failure."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    good, _, _, text = documented.run(Command('echo "$CLONE"; test -d .git'), tmp_path, tmp_path)
    assert good and Path(text.strip()) == tmp_path
    assert not documented.run(Command("make nothing-of-this-name"), tmp_path, tmp_path)[0]


def test_the_clones_environment_begins_as_links_to_the_other_ones_files(tmp_path):
    """It runs its own Python and scripts, and what is written into it leaves the other as it was."""
    clone, scratch = tmp_path / "clone", tmp_path / "scratch"
    documented.begin_environment(clone, scratch)
    assert not clone.exists()
    filled, made = scratch / "pip", clone / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(filled)], check=True)
    [packages] = filled.glob("lib/python*/site-packages")
    (packages / "shared.py").write_text("import sys\nprint(sys.prefix)\n")
    (filled / "bin" / "shows").write_text(f"#!{filled}/bin/python\nimport shared\n")
    (filled / "bin" / "shows").chmod(0o755)
    documented.begin_environment(clone, scratch)
    for environment in (filled, made):
        shown = subprocess.run([environment / "bin" / "shows"], capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == str(environment)
    copied = made / packages.relative_to(filled) / "shared.py"
    assert copied.samefile(packages / "shared.py")
    documented.begin_environment(clone, scratch)
    assert copied.exists(), "what is there stays"
