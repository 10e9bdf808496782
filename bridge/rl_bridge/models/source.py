"""Where a model comes from: its structure, made anywhere, and its weights, loaded shard by shard."""

from typing import Protocol

from transformers import PreTrainedModel


class ModelSource(Protocol):
    """Picklable: it travels to every worker, which makes and loads its own part of the model."""

    def empty(self) -> PreTrainedModel:
        """The model without values, on torch's default device (an engine makes it on ``meta``)."""
        ...

    def load(self, model: PreTrainedModel) -> None:
        """Give every parameter and buffer of ``model`` its value.

        Parameters may be on the meta device and may be DTensors, of which only the own part is read.

        Raises:
            ValueError: a weight that is missing, unknown or of another shape, by its name.
        """
        ...
