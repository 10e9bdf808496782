"""Python processes that begin with everything imported: forked from one that a test's worker starts once.

Importing torch, JAX and transformers takes ten seconds of a core, longer than most tests that need a process. It has
a pid, an environment, an output and an exit status as one of ``subprocess`` has, and can be killed.
What is read while Python starts or while packages are imported (PYTHONHASHSEED, OMP_NUM_THREADS, JAX_PLATFORMS) is the
template's: one thread, on the CPU. /proc shows the template's command line and environment.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "tyro",
    "rl_bridge.loop.loop_run",
    "rl_tools.cli",
    "rl_train.policy",
    "rl_train.policy_configs",
    "rl_train.preference",
    "rl_train.reward_model",
    "rl_train.sft",
)


class Template:
    """The process that the others are forked from."""

    def __init__(self) -> None:
        self._number, self._statuses, self._pids = 0, dict[int, int](), dict[int, int]()
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "bridge"), *filter(None, sys.path)])
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._replies, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=os.environ | threads | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            cwd=ROOT,
            text=True,
        )
        theirs.close()
        self._text = b""  # replies that were received and not yet read
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        atexit.register(self.close)

    def fork(self, job: Mapping[str, Any]) -> tuple[int, int]:
        """The number and the pid of a new process."""
        self._number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": self._number, **job}) + "\n")
        self._process.stdin.flush()
        while self._number not in self._pids:
            self._read(None)
        return self._number, self._pids[self._number]

    def status(self, number: int, timeout: float | None) -> int | None:
        """The exit status of a process, −9 for SIGKILL; None where the process has not ended in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while number not in self._statuses:
            if not self._read(None if end is None else max(0.0, end - time.monotonic())):
                return None
        return self._statuses[number]

    def _read(self, timeout: float | None) -> bool:
        """Take in a reply; False where none comes in time."""
        while b"\n" not in self._text:
            self._replies.settimeout(timeout)
            try:
                part = self._replies.recv(65536)
            except (TimeoutError, BlockingIOError):
                return False
            assert part, f"the template ended with {self._process.wait(10)}"
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        reply = json.loads(line)
        (self._pids if "pid" in reply else self._statuses)[reply["number"]] = reply.get("pid", reply.get("status"))
        return True

    def close(self) -> None:
        """Let the template end."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
        self._replies.close()
        self.folder.cleanup()


_template: Template | None = None


class Process:
    """One of ``start``; the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        global _template
        if _template is None:
            _template = Template()
        self._of, self.args, self.returncode = _template, list(command), None
        outputs = [tempfile.NamedTemporaryFile(dir=self._of.folder.name, delete=False) for _ in range(2)]  # noqa: SIM115
        self._outputs = [Path(file.name) for file in outputs]
        for file in outputs:
            file.close()
        job = {"command": self.args, "environment": dict(environment), "cwd": str(cwd)}
        self._number, self.pid = self._of.fork(job | {"outputs": [str(path) for path in self._outputs]})

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        self.returncode = self._of.status(self._number, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        self.returncode = self._of.status(self._number, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, *self.outputs())
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Everything that the process wrote to its outputs, once it has ended."""
        self.wait(timeout)
        return self.outputs()

    def outputs(self) -> tuple[str, str]:
        """The text of both outputs so far."""
        out, err = (path.read_text("utf-8", "replace") for path in self._outputs)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(*command: str, cwd: Path = ROOT, **environment: str) -> Process:
    """Begin what ``python COMMAND`` would run: ``-m MODULE``, ``-c TEXT`` or a script, with words for it."""
    return Process(command, os.environ | environment, cwd)


def ranks(count: int, *command: str, cwd: Path = ROOT, **environment: str) -> list[Process]:
    """Begin the ranks of a job, with the environment that torchrun would give them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(*command, cwd=cwd, **environment, **world, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]


def run(*command: str, count: int = 0, timeout: float = 200.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process, or a job of ``count`` ranks, to its end; the status is that of the first one that failed.

    Raises:
        subprocess.TimeoutExpired: one of them still runs; all are killed.
    """
    processes = ranks(count, *command, **options) if count else [start(*command, **options)]
    end = time.monotonic() + timeout
    try:
        statuses = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    out, err = ("".join(texts) for texts in zip(*(process.outputs() for process in processes), strict=True))
    return subprocess.CompletedProcess(list(command), next(filter(None, statuses), 0), out, err)


# The template.


def main() -> None:
    """Fork a process for each line of the standard input, and reply with pids and statuses."""
    replies = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        __import__(name)
    warnings.filterwarnings("ignore", message=r"os.fork\(\) was called", category=RuntimeWarning)
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    gc.collect()
    gc.freeze()  # the collections of engines that end need not look at what was imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(awake, selectors.EVENT_READ)
    text, numbers = b"", dict[int, int]()
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if awake in ready:
            os.read(awake, 4096)
            for pid, status in _ended():
                _reply(replies, number=numbers.pop(pid), status=status)
        if 0 in ready:
            if not (part := os.read(0, 65536)):
                return
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    replies.close()
                    _become(job)
                numbers[pid] = job["number"]
                _reply(replies, number=job["number"], pid=pid)


def _ended() -> list[tuple[int, int]]:
    """Children that have ended since the last call, with their exit statuses."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _reply(replies: socket.socket, **words: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        replies.sendall(json.dumps(words).encode() + b"\n")


def _become(job: Mapping[str, Any]) -> NoReturn:
    """Be the process of a job, to its end."""
    for number, path in ((0, os.devnull), (1, job["outputs"][0]), (2, job["outputs"][1])):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    import random

    import numpy

    random.seed()
    numpy.random.seed()
    status, interrupted = 1, False
    try:
        _execute(job["command"])
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException as error:
        traceback.print_exc()
        interrupted = isinstance(error, KeyboardInterrupt)
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


def _execute(command: Sequence[str]) -> None:
    """Do what ``python COMMAND`` does."""
    first, *rest = command
    match first:
        case "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        case "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            own = types.ModuleType("__main__")
            sys.modules["__main__"] = own
            exec(compile(rest[0], "<string>", "exec"), own.__dict__)
        case _:
            sys.argv, sys.path[0] = list(command), str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
