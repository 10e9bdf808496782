"""The mutation score of rl_fn: `python -m tests.mutation`, or with --sample N --seed S, --files a.py b.py."""

import argparse
import os
import sys
from pathlib import Path

from tests.mutation.equivalents import read
from tests.mutation.patch import Package
from tests.mutation.report import sample, write
from tests.mutation.supervise import Store, run
from tests.mutation.worker import ROOT


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="that many mutants instead of all, stratified")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[], help="only these files of rl_fn, by name")
    parser.add_argument("--skip", nargs="*", default=[], help="not these")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--examples", type=int, default=4, help="examples of a property")
    parser.add_argument("--seconds", type=float, default=6.0, help="processor time for a mutant that survives")
    parser.add_argument("--explained-seconds", type=float, default=2.0, help="for one explained as equivalent")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/mutation")
    parser.add_argument("--only-report", action="store_true", help="of the results so far")
    options = parser.parse_args(arguments)
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    store = Store(base / "rl_fn_mutation" / "results.json")
    chosen = [
        mutant
        for mutant in Package(ROOT / "rl_fn", "rl_fn").mutants.values()
        if (not options.files or mutant.file in options.files) and mutant.file not in options.skip
    ]
    if options.sample:
        chosen = sample(chosen, options.sample, options.seed)
    missing: set[str] = set()
    try:
        if not options.only_report:
            # An explained mutant is run to see that the explanation is not wrong, not in the hope of killing it.
            explained = read()
            missing = run(
                chosen,
                store,
                options.processes,
                options.examples,
                lambda m: options.explained_seconds if m.name in explained else options.seconds,
            )
    finally:
        known = [(mutant, entry["status"]) for mutant in chosen if (entry := store.result(mutant)) is not None]
        settings = {
            "sample": options.sample,
            "seed": options.seed,
            "examples": options.examples,
            "seconds": options.seconds,
            "explained_seconds": options.explained_seconds,
        }
        settings |= {"without_result": len(chosen) - len(known), "files": options.files, "skipped": options.skip}
        if known:
            total = write(options.out, known, read(), settings)
            print(f"{100 * total.raw:.2f} % of {total.total} mutants killed; ", end="")
            print(f"{100 * total.score:.2f} % without {total.equivalent} explained ones; {options.out}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
