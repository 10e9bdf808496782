"""Two-digit arithmetic with a verifiable answer: the task of the quickstart. Pure Python, no framework."""

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

ALPHABET = "0123456789+-="
Operation = Literal["+", "-"]


def arithmetic_rows(operations: Sequence[Operation] = ("+", "-")) -> list[dict[str, str]]:
    """Every problem ``a+b=`` and ``a-b=`` with 10 ≤ a, b ≤ 99, in a fixed order: 16200 rows of prompt and answer."""
    unknown = set(operations) - {"+", "-"}
    if unknown or not operations:
        raise ValueError(f"operations must be some of '+' and '-', got {list(operations)}")
    return [
        {"prompt": f"{a}{operation}{b}=", "answer": str(a + b if operation == "+" else a - b)}
        for operation in operations
        for a in range(10, 100)
        for b in range(10, 100)
    ]


def split_rows(rows: Sequence[dict], held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Shuffle and cut into (train, held-out): no prompt of the second is in the first, even if a row occurs twice."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    held_prompts: dict[str, dict] = {}
    for row in shuffled:
        if len(held_prompts) == held_out:
            break
        held_prompts.setdefault(_prompt_of(row), row)
    train = [row for row in shuffled if _prompt_of(row) not in held_prompts]
    if len(held_prompts) < held_out or not train:
        distinct = len({_prompt_of(row) for row in rows})
        raise ValueError(
            f"cannot hold out {held_out} distinct prompts of {len(rows)} rows with {distinct} and train on others: "
            "give a smaller --held-out, more rows, or --eval-data"
        )
    return train, list(held_prompts.values())


def _prompt_of(row: dict) -> str:
    """The prompt as it is written; of a whole conversation, what stands before the assistant's first message."""
    if "prompt" in row:
        return repr(row["prompt"])
    return repr(list(takewhile(lambda message: message["role"] != "assistant", row["messages"])))
