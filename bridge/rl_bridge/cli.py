"""The command ``rl-fn``."""

import sys
from collections.abc import Sequence

import tyro

from rl_bridge.jobs.grpo import GRPOJob, run_grpo
from rl_bridge.recipes import quickstart
from rl_bridge.tracking.run import Stopped

USAGE = """usage: rl-fn train grpo [--help] [options]

commands:
  train grpo   GRPO post-training; without options: two-digit arithmetic on a tiny model (the quickstart)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] != ["train", "grpo"]:
        wanted = words in ([], ["--help"], ["-h"])
        print(USAGE if wanted else f"rl-fn: unknown command {' '.join(words)!r}\n{USAGE}", end="")
        return 0 if wanted else 2
    return train_grpo(tyro.cli(GRPOJob, default=quickstart(), args=words[2:], prog="rl-fn train grpo"))


def train_grpo(job: GRPOJob) -> int:
    """Run GRPO, print the result on the last line. A user's mistake is one line, not a traceback."""
    try:
        summary = run_grpo(job)
    except Stopped as stop:
        print(f"{stop}; go on with: rl-fn train grpo --name {job.name} --resume (and the same options)")
        return 130
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"rl-fn: error: {error}", file=sys.stderr)
        return 1
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(f"held-out accuracy {before:.2f} → {after:.2f} in {summary['seconds']:.0f} s")
    return 0
