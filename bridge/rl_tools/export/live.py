"""The trainer's side of live exports: processes that are started, listened to and, at the end, waited for briefly."""

import dataclasses
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rl_bridge.common.children import Child
from rl_bridge.common.terminal import tell
from rl_bridge.run.run import Observer, Run
from rl_tools.export.export import FOLDER, ExportOptions, Target, folder_to_write
from rl_tools.export.live_process import Limits

PATIENCE = 15.0
"""Seconds that a run which has ended waits for its exporters together."""
MARGIN = 5.0
"""Seconds that an exporter which is not done has for its message, after its limit and before it is killed."""


@dataclass(frozen=True)
class LiveExport:
    """Which trackers get a run while it goes on, and how often the machine is sampled."""

    exports: Sequence[ExportOptions] = ()
    system_every: float = 0.0
    """Seconds between lines of system.jsonl; 0 for none."""
    limits: Limits = Limits()
    patience: float = PATIENCE


def live_export(names: Sequence[str], output: Path, project: str, system_every: float) -> LiveExport:
    """Exports to these trackers.

    Raises:
        ModuleNotFoundError: one of them is not installed.
        ValueError: the output is no folder.
    """
    if names:
        folder_to_write(output, "--tracker-output")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed: pip install '.[trackers]'")
    exports = [ExportOptions(to=cast(Target, name), output=output, project=project) for name in names]
    return LiveExport(exports, system_every)


class Exporters(Observer):
    """Processes beside a run. The run's steps never wait for them: they read the files in the run's folder."""

    serves = ("trackers", "system_every")

    def __init__(self, live: LiveExport) -> None:
        """No process is started before the run."""
        self._live = live
        self._processes: list[tuple[ExportOptions, Child, threading.Thread]] = []
        self._told: set[str] = set()
        self._sampler: Child | None = None

    def started(self, run: Run) -> None:
        """Start the processes; each gets a session of its own, so that Ctrl-C is the trainer's alone."""
        self._folder, live = run.folder, self._live
        if live.system_every > 0:
            words = ["-m", "rl_tools.export.system", str(os.getpid()), str(run.folder), str(live.system_every)]
            self._sampler = Child([sys.executable, *words], log=self._log("system"), grace=5.0)
        for options in live.exports:
            options_json = json.dumps({**dataclasses.asdict(options), "output": str(options.output.resolve())})
            limits = json.dumps(dataclasses.asdict(live.limits))
            words = ["-m", "rl_tools.export.live_process", str(run.folder), options_json, limits]
            process = Child(
                [sys.executable, *words],
                log=self._log(options.to),
                # A process of W&B that the trainer's own script started would be shared, and end with the trainer.
                env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
                grace=live.limits.end + MARGIN,
                by_stdin=True,
                piped=True,
            )
            process.leave()
            listener = threading.Thread(target=self._listen, args=(options, process), daemon=True)
            listener.start()
            self._processes.append((options, process, listener))

    def ended(self, error: BaseException | None) -> None:
        """Tell the processes that the run has ended, and wait for them a little; later ones go on alone.

        An exporter that hangs ends itself (``Limits.end``).
        """
        if self._sampler is not None:
            self._sampler.stop()
        for _, process, _ in self._processes:
            process.request_end()
        waited = threading.Event()
        timer = threading.Timer(self._live.patience, waited.set)
        timer.daemon = True
        timer.start()
        try:
            for options, process, listener in self._processes:
                while not waited.is_set() and not process.dead.is_set():
                    waited.wait(0.05)
                if not process.dead.is_set() and options.to not in self._told:
                    tell(f"{options.to} still gets the end of this run; if it does not: {self._again(options)}")
                elif process.dead.is_set():
                    listener.join(1.0)
        finally:
            timer.cancel()

    def _log(self, name: str) -> Path:
        """File for the output of a process and its library, one attempt after another."""
        path = self._folder / FOLDER / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        return path

    def _listen(self, options: ExportOptions, process: Child) -> None:
        """Print the exporter's messages, or its exit status if it failed without one; in a thread of its own."""
        heard = False
        with process.stdout as lines:
            for line in lines:
                self._told.add(options.to)
                tell(f"{options.to} is behind this run: {line.decode().strip()}; to catch up: {self._again(options)}")
                heard = True
        process.dead.wait()
        status = process.status
        if status and not heard:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            tell(f"{options.to} is behind this run: its exporter ended with {how}; to catch up: {self._again(options)}")

    def _again(self, options: ExportOptions) -> str:
        default = ExportOptions(to=options.to)
        flags = "".join(
            f" --{name} {getattr(options, name)}"
            for name in ("output", "project", "artifacts")
            if getattr(options, name) != getattr(default, name)
        )
        return f"`rl-fn export {self._folder} --to {options.to}{flags}`"
