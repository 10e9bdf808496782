"""README.md is one screen and its examples run; targets, links and paths of all documents exist."""

import inspect
import re
from pathlib import Path

import pytest

import rl_fn
from rl_bridge.modules.comparison import PREFERENCE_LOSSES
from rl_bridge.pipelines.objective_options import ALGORITHMS
from rl_tools.trainer_options import TRAINERS, load
from tests.repository.families import PAGE, page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
DOCUMENTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
}


BLOCKS = [
    (document, number, code)
    for document, text in DOCUMENTS.items()
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
]


@pytest.mark.parametrize(("document", "number", "code"), BLOCKS, ids=[f"{block[0]}-{block[1]}" for block in BLOCKS])
def test_example_runs(document, number, code):
    exec(compile(code, f"{document} example {number}", "exec"), {})


def test_the_first_page_is_one_screen():
    assert len(README.splitlines()) <= 80
    assert len(EXAMPLES) == 2
    assert len(EXAMPLES[0].strip().splitlines()) <= 12
    status = README.split("## Status")[1].split("##")[0]
    assert len(re.findall(r"^\|", status, flags=re.MULTILINE)) == 2 + 5


def test_losses_and_recipes_are_as_many_as_the_first_page_says():
    assert f"{len(PREFERENCE_LOSSES)} preference losses, {len(ALGORITHMS)} policy recipes" in README


@pytest.mark.parametrize("document", ["README.md", "docs/training.md"])
def test_the_rows_held_out_are_those_of_each_trainer(document):
    trainers: dict[int, list[str]] = {}
    for name, trainer in TRAINERS.items():
        trainers.setdefault(load(trainer.default)().held_out, []).append(name)
    words = ", ".join(f"{' and '.join(names)} {number}" for number, names in trainers.items())
    assert f"are held out ({words}" in " ".join(DOCUMENTS[Path(document)].split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_make_targets_exist(document):
    targets = set(
        re.findall(r"^([a-z0-9-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    code = "\n".join(re.findall(r"```\w*\n.*?```|`[^`\n]+`", DOCUMENTS[document], flags=re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", code)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_paths_exist(document):
    links = [x for x in re.findall(r"\]\(([^)#\s]+)[^)]*\)", DOCUMENTS[document]) if not x.startswith("https://")]
    paths = re.findall(r"`((?:rl_fn|kernels|bridge|experiments|tests|docs)/[\w./]*)`", DOCUMENTS[document])
    missing = [x for x in links if not (ROOT / document.parent / x).exists()]
    assert not missing + [x for x in paths if not (ROOT / x).exists()]


def test_the_table_of_families_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.repository.families writes it anew"


def test_the_numbers_of_names_are_right():
    functions = [name for name in rl_fn.__all__ if inspect.isfunction(getattr(rl_fn, name))]
    for text in (README, (ROOT / "docs/index.md").read_text(encoding="utf-8")):
        assert {int(n) for n in re.findall(r"(\d+)\s+functions", text)} <= {len(functions)}
        assert {int(n) for n in re.findall(r"(\d+)\s+algorithms", text)} == {len(rl_fn.recipes.__all__)}
    assert "functions (" in README


def test_nothing_is_left_to_fill_in():
    assert "@" not in re.sub(r"@[a-z]+\.", "", README)


def test_nobody_is_told_to_install_what_is_not_on_pypi_tool_19():
    """Until a release, whoever registers the name would be installed: extras are those of the clone, ".[tune]"."""
    code = (
        path for folder in ("bridge", "kernels", "rl_fn", "experiments") for path in ROOT.joinpath(folder).rglob("*.py")
    )
    texts = DOCUMENTS | {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in code}
    assert [str(path) for path, text in texts.items() if re.search(r"install\s+['\"]?rl-fn\b", text)] == []
