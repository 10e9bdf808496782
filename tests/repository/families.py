"""README.md's table of rl_fn: every public name, by the file that holds it, and how it is verified.

python -m tests.repository.families    # writes it anew
"""

import inspect
from pathlib import Path

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.repository.papers import TESTS_OF_MODULES
from tests.rl_fn.registry import CASES

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- families: python -m tests.repository.families -->\n", "<!-- end of families -->"


def families() -> dict[str, list[str]]:
    """Public functions by module, in the order of the modules' names; types go with the functions that return them."""
    found: dict[str, list[str]] = {}
    for name in rl_fn.__all__:
        x = getattr(rl_fn, name)
        if inspect.isfunction(x):
            found.setdefault(x.__module__.removeprefix("rl_fn."), []).append(name)
    return dict(sorted(found.items()))


def verified(module: str, names: list[str]) -> str:
    """Which generated tests see all functions of a family."""
    for prefix, test in TESTS_OF_MODULES.items():
        if f"rl_fn.{module}".startswith(prefix):
            return f"`{test}.py`"
    cases = [case for case in CASES.values() if case.name in names]
    assert {case.name for case in cases} == set(names)
    outside = {
        "oracle": sorted(set(names) - set(ORACLE)),
        "seam": sorted({case.name for case in cases if case.random}),
    }
    seen = [word + (f" (not {', '.join(rest)})" if rest else "") for word, rest in outside.items()]
    return ", ".join([f"laws ({len(cases)} cases)", *seen])


def table() -> str:
    """The table, with a line of totals."""
    groups = families()
    count = sum(map(len, groups.values()))
    lines = [
        f"{count} public functions in {len(groups)} families, {len(CASES)} registered cases.",
        "",
        "| in `rl_fn/` | functions | verified by |",
        "|---|---|---|",
    ]
    for module, names in groups.items():
        lines.append(
            f"| `{module.replace('.', '/')}.py` | {', '.join(f'`{n}`' for n in names)} | {verified(module, names)} |"
        )
    return "\n".join(lines) + "\n"


def parts() -> tuple[str, str, str]:
    """README.md before, between and after the two marks."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    between, after = rest.split(END)
    return before + BEGIN, between, END + after


if __name__ == "__main__":
    first, _, last = parts()
    README.write_text(first + table() + last, encoding="utf-8")
