"""Every example as a script of two steps on a tiny model: edited in what a model without a clue would never earn."""

from pathlib import Path

import pytest

from tests.support.results import metrics

ROOT = Path(__file__).parents[2]
ENDS = 'completion.strip().endswith(str(row["answer"]))'
EDITS = {
    # One reward in three kinds of loops, and the calls that a model makes up.
    ENDS: 'len(completion) + 0.1 * completion.count("1")',
    '\n\nif __name__ == "__main__":': (
        "\nfrom types import SimpleNamespace\n"
        "from rl_bridge.environments import functions\n"
        'CALLS = [("multiply", {"a": 3, "b": 4})]\n'
        "functions.call_form = lambda *_: SimpleNamespace(calls=lambda text: CALLS)\n"
        '\nif __name__ == "__main__":'
    ),
}
SIZES = "--prompts=4 --n=4 --max-new-tokens=5 --lr=0.02"
FLAGS = {
    "ahead": SIZES,
    "conversations": f"{SIZES} --max-turns=3",
    "grpo": SIZES,
    "own_loss": f"{SIZES} --reference-every=1",
    "own_model": "",
    "ppo": "--prompts=8 --max-new-tokens=4 --updates=2 --lr=0.02 --critic-lr=0.05 --critic-warmup=1",
    "preference": "--pairs-per-step=16 --lr=0.05",
    "reward_model": "--pairs-per-step=16 --lr=0.05",
    "sft": "--rows-per-step=16 --lr=0.05",
}
OF_TWO = {"ahead": ["--rollout-workers=1"]}
"""What two workers are asked for beyond this."""


def words(example, folder, place, model, problems, pairs):
    """The script of an example and its flags; the run's folder is ``folder / place / "run"``."""
    (folder / place).mkdir()
    script = folder / place / f"{example}.py"
    text = (ROOT / "examples" / f"{example}.py").read_text("utf-8")
    for old, new in EDITS.items():
        text = text.replace(old, new)
    script.write_text(text, "utf-8")
    data = pairs if example in ("preference", "reward_model") else problems
    own = [f"--tokenizer={model}"] if example == "own_model" else [f"--model={model}", "--name=run"]
    more = OF_TWO.get(example, []) if place != "one" else []
    return [
        str(script),
        *own,
        f"--data={data}",
        f"--output={folder / place}",
        "--steps=2",
        *FLAGS[example].split(),
        *more,
    ]


def assert_same_numbers(folder, place, example):
    """The records of ``place`` are those of one process, up to what another order of sums makes."""
    name = "own_model" if example == "own_model" else "run"
    ones, others = (metrics(folder / where / name) for where in ("one", place))
    assert sum("stage" in record for record in ones) == 2
    for one, other in zip(ones, others, strict=True):
        texts = {key for key, value in one.items() if isinstance(value, str)}
        assert one.keys() == other.keys() and {key: other[key] for key in texts} == {key: one[key] for key in texts}
        numbers = [{key: value for key, value in record.items() if key not in texts} for record in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-5)
