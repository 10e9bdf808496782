"""A reward model in this process: a trained folder, which reads conversations with its own tokenizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.errors import RowFailed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MICRO_BATCH_TOKENS = 16384
"""Of one forward pass, unless a program says otherwise."""


class RewardModel:
    """A reward of a whole batch: the number that a ``*ForSequenceClassification`` of one label gives a conversation.

    It is transformers' own number, whoever trained the model: of the conversation up to the assistant's last message,
    as the model's chat template renders it to its end, read at the last token that is not the padding of config.json.
    Contents are concatenated, each turn with its end token, where the tokenizer has no template.
    """

    def __init__(self, name: str, *, micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> None:
        """``name``: a folder or hub id. What is wrong with it shows here; the weights are read when first needed.

        Raises:
            ValueError: there is no such model, or it has another head.
        """
        # Not at the top: most runs have no reward model, and a reward's own process needs no torch.
        import torch

        from rl_bridge.models.checks import Fits
        from rl_bridge.models.loading import tokenizer_of
        from rl_bridge.models.values import PretrainedValueSource

        self.name, self._tokens = name, micro_batch_tokens
        self._source = PretrainedValueSource(name)
        with torch.device("meta"):
            empty = self._source.empty()
        self._source.check(empty)
        self._tokenizer: PreTrainedTokenizerBase = tokenizer_of(name)
        self._fits = Fits(empty, self._tokenizer)
        self._model: PreTrainedModel | None = None

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The model's numbers.

        Raises:
            RowFailed: a conversation that its tokenizer or template refuses.
        """
        import torch

        from rl_bridge.data.micro_batches import micro_batches
        from rl_bridge.data.token_batch import collate
        from rl_bridge.parallel.values import scored_places, token_values

        model, pad = self._loaded(), self._tokenizer.pad_token_id
        assert isinstance(pad, int)
        batch = collate([self._encoded(t, place) for place, t in enumerate(trajectories)], pad)
        found = torch.zeros(len(trajectories))
        with torch.no_grad():
            for part in micro_batches(batch, self._tokens):
                inside = part.batch.to(model.device)
                values = token_values(model, inside.tokens)
                last = scored_places(model, inside.tokens, inside.lengths)
                found[part.places] = values.gather(1, last[:, None])[:, 0].cpu()
        return found.tolist()

    def close(self) -> None:
        """Give the weights' memory back."""
        self._model = None

    def _loaded(self) -> "PreTrainedModel":
        import torch

        if self._model is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            with torch.device("meta"):
                model = self._source.empty()
            self._source.load(model, device)
            self._model = model
        return self._model

    def _encoded(self, trajectory: Trajectory, place: int) -> Trajectory:
        from rl_bridge.models.encoding import encode_row

        row = {"messages": list(trajectory.messages)}
        try:
            template = bool(self._tokenizer.chat_template)
            encoded = encode_row(self._tokenizer, row, apply_chat_template=template, to_end=True)
            self._fits.require_tokens(encoded.tokens)
            return encoded
        except ValueError as error:
            raise RowFailed(place, f"the reward model {self.name!r} cannot read the conversation: {error}") from error
