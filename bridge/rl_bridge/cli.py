"""The command ``rl-fn``."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from rl_bridge.pipelines.policy import PolicyPipeline, run_policy
from rl_bridge.recipes import quickstart
from rl_bridge.tracking.run import Stopped

USAGE = """usage: rl-fn train policy [--help] [options] [objective:ALGORITHM] [options of the algorithm]

       rl-fn check {trl,verl,openrlhf,tunix}
       rl-fn doctor

commands:
  train policy   post-training on groups of completions; without options: GRPO with DAPO's loss on two-digit
               arithmetic and a tiny model (the quickstart). objective:gspo takes GSPO with its own options.
  check        rl_fn's dialects against an installed library's own functions: value and gradient, option by option
  doctor       this machine's device and versions, and which backend each kernel operation takes here
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["check"]:
        # Not loaded for a training run.
        from rl_bridge.check.report import check

        return check(words[1:])
    if words == ["doctor"]:
        return print_diagnosis()
    if words[:2] != ["train", "policy"]:
        wanted = words in ([], ["--help"], ["-h"])
        print(USAGE if wanted else f"rl-fn: unknown command {' '.join(words)!r}\n{USAGE}", end="")
        return 0 if wanted else 2
    return report(run_policy, parse(quickstart(), words[2:], prog="rl-fn train policy"))


def parse(default: PolicyPipeline, words: Sequence[str], *, prog: str) -> PolicyPipeline:
    """The pipeline that a command line describes; what it does not name is the default's.

    The options of the pipeline may stand before and after the algorithm's sub-command.
    """
    return tyro.cli(
        PolicyPipeline, default=default, args=list(words), prog=prog, config=(tyro.conf.CascadeSubcommandArgs,)
    )


def print_diagnosis() -> int:
    """The doctor's findings as a table."""
    from rich.console import Console
    from rich.table import Table

    from rl_kernels.doctor import doctor

    found = doctor()
    table = Table("operation", "backend", "others", title=f"{found.device}: {found.name}")
    for finding in found.findings:
        table.add_row(finding.operation, finding.backend, "; ".join(f"{n}: {why}" for n, why in finding.others.items()))
    console = Console()
    console.print(", ".join(f"{name} {number}" for name, number in found.versions.items()))
    console.print(table)
    return 0


def report(run: Callable[[PolicyPipeline], dict[str, Any]], pipeline: PolicyPipeline) -> int:
    """Run a pipeline and print its result on the last line. A user's mistake is one line, not a traceback."""
    try:
        summary = run(pipeline)
    except Stopped as stop:
        print(f"{stop}; go on with the same command and --name {stop.name} --resume")
        return 130
    except (ValueError, FileNotFoundError, ModuleNotFoundError, NotImplementedError) as error:
        print(f"rl-fn: error: {error}", file=sys.stderr)
        return 1
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(f"held-out accuracy {before:.2f} → {after:.2f} in {summary['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
