"""completions.jsonl: a few completions of some steps, with the numbers of each token as the loss had them.

A line a step: ``{"step", "samples": [...]}``. A sample has ``row`` and ``group`` in the step's batch, ``prompt``,
``completion``, ``finish_reason``, ``rewards`` by name, ``reward`` as trained on, and ``tokens``: columns with an entry
a token behind the prompt. These are ``place`` in the trajectory, ``id``, ``text``, ``counted`` (in the loss),
``version`` of the weights that drew the token, ``rollout_logprob``, ``old_logprob``, ``logprob``, ``ratio``,
``advantage``, ``entropy``. None stands for what the loss did not compute. ``left_out``: tokens in the middle of a long
completion that have no entry.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_bridge.algorithms.completions import Sampled
from rl_bridge.common.append_log import AppendLog, parsed_or_none, whole_lines
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.modules.policy import COLUMNS

COMPLETIONS = "completions.jsonl"
STEPS = 256
"""Steps kept at the first distance; behind each such stretch the distance doubles."""
TOKENS = 512
"""Entries of a completion at most: its first and its last half of them."""
BYTES = 64 * 2**20
"""The file at most. A line that would be beyond is not written."""


class CompletionLog:
    """Appends to ``completions.jsonl`` of a run's folder; begun at a step, it cuts off what is from there on."""

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], *, every: int, kept: int) -> None:
        """``every``: steps from one line to the next, 0 for none. ``kept``: completions of a step."""
        self._file, self._decode, self._every, self._completions_a_step = folder / COMPLETIONS, decode, every, kept
        self._begun = False

    def choose(self, step: int, computed: torch.Tensor) -> torch.Tensor | None:
        """The number of each kept row [N], −1 for others; None in a step that is not kept.

        They are the first and the last of those that the loss computes, ``computed`` [N], then others: where a step has
        several updates, the last rows are in one that began with other weights than those that drew them.
        """
        if not self._begun:
            self._truncate(step)
            self._begun = True
        if not due(step, self._every):
            return None
        rows = torch.cat([computed.nonzero()[:, 0], (~computed).nonzero()[:, 0]])
        count, ends = min(self._completions_a_step, len(rows)), int(computed.sum())
        last = count // 2 if ends >= count else 0
        places = torch.cat([rows[: count - last], rows[ends - last : ends]])
        return torch.full(computed.shape, -1).index_put((places,), torch.arange(len(places)))

    def write(
        self,
        step: int,
        sampled: Sampled,
        batch: TokenBatch,
        chosen: torch.Tensor,
        seen: Mapping[int, Mapping[str, list[float]]],
    ) -> None:
        """Append the chosen rows of a step. ``seen``: what the loss had of them, by their numbers."""
        rows = sorted((number, row) for row, number in enumerate(chosen.tolist()) if number >= 0)
        rewards = sampled.rewards.flatten().tolist()
        samples = [
            self._sample(sampled.trajectories[row], batch.rows(torch.tensor([row])), seen.get(number, {}))
            | {"row": row, "reward": _short(rewards[row])}
            for number, row in rows
        ]
        with AppendLog(self._file) as log:
            if log.append({"step": step, "samples": samples}, most=BYTES):
                log.sync()

    def _sample(self, trajectory: Trajectory, batch: TokenBatch, watched: Mapping[str, list[float]]) -> dict[str, Any]:
        prompt, length = len(trajectory.prompt_tokens), len(trajectory.tokens)
        places = list(range(prompt, length))
        left_out = max(0, len(places) - TOKENS)
        if left_out:
            places = [*places[: TOKENS // 2], *places[-(TOKENS // 2) :]]
        columns: dict[str, list[Any]] = {
            "place": places,
            "id": [trajectory.tokens[place] for place in places],
            "text": [self._decode([trajectory.tokens[place]]) for place in places],
            "counted": [bool(batch.mask[0, place]) for place in places],
            "version": [trajectory.weights_versions[place] for place in places],
        }
        # Of a row without a gradient: what was known before the loss.
        fields = {"old_logprob": batch.old_logprobs, "advantage": batch.advantages}
        before = {name: None if values is None else values[0].tolist() for name, values in fields.items()}
        before["rollout_logprob"] = list(trajectory.logprobs)
        for name in COLUMNS:
            values = watched.get(name) or before.get(name)
            columns[name] = [
                None if values is None or not counted else _short(values[place])
                for place, counted in zip(places, columns["counted"], strict=True)
            ]
        return {
            "group": trajectory.group,
            "prompt": self._decode(list(trajectory.prompt_tokens)),
            "completion": self._decode(list(trajectory.tokens[prompt:])),
            "finish_reason": trajectory.finish_reason,
            "rewards": {name: _short(value) for name, value in trajectory.rewards.items()},
            "tokens": columns,
            "left_out": left_out,
        }

    def _truncate(self, step: int) -> None:
        """Remove the lines of this step and later ones, and a last line that was not written to its end."""
        if not self._file.exists():
            return
        size = 0
        for line in whole_lines(self._file):
            if _step_of(line) >= step:
                break
            size += len(line) + 1
        with AppendLog(self._file) as log:
            log.cut(size)


def due(step: int, every: int) -> bool:
    """Whether a step is kept: at a distance of ``every``, which doubles where the steps kept at it are ``STEPS``.

    >>> [step for step in range(0, 5120, 10) if due(step, 10) and step > 2540]
    [2550, 2560, 2580, 2600, ...]
    """
    return every > 0 and step % (every << (step // (every * STEPS)).bit_length()) == 0


def _step_of(line: bytes) -> float:
    # A damaged line in a file that is kept for reading alone has no step: the report names the line.
    return (parsed_or_none(line) or {}).get("step", -1)


def _short(value: float) -> float | None:
    """Seven digits, all that float32 has; None for what is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
