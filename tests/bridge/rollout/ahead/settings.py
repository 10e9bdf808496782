"""What a simulated run is like: written down, or drawn at random from a seed."""

import itertools
import random
from dataclasses import dataclass

from rl_bridge.rollout.ahead.pumps import Pace
from tests.bridge.rollout.ahead.simulated_engine import natural_length, words


@dataclass(frozen=True)
class Setting:
    """What is simulated. Accidents come at random and only so often."""

    max_staleness: int = 1
    pace: Pace = Pace(limit=40, steps=4)
    window: int = 1
    prompts: int = 2
    samples: int = 2
    steps: int = 6
    crashes: int = 0
    deaths: int = 0
    forgets: int = 0
    """Environments that begin again, so that their conversations do."""
    checkpoint_every: int = 2
    lazy: bool = False
    """The trainer goes on without an update where the engine is busy and its own prompts are ready."""
    truncated: bool = False
    turns: int = 0
    """Of a conversation; 0: completions."""
    served: bool = False
    """The engine is a server, which draws when it likes."""
    greedy: bool = False
    """Each prompt has a greedy sample behind the others."""
    apart: bool = False
    """Rewards look at each sample by itself."""

    @property
    def of_a_prompt(self):
        """Samples, the greedy one among them."""
        return self.samples + self.greedy

    def ends(self, seed, count):
        """Whether the policy stops after so many tokens that it drew."""
        if not self.turns:
            return count == natural_length(seed)
        ends = list(itertools.accumulate(words(seed, turn) for turn in range(self.turns)))
        return count in ends


def setting_of(seed):
    """A setting drawn at random: every mode, with and without accidents."""
    choose = random.Random(f"setting {seed}")
    staleness = choose.choice([0, 1, 1, 2, 3])
    mode = choose.choice(["drain", "rounds", "rounds", "free", "free", "free", "free whole", "free lazy"])
    limit, steps = choose.choice([5, 40, 1000]), choose.choice([1, 1, 3, 8])
    pace = {
        "drain": Pace(limit=limit, steps=steps),
        "rounds": Pace(partial=True, rounds=choose.choice([1, 2, 5]), limit=limit, steps=steps),
        "free": Pace(partial=True, deterministic=False, limit=limit, steps=steps,
                     seconds=choose.choice([None, None, 2.0, 30.0])),
        "free whole": Pace(deterministic=False, limit=limit, steps=steps),
        "free lazy": Pace(deterministic=False, limit=limit, steps=steps),
    }[mode]  # fmt: skip
    prompts = choose.choice([1, 2, 3])
    window = 1 if pace.deterministic or not staleness else choose.choice([1, 2, prompts * staleness + 1])
    return Setting(
        max_staleness=staleness,
        pace=pace,
        window=window,
        prompts=prompts,
        samples=choose.choice([1, 2, 3]),
        steps=choose.choice([1, 4, 7]),
        crashes=choose.choice([0, 0, 1, 4]),
        deaths=choose.choice([0, 0, 1, 3]),
        checkpoint_every=choose.choice([1, 2, 5]),
        lazy=mode == "free lazy",
        truncated=choose.random() < 0.3,
        turns=choose.choice([0, 0, 1, 3]),
        forgets=choose.choice([0, 0, 2]) if not pace.deterministic else 0,
        greedy=choose.random() < 0.5,
        served=choose.random() < 0.5,
        apart=choose.random() < 0.5,
    )
