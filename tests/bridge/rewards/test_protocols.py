"""Reward functions as each of the libraries writes them, and rewards under several names."""

import asyncio
import re
import threading
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.data.trajectory import single_turn
from rl_bridge.data.unread_keys import WORD_KEYS
from rl_bridge.rewards import RewardError, load, with_rows
from rl_bridge.rewards.function import ALL, protocol_of
from rl_bridge.rewards.scoring_models import prompt_text
from tests.support.reward_batches import rows, trajectories, values


def batch(trajectories):
    return [len(t.completion) + int(t.row["answer"]) for t in trajectories]


async def later(trajectories):
    await asyncio.sleep(0)
    return batch(trajectories)


def of_completion(completion, row, unit=1):
    return len(completion) + int(row["answer"]) * unit


async def of_completion_later(completion, row):
    await asyncio.sleep(0.001 * (3 - len(completion)))  # the first ends last
    return of_completion(completion, row)


def of_messages(messages, answer):
    assert [m["role"] for m in messages] == ["user", "assistant"]
    return len(messages[-1]["content"]) + int(answer)


def of_trl(completions, answer, **kwargs):
    assert kwargs["prompts"] == ["0+0=", "1+0=", "2+0="] and kwargs["completion_ids"] == [[3, 4]] * 3
    assert "_where" not in kwargs and kwargs["trainer_state"] is None
    return [len(c) + int(a) for c, a in zip(completions, answer, strict=True)]


def of_trl_without_others(prompts, completions):
    return [len(c) + int(p[0]) for p, c in zip(prompts, completions, strict=True)]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) + int(ground_truth), "pred": solution_str}


class Callable:
    async def __call__(self, completion, row):
        return of_completion(completion, row)


FUNCTIONS = [
    (batch, "batch"),
    (later, "batch"),
    (of_completion, "completion"),
    (of_completion_later, "completion"),
    (Callable(), "completion"),
    (of_messages, "messages"),
    (of_trl, "trl"),
    (of_trl_without_others, "trl"),
    (of_verl, "verl"),
]


@pytest.mark.parametrize(("function", "protocol"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", None))
def test_each_way_to_write_a_reward(function, protocol):
    assert protocol_of(function, "mine") == protocol
    rewards = load(function)
    assert (rewards.names, rewards.weights) == (("reward",), (1.0,))
    assert values(rewards, "", "ab", "c") == [0.0, 3.0, 3.0]


def test_coroutines_of_one_batch_run_together_and_inside_a_running_loop():
    running = set()

    async def waits_for_the_others(completion, row):
        running.add(completion)
        while len(running) < 3:
            await asyncio.sleep(0.001)
        return 1.0

    async def notebook():
        return values(load(waits_for_the_others), "a", "b", "c")

    assert asyncio.run(notebook()) == [1.0, 1.0, 1.0]


def test_conversations_reach_a_reward_of_trl_as_messages():
    def reward(completions, prompts, level):
        assert level == [3]
        return [float(c[0]["content"] == p[0]["content"]) for c, p in zip(completions, prompts, strict=True)]

    (trajectory,) = trajectories("same", data=[{"prompt": [{"role": "user", "content": "same"}], "level": 3}])
    assert load(reward).score([trajectory])[0].rewards == {"reward": 1.0}


def test_a_verl_row_has_its_truth_under_reward_model():
    row = {"prompt": "a", "reward_model": {"ground_truth": "5"}, "data_source": "gsm8k", "extra_info": {"index": 7}}

    def reward(data_source, solution_str, ground_truth, extra_info):
        return float((data_source, solution_str, ground_truth, extra_info["index"]) == ("gsm8k", "x", "5", 7))

    assert load(reward).score(trajectories("x", data=[row]))[0].rewards == {"reward": 1.0}


NO_REWARDS = {
    "": "()",
    "a, b, c": "(a, b, c)",
    "*a": "(*a)",
    "completion, row, *, strict": "(completion, row, *, strict)",
    "solution_str, wanted": "(solution_str, wanted)",
    "solution_str, /": "(solution_str, /)",
    "completions, /, answer": "(completions, /, answer)",
}


@pytest.mark.parametrize("parameters", NO_REWARDS)
def test_parameters_that_show_no_protocol_usr_17(parameters, tmp_path):
    """The file, the function and what it could have are named before anything is asked."""
    file = tmp_path / "own.py"
    file.write_text(f"def score({parameters}):\n    return 0.0\n")
    with pytest.raises(ValueError, match=r"say how it is called, with reward_protocol, one of batch, co") as refused:
        load(f"{file}:score")
    assert f"{file}: the reward score is score{NO_REWARDS[parameters]}; a reward takes (co" in str(refused.value)


# What a parameter of this name gets, in a row with these columns.
CONTENT = {
    "completion": "2",
    "response": "2",
    "text": "2",
    "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    "answer": "2",
    "prompt": "1+1=",
    "label": "even",
    "row": {"prompt": "1+1=", "answer": "2", "label": "even"},
}
CALLED = {("completion", "row"), ("response", "row"), ("text", "example"), ("words", "row"), ("messages", "answer")}


@pytest.mark.parametrize("second", [None, *CONTENT, "example"])
@pytest.mark.parametrize("first", [*CONTENT, "words"])
def test_a_parameter_gets_what_its_name_says_or_the_reward_is_refused(first, second):
    """`def r(completion, answer)` got the messages in place of the completion, and its reward was 0 for all."""
    names = [first] if second in (None, first) else [first, second]
    arguments, scope = {}, {}
    exec(f"def reward(arguments, {', '.join(names)}):\n    arguments |= locals()\n    return 1.0\n", scope)
    try:
        load(partial(scope["reward"], arguments)).score(trajectories("2", data=[CONTENT["row"]]))
    except (ValueError, RewardError) as refused:
        assert tuple(names) not in CALLED
        assert "reward_protocol" in str(refused) or "returned 1.0, expected a list of 1" in str(refused)
    else:
        assert {name: arguments[name] for name in names if name in CONTENT} == {
            name: CONTENT[name] for name in names if name in CONTENT
        }


def test_a_column_s_name_is_no_parameter_unless_the_protocol_is_said():
    def reward(completion, label):
        return float(label["label"] == "even")

    data = [CONTENT["row"]]
    with pytest.raises(
        RewardError, match=r"parameter 'label' would get .*row\['label'\], or say reward_protocol='comp"
    ):
        load(reward).score(trajectories("2", data=data))
    assert load(reward, protocol="completion").score(trajectories("2", data=data))[0].rewards == {"reward": 1.0}


def test_a_reward_without_a_signature_is_refused():
    with pytest.raises(ValueError, match="the reward max has parameters that cannot be read; a reward takes"):
        load(max)


def test_the_protocol_may_be_said():
    assert values(load(lambda *given: float(given[0] == "a"), protocol="completion"), "a", "b") == [1.0, 0.0]
    assert set(ALL) == {"batch", "completion", "messages", "trl", "verl"}


def test_several_rewards_have_names_and_weights():
    rewards = load([of_completion, batch, "style=exact"], weights=[1, 0.5, 2])
    assert rewards.names == ("of_completion", "batch", "style") and rewards.weights == (1.0, 0.5, 2.0)
    (scored,) = rewards.score(trajectories("0"))
    assert scored.rewards == {"of_completion": 1.0, "batch": 1.0, "style": 1.0}
    assert rewards.total(scored.rewards) == 3.5


def test_a_function_may_return_several_rewards():
    def both(trajectories):
        return {"length": np.array([len(t.completion) for t in trajectories]), "zero": [0] * len(trajectories)}

    def one(completion, row):
        return {"first": 1, "second": 2.0}

    rewards = load([both, one], weights=[1, 2, 3, 4])
    assert rewards.names == ("both", "one")
    rewards.try_on(rows(2))
    assert rewards.names == ("length", "zero", "first", "second")
    assert rewards.score(trajectories("abc"))[0].rewards == {"length": 3.0, "zero": 0.0, "first": 1.0, "second": 2.0}
    with pytest.raises(ValueError, match=r"there are 2 weights \(1\.0, 2\.0\) for the rewards \('length', 'zero', 'fi"):
        load([both, one], weights=[1, 2]).try_on(rows(2))
    with pytest.raises(ValueError, match="two rewards have the name 'length'; give the key of a dictionary another"):
        load([both, lambda c, row: {"length": 1.0}]).try_on(rows(2))


def test_functions_of_one_name_or_of_none_are_several_rewards():
    def style(completion, row):
        return 3.0

    first, style.__qualname__ = style, "other"
    several = [lambda c, row: 1.0, lambda c, row: 2.0, first, style, "exact", "named=exact"]
    rewards = load(several, weights=[1, 2, 3, 4, 5, 6])
    assert rewards.names == ("reward", "reward_2", "style", "style_2", "exact", "named")
    (scored,) = rewards.score(trajectories("0"))
    assert list(scored.rewards.values()) == [1.0, 2.0, 3.0, 3.0, 1.0, 1.0]


def test_names_that_change_are_refused():
    rewards = load(lambda c, row: {c: 1.0})
    with pytest.raises(RewardError, match=r"jsonl, row 2 returned the rewards \['b'\], before they were \['a'"):
        rewards.score(trajectories("a", "b"))
    with pytest.raises(ValueError, match="two rewards have the name 'exact'; name each: NAME=SOURCE"):
        load(["exact", "exact"])


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), jnp.float32(0.5), np.float64(0.5), 0.5]
)
def test_scalars_of_every_library_are_numbers(value):
    assert values(load(lambda c, row: value), "a") == [0.5]
    assert values(load(lambda trajectories: [value] * 2), "a", "b") == [0.5, 0.5]
    assert all(type(v) is float for v in values(load(lambda c, row: value), "a"))
    assert values(load(lambda c, row: np.bool_(True)), "a") == [1.0]


def test_a_list_of_a_whole_tensor():
    assert values(load(lambda trajectories: torch.tensor([1.0, 2.0])), "a", "b") == [1.0, 2.0]


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, np.float64(1e300)])
def test_what_float32_cannot_hold_is_refused(value):
    with pytest.raises(RewardError, match=r"row 1 returned .* expected a finite number up to 3\.403e\+38, which float"):
        values(load(lambda c, row: value), "a")


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(2), object(), "3", None, 1j, np.complex64(1)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(RewardError, match=r"row 2 returned .*, expected a finite number; completion 'bad'"):
        values(load(lambda c, row: value if c == "bad" else 1.0), "good", "bad")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "row 1 to problems.jsonl, row 2 (2 completions in one call) returned 1 numbers for 2 trajectories"),
        ([1.0] * 3, "returned 3 numbers for 2 trajectories"),
        ({1.0, 2.0}, "returned {1.0, 2.0}, expected a list of 2 numbers"),
        (frozenset({1.0, 2.0}), "returned frozenset({1.0, 2.0}), expected a list of 2 numbers"),
        ({"a": {1.0, 2.0}}, "returned {1.0, 2.0}, expected a list of 2 numbers"),
        (b"ab", "returned b'ab', expected a list of 2 numbers"),
        ({"a": bytearray(b"ab")}, "returned bytearray(b'ab'), expected a list of 2 numbers"),
        ({1: [1.0, 1.0], "1": [2.0, 2.0]}, "returned two rewards named '1'"),
        (None, "returned None, expected a list of 2 numbers, one a trajectory"),
        ({"a": [1.0], "b": [1.0, 2.0]}, "returned 1 numbers for 2 trajectories as 'a'"),
        ([1.0, None], "on problems.jsonl, row 2 returned None, expected a finite number; completion 'b'"),
        ({"a": [float("nan"), 1.0]}, "on problems.jsonl, row 1 returned nan, expected a finite number; completion 'a'"),
    ],
)
def test_what_a_batch_may_not_return(result, message):
    with pytest.raises(RewardError, match=re.escape(message)):
        values(load(lambda trajectories: result), "a", "b")


def test_two_rewards_of_one_name_are_refused():
    """The last one was taken without a word."""
    with pytest.raises(RewardError, match=r"returned .*, with two rewards of one name"):
        values(load(lambda completion, row: {"1": 1.0, 1: 2.0}), "a")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_exits_and_errors_name_the_row(asynchronous):
    def bad(completion, row):
        if completion == "exit":
            raise SystemExit(0)
        return 1 / (completion != "zero")

    async def bad_later(completion, row):
        return bad(completion, row)

    rewards = load(bad_later if asynchronous else bad)
    if not asynchronous:
        with pytest.raises(RewardError, match=r"on problems.jsonl, row 2 raised SystemExit: 0; completion 'exit'"):
            values(rewards, "a", "exit")
    else:
        with pytest.raises(RewardError, match="raised SystemExit"):
            values(rewards, "a", "exit")
    with pytest.raises(RewardError, match="row 3 raised ZeroDivisionError: division by zero; completion 'zero'"):
        values(rewards, "a", "b", "zero")

    def whole(trajectories):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"whole on .* row 1 to .* row 2 \(2 completions in one call\) raised K"):
        values(load(whole), "a", "b")


class Leaves(BaseException):
    """No Exception."""


def switches(completion, row):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return 1.0


def test_a_reward_cannot_change_how_torch_computes():
    """USR-16: the next update failed with "element 0 of tensors does not require grad", and no word of the reward."""
    values(load(switches), "a")
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32


def test_a_reward_that_raises_what_is_no_exception_is_named():
    """USR-16: a traceback of the whole driver."""

    def leaves(completion, row):
        raise Leaves("far away")

    with pytest.raises(RewardError, match=r"reward leaves on .* raised Leaves: far away"):
        values(load(leaves), "a")


def test_a_reward_without_any_number_is_named():
    """USR-16: `{}` was no reward, and the weighted sum failed later."""
    with pytest.raises(RewardError, match=r"returned \{\}, expected a number a name"):
        values(load(lambda completion, row: {}), "a")


def test_a_reward_is_tried_before_it_is_needed(tokenizer):
    seen = []

    def reward(trajectories):
        seen.extend((t.completion, t.row["answer"], t.messages[0]["content"], t.tokens) for t in trajectories)
        return [0.0] * len(trajectories)

    load(reward).try_on(rows(3), tokenizer)
    assert [s[:3] for s in seen] == [("0", "0", "0+0="), ("", "0", "0+0="), ("1", "1", "1+0="), ("", "1", "1+0=")]
    assert tokenizer.decode(seen[0][3]) == "0+0=="
    with pytest.raises(RewardError, match=r"on problems.jsonl, row 1 raised KeyError: 'solution'; completion '0'"):
        load(lambda c, row: row["solution"]).try_on(rows(3))


def test_no_trajectories_have_no_rewards():
    assert load(lambda trajectories: [1.0]).score([]) == []
    with pytest.raises(ValueError, match="there is no reward"):
        from rl_bridge.rewards import Rewards

        Rewards([])


def test_the_fingerprint_follows_the_text_and_the_weights(tmp_path):
    file = tmp_path / "mine.py"

    def fingerprint(text, **options):
        file.write_text(text)
        return load(f"{file}:score", **options).fingerprint

    first = fingerprint("def score(completion, row): return 1.0")
    assert first == fingerprint("def score(completion, row): return 1.0")
    others = {
        fingerprint("def score(completion, row): return 2.0"),
        fingerprint("def score(completion, row): return 1.0", weights=[2.0]),
        fingerprint("def score(completion, row): return 1.0", protocol="messages"),
    }
    assert len(others | {first}) == 4


def test_an_async_reward_that_was_cancelled_is_named():
    async def gives_up(completion, row):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match=r"reward gives_up on problems.jsonl, row 1 raised CancelledError"):
        values(load(gives_up), "a", "b")


def test_nobody_waits_for_the_thread_of_async_rewards_when_the_program_ends():
    async def alone(completion, row):
        return float(threading.current_thread().daemon)

    assert values(load(alone), "a") == [1.0]


def test_trl_s_completions_are_messages_only_behind_messages():
    prompts = ["1+1=", [3, 4], [{"role": "user", "content": "1+1="}]]
    seen = []

    def of_trl(completions, **kwargs):
        seen.extend(completions)
        return [0.0] * len(completions)

    data = [{"prompt": prompt, "answer": "2"} for prompt in prompts]
    said = {"role": "assistant", "content": "2"}
    load(of_trl).score(with_rows([single_turn([2], [3], group=i, messages=(said,)) for i in range(3)], data))
    assert seen == ["2", "2", [said]]


def test_a_file_that_was_moved_is_the_same_reward(tmp_path):
    marks = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "mine.py"
        file.write_text("def score(completion, row): return 1.0\ndef other(completion, row): return 1.0\n")
        marks += [load(f"reward={file}:{function}").fingerprint for function in ("score", "other")]
    file.write_text("def score(completion, row): return 2.0\n")
    marks.append(load(f"reward={file}:score").fingerprint)
    assert marks[:2] == marks[2:4] and len(set(marks)) == 3


USER, SAID = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
BEHIND = {
    "nothing": (),
    "a verdict": ({"role": "user", "content": "correct"},),
    "a tool": ({"role": "tool", "content": "2"}, {"role": "user", "content": "go on"}),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("turns", [1, 2])
def test_the_policy_s_last_words_are_the_completion_whatever_the_environment_says_behind_them(behind, turns):
    messages = (USER, {"role": "assistant", "content": "wait"}, USER, SAID)[4 - 2 * turns :]
    row = {"prompt": [USER], "answer": "2"}
    conversation = single_turn([2], [3], messages=messages + BEHIND[behind], turns=turns, row=row)

    def of_verl(data_source, solution_str, ground_truth, extra_info):
        return float(solution_str.split("\n")[-1] == ground_truth)  # the whole response of several turns

    def of_trl(completions, answer):
        return [float(c[-1]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    rewards = load(["exact", of_trl, lambda completion, row: float(completion == "2")])
    assert list(rewards.score([conversation])[0].rewards.values()) == [1.0, 1.0, 1.0]
    assert load(of_verl).score([replace(conversation, row={"answer": "2"})])[0].rewards["reward"] == 1.0
    before = single_turn([2], [3], messages=messages, turns=turns)
    assert prompt_text(conversation) == prompt_text(before) and "2" not in prompt_text(before).replace("1+1=", "")


def test_what_stands_in_an_opening_is_no_completion():
    opening = single_turn([2], [], messages=(USER, SAID, USER), turns=0)
    assert (opening.completion, opening.last_turn) == ("", None)
    assert prompt_text(opening) == "user: 1+1=\nassistant: 2\nuser: 1+1=\n"


@pytest.mark.parametrize("key", WORD_KEYS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_judge_reads_all_that_a_message_says(key, place):
    """Thoughts of an earlier turn, a name, a refusal; where nothing is said, the text is as without the key."""
    messages = (USER, {"role": "assistant", "content": "wait"}, USER, SAID)

    def text(value, number):
        before = tuple(m | {key: value} if at == place else m for at, m in enumerate(messages[:number]))
        return prompt_text(single_turn([2], [3], messages=(*before, SAID), turns=1))

    for number in (1, 3):
        for nothing in (None, "", [], {}):
            assert text(nothing, number) == prompt_text(single_turn([2], [3], messages=(*messages[:number], SAID)))
        assert ("forty-two" in text([{"word": "forty-two"}], number)) == (place < number)
