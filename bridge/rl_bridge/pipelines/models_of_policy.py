"""The models beside the policy: where its critic and its teacher come from."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.models.loading import pretrained
from rl_bridge.models.source import ModelSource, PretrainedSource
from rl_bridge.models.values import PretrainedValueSource, ValueSource
from rl_bridge.trainers.modules.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The model of the values, for an algorithm that has one (ppo, vapo)."""

    model: str | None = None
    """Folder or hub id of a value or reward model. None: the policy's own trunk with a head of zeros."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, final=0.2)


def critic_source(
    options: CriticOptions, source: ModelSource, warm: Path | None, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """Where the critic comes from; ``warm`` is the policy after its warm start, where there was one."""
    if options.model is not None:
        return PretrainedValueSource(options.model)
    trunk = source if warm is None else PretrainedSource(str(warm))
    pad = tokenizer.pad_token_id
    return ValueSource(trunk, pad_token=pad if isinstance(pad, int) else None)


def require_critic(options: CriticOptions) -> None:
    """Refuse a folder that is no value model, before a run begins.

    Raises:
        ValueError: no such model, another head, or weights that do not fit.
    """
    if options.model is not None:
        source = PretrainedValueSource(options.model)
        with torch.device("meta"):
            source.check(source.empty())


def teacher_source(name: str, tokenizer: PreTrainedTokenizerBase) -> ModelSource:
    """Where the teacher comes from.

    Raises:
        ValueError: no such model, or its vocabulary is not the policy's: its probabilities would be of other tokens.
    """
    source, its_own = pretrained(name)
    # Tokens that the teacher has besides are never asked about.
    if other := tokenizer.get_vocab().items() - its_own.get_vocab().items():
        example = min(other, key=lambda pair: pair[1])
        raise ValueError(f"the teacher {name!r} has another vocabulary than the policy: it has no token {example}")
    return source
