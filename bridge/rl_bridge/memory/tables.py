"""A plan as lines of text, and as JSON."""

from collections.abc import Iterable
from typing import Any

from rl_bridge.memory.places import COMPONENTS
from rl_bridge.memory.planning import Knob, Plan
from rl_bridge.memory.sizes import shown_bytes


def plan_lines(plan: Plan) -> list[str]:
    """A table: a line for each phase, a column for each component that any of them has."""
    names = [name for name in COMPONENTS if any(peak.components.get(name) for peak in plan.phases.values())]
    rows = [["phase", "peak", *names]]
    for phase, peak in plan.phases.items():
        rows.append([phase, *(shown_bytes(size) for size in (peak.bytes, *(peak.components.get(n, 0) for n in names)))])
    peak = plan.phases[plan.phase]
    at = f", at {peak.line}" if peak.line else ""
    return [*_aligned(rows), f"the most is {shown_bytes(peak.bytes)}, in {plan.phase}{at}"]


def knob_lines(knobs: Iterable[Knob]) -> list[str]:
    """A table: what each option saves at the peak, the largest first."""
    rows = [
        [knob.option, shown_bytes(knob.saves), shown_bytes(knob.plan.bytes), knob.plan.phase]
        for knob in sorted(knobs, key=lambda knob: -knob.saves)
    ]
    return _aligned([["option", "saves", "the most is then", "in"], *rows])


def as_json(plan: Plan) -> dict[str, Any]:
    """{phase: {bytes, components, line}}."""
    return {name: peak._asdict() for name, peak in plan.phases.items()}


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
