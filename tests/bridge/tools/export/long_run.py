"""``python -m tests.bridge.tools.export.long_run RUN OUTPUT TRACKERS``: steps until it is stopped."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rl_bridge.run.run import Run, Stopped
from rl_tools.export.export import ExportOptions
from rl_tools.export.live import Exporters, LiveExport
from rl_tools.export.live_process import Limits


@dataclass(frozen=True)
class Options:
    rate: float = 0.5


def main(folder, output, trackers):
    exports = [ExportOptions(to=name, output=Path(output), project="tests") for name in trackers.split(",")]
    live = LiveExport(exports, system_every=0.2, limits=Limits(every=0.1, end=60.0), patience=60.0)
    folder = Path(folder)
    with Run(folder, Options(), resume=folder.exists(), checkpoint_every=5, observers=[Exporters(live)]) as run:
        for step in run.steps("policy", 10**6, state={}):
            run.log(step, {"reward": time.time() % 1.0, "weights_version": step // 2}, tokens=3)
            time.sleep(0.02)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Stopped as stop:
        sys.exit(128 + stop.number)
