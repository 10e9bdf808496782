"""The score, its confidence interval, and the files that say so."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.mutation.equivalents import Name, joined
from tests.mutation.mutants import Mutant
from tests.mutation.supervise import write_atomically

DEAD = ("killed", "timeout")
STATUSES = (*DEAD, "survived", "uncovered", "equivalent")

PARTS = (
    ("killed", DEAD, "C0"),
    ("equivalent, explained", ("equivalent",), "lightgrey"),
    ("not killed", ("survived", "uncovered"), "C3"),
)


@dataclasses.dataclass(frozen=True)
class Score:
    killed: int
    timeout: int
    survived: int
    uncovered: int
    equivalent: int

    @property
    def dead(self) -> int:
        return self.killed + self.timeout

    @property
    def total(self) -> int:
        return self.dead + self.survived + self.uncovered + self.equivalent

    @property
    def raw(self) -> float:
        """The share of all mutants."""
        return self.dead / self.total if self.total else math.nan

    @property
    def score(self) -> float:
        """The share of those that are not explained as equivalent."""
        left = self.total - self.equivalent
        return self.dead / left if left else math.nan

    def as_dict(self) -> dict[str, Any]:
        counts = dataclasses.asdict(self) | {"total": self.total}
        shares = {"raw": self.raw, "score": self.score}
        return counts | {name: None if math.isnan(x) else round(x, 4) for name, x in shares.items()}


def score(statuses: Iterable[str]) -> Score:
    listed = list(statuses)
    return Score(*(listed.count(status) for status in STATUSES))


def wilson(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion; a sample in proportion to the strata is at least as precise."""
    if total == 0:
        return 0.0, 1.0
    p, shrink = successes / total, 1 + z * z / total
    centre = (p + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """From every file and kind in proportion, by the largest remainder.

    Who is drawn, and who gets the remainders, goes by a hash of the name: an edit redraws little more than it edits.
    The order is that of another hash, so that what a run has decided before it was cut short is a sample too.
    """

    def lot(*parts: str) -> bytes:
        return hashlib.sha256("|".join([str(seed), *parts]).encode()).digest()

    strata: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        strata.setdefault((mutant.file, mutant.kind), []).append(mutant)
    shares = {key: len(members) * min(1.0, size / len(mutants)) for key, members in strata.items()}
    counts = {key: int(share) for key, share in shares.items()}
    by_remainder = sorted(shares, key=lambda key: (counts[key] - shares[key], lot(*key)))
    for key in by_remainder[: min(size, len(mutants)) - sum(counts.values())]:
        counts[key] += 1
    drawn = [m for key, members in strata.items() for m in sorted(members, key=lambda m: lot(*m.name))[: counts[key]]]
    return sorted(drawn, key=lambda m: lot("order", *m.name))


def _by(pairs: list[tuple[Mutant, str]], key: Callable[[Mutant], str]) -> dict[str, Any]:
    names = sorted({key(mutant) for mutant, _ in pairs})
    return {name: score(status for mutant, status in pairs if key(mutant) == name).as_dict() for name in names}


def write(folder: Path, results: list[tuple[Mutant, str]], reasons: dict[Name, str], settings: dict[str, Any]) -> Score:
    """summary.json, survivors.md and plot.png; ValueError if a mutant that is explained as equivalent was killed."""
    if wrong := [mutant.name for mutant, status in results if status in DEAD and mutant.name in reasons]:
        raise ValueError(f"explained as equivalent, but a test kills them: {wrong}")
    pairs = joined(results, reasons)
    total = score(status for _, status in pairs)
    summary: dict[str, Any] = {"settings": settings, "all": total.as_dict()}
    if settings["sample"]:
        for name, left in (("raw", total.total), ("score", total.total - total.equivalent)):
            summary[f"interval_95_of_{name}"] = [round(end, 4) for end in wilson(total.dead, left)]
    by_file, by_kind = _by(pairs, lambda m: m.file), _by(pairs, lambda m: m.kind)
    summary |= {"by_file": by_file, "by_kind": by_kind}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_atomically(folder / "survivors.md", survivors(pairs, reasons))
    plot(folder / "plot.png", {"file": by_file, "kind": by_kind}, total)
    return total


def survivors(pairs: list[tuple[Mutant, str]], reasons: dict[Name, str]) -> str:
    alive = sorted(((m, s) for m, s in pairs if s not in DEAD), key=lambda p: (p[0].file, p[0].line, p[0].column))
    lines = ["# Mutants that no test kills", ""]
    lines += ["| file:line:column | in | kind | before | after | why nothing kills it |", "|---|---|---|---|---|---|"]
    for mutant, status in alive:
        before, after = (text.replace("|", "\\|").replace("\n", " ") for text in (mutant.before, mutant.after))
        place = f"{mutant.file}:{mutant.line}:{mutant.column}"
        why = reasons[mutant.name] if status == "equivalent" else f"{status}, UNEXPLAINED"
        lines.append(f"| {place} | {mutant.owner} | {mutant.kind} | `{before}` | `{after}` | {why} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, tables: dict[str, dict[str, Any]], total: Score) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(len(table) for table in tables.values())
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.2 + 0.19 * longest), layout="constrained")
    for axis, (title, table) in zip(axes, tables.items(), strict=True):
        names = sorted(table, key=lambda name: table[name]["raw"], reverse=True)
        rows, start = [f"{n} ({table[n]['total']})" for n in names], [0.0] * len(names)
        for label, statuses, colour in PARTS:
            parts = [100 * sum(table[n][status] for status in statuses) / table[n]["total"] for n in names]
            axis.barh(rows, parts, left=start, color=colour, label=label)
            start = [a + b for a, b in zip(start, parts, strict=True)]
        axis.axvline(100 * total.raw, color="black", linewidth=1)
        axis.set_xlim(min(80.0, 100 * min(table[n]["raw"] for n in names) - 2), 100)
        axis.set_xlabel(f"mutants by {title}, % (in all {100 * total.raw:.1f} % of {total.total} killed)")
        axis.tick_params(axis="y", labelsize=7)
    axes[-1].legend(loc="lower left", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130, metadata={"Software": None})
    plt.close(figure)
    temporary.replace(path)
