"""How far rollouts may run ahead: a bound that is kept where prompts go in, so nothing is thrown away for its age."""

from dataclasses import dataclass

from rl_bridge.messages import given


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which prompts may go in while the rollout holds version k of the policy.

    Prompts have the numbers 0, 1, 2, … in the order of the data. Version k is the policy after k training steps. Each
    step trains on P = ``prompts_per_step`` groups. It takes them one by one, and each is one of the ``window`` = W
    prompts from the first untrained one on. W = 1 takes prompts in their order; a larger window lets a step pass over
    prompts whose completions take long.

    **Theorem.** Let prompt g go in at version k only if g < (k + 1 + S) · P, where S is ``max_staleness`` less
    ⌈(W − 1) / P⌉. If the version that the rollout holds never falls, every token that step t trains on was drawn by a
    version of at least t − ``max_staleness``.

    *Proof.* Let step t take g, which went in at version k. Before step t there were t · P prompts taken, and g was not
    among them. As long as g is untrained, the first untrained prompt is at most g, so that no prompt from g + W on was
    taken. Therefore t · P ≤ g + W − 1 < (k + 1 + S) · P + W − 1, and t − k ≤ S + ⌈(W − 1) / P⌉ = ``max_staleness``.
    The tokens of g were drawn at version k or later. ∎

    No prompt is refused or dropped for its age: every prompt that went in is trained on, however long it takes.

    >>> one_ahead = Admission(max_staleness=1, prompts_per_step=4)
    >>> one_ahead.limit(version=0), one_ahead.limit(version=3)
    (8, 20)
    """

    max_staleness: int
    prompts_per_step: int
    window: int = 1
    steps: int | None = None
    """Training steps of the run: prompts of later steps never go in."""

    def __post_init__(self) -> None:
        """Refuse a window that the staleness leaves no room for.

        Raises:
            ValueError: with the smallest ``max_staleness`` of this window.
        """
        if self.max_staleness < 0 or self.prompts_per_step < 1 or self.window < 1:
            raise ValueError(
                "need max_staleness ≥ 0, prompts_per_step ≥ 1 and window ≥ 1, got "
                f"{given(self, 'max_staleness', 'prompts_per_step', 'window')}"
            )
        if self.ahead < 0:
            raise ValueError(
                f"a window of {self.window} prompts, {self.prompts_per_step} a step, needs max_staleness ≥ "
                f"{self.max_staleness - self.ahead}, got {self.max_staleness}"
            )

    @property
    def ahead(self) -> int:
        """S: the steps whose prompts may be in the rollout besides those of the next step."""
        return self.max_staleness - -(-(self.window - 1) // self.prompts_per_step)

    def limit(self, version: int) -> int:
        """Prompts with numbers below this may go in while the rollout holds ``version``."""
        limit = (version + 1 + self.ahead) * self.prompts_per_step
        return limit if self.steps is None else min(limit, self.steps * self.prompts_per_step)
