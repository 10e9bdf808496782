"""The Pareto front of several rewards over a run: which steps no other step beats in all of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import rl_fn
from rl_bridge.atomic import replacing, write_json
from rl_bridge.plots import Figure

CAPACITY = 64


class Archive:
    """Held-out means of two or more rewards at each evaluation; ``pareto.json`` and ``pareto.png`` in ``folder``."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names, self.folder = tuple(names), folder
        self._archive = rl_fn.pareto_archive(CAPACITY, len(self.names), maximize=True)
        self._state = self._archive.init()
        self._seen: list[dict[str, Any]] = []

    def insert(self, rewards: Mapping[str, float], step: int) -> None:
        """Take in the rewards after ``step`` steps, and write pareto.json anew."""
        point = [rewards[name] for name in self.names]
        self._state = self._archive.insert(self._state, jnp.asarray(point, jnp.float32), step)
        self._seen.append({"step": step, **rewards})
        write_json(self.folder / "pareto.json", {"names": self.names, "front": self.front(), "evaluations": self._seen})

    def front(self) -> list[dict[str, Any]]:
        """The steps that no other beats, with their rewards."""
        used = np.asarray(self._state.used)
        points, tags = np.asarray(self._state.points)[used].tolist(), np.asarray(self._state.tags)[used].tolist()
        return [
            {"step": tag, **dict(zip(self.names, point, strict=True))} for point, tag in zip(points, tags, strict=True)
        ]

    def checkpoint_state(self) -> dict[str, Any]:
        """What was seen; the front is a function of it."""
        return {"names": list(self.names), "seen": json.loads(json.dumps(self._seen))}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave; other rewards raise ValueError."""
        if tuple(state["names"]) != self.names:
            raise ValueError(f"the checkpoint has the rewards {state['names']}, this run has {list(self.names)}")
        self._state, self._seen = self._archive.init(), []
        for point in state["seen"]:
            self._seen.append(point)
            values = jnp.asarray([point[name] for name in self.names], jnp.float32)
            self._state = self._archive.insert(self._state, values, point["step"])

    def draw(self) -> None:
        """pareto.png, the first two rewards against each other: every evaluation, and the front in bold."""
        x, y = self.names[:2]
        figure = Figure(figsize=(6, 5), layout="constrained")
        axis = figure.subplots()
        seen = [p[x] for p in self._seen], [p[y] for p in self._seen]
        axis.plot(*seen, "o", color="C0", alpha=0.35, label="evaluations")
        front = sorted(self.front(), key=lambda point: point[x])
        axis.plot([p[x] for p in front], [p[y] for p in front], "o-", color="C1", label="no other is better in all")
        for point in front:
            axis.annotate(str(point["step"]), (point[x], point[y]), (3, 3), textcoords="offset points", fontsize=7)
        axis.set(xlabel=x, ylabel=y, title=f"{self.folder.name}: held-out rewards")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        with replacing(self.folder / "pareto.png") as temporary:
            figure.savefig(temporary, format="png", dpi=110)
