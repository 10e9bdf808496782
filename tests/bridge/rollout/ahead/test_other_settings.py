"""A checkpoint with groups ahead of training that is taken up with other settings: these groups are drawn again."""

import itertools
import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

import rl_fn
from rl_bridge.data.rows import RowStream
from rl_bridge.engines import InferenceEngine
from rl_bridge.rewards import load
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.ledger import passed_over
from rl_bridge.rollout.ahead.pumps import Pace
from tests.bridge.rollout.ahead.runs import (
    CONFIG,
    ROWS,
    SOURCE,
    TOKENIZER,
    Weights,
    ahead,
    digits,
    in_step,
    shown,
    steps_of,
)

WHOLE = Pace(limit=14, steps=4)
PARTIAL = Pace(partial=True, rounds=2, steps=2, limit=14)
FREE = Pace(partial=True, deterministic=False, steps=1, limit=14)
LAZY = Pace(deterministic=False, steps=1, limit=14)
PACES = {"whole": WHOLE, "partial": PARTIAL, "free": FREE, "lazy": LAZY}
DONE = 2
"""Steps before the checkpoint."""
STALENESS = 2


def sampled(**options):
    return replace(CONFIG, sampling=replace(CONFIG.sampling, **options))


CHANGES = {
    "n up": ({"config": sampled(n=4)}, "sampling.n was 2 and is 4"),
    "n down": ({"config": sampled(n=1)}, "sampling.n was 2 and is 1"),
    "fewer tokens": ({"config": sampled(max_new_tokens=5)}, "sampling.max_new_tokens was 14 and is 5"),
    "more tokens": ({"config": sampled(max_new_tokens=20)}, "sampling.max_new_tokens was 14 and is 20"),
    "temperature": ({"config": sampled(temperature=1.3)}, "sampling.temperature was 0.9 and is 1.3"),
    "top-p": ({"config": sampled(top_p=0.8)}, "sampling.top_p was None and is 0.8"),
    "top-k": ({"config": sampled(top_k=3)}, "sampling.top_k was None and is 3"),
    "min-p": ({"config": sampled(min_p=0.2)}, "sampling.min_p was None and is 0.2"),
    "stop": ({"config": sampled(stop=("7",))}, "sampling.stop was [] and is ['7']"),
    "fewer prompts": ({"config": replace(CONFIG, prompts_per_step=2)}, "prompts_per_step was 3 and is 2"),
    "more prompts": ({"config": replace(CONFIG, prompts_per_step=4)}, "prompts_per_step was 3 and is 4"),
    "greedy": ({"objective": rl_fn.recipes.remax()}, "greedy completions was False and is True"),
}
"""Settings by which groups are others, and how the line names them."""


def opened():
    """An engine: a run has one of its own, also where it goes on with another one's checkpoint."""
    return InferenceEngine(lambda: InProcessRollout(SOURCE, TOKENIZER)).build()


def run(steps, state=None, *, pace=WHOLE, staleness=STALENESS, change=True, opened_to=0, **options):
    """The steps from a checkpoint on, and the checkpoint behind them, prompts up to ``opened_to`` opened."""
    limit = options.get("config", CONFIG).sampling.max_new_tokens
    options |= {"pace": replace(pace, limit=limit), "staleness": staleness, "lazy": pace is LAZY}
    rollout, policy = opened(), Weights(change)
    sampler = ahead(rollout, **options)
    if state is not None:
        sampler.load_checkpoint_state(json.loads(state))
    policy.step = steps[0]
    try:
        made = steps_of(sampler, policy, rollout, steps)
        patience = time.monotonic() + 60
        while not pace.deterministic and sampler._ledger.opened <= opened_to:
            assert time.monotonic() < patience, f"no prompt was opened behind {sampler._ledger.opened}"
            time.sleep(0.001)  # a free rollout opens prompts when it comes to them
        return made, json.dumps(sampler.checkpoint_state())
    finally:
        sampler.close()


def places(steps):
    """Rows of the groups, in order."""
    return [trajectory.row["_where"] for step in steps for trajectory in step.trajectories[:: step.rewards.shape[1]]]


def assert_whole(steps, config, first=DONE):
    """Every group is of one prompt and of the settings; no token is older than the bound."""
    n, count = config.sampling.n, config.prompts_per_step
    for number, step in enumerate(steps, first):
        assert step.rewards.shape == (count, n)
        assert [t.group for t in step.trajectories] == [place for place in range(count) for _ in range(n)]
        for start in range(0, count * n, n):
            group = step.trajectories[start : start + n]
            assert len({t.row["_where"] for t in group}) == len({t.prompt_tokens for t in group}) == 1
            assert len({t.request_id for t in group}) == n
        assert all(len(t.sampled_tokens) <= config.sampling.max_new_tokens for t in step.trajectories)
        ages = [number - v // 10 for t in step.trajectories for v in t.weights_versions if v >= 0]
        assert min(ages) >= 0 and max(ages) == step.ahead["staleness_max"]


def assert_each_row_once(*parts):
    """No row is left out or trained on twice: each comes once an epoch."""
    counts = Counter(place for steps in parts for place in places(steps))
    times = [counts[row["_where"]] for row in ROWS]
    assert sum(times) == sum(counts.values()) and max(times) - min(times) <= 1


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pace", PACES)
def test_groups_that_are_not_trained_on_are_drawn_again_with_the_new_settings(capsys, pace, change):
    options, line = CHANGES[change]
    before, state = run(range(DONE), pace=PACES[pace])
    count = len(json.loads(state)["ledger"]["groups"])
    after, again = run(range(DONE, CONFIG.steps), state, pace=PACES[pace], **options)
    assert capsys.readouterr().out == f"{count} prompts that were ahead of step {DONE} are drawn again: {line}\n"
    assert_whole(after, options.get("config", CONFIG))
    assert all(step.ahead["staleness_max"] <= STALENESS for step in after)
    assert_each_row_once(before, after)
    counts = json.loads(again)["ledger"]["finished"]
    assert counts["trained"] == sum(step.rewards.numel() for step in [*before, *after])


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pace", [WHOLE, PARTIAL])
def test_what_is_drawn_again_is_what_a_run_in_step_draws_there(pace, change):
    """Of weights that stay as they are: the tokens depend on the seed, the step and the place alone."""
    options, _ = CHANGES[change]
    _, state = run(range(DONE), pace=pace, change=False)
    steps = range(DONE, CONFIG.steps)
    made = shown(run(steps, state, pace=pace, change=False, **options)[0])
    rollout = opened()
    plain = in_step(rollout, **options)
    plain.stream.take(DONE * CONFIG.prompts_per_step)
    here = shown(steps_of(plain, Weights(change=False), rollout, steps))
    drawn = [[(t.request_id, t.group, t.tokens, t.finish_reason, t.rewards) for t in part] for part in (made, here)]
    assert drawn[0] == drawn[1]


@pytest.mark.long
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
@pytest.mark.parametrize("version", ["this", "an earlier one"])
def test_another_bound_holds_from_the_next_step_on(capsys, pace, staleness, version):
    """Groups that went in by a larger one are drawn again where it would be broken; others stay as they are."""
    before, state = run(range(DONE), pace=PACES[pace], staleness=3)
    ledger = json.loads(state)["ledger"]
    broken = any(group["number"] // 3 - group["admitted"] > staleness for group in ledger["groups"])
    assert broken == (staleness < 3) or pace == "lazy"
    line = f"max_staleness was 3 and is {staleness}"
    if version != "this":
        state, line = earlier(state), f"max_staleness is {staleness}"
    after, _ = run(range(DONE, CONFIG.steps), state, pace=PACES[pace], staleness=staleness)
    expected = f"{len(ledger['groups'])} prompts that were ahead of step {DONE} are drawn again: {line}\n"
    assert capsys.readouterr().out == (expected if broken else "")
    assert_whole(after, CONFIG)
    assert all(step.ahead["staleness_max"] <= staleness for step in after)
    assert_each_row_once(before, after)


def earlier(state):
    """The checkpoint as it was before it had settings."""
    added = ("skips", "settings", "bound", "rows")
    return json.dumps({name: value for name, value in json.loads(state).items() if name not in added})


@pytest.mark.long
@pytest.mark.parametrize("pace", [WHOLE, PARTIAL])
def test_a_checkpoint_without_settings_goes_on_as_before(capsys, pace):
    steps = range(DONE, CONFIG.steps)
    whole, _ = run(range(CONFIG.steps), pace=pace)
    _, state = run(range(DONE), pace=pace)
    for checkpoint in (state, earlier(state)):
        assert shown(run(steps, checkpoint, pace=pace)[0]) == shown(whole)[DONE * 6 :]
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="a group has n=4 completions of one prompt, and group 0 has 2"):
        run(steps, earlier(state), pace=pace, config=sampled(n=4))


BETWEEN = {
    ("free", "whole"): "partial was True and is False; deterministic was False and is True",
    ("free", "partial"): "deterministic was False and is True",
    ("partial", "whole"): "partial was True and is False",
    ("lazy", "free"): "partial was False and is True",
}


@pytest.mark.parametrize("paces", BETWEEN)
def test_another_pace_draws_again(capsys, paces):
    """A completion of several versions, or prompts out of order, are none of a pace that has neither."""
    before, state = run(range(DONE), pace=PACES[paces[0]])
    after, _ = run(range(DONE, CONFIG.steps), state, pace=PACES[paces[1]])
    assert capsys.readouterr().out.endswith(f" prompts that were ahead of step 2 are drawn again: {BETWEEN[paces]}\n")
    assert_whole(after, CONFIG)
    assert_each_row_once(before, after)
    if paces[1] == "whole":
        assert all(step.ahead["versions_per_completion"] == 1 for step in after)


def other(completion, row):
    return {"odd": float(sum(character in "13579" for character in completion)), "long": float(len(completion))}


def test_another_reward_is_asked_about_what_is_drawn_again(capsys):
    """Its names are others: no group with rewards of the one before is left."""
    _, state = run(range(DONE))
    after, _ = run(range(DONE, CONFIG.steps), state, reward=other)
    assert "are drawn again: the reward's fingerprint was" in capsys.readouterr().out
    for step in after:
        assert step.names == ("odd", "long")
        assert all(t.rewards == other(t.completion, t.row) for t in step.trajectories)


OTHER_ROWS = "their rows, or the tokens of their prompts, are others"


def near(completion, row):
    return float(len(completion) - int(row["answer"]))


def test_rewards_of_other_answers_are_none_of_the_rows(capsys, monkeypatch):
    """Only the answers of the data were corrected: groups in hand had been scored by the old ones."""
    _, state = run(range(DONE), reward=near)
    monkeypatch.setattr("tests.bridge.rollout.ahead.runs.ROWS", [row | {"answer": "1000"} for row in ROWS])
    after, _ = run(range(DONE, CONFIG.steps), state, reward=near)
    assert f"are drawn again: {OTHER_ROWS}\n" in capsys.readouterr().out
    for trajectory in shown(after):
        assert trajectory.row["answer"] == "1000" and trajectory.rewards == {
            "reward": near(trajectory.completion, trajectory.row)
        }


def test_a_row_from_elsewhere_that_says_the_same_is_the_same(capsys, monkeypatch):
    steps = range(DONE, CONFIG.steps)
    whole, _ = run(range(CONFIG.steps))
    _, state = run(range(DONE))
    moved = [row | {"_where": f"elsewhere, {row['_where']}"} for row in ROWS]
    monkeypatch.setattr("tests.bridge.rollout.ahead.runs.ROWS", moved)
    after = shown(run(steps, state)[0])
    assert [t.tokens for t in after] == [t.tokens for t in shown(whole)[DONE * 6 :]]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "options, line",
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"reward": load(digits, none="leave-out")}, "none was refuse and is leave-out"),
    ],
)
def test_another_seed_or_rule_for_a_reward_that_is_none_draws_again(capsys, options, line):
    _, state = run(range(DONE), reward=load(digits))
    after, _ = run(range(DONE, CONFIG.steps), state, **{"reward": load(digits)} | options)
    assert f"are drawn again: {line}\n" in capsys.readouterr().out
    assert_whole(after, CONFIG)


def test_tokens_behind_another_prompt_are_drawn_again(capsys, monkeypatch):
    """Rows may be as many as before and say something else."""
    _, state = run(range(DONE))
    rows = [row | {"prompt": f"{place}="} for place, row in enumerate(ROWS)]
    monkeypatch.setattr("tests.bridge.rollout.ahead.runs.ROWS", rows)
    after, _ = run(range(DONE, CONFIG.steps), state)
    assert f"are drawn again: {OTHER_ROWS}\n" in capsys.readouterr().out
    assert_whole(after, CONFIG)
    rollout = opened()
    plain = in_step(rollout)
    plain.stream.take(DONE * CONFIG.prompts_per_step)
    wanted = steps_of(plain, Weights(), rollout, [DONE])[0]
    assert [t.prompt_tokens for t in after[0].trajectories] == [t.prompt_tokens for t in wanted.trajectories]


def test_other_rows_begin_with_the_first_one_and_the_next_step(monkeypatch):
    """A run that is resumed anyway goes on from the refusal."""
    _, state = run(range(DONE))
    monkeypatch.setattr("tests.bridge.rollout.ahead.runs.ROWS", ROWS[:7])
    rollout, policy = opened(), Weights()
    sampler = ahead(rollout, pace=WHOLE, staleness=STALENESS)
    with pytest.raises(ValueError, match="made on 9 rows"):
        sampler.load_checkpoint_state(json.loads(state))
    policy.step = DONE
    after = steps_of(sampler, policy, rollout, range(DONE, CONFIG.steps))
    sampler.close()
    assert_whole(after, CONFIG)
    assert places(after)[:7] == [row["_where"] for row in RowStream(ROWS[:7], 3).take(7)]


# Steps that passed over prompts: the rows that are trained on lie among those that are not.


def passed(state, trained, number):
    """The checkpoint as if a step had taken the prompt ``trained`` in the place of ``number``, an earlier one."""
    state = json.loads(state)
    ledger = state["ledger"]
    assert ledger["groups"][0]["number"] == number + 1 and trained < ledger["opened"]
    ledger["groups"] = [
        ledger["groups"][0] | {"number": number},
        *(group for group in ledger["groups"] if group["number"] != trained),
    ]
    del state["rows"]
    ledger["taken"], state["stream"] = [trained], state["stream"] | {"position": number}
    return json.dumps(state)


@pytest.mark.long
@pytest.mark.parametrize("change", ["n up", "fewer prompts", "more prompts", "temperature"])
@pytest.mark.parametrize("trained", [7, 11])
@pytest.mark.parametrize("pace", ["whole", "free"])
def test_prompts_that_were_passed_over_are_drawn_again_and_no_trained_one_is(capsys, change, trained, pace):
    """Also from a checkpoint that was made since, with the same settings and with others again."""
    options, _ = CHANGES[change]
    pacing = {"pace": PACES[pace], "staleness": 2}
    _, state = run(range(DONE), opened_to=trained, **pacing)
    state = passed(state, trained, 5)
    order = RowStream(ROWS, 3).take(40)
    left = [row["_where"] for number, row in enumerate(order) if number >= 5 and number != trained]
    whole, _ = run(range(DONE, CONFIG.steps), state, **pacing, **options)
    assert places(whole) == left[: len(places(whole))]
    first, again = run([DONE], state, **pacing, **options)
    for other_options in (options, {"config": sampled(top_k=2)}):
        capsys.readouterr()
        rest, _ = run(range(DONE + 1, CONFIG.steps), again, **pacing, **other_options)
        assert ("drawn again" in capsys.readouterr().out) == (other_options is not options)
        found = places([*first, *rest])
        assert found == left[: len(found)]


def ledger_of(choose):
    """Untrained prompts of a ledger, the next number, and the rows that are passed over before some."""
    head = choose.randrange(5)
    opened = head + choose.randrange(8)
    skips = {number: choose.randrange(3) for number in range(head, head + 12) if choose.random() < 0.3}
    untrained = [number for number in range(head, opened) if number == head or choose.random() < 0.6]
    return head, opened, untrained, skips


def test_rows_behind_a_ledger_that_begins_anew_are_the_untrained_ones_in_order():
    """Against the numbers of all rows."""
    for seed in range(300):
        choose = random.Random(seed)
        (head, opened, untrained, skips), first = ledger_of(choose), choose.randrange(9)
        rows = list(itertools.accumulate(skips.get(number, 0) + 1 for number in range(head, 30)))
        left = [row for number, row in enumerate(rows, head) if number in untrained or number >= opened]
        state = {"groups": [{"number": number} for number in untrained], "opened": opened}
        again, numbers = passed_over(state, skips, first), range(first, first + len(left))
        assert list(itertools.accumulate(again.get(number, 0) + 1 for number in numbers)) == left, f"seed {seed}"
        assert set(again) <= set(numbers)
