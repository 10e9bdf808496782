"""A cell of the table: one family in one arrangement is right, falls back to padding, or is refused by name."""

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

RIGHT, PADDED, REFUSED, NONE, WRONG = "✓", "padded", "refused", "–", "WRONG"


class Cell(NamedTuple):
    """A verdict, and in words why; ``error`` is the largest one over its tolerance."""

    verdict: str
    why: str = ""
    error: float | None = None

    def text(self) -> str:
        """For a table in a terminal."""
        number = "" if self.error is None else f" {self.error:.2g}"
        return f"{self.verdict}{number}" + (f" {self.why}" if self.verdict != RIGHT and self.why else "")


class Refusal(Exception):
    """Raised by ``building`` in place of what the build itself raised, for the cell to judge."""


def building(build: Callable[[], Any]) -> Any:
    """What ``build`` makes. A refusal is right here alone: before anything is trained or drawn."""
    try:
        return build()
    except (ValueError, NotImplementedError) as error:
        raise Refusal(f"{type(error).__name__}: {error}") from error


def cell(model: PreTrainedModel | None, work: Callable[[], Mapping[str, float] | Cell]) -> Cell:
    """The cell of errors (≤ 1 is right) that ``work`` finds, or of what it raises."""
    try:
        found = work()
    except Refusal as refusal:
        message = _one_line(str(refusal))
        return Cell(REFUSED if names(model, message) else WRONG, message)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        return Cell(WRONG, _one_line(f"{type(error).__name__}: {error} ({where})"))
    return found if isinstance(found, Cell) else judged(found)


def judged(found: Mapping[str, float], verdict: str = RIGHT, why: str = "") -> Cell:
    """``verdict`` if every error is at most 1, else WRONG with the largest."""
    wrong = {name: error for name, error in found.items() if not error <= 1.0}  # NaN is wrong
    worst = max(wrong or found, key=(wrong or found).__getitem__)
    return Cell(WRONG, worst, found[worst]) if wrong else Cell(verdict, why, found[worst])


def names(model: PreTrainedModel | None, message: str) -> bool:
    """Whether a refusal says what is refused: the model by class or type, or an argument by name."""
    known = {"tensor=", "sequence=", "shard=", "target_modules", "Mesh(", "LoRA"}
    if model is not None:
        config = model.config
        known |= {type(model).__name__, type(model.base_model).__name__, repr(config.model_type)}
        known |= {type(config).__name__, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "LoRA")}
    return any(word in message for word in known)


def _one_line(text: str) -> str:
    text = re.sub(r"/tmp/\S+", "…", text)  # folders of a test are other ones each time
    return re.sub(r"\s+", " ", text)[:1500]
