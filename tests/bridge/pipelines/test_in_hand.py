"""Inputs in hand of the policy's recipe are those of a file, and what cannot be trained is refused before a run."""

from dataclasses import replace
from functools import partial

import pytest

from rl_bridge import Mesh, Model
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.common.terminal import remark, remarks
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.pipelines.objective_options import objective_options
from rl_bridge.rewards import exact_match
from rl_train.policy import run_policy
from rl_train.policy_configs import quickstart
from rl_train.policy_inputs import PolicyInputs, settled
from rl_train.policy_options import PolicyPipeline
from tests.support.chat_templates import bytes_tokenizer

PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]}]
PLAIN = [{"role": "user", "content": "1+1"}]


def model_of(tokenizer):
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)


@pytest.fixture
def options(tmp_path):
    start = quickstart()
    return replace(start, output=tmp_path, sft=replace(start.sft, steps=0))


def test_held_out_rows_in_hand_have_the_spelling_of_those_to_train_on(options):
    model, row = model_of(bytes_tokenizer("chatml")), {"prompt": PARTS, "answer": "2"}
    inputs = PolicyInputs.of(options, model, [row], [row], exact_match)
    assert inputs.held_out == list(inputs.rows.rows) == [{"prompt": PLAIN, "answer": "2"}]


@pytest.mark.parametrize("template", ["chatml", "phi3"])
@pytest.mark.parametrize("row", [{"prompt": PARTS}, {"messages": PARTS}], ids=["prompt", "messages"])
def test_rows_in_hand_are_checked_in_the_spelling_that_is_read(options, template, row):
    """A template may join texts, of which a content in parts is none."""
    texts = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
    tokenizer = bytes_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template if template == "chatml" else texts
    inputs = PolicyInputs.of(
        options, model_of(tokenizer), [row | {"answer": "2"}], [row | {"answer": "2"}], exact_match
    )
    assert inputs.held_out[0]["prompt"] == inputs.rows.rows[0]["prompt"] == PLAIN


def test_a_row_in_hand_without_a_prompt_is_refused(options):
    with pytest.raises(ValueError, match=r"row 2: .*prompt"):
        PolicyInputs.of(
            options, model_of(character_tokenizer("01+=")), [{"prompt": "1+1="}, {"answer": "2"}], [], exact_match
        )


@pytest.mark.parametrize("place", ["rows", "held_out"])
def test_a_row_in_hand_that_the_model_cannot_read_is_refused(options, place):
    model = model_of(character_tokenizer("0123456789+="))
    rows = {"rows": [{"prompt": "1+1="}], "held_out": [{"prompt": "2+1="}]}
    with pytest.raises(ValueError, match=r"'x'"):
        PolicyInputs.of(options, model, **rows | {place: [{"prompt": "x"}]}, reward=exact_match)


def test_statistics_of_a_batch_that_is_split_are_refused_before_a_run_begins(options, monkeypatch):
    shared = PolicyPipeline.shared
    monkeypatch.setattr(PolicyPipeline, "shared", lambda self: shared(self) | {"mesh": Mesh(shard=2)})
    model, rows = (
        model_of(character_tokenizer("0123456789+=")),
        [{"prompt": f"{n}+1=", "answer": "2"} for n in range(9)],
    )
    options = replace(
        options, objective=objective_options("kl_cov"), policy=replace(options.policy, prompts_per_step=2)
    )
    read = partial(PolicyInputs.of, model=model, rows=rows[2:], held_out=rows[:2], reward=exact_match)
    with pytest.raises(ValueError, match="kl_cov reads statistics of the whole batch, which is split over 2 workers"):
        run_policy(options, read=read)
    assert not list(options.output.iterdir())


def two(completion, row):
    return {"right": 1.0, "short": 0.0}


NUMBERS = {
    "--policy.scalar.weights": ("grpo", {"weights": (1.0, 2.0, 3.0)}, {}),
    "--policy.scalar.ideal": ("grpo", {"method": "tchebycheff", "ideal": (1.0, 1.0, 1.0)}, {}),
    "--objective.weights": ("gdpo", {}, {"weights": (1.0, 2.0, 3.0)}),
}


@pytest.mark.parametrize("reward", [exact_match, two])
@pytest.mark.parametrize("option", NUMBERS)
def test_numbers_that_are_not_one_a_reward_are_refused_before_a_run_begins(options, option, reward):
    """A paid rollout would come first; and a function of several rewards shows their names when it is tried."""
    algorithm, scalar, own = NUMBERS[option]
    options = replace(
        options,
        objective=objective_options(algorithm, **own),
        policy=replace(options.policy, prompts_per_step=1, scalar=ScalarOptions(**scalar)),
    )
    model, rows = model_of(character_tokenizer("0123456789+=")), [{"prompt": "1+1=", "answer": "2"}]
    inputs = PolicyInputs.of(options, model, rows, rows, reward)
    with pytest.raises(ValueError, match=rf"{option} has 3 numbers.* the rewards are (reward|right, short): "):
        settled(options, inputs)


def test_inputs_are_read_once_the_processes_are_there(options):
    """Of what is said before, no record would have a line; and under torchrun each rank would read the rows."""
    remark("said before the run")

    def read(own):
        assert own is options and remarks() == []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_policy(options, read=read)
