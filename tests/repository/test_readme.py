"""The README's examples are run, its commands exist, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.repository.families import parts, table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    # torch's example uses rl_fn as the reader has imported it in the first one.
    exec(compile("import rl_fn\n" + EXAMPLES[number], f"README.md example {number}", "exec"), {})


def test_the_library_example_is_short():
    assert len(EXAMPLES) == 2
    assert len(EXAMPLES[0].strip().splitlines()) <= 20


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert named and named <= targets


def test_links_and_paths_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    paths = re.findall(r"`((?:rl_fn|kernels|bridge|experiments|tests|docs)/[\w./]*)`", README)
    assert links and paths
    missing = [path for path in [*links, *paths] if not (ROOT / path).exists()]
    assert not missing


def test_the_table_of_families_is_what_the_code_says():
    assert parts()[1] == table(), "python -m tests.repository.families writes it anew"


def test_nothing_is_left_to_fill_in():
    assert "@" not in re.sub(r"@[a-z]+\.", "", README)
