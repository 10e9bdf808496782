"""Options and inputs that the recipes which learn from rows alone share: imitation, preferences, reward models."""

import math
from dataclasses import dataclass
from typing import Any

from rl_bridge.common.terminal import given
from rl_bridge.data.census import Census
from rl_bridge.loop.data import Model, Rows
from rl_bridge.run.options import STEPS, require_used
from rl_bridge.run.provenance import with_evaluation
from rl_train.options import RecipeOptions


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The model that a recipe starts from, and its rows as the loss reads them."""

    model: Model
    rows: Rows
    held_out: Rows
    census: Census
    fingerprints: dict[str, str]
    """Hashes of all rows, and of the held-out ones."""


@dataclass(frozen=True, kw_only=True)
class RowOptions(RecipeOptions):
    """One step is one update on ``rows_per_step`` rows."""

    steps: int = 200
    """Updates."""
    rows_per_step: int = 64
    """Rows of an update."""
    evaluate_every: int = 25
    """Steps from one measurement on the held-out rows to the next."""
    epochs: float | None = None
    """Passes over the rows, in place of ``steps``."""
    apply_chat_template: bool = True
    """Render messages by the tokenizer's template. False concatenates their contents, and ends each turn of the
    assistant with the end-of-sequence token."""
    max_length: int | None = None
    """Rows with more tokens, prompt included, are left out, and counted. None keeps them all."""

    def __post_init__(self) -> None:
        """Refuse counts that train nothing, and steps beside epochs."""
        super().__post_init__()
        if min(self.steps, self.rows_per_step, self.evaluate_every) < 1:
            raise ValueError(f"counts must be ≥ 1, got {given(self, 'steps', 'rows_per_step', 'evaluate_every')}")
        if (self.epochs is not None and not self.epochs > 0) or (self.max_length is not None and self.max_length < 2):
            raise ValueError(f"need epochs > 0 and max_length ≥ 2, got {self.epochs} and {self.max_length}")
        if self.epochs is not None:
            require_used(self, ("steps",), f"beside --epochs {self.epochs}")

    def unread(self) -> dict[str, str]:
        """Options that nothing reads beside the others."""
        no_phases = "here, where no model waits while another one works; --offload always keeps all in host memory"
        return super().unread() | ({"offload": no_phases} if self.offload == "phases" else {})

    def steps_for(self, rows: int) -> int:
        """Updates for so many rows: ``steps``, or what the epochs take, the last one rounded up.

        Raises:
            ValueError: more than a run can ever make.
        """
        steps = self.steps if self.epochs is None else math.ceil(self.epochs * rows / self.rows_per_step)
        if steps > STEPS:
            option = f"--steps {steps}" if self.epochs is None else f"--epochs {self.epochs:g} of {rows} rows"
            raise ValueError(f"{option}: a run of {steps:.4g} steps never ends; give {STEPS:.0e} steps at most")
        return steps

    def due(self, step: int, steps: int) -> bool:
        """Whether the held-out rows are measured after this step: every ``evaluate_every``, and after the last one."""
        return (step + 1) % self.evaluate_every == 0 or step + 1 == steps

    def reading(self) -> dict[str, Any]:
        """How rows become tokens: arguments of ``encoded``."""
        return {"apply_chat_template": self.apply_chat_template, "max_length": self.max_length}

    def settle(self, inputs: Inputs, *, trained: int, held_out: int, loss: Any = None) -> dict[str, str]:
        """Count the rows, print the numbers, and return the fingerprints that a resumed run compares.

        ``loss``: what the held-out rows are measured by, where it is not their likelihood.

        Raises:
            ValueError: rows were left out, and those to train on are fewer than one step takes.
        """
        step, rows = {"--rows-per-step": self.rows_per_step}, len(inputs.rows)
        self.remark_on_warmup(self.steps_for(rows))
        inputs.census.settle(trained=trained, held_out=held_out, step=step, examples=rows)
        marks = inputs.fingerprints | self.fingerprints(inputs.model.tokenizer)
        return with_evaluation(marks, **self.reading(), softcap=self.softcap, loss=loss)
