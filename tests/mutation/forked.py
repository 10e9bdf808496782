"""A fresh process for every mutant: forked from one that has imported the libraries, in a copy of the repository.

rl_bridge keeps programs that it has made of functions, registers rules when it is imported, and starts processes of its
own: its code cannot be exchanged in a living process as rl_fn's is (patch.py). The mutant is written into the copy, the
child imports everything from there, and stops at the first test that fails.
"""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.mutation.worker import ROOT

LIBRARIES = ("numpy", "jax", "jax.numpy", "jaxtyping", "beartype", "hypothesis", "pytest", "torch", "transformers")
# Of each test that many cases before more of any.
CASES = 3
# Chromium and a cluster of Ray do not start in a forked process: their tests would fail without a fault.
ALONE = "not slow and not peers and not ray and not openenv and not browser"
# A child's exit status that no test run has.
BROKEN = 70
# pytest's, where it has collected nothing. Like a process that the system has killed for its memory, it is no verdict.
NO_TESTS = 5
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def imported(path: Path, root: Path) -> set[Path]:
    """Files of the repository that a file imports, as far as its text says."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = name.replace(".", "/")
            for base in (root, root / "bridge"):
                found |= {p for p in (base / f"{place}.py", base / place / "__init__.py") if p.exists()}
    return found


class Reach:
    """Which test files reach a file of the package through imports, the nearest first."""

    def __init__(self, root: Path, tests: Path) -> None:
        self.root = root
        self.tests = sorted(tests.rglob("test_*.py"))
        self.imports: dict[Path, set[Path]] = {}

    def _imports(self, path: Path) -> set[Path]:
        if path not in self.imports:
            self.imports[path] = imported(path, self.root)
            # A test has the fixtures of the conftest.py files above it.
            if path.name.startswith("test_"):
                above = [
                    folder / "conftest.py" for folder in path.parents if folder.is_relative_to(self.root / "tests")
                ]
                self.imports[path] |= {p for p in above if p.exists()}
        return self.imports[path]

    def distance(self, test: Path, file: Path) -> int | None:
        seen, level, steps = {test}, {test}, 0
        while level:
            if file in level:
                return steps
            level = {p for path in level for p in self._imports(path)} - seen
            seen |= level
            steps += 1
        return None

    def of(self, file: Path) -> list[str]:
        """Test files, nearest first; of equally near ones first those of a folder or a file of the same name."""
        words = {file.stem, file.parent.name}
        found = []
        for test in self.tests:
            if (steps := self.distance(test, file)) is not None:
                alike = len(words & {test.parent.name, *test.stem.split("_")})
                found.append((steps - alike, steps, test.relative_to(self.root).as_posix()))
        return [name for *_, name in sorted(found)]


def words_of(tree: ast.Module, owner: str, file: str) -> list[set[str]]:
    """What tests of a mutant may be named after: its function and the primitives this is the rule of; its file."""
    name = owner.split(".")[-1].strip("_").lower()
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == owner]
    registered = [call for node in definitions for call in node.decorator_list if isinstance(call, ast.Call)]
    texts = {x.value for call in registered for x in call.args if isinstance(x, ast.Constant)}
    # `from` is in the name of most tests, for from_jax.
    return [{name, *map(str, texts)} - {"", "init", "from"}, {Path(file).stem.strip("_")}]


def ordered(names: Sequence[str], words: Sequence[set[str]]) -> list[int]:
    """Tests named after the words come first, then some cases of every test, then the others in their order."""
    seen: dict[str, int] = {}

    def rank(number: int) -> tuple[int, bool, int]:
        name = names[number]
        level = next(
            (i for i, some in enumerate(words) if any(re.search(rf"(?<![A-Za-z]){w}(?![A-Za-z])", name) for w in some)),
            len(words),
        )
        test = f"{level} {name.split('[')[0]}"
        seen[test] = seen.get(test, 0) + 1
        return level, seen[test] > CASES, number

    return [number for *_, number in sorted(map(rank, range(len(names))))]


class Plugin:
    """Orders the tests; writes the first that fails, and how many have run, where the parent reads it."""

    def __init__(self, path: Path, words: Sequence[set[str]]) -> None:
        self.path, self.words, self.ran = path, words, 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [items[number] for number in ordered([item.nodeid for item in items], self.words)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.ran += 1
        if report.failed:
            self.path.write_text(f"{report.nodeid}\n{self.ran}", encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(f"{report.nodeid or 'collection'}\n{self.ran}", encoding="utf-8")

    def pytest_sessionfinish(self) -> None:
        if not self.path.exists():
            self.path.write_text(f"\n{self.ran}", encoding="utf-8")


def copy(folder: Path) -> None:
    """The repository's files, tracked or not, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _child(tests: list[str], words: Sequence[set[str]], outcome: Path, log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "rl_fn", "rl_bridge", "rl_kernels")]:
        del sys.modules[name]
    import pytest

    options = ["-q", "-x", "-m", ALONE, "--no-header", "-p", "no:xdist"]
    # The libraries are imported before pytest could rewrite their assertions.
    options.append("-Wignore::pytest.PytestAssertRewriteWarning")
    code = pytest.main([*options, *tests], plugins=[Plugin(outcome, words)])
    os._exit(int(code))


def verdict(code: int | None) -> str:
    """What a test run's exit status says of the fault; None is a run that its time limit ended."""
    if code in (BROKEN, NO_TESTS, -signal.SIGKILL):
        raise ValueError(f"no verdict from exit status {code}")
    return "survived" if code in (0, None) else "killed"


class Server:
    """Runs the tests of one mutant after another, each in a forked process; see serve."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self.reach = Reach(folder, folder / "tests" / "bridge")
        self.stamp = int(time.time())

    def write(self, path: Path, text: str) -> None:
        """Every version has a time of its own: compiled files of an older one do not pass for it."""
        path.write_text(text, encoding="utf-8")
        self.stamp += 2
        os.utime(path, (self.stamp, self.stamp))

    def run(
        self, file: str, source: str, owner: str, seconds: float, first: Sequence[str] = ()
    ) -> tuple[str, str, float, int]:
        """Status, the test that failed first, seconds by the clock, how many tests ran; the files ``first`` first."""
        path = self.folder / self.package / file
        original = path.read_text(encoding="utf-8")
        doctests = [path.relative_to(self.folder).as_posix()] if ">>>" in original else []
        near = self.reach.of(path)
        chosen = [*doctests, *(test for test in first if test in near), *(test for test in near if test not in first)]
        if not chosen:
            return "uncovered", "", 0.0, 0
        words = words_of(ast.parse(original), owner, file)
        outcome, log = self.folder / "outcome.txt", self.folder / "log.txt"
        outcome.unlink(missing_ok=True)
        begun = time.monotonic()
        self.write(path, source)
        try:
            child = os.fork()
            if child == 0:
                try:
                    _child(chosen, words, outcome, log)
                except BaseException:
                    traceback.print_exc(file=sys.__stderr__)
                finally:
                    os._exit(BROKEN)
            code = self._wait(child, begun + seconds)
        finally:
            self.write(path, original)
        try:
            status = verdict(code)
        except ValueError as error:
            raise RuntimeError(f"the tests of {file}: {error}: {log.read_text(encoding='utf-8')}") from error
        by, ran = (outcome.read_text(encoding="utf-8").split("\n") if outcome.exists() else ["", "0"])[:2]
        return status, by if status == "killed" else "", time.monotonic() - begun, int(ran)

    def _wait(self, child: int, until: float) -> int | None:
        while time.monotonic() < until:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def serve(connection: Connection, package: str, compiled: str) -> None:
    """Entry point of the process that forks: the libraries imported, no JAX backend started, nothing of ours loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(19)
    with tempfile.TemporaryDirectory(prefix="rl-fn-mutation-") as temporary:
        folder = Path(temporary).resolve()
        copy(folder)
        os.chdir(folder)
        here = {str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), ""}
        sys.path[:] = [
            str(folder),
            str(folder / "kernels"),
            str(folder / "bridge"),
            *(p for p in sys.path if p not in here),
        ]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
        # conftest.py tries XLA's flags in a process of its own, except in a worker of pytest-xdist.
        os.environ |= {"PYTEST_XDIST_WORKER": "gw0", "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        os.environ |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TRITON_INTERPRET", "1")
        for name in LIBRARIES:
            __import__(name)
        server = Server(folder, package)
        connection.send("ready")
        while (request := connection.recv()) is not None:
            try:
                connection.send(server.run(*request))
            except Exception as error:
                connection.send(("broken", str(error), 0.0, 0))
