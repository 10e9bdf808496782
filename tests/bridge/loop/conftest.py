"""The tiny model of this folder's loops."""

import pytest

from rl_bridge import Model, current_executor
from rl_bridge.models.small import TinySource, character_tokenizer


@pytest.fixture(scope="module")
def model():
    """A tiny model; its engines are gone in the end."""
    current_executor().stop()
    tokenizer = character_tokenizer("0123456789+=")
    yield Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    current_executor().stop()
