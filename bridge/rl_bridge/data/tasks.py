"""Tasks made here, with a rule that scores: two-digit arithmetic, and those of the package ``reasoning-gym``."""

import functools
import importlib.util
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from rl_bridge.data.messages import Chat
from rl_bridge.data.rows import missing

# Two-digit arithmetic with a verifiable answer: the task of the quickstart. Pure Python, no framework.

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
        held_prompts.setdefault(prompt_of(row), row)
    train = [row for row in shuffled if prompt_of(row) not in held_prompts]
    if len(held_prompts) < held_out or not train:
        distinct = len({prompt_of(row) for row in rows})
        raise ValueError(
            f"cannot hold out {held_out} distinct prompts of {len(rows)} rows with {distinct} and train on others: "
            f"at most {max(0, distinct - 1)} can be held out"
        )
    return train, list(held_prompts.values())


def prompt_of(row: Mapping[str, Any]) -> str:
    """The prompt as it is written, by which two rows are of one prompt.

    Of a whole conversation it is what stands before the assistant's first message; of a row of an environment's own,
    which has neither, the whole row without the place where it was read.

    >>> prompt_of({"prompt": "1+1=", "answer": "2"}) == prompt_of({"prompt": "1+1=", "answer": "3"})
    True
    """
    if not missing(row, "prompt"):
        task = [row["reset"]] if row.get("reset") else []  # of an OpenEnv server: prompts of many tasks are alike
        return repr(_in_order([row["prompt"], *task] if task else row["prompt"]))
    if missing(row, "messages") or not all(isinstance(message, Mapping) for message in row["messages"]):
        return repr(_in_order({name: value for name, value in row.items() if name != "_where"}))
    return repr(_in_order(list(takewhile(lambda message: message.get("role") != "assistant", row["messages"]))))


def _in_order(value: Any) -> Any:
    """The value with the keys of its objects in one order, which says nothing about a prompt."""
    if isinstance(value, Chat):
        value = value.row()
    if isinstance(value, Mapping):
        return sorted(((key, _in_order(item)) for key, item in value.items()), key=repr)
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value


# Tasks of the package ``reasoning-gym``: problems made from a seed, each scored by the gym's own rule.

# A minus sign directly after a digit is a subtraction ("5-3"), not the sign of what follows.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_TRIES_PER_ROW = 50
# Their scorers run the completion as Python (eval, or sympy's parse_expr), which must never be done to sampled text.
UNSAFE = frozenset(
    [
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ]
)


def _gym() -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError("reasoning tasks need reasoning-gym; install with: make install-smollm2")
    import reasoning_gym  # pyright: ignore[reportMissingImports]  (an extra)

    return reasoning_gym


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return _gym().get_score_answer_fn(task)


def _distinct(task: str, arguments: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    # The gym makes problem i of seed s from s + i. Near seeds share nearly all problems, so seeds are spread first.
    start = random.Random(f"{task} {seed}").randrange(2**31)
    dataset = _gym().create_dataset(task, size=count * _TRIES_PER_ROW, seed=start, **arguments)
    entries: dict[str, dict[str, Any]] = {}
    for index in range(len(dataset)):
        if len(entries) == count:
            break
        entry = dataset[index]
        entries.setdefault(entry["question"].strip(), entry)
    if len(entries) < count:
        raise ValueError(
            f"{task} {dict(arguments)} gave {len(entries)} distinct problems in {len(dataset)} tries, wanted {count}"
        )
    return list(entries.values())


def reasoning_rows(
    tasks: Mapping[str, Mapping[str, Any]] | Sequence[str],
    *,
    size: int,
    seed: int,
    instruction: str = "Answer with the final answer only.",
) -> list[dict[str, Any]]:
    """``size`` problems with distinct prompts, the same number of each task (the first ones get the remainder).

    ``tasks`` are names of reasoning-gym, or a mapping from names to the arguments of their generators. Each row has
    ``prompt`` (chat messages, ``instruction`` being the system's), ``answer``, ``task`` and the ``metadata`` that
    scoring needs. Two seeds may still share a prompt: hold rows out with ``split_rows``, which never shares one.
    """
    arguments = dict(tasks) if isinstance(tasks, Mapping) else {task: {} for task in tasks}
    if not arguments or size < len(arguments):
        raise ValueError(f"need at least one task and a row of each, got size={size} for tasks {list(arguments)}")
    if unsafe := UNSAFE & arguments.keys():
        raise ValueError(
            f"reasoning-gym scores {sorted(unsafe)} by running completions as Python: not for sampled text"
        )
    share, rest = divmod(size, len(arguments))
    rows = [
        {
            "prompt": [
                {"role": "system", "content": instruction},
                {"role": "user", "content": entry["question"].strip()},
            ],
            "answer": entry["answer"],
            "task": task,
            "metadata": entry["metadata"],
        }
        for place, (task, options) in enumerate(arguments.items())
        for entry in _distinct(task, options, share + (place < rest), seed)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def extract_answer(completion: str, answer: str) -> str:
    """The part of a completion that has the form of ``answer``; empty if there is none.

    A number: the last one in the completion. One word: the first word. Anything else: the first line, without its
    full stop.
    """
    if _NUMBER.fullmatch(answer):
        return (_NUMBER.findall(completion) or [""])[-1]
    if _WORD.fullmatch(answer):
        first = _WORD.search(completion)
        return first.group() if first else ""
    return completion.strip().partition("\n")[0].strip().removesuffix(".")


def reasoning_reward(completion: str, row: Mapping[str, Any]) -> float:
    """The gym's score in [0, 1] of the result in ``completion``. Some tasks give part of it for a near miss."""
    if row["task"] in UNSAFE:
        raise ValueError(f"reasoning-gym scores {row['task']} by running completions as Python: not for sampled text")
    candidate = extract_answer(completion, row["answer"])
    if not candidate:
        return 0.0
    entry = {"question": row["prompt"][-1]["content"], "answer": row["answer"], "metadata": row["metadata"]}
    score = float(_scorer(row["task"])(candidate, entry))
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"reasoning-gym scored {score} outside [0, 1] for {row['task']}: {candidate!r}")
    return score
