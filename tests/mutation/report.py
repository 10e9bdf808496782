"""The score, its confidence interval, and the files that say so."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.supervise import write_atomically

DEAD = ("killed", "timeout")


@dataclasses.dataclass(frozen=True)
class Score:
    killed: int
    timeout: int
    survived: int
    uncovered: int

    @property
    def total(self) -> int:
        return self.killed + self.timeout + self.survived + self.uncovered

    @property
    def score(self) -> float:
        return (self.killed + self.timeout) / self.total if self.total else math.nan

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total": self.total, "score": round(self.score, 4)}


def score(statuses: Iterable[str]) -> Score:
    listed = list(statuses)
    return Score(*(listed.count(status) for status in ("killed", "timeout", "survived", "uncovered")))


def wilson(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion; a sample in proportion to the strata is at least as precise."""
    if total == 0:
        return 0.0, 1.0
    p, shrink = successes / total, 1 + z * z / total
    centre = (p + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """From every file and kind in proportion, by the largest remainder."""
    strata: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        strata.setdefault((mutant.file, mutant.kind), []).append(mutant)
    rng = random.Random(seed)
    shares = {key: len(members) * min(1.0, size / len(mutants)) for key, members in strata.items()}
    counts = {key: int(share) for key, share in shares.items()}
    # Ties are broken at random, or the first files of the alphabet would be drawn more often.
    by_remainder = sorted(shares, key=lambda key: (counts[key] - shares[key], rng.random()))
    for key in by_remainder[: min(size, len(mutants)) - sum(counts.values())]:
        counts[key] += 1
    return [m for key, members in strata.items() for m in rng.sample(members, counts[key])]


def _by(pairs: list[tuple[Mutant, str]], key: Callable[[Mutant], str]) -> dict[str, Any]:
    names = sorted({key(mutant) for mutant, _ in pairs})
    return {name: score(status for mutant, status in pairs if key(mutant) == name).as_dict() for name in names}


def write(folder: Path, pairs: list[tuple[Mutant, str]], settings: dict[str, Any]) -> Score:
    """summary.json, survivors.md and plot.png."""
    total = score(status for _, status in pairs)
    low, high = wilson(total.killed + total.timeout, total.total)
    summary: dict[str, Any] = {"settings": settings, "all": total.as_dict()}
    if settings["sample"]:
        summary["interval_95"] = [round(low, 4), round(high, 4)]
    by_file, by_kind = _by(pairs, lambda m: m.file), _by(pairs, lambda m: m.kind)
    summary |= {"by_file": by_file, "by_kind": by_kind}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_atomically(folder / "survivors.md", survivors(pairs))
    plot(folder / "plot.png", {"file": by_file, "kind": by_kind}, total)
    return total


def survivors(pairs: list[tuple[Mutant, str]]) -> str:
    alive = sorted(((m, s) for m, s in pairs if s not in DEAD), key=lambda p: (p[0].file, p[0].line, p[0].column))
    lines = ["# Mutants that no test kills", ""]
    lines += ["| file:line:column | in | kind | before | after | status |", "|---|---|---|---|---|---|"]
    for mutant, status in alive:
        before, after = (text.replace("|", "\\|").replace("\n", " ") for text in (mutant.before, mutant.after))
        place = f"{mutant.file}:{mutant.line}:{mutant.column}"
        lines.append(f"| {place} | {mutant.owner} | {mutant.kind} | `{before}` | `{after}` | {status} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, tables: dict[str, dict[str, Any]], total: Score) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(len(table) for table in tables.values())
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.2 + 0.19 * longest), layout="constrained")
    for axis, (title, table) in zip(axes, tables.items(), strict=True):
        names = sorted(table, key=lambda name: table[name]["score"], reverse=True)
        axis.barh([f"{n} ({table[n]['total']})" for n in names], [100 * table[n]["score"] for n in names], color="C0")
        axis.axvline(100 * total.score, color="black", linewidth=1)
        axis.set_xlim(min(80.0, 100 * min(table[n]["score"] for n in names) - 2), 100)
        axis.set_xlabel(f"mutants killed by {title}, % (in all {100 * total.score:.1f} % of {total.total})")
        axis.tick_params(axis="y", labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130, metadata={"Software": None})
    plt.close(figure)
    temporary.replace(path)
