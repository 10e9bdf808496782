"""The tool itself: which mutants a text has, that one is set and taken back, and what the score says of them."""

import ast
import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from tests.mutation import equivalents
from tests.mutation.equivalents import joined
from tests.mutation.mutants import mutants
from tests.mutation.patch import Package
from tests.mutation.report import sample, score, survivors, wilson, write
from tests.mutation.selection import Selection
from tests.mutation.supervise import code
from tests.mutation.worker import ROOT

SOURCE = textwrap.dedent(
    '''
    """A module's 1 + 1."""

    import dataclasses

    LIMIT: float = 2.0
    BOUNDS = (LIMIT, LIMIT)
    Number = int | float


    def scale(x: int, *, by: float = 1.5, up: bool = True) -> float:
        """Twice 2 * 2."""
        if x < 0:
            raise ValueError(f"x must not be below 0, got {x + 1}")
        return x * by if up else LIMIT


    def outer(x):
        def inner(y):
            return y - LIMIT
        return inner(x)


    def positive(xs):
        return [x for x in xs if x > 0 and not x == 7][0]


    @dataclasses.dataclass(frozen=True)
    class Piece:
        share: float = 0.5

        def of(self, x):
            return self.share + x

        def explain(self):
            return "a share" if self.share < 0 else "none"
    '''
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "toy_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "code.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield Package(folder, "toy_package")
    for name in ("toy_package.code", "toy_package"):
        sys.modules.pop(name, None)


def of(found, kind, owner):
    return [(mutant.before, mutant.after) for mutant in found if mutant.kind == kind and mutant.owner == owner]


def test_the_mutants_of_a_text_are_these():
    tree, found = mutants(SOURCE, "code.py")
    assert len({mutant.id for mutant in found}) == len(found)
    assert of(found, "default", "scale") == [("1.5", repr(1.5 * 1.1)), ("True", "False")]
    assert of(found, "comparison", "scale") == [("x < 0", "x <= 0"), ("x < 0", "x >= 0")]
    assert of(found, "arithmetic", "scale") == [("x * by", "x / by")]
    assert of(found, "branches", "scale") == [("x * by if up else LIMIT", "LIMIT if up else x * by")]
    assert of(found, "boolean", "positive") == [
        ("x > 0 and (not x == 7)", "x > 0 or not x == 7"),
        ("not x == 7", "x == 7"),
    ]
    assert of(found, "index", "positive") == [("0", "1"), ("0", "-1")]
    assert of(found, "arithmetic", "outer") == [("y - LIMIT", "y + LIMIT")]
    assert of(found, "constant", "") == [("2.0", "2.2")]
    assert of(found, "constant", "Piece") == [("0.5", "0.55")]
    # Neither docstrings nor messages nor types, and the tree is as it was.
    assert not any("2 * 2" in m.before or "+ 1" in m.before or "int |" in m.before for m in found)
    assert ast.unparse(tree) == ast.unparse(ast.parse(SOURCE))


def test_calls_are_swapped_and_dropped():
    source = "def f(x, m):\n    return jnp.where(m, jax.lax.stop_gradient(jnp.sum(x)), jnp.minimum(x, x))\n"
    found = mutants(source, "f.py")[1]
    assert of(found, "swap", "f") == [("jnp.sum(x)", "sum → mean"), ("jnp.minimum(x, x)", "minimum → maximum")]
    assert of(found, "dropped", "f") == [("jax.lax.stop_gradient(jnp.sum(x))", "jnp.sum(x)")]
    assert of(found, "branches", "f")[0][1].startswith("jnp.where(m, jnp.minimum(x, x), ")
    swap = next(mutant for mutant in found if mutant.kind == "swap")
    tree, again = mutants(source, "f.py")
    with next(mutant for mutant in again if mutant.id == swap.id).set():
        assert "jnp.mean(x)" in ast.unparse(tree)
    assert ast.unparse(tree) == source.strip()


def results(code):
    inner = code.outer(5.0)
    return code.scale(3), code.scale(3, up=False), inner, code.positive([-1, 7, 2]), code.Piece().of(1.0)


def test_every_mutant_changes_the_living_functions_and_is_taken_back(package):
    """However a name was imported: the functions stay the same objects."""
    code = package.module("code.py")
    expected = (4.5, 2.0, 3.0, 2, 1.5)
    assert results(code) == expected
    changed = set()
    for mutant in package.mutants.values():
        with package.applied(mutant):
            try:
                changed |= {mutant.id} if results(code) != expected else set()
            except (ValueError, IndexError):
                changed.add(mutant.id)
        assert results(code) == expected
    same = sorted(m.before + " → " + m.after for m in package.mutants.values() if m.id not in changed)
    # The list of one element is the same from its end, and nothing in the results is on a boundary; the rest shows.
    assert same == ["0 → -1", "0 → 1", "0 → 1", "x < 0 → x <= 0", "x > 0 → x >= 0"]


def test_constants_made_of_a_constant_change_with_it(package):
    code = package.module("code.py")
    mutant = next(m for m in package.mutants.values() if not m.owner and m.after == "2.2")
    with package.applied(mutant):
        assert code.LIMIT == 2.2 and code.BOUNDS == (2.2, 2.2)
    assert code.LIMIT == 2.0 and code.BOUNDS == (2.0, 2.0)


def test_tests_are_selected_by_the_calls_between_them_and_the_function(tmp_path):
    (tmp_path / "test_it.py").write_text("HELP = top\n\ndef test_a():\n    HELP(1)\n\ndef test_b():\n    other()\n")
    functions = "def low(): pass\ndef middle(): low()\ndef top(): middle(), sized()\ndef other(): pass\n"
    tree = ast.parse(f"{functions}_SIZE = 2\ndef sized(): _SIZE\n")
    nodeids = ["test_it.py::test_a", "test_it.py::test_b", "test_oracle.py::test_x[middle-1]", "code.py::code.low"]
    selection = Selection(nodeids, tmp_path, {"code.py": tree})
    assert selection.of("low", "code.py") == {
        "test_it.py::test_a": 2,
        "test_oracle.py::test_x[middle-1]": 1,
        "code.py::code.low": 0,
    }
    assert selection.of("other", "code.py") == {"test_it.py::test_b": 0}
    assert selection.of("_SIZE", "code.py") == {"test_it.py::test_a": 2}


def test_score_counts_what_died_and_what_nothing_ran():
    total = score(["killed", "killed", "timeout", "survived", "uncovered", "equivalent"])
    assert total.total == 6 and total.raw == pytest.approx(3 / 6) and total.score == pytest.approx(3 / 5)


def test_wilsons_interval():
    # (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n) for 8 of 10: 0.4902, 0.9433 (Wilson, 1927).
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_sample_is_in_proportion_and_repeatable():
    found = mutants(SOURCE, "code.py")[1] + mutants(SOURCE, "more.py")[1]
    drawn = sample(found, 12, seed=3)
    assert drawn == sample(found, 12, seed=3) != sample(found, 12, seed=4)
    assert len({mutant.id for mutant in drawn}) == 12
    assert 4 <= sum(mutant.file == "code.py" for mutant in drawn) <= 8
    assert len(sample(found, 10_000, seed=0)) == len(found)


def test_an_edit_changes_little_of_a_sample():
    one = {mutant.name for mutant in sample(mutants(SOURCE, "code.py")[1], 12, seed=3)}
    edited = mutants(SOURCE.replace("by: float = 1.5", "by: float = 2.5"), "code.py")[1]
    assert len(one & {mutant.name for mutant in sample(edited, 12, seed=3)}) >= 9


def test_comments_and_docstrings_are_not_code():
    assert code(SOURCE) == code("# Said.\n" + SOURCE.replace("Twice 2 * 2.", "Thrice."))
    assert code(SOURCE) != code(SOURCE.replace("LIMIT: float = 2.0", "LIMIT: float = 3.0"))


def test_survivors_are_listed_and_the_dead_are_not():
    found = mutants(SOURCE, "code.py")[1]
    reasons = {found[2].name: "Never read."}
    pairs = joined([(found[0], "survived"), (found[1], "killed"), (found[2], "survived")], reasons)
    assert [status for _, status in pairs] == ["survived", "killed", "equivalent"]
    lines = survivors(pairs, reasons).strip().splitlines()
    assert len(lines) == 6
    assert lines[4].endswith(f"`{found[0].after}` | survived, UNEXPLAINED |")
    assert lines[5].endswith(f"`{found[2].after}` | Never read. |")


def test_a_mutant_that_was_explained_and_is_killed_is_an_error(tmp_path):
    found = mutants(SOURCE, "code.py")[1]
    with pytest.raises(ValueError, match="explained as equivalent, but a test kills"):
        write(tmp_path, [(found[0], "killed")], {found[0].name: "No."}, {"sample": 0})


def test_a_mutant_keeps_its_name_when_lines_are_added_elsewhere():
    names = {mutant.name for mutant in mutants(SOURCE, "code.py")[1]}
    moved = mutants(SOURCE.replace("LIMIT: float", "# More.\n\nLIMIT: float"), "code.py")[1]
    assert {mutant.name for mutant in moved} == names and len(names) == len(moved)


@pytest.mark.long
@pytest.mark.parametrize("folder", ["rl_fn", "bridge/rl_bridge", "bridge/rl_train", "bridge/rl_tools"])
def test_every_explanation_is_of_a_mutant_that_there_is(folder):
    """Stale: the source line was changed, and the argument must be made again (see docs/mutation.md)."""
    package = Package(ROOT / folder, Path(folder).name)
    assert equivalents.stale(equivalents.read(package.package), package.mutants.values()) == []
    assert equivalents.stale([("code.py", "f", "flag", "True", "True", "False", "0")], []) != []


@pytest.mark.parametrize(("entries", "wrong"), [(2, "twice"), (1, "no reason")])
def test_an_explanation_is_given_once(tmp_path, entries, wrong):
    keys = "\n".join(f'{field} = "x"' for field in equivalents.FIELDS)
    reason = "It is." if entries == 2 else " "
    (tmp_path / "rl_fn.toml").write_text(f'[[equivalent]]\n{keys}\nreason = "{reason}"\n' * entries)
    with pytest.raises(ValueError, match=wrong):
        equivalents.read("rl_fn", tmp_path)
