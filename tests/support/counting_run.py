"""A run that counts, in place of one that trains."""

from dataclasses import dataclass, field

from rl_bridge.run.options import MAY_CHANGE
from rl_bridge.run.run import Run


@dataclass(frozen=True)
class Optimizer:
    rate: float = 0.5
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True)
class Options:
    seed: int = 0
    data: str | None = None
    threads: int | None = field(default=None, metadata=MAY_CHANGE)
    optimizer: Optimizer = Optimizer()


DATA = {"data": "0123", "reward": "abcd"}


class Place:
    """A stream that knows how many rows there are."""

    def __init__(self, rows=10):
        self.rows, self.place = rows, 0

    def checkpoint_state(self):
        return {"rows": self.rows, "place": self.place}

    def load_checkpoint_state(self, state):
        if state["rows"] != self.rows:
            raise ValueError(f"the checkpoint was made on {state['rows']} rows, this run has {self.rows}")
        self.place = state["place"]


def go(folder, options=Options(), *, until=6, fingerprints=DATA, rows=10, **how):
    """Steps of a run with a checkpoint every two; returns the steps that were made."""
    place, made = Place(rows), []
    with Run(folder, options, fingerprints=fingerprints, checkpoint_every=2, **how) as run:
        for step in run.steps("only", 6, state={"place": place}):
            if step == until:  # the checkpoint of the step before is begun
                break
            place.place += 1
            made.append((step, place.place))
            run.log(step, {"reward": float(place.place)})
        else:
            run.finish({})
    return made
