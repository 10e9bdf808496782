"""A ledger as JSON: what a checkpoint holds of rollouts that are on their way."""

import base64
import copy
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rl_bridge.rollout.asynchronous.ledger import Group, Ledger, Sample, State, Turn

PLAIN = ("seed", "tokens", "logprobs", "reason", "rewards", "seconds")


def saved(ledger: Ledger) -> dict[str, Any]:
    """The ledger without its prompts. Floats come back from JSON bit for bit.

    What an engine draws right now is known up to where it was given to the engine: a resumed run draws the rest again.
    """
    return {
        "opened": ledger.opened,
        "taken": sorted(ledger.taken),
        "finished": dict(ledger.finished),
        "groups": [
            {"number": group.number, "admitted": group.admitted, "samples": [_sample(s) for s in group.samples]}
            for group in ledger.groups.values()
        ],
    }


def loaded(state: dict[str, Any], prompt: Callable[[int], Any]) -> Ledger:
    """The ledger of what ``saved`` gave; ``prompt``: of a number, called for every untrained one in order."""
    ledger = Ledger()
    ledger.opened, ledger.taken = state["opened"], set(state["taken"])
    ledger.finished = Counter(state["finished"])
    for group in state["groups"]:
        number = group["number"]
        samples = [_of(sample) for sample in group["samples"]]
        ledger.groups[number] = Group(number, prompt(number), samples, group["admitted"])
    return ledger


def _sample(sample: Sample) -> dict[str, Any]:
    state = State.WAITING if sample.state is State.RUNNING else sample.state
    return {
        "state": str(state),
        "greedy": sample.greedy,
        # Copies: the state is written while engines go on.
        **{name: copy.copy(getattr(sample, name)) for name in PLAIN},
        "spans": [list(span) for span in sample.spans],
        "turns": [asdict(turn) for turn in sample.turns],
        "allowed": None if sample.allowed is None else [_packed(ids) for ids in sample.allowed],
    }


def _of(saved: dict[str, Any]) -> Sample:
    return Sample(
        **{name: saved[name] for name in PLAIN},
        state=State(saved["state"]),
        spans=[(version, count) for version, count in saved["spans"]],
        turns=[Turn(**turn) for turn in saved.get("turns", ())],
        greedy=saved.get("greedy", False),
        allowed=None if saved["allowed"] is None else [_unpacked(text) for text in saved["allowed"]],
    )


def _packed(ids: Sequence[int]) -> str:
    """Thousands of ids a token are as short as bytes in JSON can be."""
    return base64.b64encode(array("i", ids).tobytes()).decode()


def _unpacked(text: str) -> array:
    return array("i", base64.b64decode(text))
