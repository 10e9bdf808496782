"""The quickstart: a warm start and reinforcement learning in one loop, with the numbers of the command to the bit."""

import re
from functools import partial
from pathlib import Path

import pytest

from experiments import quickstart
from rl_bridge import NLL, AdamW, Policy, Run, load_rows, tiny_model
from rl_bridge.models.small import TinySource
from rl_tools.cli import main
from tests.support.results import metrics

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SIZES = {"seed": 1, "held_out": 8, "warm_steps": 2, "warm_rows": 8, "steps": 3, "prompts": 4, "evaluate_every": 2}
WORDS = {
    "--seed": 1,
    "--held-out": 8,
    "--sft.steps": 2,
    "--sft.rows-per-step": 8,
    "--policy.steps": 3,
    "--policy.prompts-per-step": 4,
    "--policy.evaluate-every": 2,
    "--samples-every": 0,
}


def shorter(completion, row):
    """A reward that a model without a clue earns."""
    return len(completion) + 0.1 * completion.count("1")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The model has 10,000 parameters and not a million."""
    monkeypatch.setattr(TinySource, "for_tokenizer", partial(TinySource.for_tokenizer, hidden=16))


@pytest.fixture
def run_here(ended, tmp_path, monkeypatch):
    """Run the script in this process; the records of its folder."""
    monkeypatch.setattr(quickstart, "reward", shorter)

    def run(name, **changes):
        ended(quickstart, name=name, output=tmp_path, **{**SIZES, **changes})
        return metrics(tmp_path / name)

    return run


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def test_the_quickstart_has_the_command_s_numbers_to_the_bit(run_here, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(completion, row):\n    return len(completion) + 0.1 * completion.count('1')\n")
    options = WORDS | {"--reward": f"{reward}:reward", "--output": tmp_path, "--name": "command"}
    assert main(["train", "policy", "--no-track-kl", *(str(w) for pair in options.items() for w in pair)]) == 0
    records = run_here("loop")
    assert records == metrics(tmp_path / "command")
    assert [record["stage"] for record in records] == ["sft"] * 2 + ["policy"] * 3
    assert [("held_out" in record) for record in records] == [False, False, False, True, True]
    assert weights(tmp_path / "loop") == weights(tmp_path / "command")
    assert "held-out accuracy" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("stopped_at", [2, 4], ids=["in the warm start", "in reinforcement learning"])
def test_a_run_that_is_stopped_in_either_stage_ends_bit_for_bit_as_a_whole_one(
    run_here, tmp_path, monkeypatch, stopped_at
):
    whole = run_here("whole", checkpoint_every=1)
    update, calls = Policy.update, []

    def interrupted(policy, batch, **options):
        calls.append(batch)
        if len(calls) == stopped_at:
            raise KeyboardInterrupt
        return update(policy, batch, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Policy, "update", interrupted)
        run_here("stopped", checkpoint_every=1)
    assert metrics(tmp_path / "stopped") == whole[: stopped_at - 1]
    assert run_here("stopped", checkpoint_every=1, resume=True) == whole
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_stage_has_objects_of_the_state_and_comes_once(ended, tmp_path):
    rows = load_rows(quickstart.PROBLEMS[:8])
    model = tiny_model(quickstart.PROBLEMS)

    class Loop:
        @staticmethod
        def main():
            policy = Policy(model, NLL(), AdamW(1e-3))
            with Run("stages", [policy, rows], output=tmp_path) as run:
                with pytest.raises(ValueError, match="a rows changes in these steps that"):
                    next(run.steps(1, [policy, load_rows(quickstart.PROBLEMS[:8])]))
                assert list(run.steps(1, [policy])) == [0]
                with pytest.raises(ValueError, match="has had its stage 'sft'"):
                    next(run.steps(1))
                with pytest.raises(TypeError, match="NLL imitates rows"):
                    policy.update(rows.stream)

    ended(Loop)


def test_the_script_is_a_page_long_and_the_first_page_shows_its_lines():
    script = (ROOT / "experiments" / "quickstart.py").read_text("utf-8")
    assert len(script.splitlines()) <= 100
    (loop,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert loop in script
