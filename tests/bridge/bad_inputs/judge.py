"""Good, poor or bad, by rules alone."""

import json
import math
import re
from pathlib import Path

from safetensors import safe_open

from tests.bridge.bad_inputs.case import Case
from tests.bridge.bad_inputs.runner import Outcome

LONGEST = 700
"""Characters of a refusal in one paragraph."""
OBJECT = re.compile(r"\b[A-Z]\w+\((?:[a-z_]+=[^()]*(?:\([^()]*\)[^()]*)*)\)")
BEGINS = "rl-fn: error: "


def judged(case: Case, outcome: Outcome) -> tuple[str, str]:
    """(good, poor or bad; why it is not good)."""
    if outcome.status is None:
        return "bad", outcome.how
    faults = _works(case, outcome) if case.works else _refused(case, outcome)
    worst = next((verdict for verdict in ("bad", "poor") if any(v == verdict for v, _ in faults)), "good")
    return worst, "; ".join(why for _, why in faults)


def _refused(case: Case, outcome: Outcome) -> list[tuple[str, str]]:
    if outcome.status == 0:
        return [("bad", "accepted, exit 0")]
    faults = []
    said = paragraph(outcome.printed)
    if "Traceback (most recent" in outcome.printed:
        faults.append(("poor", "a traceback"))
    if not said:
        faults.append(("poor", "no paragraph says what is wrong"))
    if len(said) > LONGEST:
        faults.append(("poor", f"{len(said)} characters"))
    if OBJECT.search(said):
        faults.append(("poor", "prints a whole object"))
        said = OBJECT.sub("", said)
    faults += [("poor", f"does not say {word!r}") for word in unsaid(case.says, said)]
    if left := sorted(path.name for path in (outcome.folder / "runs").glob("*") if path.is_dir()):
        faults.append(("poor", f"late: leaves the run folder {left[0]}"))
    return faults


def _works(case: Case, outcome: Outcome) -> list[tuple[str, str]]:
    if outcome.status != 0:
        traced = ["a traceback"] if "Traceback (most recent" in outcome.printed else []
        return [("poor", "; ".join(["refused, though right", *traced]))]
    faults = [("poor", f"does not say {word!r}") for word in unsaid(case.says, outcome.printed)]
    if case.words[0] == "train":
        faults += [("bad", why) for why in _wrong_run(outcome.folder)]
    return faults


def _wrong_run(folder: Path) -> list[str]:
    """What of a finished run cannot be."""
    found = [path for path in (folder / "runs").glob("*") if (path / "summary.json").is_file()]
    if not found:
        return ["exit 0 without a finished run"]
    run, wrong = found[0], []
    for file in run.glob("*.jsonl"):
        for line in file.read_text().splitlines() if file.name == "metrics.jsonl" else ():
            wrong += [f"{name} is {value}" for name, value in json.loads(line).items() if _not_finite(value)]
    wrong += [f"{n} is {v}" for n, v in json.loads((run / "summary.json").read_text()).items() if _not_finite(v)]
    weights = run / "model" / "model.safetensors"
    if not weights.is_file():
        return [*wrong, "no model was written"]
    with safe_open(weights, "pt") as tensors:
        names = list(tensors.keys())
        wrong += [f"weights {name} are not finite" for name in names if not tensors.get_tensor(name).isfinite().all()]
    return wrong


def _not_finite(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def paragraph(printed: str) -> str:
    """What is said of an error: the one line behind ``BEGINS``, or what the parser of options prints."""
    lines = [line for line in printed.splitlines() if line.startswith(BEGINS)]
    if lines:
        return lines[-1].removeprefix(BEGINS) if len(lines) == 1 else ""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", printed)
    if re.search(r"(?i)\b(error|invalid|unrecognized|required|missing)\b", plain) and len(printed.splitlines()) < 40:
        return " ".join(plain.split())
    return ""


def unsaid(says: tuple[str, ...], text: str) -> list[str]:
    """The words that stand nowhere in a text as words of their own."""
    return [word for word in says if not any(_has(text, either) for either in word.split("|"))]


def _has(text: str, word: str) -> bool:
    """An option is ``--held-out`` on the command line and ``held_out`` in Python: either is its name."""
    word, text = word.replace("_", "-"), text.replace("_", "-")
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def vague(case: Case) -> bool:
    """Whether a refusal with no word of its own would be found poor."""
    text = f"{BEGINS}something is wrong with the input: expected another value, got this one"
    return judged(case, Outcome(1, "ended", text, Path("/nowhere"), 0.0))[0] == "poor"
