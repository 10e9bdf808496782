"""``rl-fn export RUN --to TRACKER``."""

from collections.abc import Sequence
from pathlib import Path

import tyro

from rl_bridge.common.terminal import say
from rl_tools.export.export import ExportOptions, export


def run(words: Sequence[str]) -> int:
    """Export a run; returns the exit status."""
    folder, options = tyro.cli(
        tuple[tyro.conf.Positional[Path], ExportOptions],
        args=list(words),
        prog="rl-fn export",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    records, new = export(folder, options)
    say(f"{options.to} has {records} records of {folder} in {options.output}, {new} of them new")
    return 0
