"""Four prompts, 64 completions of each, a true reward of every one, and the policies that are best for it.

A prompt is a letter, a completion a string of three letters. The true reward r(x, y) is the sum of what each letter is
worth at its place after that prompt, and of what two neighbours are worth together.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_bridge.data.comparisons import PairBatch, collate_comparisons
from rl_bridge.data.examples import Example
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.modules.comparison import ComparisonLoss

PAD, EOS = 0, 1
LETTERS = range(2, 6)
PROMPTS = [(token,) for token in range(6, 10)]
COMPLETIONS = list(itertools.product(LETTERS, repeat=3))
BETA = 0.5


@dataclass(frozen=True)
class World:
    """True rewards and what they make of the reference; [prompts, completions] each."""

    rewards: np.ndarray
    reference: np.ndarray
    """Probabilities, which sum to 1 over the completions."""

    def optimum(self) -> np.ndarray:
        return normalised(np.log(self.reference) + self.rewards / BETA)

    def optimum_of_ipo(self) -> np.ndarray:
        wins = 1.0 / (1.0 + np.exp(self.rewards[:, None, :] - self.rewards[:, :, None]))
        return normalised(np.log(self.reference) + wins.mean(-1) / (BETA / 4))


def normalised(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Mean over prompts, in nats."""
    return float((p * (np.log(p) - np.log(q))).sum(-1).mean())


def true_rewards(seed: int) -> np.ndarray:
    """Of mean 0 and standard deviation 1 for each prompt, [prompts, completions]."""
    generator, letters = np.random.default_rng([seed, 3]), np.array(COMPLETIONS) - LETTERS[0]
    alone = generator.normal(size=(len(PROMPTS), 3, len(LETTERS)))
    pairs = 0.5 * generator.normal(size=(2, len(LETTERS), len(LETTERS)))
    rewards = np.zeros((len(PROMPTS), len(COMPLETIONS)))
    for place in range(3):
        rewards += alone[:, place, letters[:, place]]
    for place in range(2):
        rewards += pairs[place, letters[:, place], letters[:, place + 1]]
    return (rewards - rewards.mean(-1, keepdims=True)) / rewards.std(-1, keepdims=True)


def trajectory(prompt: Sequence[int], completion: Sequence[int]) -> Trajectory:
    return single_turn(prompt, [*completion, EOS])


def every_completion() -> PairBatch:
    rows = [[trajectory(prompt, completion)] for prompt in PROMPTS for completion in COMPLETIONS]
    return collate_comparisons(rows, PAD)


def pairs_of(world: World, count: int, seed: int, flipped: float) -> list[tuple[int, int, int]]:
    """(prompt, chosen, rejected), labelled by the true rewards; a share ``flipped`` of the labels is wrong."""
    generator = np.random.default_rng([seed, 2])
    x = generator.integers(len(PROMPTS), size=count)
    a = generator.integers(len(COMPLETIONS), size=count)
    b = (a + generator.integers(1, len(COMPLETIONS), size=count)) % len(COMPLETIONS)
    wins = generator.random(count) < 1.0 / (1.0 + np.exp(world.rewards[x, b] - world.rewards[x, a]))
    wins ^= generator.random(count) < flipped
    chosen, rejected = np.where(wins, a, b), np.where(wins, b, a)
    return list(zip(x.tolist(), chosen.tolist(), rejected.tolist(), strict=True))


def examples_for(loss: ComparisonLoss, pairs: Sequence[tuple[int, int, int]]) -> list[Example]:
    """Pairs, or for a loss of single completions each completion with its label and one of another prompt."""
    table = {(x, y): trajectory(PROMPTS[x], COMPLETIONS[y]) for x in range(len(PROMPTS)) for y in range(64)}
    if loss.form == "pairs":
        return [Example(completions=(table[x, good], table[x, bad])) for x, good, bad in pairs]
    single = []
    for (x, good, bad), (_, other, _) in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        single.append(Example(completions=(table[x, good], table[x, other]), desirable=True))
        single.append(Example(completions=(table[x, bad], table[x, other]), desirable=False))
    return single
