"""A case of bad input: a right command in a folder of right inputs, one damage, and what has to be said of it."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Damage = Callable[[Path], None]
KINDS = (
    "data",
    "options",
    "chat templates",
    "model folders",
    "rewards",
    "commands",
    "environment variables",
    "permissions",
)

RECIPES = ("objective:", "loss:")
COMMON = "--model tinyq --held-out 2 --threads 1 --name first --output runs"
SFT = f"train sft {COMMON} --data sums.jsonl --steps 1 --rows-per-step 2"
POLICY = (
    f"train policy {COMMON} --data asked.jsonl --policy.steps 1 --policy.prompts-per-step 2 --policy.evaluate-every 1"
    " --policy.sampling.n 2 --policy.sampling.max-new-tokens 3 --reward judged.py:score"
)
PREFERENCE = f"train preference {COMMON} --data pairs.jsonl --steps 1 --rows-per-step 2"
REWARD_MODEL = f"train reward-model {COMMON} --data pairs.jsonl --steps 1 --rows-per-step 2"
TRAINERS = {"sft": SFT, "policy": POLICY, "preference": PREFERENCE, "reward-model": REWARD_MODEL}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``says``: words that the refusal has to have, each as a word of its own; ``a|b`` is either. A case that
    ``works`` ends well, and what it prints has to have them."""

    kind: str
    name: str
    command: str
    says: tuple[str, ...]
    works: bool = False
    damage: Damage | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a case that any refusal would pass."""
        if self.kind not in KINDS or (not self.works and not any(len(word) > 1 for word in self.says)):
            raise ValueError(f"{self.kind}, {self.name}: give the words that its refusal has to have")

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def changed(command: str, *options: str) -> str:
    """A command with options as ``--held-out 3`` in place of its own; a bare ``-- NAME`` takes the option away."""
    words = shlex.split(command)
    for option in options:
        name, *values = shlex.split(option)
        if name in words:
            place = words.index(name)
            end = place + 1
            while end < len(words) and not words[end].startswith(("--", *RECIPES)):
                end += 1
            del words[place:end]
        if values != ["-"]:
            words += [name, *values]
    # The sub-command of an algorithm stands where the options of all commands begin.
    recipes = [word for word in words if word.startswith(RECIPES)]
    rest = [word for word in words if word not in recipes]
    return shlex.join([*rest[:2], *recipes, *rest[2:]])


def cut(path: Path, share: float = 0.5) -> None:
    """Keep the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
