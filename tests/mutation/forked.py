"""A fresh process for every mutant: forked from one that has imported the libraries, in a copy of the repository.

rl_bridge keeps programs that it has made of functions, registers rules when it is imported, and starts processes of its
own: its code cannot be exchanged in a living process as rl_fn's is (patch.py). The mutant is written into the copy, the
child imports everything from there, and stops at the first test that fails. That test is then run alone, without the
mutant and with it: a test that fails without it, or passes with it, has killed nothing, and the others go on.
"""

import ast
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.mutation.entered import Entered
from tests.mutation.worker import ROOT

LIBRARIES = ("numpy", "jax", "jax.numpy", "jaxtyping", "beartype", "hypothesis", "pytest", "torch", "transformers")
# Of each test that many cases before more of any.
CASES = 3
# Test files of one process: collecting all that reach a file costs more than most tests, and most kills are near.
NEAR, STAGE = 2, 6
# Tests of one process, where a record says which tests run a line.
FIRST_TESTS, MORE_TESTS = 16, 60
# A test alone has ALONE_SECONDS; with the mutant it hangs after SLOWER times what it took without, and HANG_SECONDS.
ALONE_SECONDS, SLOWER, HANG_SECONDS = 240.0, 10.0, 20.0
# Limits are of processor time, which a busy machine gives out slowly: at most BUSY times as long by the clock.
# Processes that use none for IDLE_SECONDS by the clock wait for what does not come.
BUSY, IDLE_SECONDS = 20.0, 60.0
# Chromium and a cluster of Ray do not start in a forked process: their tests would fail without a fault.
ALONE = "not slow and not peers and not ray and not openenv and not browser"
# A child's exit status that no test run has.
BROKEN = 70
# pytest's, where it has collected nothing. Like a process that the system has killed for its memory, it is no verdict.
NO_TESTS = 5
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


DOTTED = re.compile(r"(\w+(?:\.\w+)+)(?::\w+)?")


def imported(path: Path, root: Path) -> set[Path]:
    """Files of the repository that a file imports, as far as its text says: by statements or by a name in a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := DOTTED.fullmatch(node.value)):
            names = [named[1]]
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
        """Test files, nearest first; every folder or name of a file that is the same counts as a step less.

        Of equals the file's namesake comes first.
        """
        words = {file.stem, *file.relative_to(self.root).parent.parts}
        found = []
        for test in self.tests:
            if (steps := self.distance(test, file)) is not None:
                alike = len(words & {*test.relative_to(self.root).parent.parts, *test.stem.split("_")})
                other = test.stem != f"test_{file.stem}"
                found.append((steps - alike, other, steps, test.relative_to(self.root).as_posix()))
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


@dataclasses.dataclass
class Outcome:
    """What a run of tests came to. failed: the first test or file that did. running: the test that it was at, since.

    took: seconds of processor time.
    """

    failed: str = ""
    running: str = ""
    since: float = 0.0
    ran: int = 0
    code: int | None = None
    took: float = 0.0


def processor_seconds(session: int) -> float:
    """What the processes of a session have used and the children that they have waited for; elsewhere the clock's."""
    if not Path("/proc/self/stat").exists():
        return time.monotonic()
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return total / os.sysconf("SC_CLK_TCK")


class Plugin:
    """Orders the tests and says where the parent reads it which one runs, which failed first and how many have run."""

    def __init__(self, path: Path, words: Sequence[set[str]], without: Sequence[str] = ()) -> None:
        self.path, self.words, self.without = path, words, set(without)
        self.outcome = Outcome()

    def write(self) -> None:
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(dataclasses.asdict(self.outcome)), encoding="utf-8")
        temporary.replace(self.path)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [items[number] for number in ordered([item.nodeid for item in items], self.words)]
        items[:] = [item for item in items if item.nodeid not in self.without]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome.running, self.outcome.since = nodeid, time.time()
        self.write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.outcome.ran += report.when == "call"
        self.outcome.failed = self.outcome.failed or (report.nodeid if report.failed else "")

    def pytest_runtest_logfinish(self) -> None:
        self.outcome.running = ""
        self.write()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcome.failed = self.outcome.failed or report.nodeid
            self.write()


def stages(files: Sequence[str], first: int = NEAR, more: int = STAGE) -> Iterator[Sequence[str]]:
    yield files[:first]
    for start in range(first, len(files), more):
        yield files[start : start + more]


def of_each_some(tests: Sequence[str]) -> list[str]:
    """Some cases of every test before more of any, else as they are."""
    seen: dict[str, int] = {}

    def rank(number: int) -> tuple[bool, int]:
        test = tests[number].split("[")[0]
        seen[test] = seen.get(test, 0) + 1
        return seen[test] > CASES, number

    return [tests[number] for *_, number in sorted(map(rank, range(len(tests))))]


def copy(folder: Path, root: Path = ROOT) -> None:
    """The repository's files, tracked or not, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


OURS = ("tests", "rl_fn", "rl_bridge", "rl_kernels", "rl_train", "rl_tools")
IMPORTS = f"""
import contextlib, importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
    with contextlib.suppress(ImportError):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(*sorted(name for name in sys.modules if name.split(".")[0] not in {("__main__", *OURS)!r}))
"""


def third_party(package: str) -> list[str]:
    """Modules of other libraries that the package imports: the parent has them once for all children."""
    found = subprocess.run([sys.executable, "-c", IMPORTS, package], check=True, capture_output=True, text=True)
    return found.stdout.split()


def _child(arguments: Sequence[str], plugin: Plugin, log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    import pytest

    options = ["-q", "-x", "-m", ALONE, "--no-header", "-p", "no:xdist"]
    # The libraries are imported before pytest could rewrite their assertions.
    options.append("-Wignore::pytest.PytestAssertRewriteWarning")
    os._exit(int(pytest.main([*options, *arguments], plugins=[plugin])))


def blamed(outcome: Outcome, first: str) -> str:
    """The test, or the file that could not be collected, that a run ended at; nothing where all passed.

    A process that dies is the fault of the test that ran, one that its time limit ended only if that test hung. Without
    any test it was the collection of the ``first`` file.
    """
    if outcome.code in (BROKEN, -signal.SIGKILL):
        raise ValueError(f"no verdict from exit status {outcome.code}")
    if outcome.code in (0, NO_TESTS):
        return ""
    if outcome.code is None:
        return outcome.running if time.time() - outcome.since > HANG_SECONDS else ""
    return outcome.failed or outcome.running or first


def alone(test: str) -> list[str]:
    """pytest's arguments for a test, or for the collection of a file."""
    return [test] if "::" in test else ["--collect-only", test]


class Server:
    """Runs the tests of one mutant after another, each in a forked process; see serve."""

    def __init__(self, folder: Path, package: str, tests: str = "tests/bridge", record: Path | None = None) -> None:
        self.folder, self.package = folder, package
        self.reach = Reach(folder, folder / tests)
        self.entered = Entered(record, folder) if record is not None else None
        self.stamp = int(time.time())
        # Seconds that a test takes alone without any mutant; None if it does not pass so.
        self.steady: dict[str, float | None] = {}

    def write(self, path: Path, text: str) -> None:
        """Every version has a time of its own: compiled files of an older one do not pass for it."""
        path.write_text(text, encoding="utf-8")
        self.stamp += 2
        os.utime(path, (self.stamp, self.stamp))

    def chosen(self, path: Path, first: Sequence[str], nearest: int) -> list[str]:
        """The file's doctests and the test files that reach it, those of ``first`` first."""
        near = self.reach.of(path)
        near = [*(test for test in first if test in near), *(test for test in near if test not in first)]
        return [*self.doctests(path), *(near[:nearest] if nearest else near)]

    def doctests(self, path: Path) -> list[str]:
        """The file itself where it has some."""
        return [path.relative_to(self.folder).as_posix()] if ">>>" in path.read_text(encoding="utf-8") else []

    def recorded(self, path: Path, line: int, first: Sequence[str]) -> list[str]:
        """Doctests and recorded tests that run the line; behind the first of these, test files newer than the record.

        A whole file takes longer than the recorded tests, which kill most.
        """
        if self.entered is None or not line:
            return []
        name = path.relative_to(self.folder).as_posix()
        tests = of_each_some(self.entered.of(name, path.read_text(encoding="utf-8"), line))
        tests = sorted(tests, key=lambda test: test.split("::")[0] not in first)
        newer = [file for file in self.reach.of(path) if not self.entered.is_same(file)]
        return [*self.doctests(path), *tests[:FIRST_TESTS], *newer, *tests[FIRST_TESTS:]] if tests else []

    def run(
        self,
        file: str,
        source: str,
        owner: str,
        seconds: float,
        first: Sequence[str] = (),
        nearest: int = 0,
        line: int = 0,
    ) -> tuple[str, str, float, int, list[str]]:
        """Status, the test that kills alone, seconds by the clock, how many tests ran, the files whose tests did.

        ``seconds``: of processor time, for a mutant that survives. The files ``first`` come first; with ``nearest``
        only so many of the files that reach the mutant's are run. Where a record says which tests run the ``line``,
        those are run instead.
        """
        path = self.folder / self.package / file
        original = path.read_text(encoding="utf-8")
        tests = self.recorded(path, line, first)
        chosen = tests or self.chosen(path, first, nearest)
        if not chosen:
            return "uncovered", "", 0.0, 0, []
        # Recorded tests are in their order, and a test of this process is named after nothing.
        words = () if tests else words_of(ast.parse(original), owner, file)
        begun, ran, spent = time.monotonic(), 0, 0.0
        without: list[str] = []
        used: list[str] = []
        for files in stages(chosen, FIRST_TESTS, MORE_TESTS) if tests else stages(chosen):
            used += sorted({name.split("::")[0] for name in files} - set(used)) if spent < seconds else []
            while files and (left := seconds - spent) > 0:
                with self.mutated(path, original, source):
                    outcome = self.tests(files, left, words, without)
                ran, spent = ran + outcome.ran, spent + outcome.took
                if not (by := blamed(outcome, files[0])):
                    break
                if status := self.confirmed(by, path, original, source):
                    return status, by, time.monotonic() - begun, ran, used
                without.append(by)
                files = [file for file in files if file != by]
        if not ran:
            raise ValueError(f"no verdict: no test of {file} ran")
        return "survived", "", time.monotonic() - begun, ran, used

    @contextlib.contextmanager
    def mutated(self, path: Path, original: str, source: str) -> Iterator[None]:
        self.write(path, source)
        try:
            yield
        finally:
            self.write(path, original)

    def confirmed(self, by: str, path: Path, original: str, source: str) -> str:
        """The status if the test passes alone without the mutant and fails, or hangs, alone with it; else nothing."""
        if by not in self.steady:
            outcome = self.tests(alone(by), ALONE_SECONDS)
            self.steady[by] = outcome.took if outcome.code == 0 else None
        if (took := self.steady[by]) is None:
            return ""
        with self.mutated(path, original, source):
            outcome = self.tests(alone(by), HANG_SECONDS + SLOWER * took)
        if outcome.code is None:
            return "timeout"
        # A name that the mutant's parameters do not have is pytest's error, not the test's.
        failed = outcome.failed or outcome.running or ("::" not in by and outcome.code)
        return "killed" if outcome.code and failed else ""

    def tests(
        self, arguments: Sequence[str], seconds: float, words: Sequence[set[str]] = (), without: Sequence[str] = ()
    ) -> Outcome:
        """The outcome of pytest with these arguments, in a forked process of at most so many processor seconds."""
        path, log = self.folder / "outcome.json", self.folder / "log.txt"
        path.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                _child(arguments, Plugin(path, words, without), log)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(BROKEN)
        code, took = self._wait(child, seconds)
        outcome = Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Outcome()
        return dataclasses.replace(outcome, code=code, took=took)

    def _wait(self, child: int, seconds: float) -> tuple[int | None, float]:
        """The exit status, None of one that was ended here, and the processor time that was used."""
        begun = moved = looked = time.monotonic()
        used, now = 0.0, begun
        while used < seconds and now < begun + BUSY * seconds and now < moved + IDLE_SECONDS:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            time.sleep(0.05)
            now = time.monotonic()
            if now > looked + 1.0:
                looked, before, used = now, used, processor_seconds(child)
                moved = now if used > before else moved
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None, used


def serve(connection: Connection, package: str, compiled: str, record: Path) -> None:
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
        for name in third_party(Path(package).name):
            with contextlib.suppress(ImportError):
                __import__(name)
        server = Server(folder, package, record=record)
        connection.send("ready")
        while (request := connection.recv()) is not None:
            try:
                connection.send(server.run(*request))
            except Exception as error:
                connection.send(("broken", str(error), 0.0, 0, []))
