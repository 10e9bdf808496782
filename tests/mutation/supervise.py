"""Hands mutants to warm processes, ends the ones that hang, and keeps every result."""

import ast
import hashlib
import json
import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.mutation import forked
from tests.mutation.mutants import Mutant
from tests.mutation.patch import Package
from tests.mutation.worker import ROOT, serve

# The tests of rl_fn: its own folder and the doctests.
PATHS = ("tests/rl_fn", "rl_fn")
# Processor time of the worker; on a busy machine that is many times as long by the clock, up to BUSY times.
HANG_SECONDS, BUSY = 120.0, 20.0
GROUP = 30
# Processor time for a mutant that survives.
Budget = Callable[[Mutant], float]


def code(text: str) -> str:
    """A source without comments, docstrings and positions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def digest(paths: Iterable[Path], *, docstrings: bool = False) -> str:
    """What files do; with `docstrings`, what they say too."""
    total = hashlib.sha256()
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8")
        total.update(f"{path.relative_to(ROOT)}\0{text if docstrings else code(text)}".encode())
    return total.hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def processor_seconds(pid: int) -> float:
    """What a process has used; on a system that does not say, the clock's time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """One process and the pipe to it."""

    def __init__(self, number: int, examples: int, compiled: Path) -> None:
        self.number = number
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        log = str(Path(tempfile.gettempdir()) / f"mutation-{os.getpid()}-{number}.log")
        self.process = context.Process(
            target=serve, args=(child, list(PATHS), examples, str(compiled), log), daemon=True
        )
        self.process.start()
        child.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        try:
            self.items: list[str] = self.connection.recv()[1]
        except EOFError:
            raise RuntimeError(f"the tests could not be collected; see {log}") from None

    def ask(self, *request: Any, seconds: float = HANG_SECONDS) -> Any:
        """The answer, or None if there is none in time (the process is then ended)."""
        self.connection.send(request)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        begun, used = time.monotonic(), processor_seconds(self.pid)
        try:
            while processor_seconds(self.pid) - used < seconds and time.monotonic() - begun < BUSY * seconds:
                if self.connection.poll(1.0):
                    return self.connection.recv()
        except (EOFError, ConnectionResetError):
            pass  # The process died, which a mutant can bring about; the caller sees None.
        self.stop()
        return None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


class Store:
    """Results on disk, valid as long as the files they were made from are unchanged."""

    def __init__(self, path: Path, folder: Path = ROOT / "rl_fn", tests: Path = ROOT / "tests/rl_fn") -> None:
        self.path = path
        self.record = path.with_name("entered.json")
        self.data: dict[str, Any] = {"results": {}}
        if path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
        self.keys: dict[str, str] = {}
        self.sources = {p.relative_to(folder).as_posix(): digest([p]) for p in folder.rglob("*.py")}
        self.of_rl_fn = tests == ROOT / "tests/rl_fn"
        support = [*(ROOT / "tests/oracle").glob("*.py"), *(ROOT / "tests/rl_fn/cases").glob("*.py")]
        support += [p for p in sorted((ROOT / "tests/rl_fn").glob("*.py")) if not p.name.startswith("test_")]
        self.support = digest(support) if self.of_rl_fn else ""
        self.all_tests = digest(tests.rglob("*.py")) + self.support

    def _helpers(self, path: Path) -> str:
        """The files of tests that a test file imports, directly or not; those of rl_fn share theirs."""
        if self.of_rl_fn:
            return self.support
        found, waiting = set(), [path]
        while waiting:
            near = {p for p in forked.imported(waiting.pop(), ROOT) if p.is_relative_to(ROOT / "tests")} - found
            found |= near
            waiting += near
        return digest(found | {p for p in (folder / "conftest.py" for folder in path.parents) if p.exists()})

    def test_key(self, nodeid: str) -> str:
        name = nodeid.split("::")[0]
        if name not in self.keys:
            path = ROOT / name
            self.keys[name] = digest([path], docstrings=not path.name.startswith("test_")) + self._helpers(path)
        return self.keys[name]

    def save(self) -> None:
        write_atomically(self.path, json.dumps(self.data))

    def result(self, mutant: Mutant, seconds: float = 0.0) -> dict[str, Any] | None:
        """A kill holds while its source and the test are the same, a survival of `seconds` while all that ran are.

        A new test can only kill more, so it does not end a survival unless its file was among those that ran.
        """
        entry = self.data["results"].get("|".join(mutant.name))
        if entry is None or entry["source"] != self.sources[mutant.file]:
            return None
        if entry["by"] and (ROOT / entry["by"].split("::")[0]).exists():
            return entry if entry["test"] == self.test_key(entry["by"]) else None
        ran = self._survived_by(entry.get("files", []))
        return entry if entry["test"] == ran and entry["budget"] >= seconds else None

    def _survived_by(self, files: Iterable[str]) -> str:
        """The tests of these files that are there; of none, all tests."""
        keys = [self.test_key(file) for file in files if (ROOT / file).exists()]
        return hashlib.sha256("".join(keys).encode()).hexdigest()[:16] if keys else self.all_tests

    def put(
        self,
        mutant: Mutant,
        status: str,
        by: str,
        seconds: float,
        ran: int,
        budget: float,
        files: Iterable[str] = (),
    ) -> None:
        """Keep a result. ``files``: whose tests ran."""
        key = self.test_key(by) if by else self._survived_by(files)
        entry = {"files": [] if by else list(files)} | {
            "status": status,
            "by": by,
            "seconds": round(seconds, 3),
            "ran": ran,
            "test": key,
            "budget": budget,
        }
        self.data["results"]["|".join(mutant.name)] = entry | {"source": self.sources[mutant.file]}

    def killers(self, file: str) -> list[str]:
        """Test files that killed mutants of this file, the most frequent first."""
        results = self.data["results"].items()
        of_file = [entry for name, entry in results if name.split("|", 1)[0] == file and entry["by"]]
        counts = Counter(entry["by"].split("::")[0] for entry in of_file)
        return [test for test, _ in counts.most_common()]


def groups_of(mutants: list[Mutant]) -> Iterator[list[Mutant]]:
    """Neighbours together, so that the test that killed one is tried first on the next."""
    # Shared helpers last: almost every test concerns them, and a process has compiled most of it by then.
    for file in sorted({mutant.file for mutant in mutants}, key=lambda name: (name.startswith("_"), name)):
        members = sorted((m for m in mutants if m.file == file), key=lambda m: (m.line, m.column))
        for start in range(0, len(members), GROUP):
            yield members[start : start + GROUP]


class Crew:
    """Threads that each drive one process through groups of mutants until none is left."""

    def __init__(self, store: Store, examples: int, budget: Budget, progress: tqdm) -> None:
        self.store, self.examples, self.budget, self.progress = store, examples, budget, progress
        self.stopping = threading.Event()
        self.unsteady: set[str] = set()

    def fresh(self, number: int) -> Worker:
        worker = Worker(number, self.examples, self.store.path.with_name("compiled"))
        worker.ask("avoid", self.unsteady)
        return worker

    def drive(self, worker: Worker, groups: queue.SimpleQueue[list[Mutant]]) -> None:
        try:
            while not self.stopping.is_set():
                try:
                    group = groups.get_nowait()
                except queue.Empty:
                    return
                worker = self.group(worker, group)
        finally:
            worker.stop()

    def group(self, worker: Worker, group: list[Mutant]) -> Worker:
        """The results count only if the tests that killed pass again on the unmutated code, in the same process."""
        done: list[tuple[Mutant, str, str, float, int]] = []
        for mutant in group:
            if self.stopping.is_set():
                break
            answer = worker.ask("run", mutant.id, self.budget(mutant))
            if answer is None:
                worker = self.fresh(worker.number)
                answer = ("timeout", "", HANG_SECONDS, 0)
            status, by, seconds, ran = answer
            done.append((mutant, status, by, seconds, ran))
            self.progress.update()
        killers = sorted({by for _, _, by, _, _ in done if by})
        failing = worker.ask("check", killers, seconds=HANG_SECONDS + 10 * len(killers))
        if failing:
            worker.stop()
            worker = self.fresh(worker.number)
            # Those that fail in a new process too tell nothing; the others failed for what a mutant left behind.
            self.unsteady |= set(worker.ask("check", failing) or failing)
            worker.ask("avoid", self.unsteady)
        elif failing is None:
            worker = self.fresh(worker.number)
        for mutant, status, by, seconds, ran in done:
            if by not in (failing or ()):
                self.store.put(mutant, status, by, seconds, ran, self.budget(mutant))
        self.store.save()
        return worker


class Forks:
    """Threads that each have one process fork a child for every mutant (forked.py), until none is left."""

    def __init__(self, package: Package, store: Store, budget: Budget, nearest: int, progress: tqdm) -> None:
        self.package, self.store, self.budget, self.progress = package, store, budget, progress
        self.nearest = nearest
        self.lock, self.stopping = threading.Lock(), threading.Event()

    def drive(self, waiting: queue.SimpleQueue[Mutant]) -> None:
        context = multiprocessing.get_context("spawn")
        connection, child = context.Pipe()
        folder = self.package.folder.relative_to(ROOT).as_posix()
        compiled = str(self.store.path.with_name("compiled"))
        process = context.Process(target=forked.serve, args=(child, folder, compiled, self.store.record), daemon=True)
        process.start()
        child.close()
        connection.recv()
        try:
            while not self.stopping.is_set():
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                with self.lock:  # one tree for all threads
                    source = self.package.source(mutant)
                    killers = self.store.killers(mutant.file)
                request = (mutant.file, source, mutant.owner, self.budget(mutant), killers, self.nearest, mutant.runs)
                connection.send(request)
                status, by, seconds, ran, files = connection.recv()
                if status == "broken":  # no verdict, so no result: a later run tries again
                    self.progress.write(f"{mutant.id}: {by}")
                    continue
                with self.lock:
                    self.store.put(mutant, status, by, seconds, ran, self.budget(mutant), files)
                    self.store.save()
                    self.progress.update()
        finally:
            connection.send(None)
            process.join(10)


def run_forked(
    package: Package, mutants: list[Mutant], store: Store, processes: int, budget: Budget, nearest: int = 0
) -> set[str]:
    """Every mutant that has no valid result yet, each in a process of its own."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    todo = [mutant for mutant in mutants if store.result(mutant, budget(mutant)) is None]
    # Those that no run has decided come before those that another tree's tests have.
    for mutant in sorted(todo, key=lambda mutant: "|".join(mutant.name) in store.data["results"]):
        waiting.put(mutant)
    with tqdm(total=len(todo), desc="mutants", mininterval=5) as progress:
        forks = Forks(package, store, budget, nearest, progress)
        threads = [threading.Thread(target=forks.drive, args=(waiting,)) for _ in range(min(processes, len(todo)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            forks.stopping.set()
            for thread in threads:
                thread.join()
            raise
    return {mutant.id for mutant in mutants if store.result(mutant, budget(mutant)) is None}


def run(mutants: list[Mutant], store: Store, processes: int, examples: int, budget: Budget) -> set[str]:
    """Every mutant that has no valid result yet, twice where state was left behind; returns those still without one."""
    for _ in range(2):
        todo = [mutant for mutant in mutants if store.result(mutant, budget(mutant)) is None]
        if not todo:
            break
        groups: queue.SimpleQueue[list[Mutant]] = queue.SimpleQueue()
        for group in groups_of(todo):
            groups.put(group)
        with tqdm(total=len(todo), desc="mutants", mininterval=5) as progress:
            crew = Crew(store, examples, budget, progress)
            workers = [crew.fresh(number) for number in range(processes)]
            threads = [threading.Thread(target=crew.drive, args=(worker, groups)) for worker in workers]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                crew.stopping.set()
                for thread in threads:
                    thread.join()
                raise
    return {mutant.id for mutant in mutants if store.result(mutant, budget(mutant)) is None}
