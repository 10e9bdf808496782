"""The first example: the numbers of the command to the bit, resumed, and in the documentation."""

import re
from pathlib import Path

import pytest

from examples import grpo
from rl_tools.cli import main
from tests.support.results import metrics

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SIZES = {"steps": 2, "prompts": 4, "n": 4, "max_new_tokens": 5, "lr": 0.02}
LENGTH = "def reward(completion, row):\n    return len(completion) + 0.1 * completion.count('1')\n"


def longer(completion, row):
    """A reward that a model without a clue earns."""
    return len(completion) + 0.1 * completion.count("1")


def words(model_folder, problems, output, name):
    """The command with the settings of the example."""
    (output / "reward.py").write_text(LENGTH)
    options = {
        "--model": model_folder,
        "--data": problems,
        "--eval-data": problems,
        "--reward": f"{output / 'reward.py'}:reward",
        "--output": output,
        "--name": name,
        "--policy.steps": SIZES["steps"],
        "--policy.prompts-per-step": SIZES["prompts"],
        "--policy.sampling.n": SIZES["n"],
        "--policy.sampling.max-new-tokens": SIZES["max_new_tokens"],
        "--optimizer.learning-rate": SIZES["lr"],
        "--optimizer.decay": "linear",
        "--optimizer.beta2": 0.99,
        "--samples-every": 0,
    }
    pairs = [str(word) for pair in options.items() for word in pair]
    return ["train", "policy", "objective:grpo", "--objective.kl.coef", "0.02", *pairs]


@pytest.fixture
def run_here(ended, model_folder, problems, tmp_path, monkeypatch):
    """Run the example in this process; the records of its folder."""
    monkeypatch.setattr(grpo, "reward", longer)

    def run(name, **changes):
        ended(grpo, model_folder, problems, name=name, output=tmp_path, **{**SIZES, **changes})
        return metrics(tmp_path / name)

    return run


def test_the_example_has_the_command_s_numbers_to_the_bit(run_here, model_folder, problems, tmp_path):
    assert main(words(model_folder, problems, tmp_path, "command")) == 0
    expected = [
        {name: value for name, value in record.items() if not name.startswith("held_out")}
        for record in metrics(tmp_path / "command")
        if "stage" in record  # else a note of what is odd about the held-out rows
    ]
    records = run_here("example")
    assert records == expected
    assert records[0]["policy_loss"] != records[1]["policy_loss"] and records[1]["kl"] > 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("command", "example")]
    assert weights[0] == weights[1]


def test_a_resumed_loop_ends_bit_for_bit_as_one_that_was_not_stopped(run_here, tmp_path, monkeypatch):
    whole = run_here("whole", steps=3)
    update, calls = grpo.Policy.update, []

    def interrupted(policy, batch, **options):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return update(policy, batch, **options)

    run = grpo.Run
    monkeypatch.setattr(grpo, "Run", lambda *args, **options: run(*args, checkpoint_every=1, **options))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grpo.Policy, "update", interrupted)
        run_here("stopped", steps=3)
    assert metrics(tmp_path / "stopped") == whole[:2]
    assert run_here("stopped", steps=3, resume=True) == whole
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]
    with pytest.raises(
        ValueError, match=r"options: policy\.optimizer\.learning_rate was .* and is 0\.01\. Give .* resume_anyway=True"
    ):
        run_here("stopped", steps=3, resume=True, lr=0.01)


def test_the_page_shows_the_examples_as_they_are():
    page = (ROOT / "docs" / "your_own_loop.md").read_text("utf-8")
    first, *parts = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert first == (ROOT / "examples" / "grpo.py").read_text("utf-8") and parts
    lines = {line.strip() for path in (ROOT / "examples").glob("*.py") for line in path.read_text("utf-8").splitlines()}
    own = {line.strip() for part in parts for line in part.splitlines() if not line.startswith("from rl_bridge import")}
    assert own <= lines


def test_an_example_is_short():
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert lengths and max(lengths.values()) <= 60
