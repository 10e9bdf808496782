"""Run all cases, those that match, or a sample: ``make bad-inputs``, ``python -m tests.bridge.bad_inputs --only WORD``.

What the journal has of a case is not run again unless the case has changed: a run that was ended goes on.
"""

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bridge.bad_inputs.case import KINDS, Case
from tests.bridge.bad_inputs.judge import judged, paragraph, vague
from tests.bridge.bad_inputs.results import RESULTS, write_results
from tests.bridge.bad_inputs.runner import Runner, import_everything
from tests.bridge.bad_inputs.table import all_cases

JOURNAL = Path("runs/bad_inputs.jsonl")


def mark(case: Case) -> str:
    """Changes where the case does; what a damage writes is not in it."""
    told = repr((case.command, case.says, case.works, sorted(case.environment.items())))
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def read_journal(path: Path) -> dict[tuple[str, str], dict]:
    """(Case, mark) → the last line about it."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(line["id"], line["mark"]): line for line in map(json.loads, lines)}


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """So many of every kind, of those that have to be refused."""
    draw = random.Random(seed)
    refused = [[case for case in cases if case.kind == kind and not case.works] for kind in KINDS]
    return [case for of_kind in refused for case in draw.sample(of_kind, count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bridge.bad_inputs", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose name has one of these")
    parser.add_argument("--sample", type=int, metavar="N", help="N of every kind")
    parser.add_argument("--seed", type=int, default=22, help="of the sample")
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--again", nargs="*", default=[], choices=["good", "poor", "bad"], help="run these once more")
    parser.add_argument("--table", action="store_true", help="write the table of what the journal has, and run nothing")
    given = parser.parse_args()
    every = all_cases()
    if lax := [case.id for case in every if not case.works and not vague(case)]:
        raise ValueError(f"cases that a message without a word of theirs would pass: {lax}")
    cases = [case for case in every if not given.only or any(word in case.id for word in given.only)]
    cases = cases if given.sample is None else sample(cases, given.sample, given.seed)
    known = read_journal(given.journal)
    todo = [c for c in cases if (line := known.get((c.id, mark(c)))) is None or line["verdict"] in given.again]
    print(f"{len(cases)} cases, {len(todo)} to run", flush=True)
    if given.table:
        write_results([line for case in every if (line := known.get((case.id, mark(case))))], len(every))
        return 0
    import_everything(also_rare=given.sample is None)
    given.journal.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place, given.journal.open("a") as journal:
        runner = Runner(Path(place))
        for number, case in enumerate(todo, 1):
            outcome = runner.run(case)
            verdict, why = judged(case, outcome)
            said = (paragraph(outcome.printed) or outcome.printed[-400:]).replace(place, "")
            line = {"id": case.id, "mark": mark(case), "kind": case.kind, "verdict": verdict, "why": why, "said": said}
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            if verdict != "good":
                print(f"{verdict}: {case.id}\n    {why}\n    {said[:400]}", flush=True)
            if number % 25 == 0:
                print(f"{number} of {len(todo)} in {time.monotonic() - begun:.0f} s", flush=True)
    if given.sample is None and not given.only:
        done = read_journal(given.journal)
        write_results([done[case.id, mark(case)] for case in cases], len(every))
        print(f"table in {RESULTS}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
