"""Parameters that are not trained, chosen by patterns of their names."""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rl_bridge.models.source import ModelSource

_WRAPPER = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


@dataclass(frozen=True)
class FreezingSource:
    """The model of ``source``, in which parameters whose names match a pattern are not trained.

    Patterns are those of file names: ``model.embed_tokens.*``, ``*.layers.[0-3].*``. Of a tensor with two names, such
    as tied output embeddings, either name freezes both. A peft model's names go without peft's prefix.
    """

    source: ModelSource
    patterns: tuple[str, ...]

    def empty(self) -> PreTrainedModel:
        """The model, its matching parameters without a gradient.

        Raises:
            ValueError: a pattern that matches no parameter, with near names; or nothing is left to train.
        """
        model = self.source.empty()
        named = [(name.removeprefix(_WRAPPER), p) for name, p in model.named_parameters(remove_duplicate=False)]
        for pattern in self.patterns:
            chosen = [parameter for name, parameter in named if fnmatch.fnmatchcase(name, pattern)]
            if not chosen:
                raise ValueError(f"freeze pattern {pattern!r} matches no parameter of the model{_near(pattern, named)}")
            for parameter in chosen:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError(f"freeze patterns {', '.join(map(repr, self.patterns))} leave no parameter to train")
        return model

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """As ``source`` does."""
        self.source.load(model, device)


def _near(pattern: str, named: Sequence[tuple[str, torch.nn.Parameter]]) -> str:
    """The names that look most like the pattern, each with its own number in place of the layer's star."""
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(name for name, _ in named)), n=3, cutoff=0.3)
    return f"; near names are {', '.join(near)}" if near else f"; the first is {named[0][0]}"
