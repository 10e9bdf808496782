"""Which tests enter which block of a package: recorded once, so that a mutant meets the tests that run it.

Files that import each other say little: most tests of a bridge reach most of its files. A copy of the repository has a
call at the beginning of every block (the body of a function, of a branch, of a loop). The tests run there once, and
each process writes down which blocks it enters during which test; processes that tests start do so too.

    python -m tests.mutation --package rl_bridge --record    # about as long as the tests take
"""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = "RL_FN_ENTERED"
"""The folder that processes write to, in the environment: a file for each process."""
MARK = "_rl_fn_entered"
# sitecustomize.py of the copy: in every Python process before anything else. What a process has written it does not
# write again; a forked one has a file of its own.
HOOK = f'''
import builtins, os

folder, seen, file = os.environ.get("{RECORDS}"), set(), None

def enter(block, test=os.environ._data.get, name=os.environ.encodekey("PYTEST_CURRENT_TEST")):
    global file
    pair = block, test(name)
    if pair not in seen:
        seen.add(pair)
        if pair[1] is not None and folder is not None:
            if file is None:
                file = os.open(f"{{folder}}/{{os.getpid()}}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, block.encode() + b"\\t" + pair[1].rsplit(b" (", 1)[0].replace(b"\\n", b" ") + b"\\n")

def forked():
    global file
    file = None
    seen.clear()

builtins.{MARK} = enter
os.register_at_fork(after_in_child=forked)
'''
# A test that takes a second, or enters many blocks, comes after one that is quick and about few.
SECONDS_OF_ANY = 0.3
MOST = 300
"""Tests of a block that are listed."""


def blocks(tree: ast.Module) -> Iterator[tuple[int, int, int]]:
    """First and last line of each block, and the column of its lines; what stands on its header's line is no block."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.Module | ast.Lambda):
            continue
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inside = getattr(node, name, None)
            if not isinstance(inside, list) or not inside or not isinstance(inside[0], ast.stmt):
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
                inside = inside[1:]
            if inside and not _is_of_elif(node, name, inside):
                first = min([inside[0].lineno, *(x.lineno for x in getattr(inside[0], "decorator_list", []))])
                yield first, inside[-1].end_lineno or first, inside[0].col_offset


def _is_of_elif(node: ast.AST, name: str, inside: Sequence[ast.stmt]) -> bool:
    """`elif` is an `if` in the other's `orelse`, at a place where no line can be put."""
    return isinstance(node, ast.If) and name == "orelse" and isinstance(inside[0], ast.If)


def marked(source: str, file: str) -> str:
    """The source with a call at the beginning of every block; where nothing listens, the call is one of `str`."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    for first, _, column in sorted(set(blocks(tree)), reverse=True):
        line = lines[first - 1].encode()
        if not line[:column].strip():
            lines.insert(first - 1, line[:column].decode() + f"{MARK}({f'{file}:{first}'!r})\n")
    imports = [n for n in tree.body if not isinstance(n, ast.Expr) and getattr(n, "module", None) != "__future__"]
    if imports:
        first = min([imports[0].lineno, *(x.lineno for x in getattr(imports[0], "decorator_list", []))])
        lines.insert(first - 1, f'import builtins; {MARK} = getattr(builtins, "{MARK}", str)\n')
    return "".join(lines)


def block_of(source: str, line: int) -> list[int]:
    """First lines of the blocks around a line, the innermost first."""
    around = [(last - first, first) for first, last, _ in blocks(ast.parse(source)) if first <= line <= last]
    return [first for _, first in sorted(around)]


class Times:
    """A plugin of the controller: the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: Any) -> None:
        if not hasattr(session.config, "workerinput"):
            Path(os.environ[RECORDS], "seconds.json").write_text(json.dumps(self.seconds), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """This module is given to pytest by its name."""
    config.pluginmanager.register(Times())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def record(root: Path, package: str, tests: Sequence[str], processes: int, out: Path) -> None:
    """Run the tests in a copy whose package (a folder) is marked, and write which of them enter which block.

    Tests that fail there, because they look at the source or at what a compiler makes of it, are recorded all the same.
    """
    from tests.mutation.forked import ALONE, copy
    from tests.mutation.supervise import write_atomically

    with tempfile.TemporaryDirectory(prefix="rl-fn-entered-") as temporary:
        folder, records = Path(temporary).resolve() / "tree", Path(temporary).resolve() / "records"
        records.mkdir()
        copy(folder, root)
        files = {
            path.relative_to(folder).as_posix(): _digest(path) for path in sorted((folder / package).rglob("*.py"))
        }
        files |= {p.relative_to(folder).as_posix(): _digest(p) for p in sorted((folder / "tests").rglob("*.py"))}
        for path in (folder / package).rglob("*.py"):
            name = path.relative_to(folder).as_posix()
            path.write_text(marked(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        shutil.copy2(__file__, folder / f"{MARK}_times.py")
        paths = [str(folder / name) for name in ("", "kernels", "bridge")]
        # A run of pytest that this one is in does not count.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {RECORDS: str(records), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", f"{MARK}_times", "-m", ALONE, "--tb=line"]
        command += ["-p", "no:cacheprovider", "-n", str(processes), "--dist", "worksteal", *tests]
        subprocess.run(command, cwd=folder, env=environment)
        entered: dict[str, set[str]] = defaultdict(set)
        for path in records.glob("*.txt"):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                block, _, test = line.partition("\t")
                entered[block].add(test)
        seconds = json.loads((records / "seconds.json").read_text(encoding="utf-8"))
        write_atomically(out, json.dumps({"files": files, **tables(entered, seconds)}))


def tables(entered: Mapping[str, set[str]], seconds: Mapping[str, float]) -> dict[str, Any]:
    """For every block the numbers of its tests, the quickest and those about few blocks first.

    >>> tables({"a.py:1": {"t::x", "t::y"}, "a.py:5": {"t::x"}}, {"t::x": 0.1, "t::y": 0.1})["blocks"]
    {'a.py:1': [1, 0], 'a.py:5': [0]}
    """
    about: dict[str, int] = defaultdict(int)
    for tests in entered.values():
        for test in tests:
            about[test] += 1
    names = sorted(set(about) & set(seconds))
    number = {name: i for i, name in enumerate(names)}
    cost = {name: about[name] * (seconds[name] + SECONDS_OF_ANY) for name in names}
    listed = {
        block: [number[test] for test in sorted(tests & number.keys(), key=lambda test: (cost[test], test))[:MOST]]
        for block, tests in sorted(entered.items())
    }
    return {"tests": names, "blocks": listed}


class Entered:
    """A record: the tests of a line, as far as source and tests are as they were."""

    def __init__(self, path: Path, root: Path) -> None:
        self.root, self.path = root, path
        data = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"files": {}, "tests": [], "blocks": {}}
        )
        self.files, self.tests, self.blocks = data["files"], data["tests"], data["blocks"]
        self.same: dict[str, bool] = {}

    def is_same(self, name: str) -> bool:
        """Whether the file is as it was recorded."""
        if name not in self.same:
            path = self.root / name
            self.same[name] = path.exists() and self.files.get(name) == _digest(path)
        return self.same[name]

    def of(self, file: str, source: str, line: int) -> list[str]:
        """Tests that enter the innermost block around the line which any test enters; none for lines in no block."""
        if not self.is_same(file):
            return []
        for first in block_of(source, line):
            if tests := self.blocks.get(f"{file}:{first}"):
                return [name for name in (self.tests[i] for i in tests) if self.is_same(name.split("::")[0])]
        return []
