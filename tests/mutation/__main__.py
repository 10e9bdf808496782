"""The mutation score of rl_fn: `python -m tests.mutation`, or with --sample N --seed S, --files a.py b.py.

--package rl_bridge is the other package's; --by-hand the faults of by_hand/*.toml instead of the tool's own mutants.
"""

import argparse
import os
import sys
from pathlib import Path

from tests.mutation import by_hand, entered
from tests.mutation.equivalents import read
from tests.mutation.patch import Package
from tests.mutation.report import sample, write
from tests.mutation.supervise import Store, run, run_forked
from tests.mutation.worker import ROOT

# Folder, tests, and seconds of processor time for a mutant that survives.
PACKAGES = {"rl_fn": ("rl_fn", "tests/rl_fn", 6.0), "rl_bridge": ("bridge/rl_bridge", "tests/bridge", 180.0)}
PACKAGES |= {name: (f"bridge/{name}", "tests/bridge", 180.0) for name in ("rl_train", "rl_tools")}
# The peers' comparisons run in an environment of their own.
PEERS = "check/"


def chosen_of(package: Package, options: argparse.Namespace) -> list:
    if options.by_hand:
        entries = by_hand.read(options.package)
        for entry in entries:
            if reason := by_hand.wrong(entry, ROOT):
                print(f"not planted, {reason}: {entry}", file=sys.stderr)
        chosen = package.add([entry for entry in entries if not by_hand.wrong(entry, ROOT)], ROOT)
    else:
        chosen = [m for m in package.mutants.values() if not m.file.startswith(PEERS)]
    chosen = [m for m in chosen if (not options.files or m.file in options.files) and m.file not in options.skip]
    return sample(chosen, options.sample, options.seed) if options.sample else chosen


def out_of(options: argparse.Namespace) -> Path:
    """rl_fn's own mutants have the folder itself, the others one each in it."""
    parts = [options.package] if options.package != "rl_fn" or options.by_hand else []
    return options.out.joinpath(*parts, *(["by_hand"] if options.by_hand else []))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=sorted(PACKAGES), default="rl_fn")
    parser.add_argument("--by-hand", action="store_true", help="the faults of by_hand/*.toml")
    parser.add_argument("--sample", type=int, default=0, help="that many mutants instead of all, stratified")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[], help="only these files of the package, by name")
    parser.add_argument("--skip", nargs="*", default=[], help="not these")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--examples", type=int, default=4, help="examples of a property, in rl_fn")
    parser.add_argument("--seconds", type=float, default=0.0, help="for a mutant that survives")
    parser.add_argument("--nearest", type=int, default=0, help="test files of a mutant of rl_bridge; 0: all in reach")
    parser.add_argument("--explained-seconds", type=float, default=2.0, help="for one explained as equivalent")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/mutation")
    parser.add_argument(
        "--record", action="store_true", help="first, which tests run which lines: as long as the tests"
    )
    parser.add_argument("--only-report", action="store_true", help="of the results so far")
    options = parser.parse_args(arguments)
    name, tests, seconds = PACKAGES[options.package]
    seconds = options.seconds or seconds
    folder = ROOT / name
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    store = Store(base / f"{options.package}_mutation" / "results.json", folder, ROOT / tests)
    if options.record and options.package == "rl_fn":
        parser.error("--record is for packages whose mutants run in processes of their own, got rl_fn")
    if options.record:
        entered.record(ROOT, name, [tests], options.processes, store.record)
    package = Package(folder, options.package)
    chosen = chosen_of(package, options)
    # An explained mutant is run to see that the explanation is not wrong, not in the hope of killing it.
    explained = read(options.package)
    missing: set[str] = set()

    def budget(mutant) -> float:
        return options.explained_seconds if mutant.name in explained else seconds

    try:
        if not options.only_report and options.package == "rl_fn":
            missing = run(chosen, store, options.processes, options.examples, budget)
        elif not options.only_report:
            missing = run_forked(package, chosen, store, options.processes, budget, options.nearest)
    finally:
        known = [(mutant, entry["status"]) for mutant in chosen if (entry := store.result(mutant)) is not None]
        settings = {
            "package": options.package,
            "by_hand": options.by_hand,
            "sample": options.sample,
            "seed": options.seed,
            "examples": options.examples,
            "seconds": seconds,
            "explained_seconds": options.explained_seconds,
            "nearest": options.nearest,
        }
        settings |= {"without_result": len(chosen) - len(known), "files": options.files, "skipped": options.skip}
        if known:
            out = out_of(options)
            total = write(out, known, explained, settings)
            print(f"{100 * total.raw:.2f} % of {total.total} mutants killed; ", end="")
            print(f"{100 * total.score:.2f} % without {total.equivalent} explained ones; {out}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
