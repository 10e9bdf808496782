"""Every case is a forked child of one process that has everything imported; its clock and memory are bounded."""

import contextlib
import gc
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bridge.bad_inputs.case import Case
from tests.bridge.bad_inputs.forks import in_a_child, leave
from tests.bridge.bad_inputs.inputs import make_inputs, make_run

CPU_SECONDS = 40
WALL_SECONDS = 120
MEMORY = 16 * 2**30


@dataclass(frozen=True)
class Outcome:
    """What a case's process did."""

    status: int | None
    """None: ended by a signal, or by the clock."""
    how: str
    printed: str
    folder: Path
    seconds: float


def import_everything(*, also_rare: bool = True) -> None:
    """What the commands import one by one, so that no child has to. Nothing is computed: threads do not fork."""
    import importlib
    import pkgutil

    import torch

    torch.set_num_threads(1)
    rooms = ("pipelines", "memory", "data", "models", "rewards", "modules", "algorithms", "run")
    packages = [*(f"rl_bridge.{room}" for room in rooms), "rl_tools.report", "rl_tools.plan", "rl_tools.tune"]
    for package in packages if also_rare else ("rl_bridge.pipelines", "rl_bridge.models"):
        folders = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folders, f"{package}."):
            with contextlib.suppress(ImportError):  # an extra's
                importlib.import_module(module.name)
    for name in (
        "importlib.readers",
        "transformers.models.qwen2.modeling_qwen2",
        "datasets",
        "peft",
        "tyro",
        "rich.console",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Runner:
    """Runs cases in folders below ``place``; a case's folder is there until the next one begins."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._inputs = place / "inputs"
        if not self._inputs.exists():
            # Models are computed with: in a child, for the parent has to stay without threads.
            in_a_child(lambda: make_inputs(self._inputs))
            in_a_child(lambda: make_run(self._inputs))

    def run(self, case: Case) -> Outcome:
        """The case in a fresh copy of the inputs."""
        folder = self._place / "case"
        if folder.exists():
            _writable(folder)
            shutil.rmtree(folder)
        shutil.copytree(self._inputs, folder)
        log = self._place / "printed"
        log.unlink(missing_ok=True)
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            leave(lambda: _child(case, folder, log))
        status, how = _await(child, begun + WALL_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what the command has left behind
        _writable(folder)
        printed = log.read_text(errors="replace") if log.exists() else ""
        return Outcome(status, how, printed, folder, time.monotonic() - begun)


def _child(case: Case, folder: Path, log: Path) -> int:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # as long as this user may
    os.chdir(folder)
    os.environ.update(case.environment)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if case.damage is not None:
        case.damage(folder)
    for stream in (1, 2):
        os.dup2(to, stream)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # The streams of a test runner are its own: the case's are new.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    from rl_tools.cli import main

    return main(case.words)


def _await(child: int, until: float) -> tuple[int | None, str]:
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.WIFEXITED(status):
                return os.WEXITSTATUS(status), "ended"
            number = os.WTERMSIG(status)
            hung = number in (signal.SIGXCPU, signal.SIGKILL)
            return None, "hang" if hung else f"crash: {signal.Signals(number).name}"
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, "hang"


def _writable(folder: Path) -> None:
    """Undo what cases of permissions did."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.chmod(0o755)
