"""Everything that must hold before a commit lands, in one run: each stage runs, whatever failed before it.

The last lines are a table of the stages and every failing test with its first line of error. A test that passes only
when it is run again is FLAKY: an open fault, which tests/flaky.md lists. The gate is red with more than five of these.

    python .ci/gate.py                 all stages
    python .ci/gate.py test docs       these alone
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAKY = ROOT / "tests" / "flaky.md"
MOST_FLAKY = 5
NOT_RUN = 77
"""Exit status of a stage that says why it cannot run here."""
LIMIT = 3600
"""Seconds of one stage. Its processes then print their stacks, and end."""
MOST_COMPILED = 4 << 30
"""Bytes of compiled programs that are kept from one run to the next."""
BEAT = 120
"""Seconds between two lines that say where a stage is."""

SUBJECT = r"""
subject=$(git log -1 --format=%s)
[ "${#subject}" -le 72 ] || { echo "the commit's subject has ${#subject} characters, at most 72: $subject"; exit 1; }
"""
BROWSER = f"""
if ! command -v chromium >/dev/null; then
  (apt-get update && apt-get install --yes --no-install-recommends chromium) >/dev/null 2>&1 ||
    {{ echo "NOT RUN: make test-browser, for there is no Chromium and none can be installed"; exit {NOT_RUN}; }}
fi
make test-browser
"""
COMMANDS = {
    "subject": SUBJECT,
    "install": "make install",
    "install-vllm": "make install-vllm",
    "lint": "make lint",
    "types": "make types",
    "docs": "make docs",
    "test": "trap 'make durations' EXIT; make test-all",
    "test-vllm": "make test-vllm",
    "test-ray": "make test-ray",
    "test-reasoning": "make test-reasoning",
    "test-openenv": "make test-openenv",
    "test-peers": "make test-peers",
    "test-tools": "make test-tools",
    "test-browser": BROWSER,
    "documented": 'make documented DOCUMENTED="--of README.md --without vllm"',
}
PHASES: list[list[list[str]]] = [
    # Environments wait for the disk and the network, one beside the other.
    [["subject", "install", "lint", "types"], ["install-vllm"]],
    # This one has both cores to itself.
    [["test"]],
    # vLLM's tests are one process on one core; so are the others. One list alone installs into .venv.
    [
        ["test-vllm", "documented", "test-peers"],
        ["docs", "test-reasoning", "test-openenv", "test-ray", "test-tools", "test-browser"],
    ],
]
"""What runs after what. Lists within a phase run beside each other."""


@dataclass
class Stage:
    """One command, and what came of it."""

    name: str
    seconds: float = 0.0
    status: int = 0
    output: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    """Tests, and the first line of what they say."""
    flaky: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """One word or two."""
        if self.status == NOT_RUN:
            return "not run"
        return "passed" if self.status == 0 else "FAILED"


def run(name: str, lock: threading.Lock) -> Stage:
    """Run a stage; its output is printed whole when it has ended."""
    stage, start = Stage(name), time.monotonic()
    with lock:
        print(f"::: {name} begins", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"set -eu\n{COMMANDS[name]}"],
            cwd=ROOT,
            env=os.environ | compiled_programs(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            stage.status = followed(process, name, output, lock)
        except subprocess.TimeoutExpired:
            stage.status = 124
            end(process, f"took longer than {LIMIT} s", output)
        except BaseException:
            end(process, "interrupted", output)
            raise
        output.seek(0)
        stage.output = output.read()
    stage.seconds = time.monotonic() - start
    stage.failed, stage.flaky = tests_of(stage.output)
    with lock:
        print(stage.output.rstrip())
        print(f"::: {name}: {stage.outcome} after {stage.seconds:.0f} s", flush=True)
    return stage


def compiled_programs() -> dict[str, str]:
    """Where the tests keep what XLA has compiled: half of the suite's time, and the next run's on this machine.

    A program is found by its text, XLA's version and its flags. What a processor can do is in the folder's name.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    try:
        features = re.search(r"^flags.*$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        features = None
    if features is None:
        return {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-fn"
    folder = cache / f"xla-{hashlib.sha256(features[0].encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    if sum(file.stat().st_size for file in folder.iterdir()) > MOST_COMPILED:
        shutil.rmtree(folder)
        folder.mkdir()
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def followed(process: subprocess.Popen, name: str, output, lock: threading.Lock) -> int:
    """Wait for the end; say now and then what the last line is."""
    start = time.monotonic()
    while True:
        left = start + LIMIT - time.monotonic()
        try:
            return process.wait(min(BEAT, left))
        except subprocess.TimeoutExpired:
            if left <= BEAT:
                raise
        size = os.fstat(output.fileno()).st_size
        last = os.pread(output.fileno(), 400, max(0, size - 400)).decode(errors="replace").strip().rpartition("\n")[2]
        with lock:
            print(f"::: {name}, {time.monotonic() - start:.0f} s: {last[-120:]}", flush=True)


def end(process: subprocess.Popen, why: str, output) -> None:
    """Pytest prints the stacks of all its threads when it is aborted."""
    print(f"::: {why}: ended", file=output, flush=True)
    for number in (signal.SIGABRT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(5)
    process.wait()


def tests_of(output: str) -> tuple[dict[str, str], list[str]]:
    r"""Failing tests with the first line of their error, and tests that passed when they ran again.

    >>> tests_of("FAILED a.py::b - assert 1\nRERUN a.py::b\nRERUN a.py::c[x y]\nRERUN a.py::c[x y]")
    ({'a.py::b': 'assert 1'}, ['a.py::c[x y]'])
    """
    found = re.findall(r"^(FAILED|ERROR|RERUN) (\S+\.py\S*?(?:::.*?)?)(?: - (.*))?$", output, flags=re.MULTILINE)
    failed = {test: words for kind, test, words in found if kind != "RERUN"}
    again = {test: None for kind, test, _ in found if kind == "RERUN"}
    return failed, [test for test in again if test not in failed]


def lane(names: Sequence[str], stages: list[Stage], lock: threading.Lock) -> None:
    """One after another."""
    for name in names:
        stages.append(run(name, lock))


def listed_as_flaky() -> list[str]:
    """The rows of tests/flaky.md."""
    rows = FLAKY.read_text().splitlines() if FLAKY.exists() else []
    return [row for row in rows if re.match(r"\| \d{4}-", row)]


def main(chosen: Sequence[str]) -> int:
    """Exit status 1 if a stage failed, or too many tests are known to be flaky."""
    if strange := set(chosen) - set(COMMANDS):
        sys.exit(f"no such stage: {', '.join(sorted(strange))}; there are {', '.join(COMMANDS)}")
    stages: list[Stage] = []
    lock, start = threading.Lock(), time.monotonic()
    for phase in PHASES:
        lanes = [[name for name in names if not chosen or name in chosen] for names in phase]
        threads = [threading.Thread(target=lane, args=(names, stages, lock)) for names in lanes if names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with FLAKY.open("a") as file:
        for stage in stages:
            file.writelines(f"| {date.today()} | `{test}` | {stage.name} | not known |\n" for test in stage.flaky)
    red = [stage for stage in stages if stage.outcome == "FAILED"]
    print("\nstage            seconds  outcome")
    for stage in stages:
        counts = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", stage.output, flags=re.MULTILINE)
        print(f"{stage.name:16} {stage.seconds:7.0f}  {stage.outcome:8} {counts[-1] if counts else ''}")
    print(f"{'all':16} {time.monotonic() - start:7.0f}  {'FAILED' if red else 'passed'}")
    for stage in stages:
        for test in stage.flaky:
            print(f"FLAKY {test} ({stage.name})")
    for stage in red:
        for test, words in stage.failed.items():
            print(f"FAILED {test} - {words}")
        if not stage.failed:
            print(f"FAILED stage {stage.name}, exit status {stage.status}; its last lines:")
            print("\n".join(f"    {line}" for line in stage.output.splitlines()[-12:]))
    flaky = listed_as_flaky()
    if len(flaky) > MOST_FLAKY:
        print(f"FAILED {FLAKY.relative_to(ROOT)} lists {len(flaky)} open faults, {MOST_FLAKY} are the most")
    passed = sum(stage.outcome == "passed" for stage in stages)
    print(f"stages: {passed} passed, {len(red)} failed")
    return int(bool(red) or len(flaky) > MOST_FLAKY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
