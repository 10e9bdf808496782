"""docs/families.md: every public function, by the file that holds it, and how it is verified.

python -m tests.repository.families    # writes the page
"""

import inspect
from pathlib import Path

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.repository.papers import TESTS_OF_MODULES
from tests.rl_fn.registry import CASES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = """# Families

One row a file of `rl_fn`, written by `python -m tests.repository.families`; a test compares. A folder is a family.

- *laws*: generated tests over the registered cases of each function ([verification](verification.md#laws)).
- *oracle*: an independent float64 version in NumPy (`tests/oracle/`).
- *interop*: the same value and gradient in PyTorch (`tests/bridge/functional/`).

| in `rl_fn/` | functions | verified by |
|---|---|---|
"""


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
        "interop": sorted({case.name for case in cases if case.random}),
    }
    seen = [word + (f" (not {', '.join(rest)})" if rest else "") for word, rest in outside.items()]
    return ", ".join(["laws", *seen])


def page() -> str:
    """The page."""
    rows = [
        f"| `{module.replace('.', '/')}.py` | {', '.join(f'`{n}`' for n in names)} | {verified(module, names)} |"
        for module, names in families().items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
