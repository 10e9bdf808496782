"""Rewards that compare a completion with the row."""

from collections.abc import Mapping
from typing import Any


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, surrounding white space aside, else 0.

    >>> exact_match(" 95", {"answer": "95"}), exact_match("96", {"answer": "95"})
    (1.0, 0.0)
    """
    if isinstance(row["answer"], Mapping | list | tuple):
        raise ValueError(f"answer must be text or a number to be compared, got {row['answer']!r}")
    return float(completion.strip() == str(row["answer"]).strip())
