"""The probe of an update: a fixed prompt whose continuation the engine draws and the trainer scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_PROMPT, _COUNT, _SEED = 24, 8, 20
_LONGER = 32
_MULTIPLE = 4.0


class EngineLimits(NamedTuple):
    """Sizes of an engine that a probe depends on. ``block``: tokens of a block of the prefix cache, 0 without one."""

    vocabulary: int
    longest: int
    block: int


class Drawn(NamedTuple):
    """The tokens that an engine drew after the probe's prompt.

    ``cached``: how many tokens of the prompt it did not compute. ``version``: of the weights that drew all of them,
    None where they are of several.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    version: str | None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and drawn tokens, which a trainer scores."""
        return (*self.prompt, *self.tokens)


class ProbeFailed(RuntimeError):
    """The engine does not generate from the weights that it should have."""


@dataclass(frozen=True)
class Tolerance:
    """Nats between the engine's log-probability of a token and the trainer's: the mean and the most."""

    mean: float
    most: float
    fixed: bool = field(default=False, repr=False)
    """The user's own, which nothing that is measured changes."""

    @classmethod
    def of(cls, precision: str, mean: float | None = None) -> "Tolerance":
        """By the precision of the engine's matrices, ``fp32``, ``bf16`` or a quantised one.

        ``mean``: in place of the precision's own; the most changes in proportion.

        >>> Tolerance.of("fp32"), Tolerance.of("int8", mean=0.6)
        (Tolerance(mean=0.001, most=0.01), Tolerance(mean=0.6, most=4.0))
        """
        default = _TOLERANCES.get(precision, cls(0.3, 2.0))
        return default if mean is None else cls(mean, default.most * mean / default.mean, fixed=True)

    def of_trusted(self) -> "Tolerance":
        """For weights all of which were compared in the engine: what is left are roundings, and the model has its own.

        >>> Tolerance.of("bf16").of_trusted()
        Tolerance(mean=0.2, most=2.0)
        """
        return self if self.fixed else Tolerance(_MULTIPLE * self.mean, _MULTIPLE * self.most)

    def measured(self, drawn: Drawn, expected: Sequence[float]) -> "Tolerance":
        """From now on: four times the gaps of weights that are proved, and not less than the precision's own."""
        if self.fixed:
            return self
        gaps = _gaps(drawn, expected)
        return Tolerance(max(self.mean, _MULTIPLE * sum(gaps) / len(gaps)), max(self.most, _MULTIPLE * max(gaps)))


_TOLERANCES = {"fp32": Tolerance(1e-3, 1e-2), "bf16": Tolerance(0.05, 0.5)}


@dataclass(frozen=True)
class Probe:
    """The same prompt, seed and count at every update."""

    prompt: tuple[int, ...]
    count: int
    seed: int = _SEED
    temperature: float = 1.0
    cacheable: bool = True
    """Whether the prompt fills a block of the prefix cache, so that stale keys and values would show."""

    @classmethod
    def of(cls, limits: EngineLimits, temperature: float) -> "Probe":
        """A prompt a little longer than a block of the prefix cache, if the engine can read one."""
        count = min(_COUNT, limits.longest - 1)
        length = min(limits.block + _PROMPT, limits.longest - count)
        prompt = tuple((3 + 7 * place) % limits.vocabulary for place in range(length))
        return cls(prompt, count, temperature=temperature, cacheable=0 < limits.block < length)

    def longer(self, limits: EngineLimits) -> "Probe":
        """Another prompt and more tokens: the second look, before an engine is given up."""
        length = len(self.prompt)
        prompt = tuple((5 + 11 * place) % limits.vocabulary for place in range(length))
        count = min(_LONGER, limits.longest - length)
        return replace(self, prompt=prompt, count=count, seed=self.seed + 1)


def joined(looks: Sequence[tuple[Drawn, Sequence[float]]]) -> tuple[Drawn, tuple[float, ...]]:
    """Several draws and their scores as one, under the first prompt."""
    drawn = looks[0][0]._replace(
        tokens=tuple(token for look, _ in looks for token in look.tokens),
        logprobs=tuple(value for look, _ in looks for value in look.logprobs),
    )
    return drawn, tuple(value for _, scored in looks for value in scored)


def check_drawn(drawn: Drawn, probe: Probe, version: str) -> None:
    """The checks of a draw that need no trainer.

    Raises:
        ProbeFailed: the prompt came from a cache that the old weights filled, another version drew, or something is
            not a number.
    """
    if drawn.cached:
        raise ProbeFailed(f"{drawn.cached} tokens of the prompt came from the prefix cache, which has the old weights'")
    if drawn.version != version:
        raise ProbeFailed(f"weights of version {drawn.version!r} drew the tokens, not {version!r}")
    if len(drawn.tokens) != probe.count or len(drawn.logprobs) != probe.count:
        raise ProbeFailed(
            f"{probe.count} tokens were asked for; {len(drawn.tokens)} came, with {len(drawn.logprobs)} values"
        )
    if wrong := [value for value in drawn.logprobs if not math.isfinite(value)]:
        raise ProbeFailed(f"{len(wrong)} of {probe.count} log-probabilities are no numbers, the first: {wrong[0]}")


def check_scored(drawn: Drawn, expected: Sequence[float], tolerance: Tolerance) -> None:
    """Compare the engine's log-probabilities with the trainer's of the same tokens.

    Raises:
        ProbeFailed: they are farther apart than this precision explains, or the trainer's are no numbers.
    """
    if len(expected) != len(drawn.tokens):
        raise ProbeFailed(f"the trainer scored {len(expected)} tokens of {len(drawn.tokens)}")
    gaps = _gaps(drawn, expected)
    mean, most = sum(gaps) / len(gaps), max(gaps)
    # The comparison is written so that NaN fails.
    if not (all(map(math.isfinite, gaps)) and mean <= tolerance.mean and most <= tolerance.most):
        raise ProbeFailed(
            f"the engine's log-probabilities are {mean:.2g} nats from the trainer's in the mean and {most:.2g} at "
            f"most; allowed are {tolerance.mean:g} and {tolerance.most:g} (--rollout.vllm.proof-tolerance)"
        )


def _gaps(drawn: Drawn, expected: Sequence[float]) -> list[float]:
    return [abs(logprob - score) for logprob, score in zip(drawn.logprobs, expected, strict=True)]


def check_again(drawn: Drawn, before: Drawn, expected: Sequence[float], tolerance: Tolerance) -> None:
    """Compare a fresh engine's draw with the proved one of an engine that had the same weights.

    ``expected``: the trainer's log-probabilities of the proved tokens. Rows beside the probe change the rounding, which
    may change a token and all behind that one; half of the tokens must be the same.

    Raises:
        ProbeFailed: other tokens, or log-probabilities farther from the trainer's than this precision explains.
    """
    pairs = zip(drawn.tokens, before.tokens, strict=True)
    same = next((place for place, (now, then) in enumerate(pairs) if now != then), len(drawn.tokens))
    if drawn.prompt != before.prompt or 2 * same < len(drawn.tokens):
        raise ProbeFailed(f"with the same seed these weights drew {before.tokens} when proved, and {drawn.tokens} now")
    first = drawn._replace(tokens=drawn.tokens[:same], logprobs=drawn.logprobs[:same])
    check_scored(first, expected[:same], tolerance)
