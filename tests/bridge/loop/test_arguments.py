"""Arguments of another kind than their annotation: each object of a loop refuses them by the argument's name."""

from pathlib import Path

import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Ahead,
    Critic,
    LoRAOptions,
    Mesh,
    ParallelConfig,
    Policy,
    Reference,
    RewardModel,
    Rollout,
    Rows,
    Run,
    SamplingParams,
    ScoringConfig,
    Teacher,
    Turns,
    load_rows,
    preference_loss,
    tiny_model,
)
from rl_bridge.run.run import Observer

GRPO, PPO, RATE = rl_fn.recipes.grpo().replace(kl=None), rl_fn.recipes.ppo(), AdamW(1e-3)
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)
FLAGS, COUNTS, NUMBERS = ["no", 1, None], ["16", 1.5, True, [2]], ["a", True, [0.5]]
READ_ONCE = iter(())
PLACED = {
    "mesh": [2, "2", (1, 2), {"shard": 2}, Mesh],
    "scoring": [0.7, {"temperature": 0.7}, ScoringConfig, Mesh()],
    "parallel": [True, "bf16", ParallelConfig],
    "apart_from": [None, 2, [2], "rollout", [Rollout], READ_ONCE, {2}],
    "turns": [True, 1, Turns, []],
}
TRAINED = {
    **PLACED,
    "lora": [16, {"rank": 16}, LoRAOptions, "all-linear"],
    "freeze": [5, "model.*"],
    "seed": COUNTS,
    "export_dtype": ["half", torch.float16, 16],
    "rehearsed": FLAGS,
}
OF_POLICY = {
    "fused_loss": FLAGS,
    "control": [5, [0.1], {"kl": 0.1}, {"kl": rl_fn.linear_kl}],
    "least_effective_share": [*NUMBERS, 2.0, -0.5, None],
}
OF_RUN = {
    "name": [5, None, Path("run")],
    "resume": FLAGS,
    "resume_anyway": FLAGS,
    "checkpoint_every": [*COUNTS, 2.5],
    "keep_checkpoints": COUNTS,
    "stop_after_skips": COUNTS,
    "samples_every": [*COUNTS, 2.5],
    "samples_kept": COUNTS,
    "observers": [print, None, [print], [Observer], [1], READ_ONCE, set()],
}
OF_AHEAD = {
    "rollout": [None, "rollout"],
    "policy": [None, GRPO],
    "rows": [PROMPTS, None, "rows.jsonl"],
    "sampling": [{"n": 2}, 2, SamplingParams],
    "prompts": COUNTS,
    "steps": COUNTS,
    "max_staleness": [1.5, "1", True, None],
    "partial": FLAGS,
    "deterministic": FLAGS,
    "tokens_beside": COUNTS,
    "round_tokens": COUNTS,
    "window": COUNTS,
    "request_seconds": NUMBERS,
    "weights": [0.5, "1", b"1", {0.5}, {"reward": 0.5}, READ_ONCE],
    "scalar": [{"method": "tchebycheff"}, "weighted_sum"],
    "overlong_buffer": COUNTS,
    "none": ["skip", 0],
    "max_turns": COUNTS,
    "max_tokens": COUNTS,
    "step_timeout": NUMBERS,
    "processes": COUNTS,
}
OF_SCORE = {name: OF_AHEAD[name] for name in ("weights", "scalar", "overlong_buffer", "none")} | {
    "greedy": [1, PROMPTS]
}
SEED = {"seed": COUNTS}
OF_ROWS = SEED | {"max_length": COUNTS, "new_tokens": COUNTS, "apply_chat_template": FLAGS}
OF_LOSS = {"name": [5, None], "average": ["no", 1], "wpo": FLAGS, "shift_momentum": NUMBERS}

CALLS = {
    "Policy": (TRAINED | OF_POLICY, lambda o: (Policy, {"model": o.model, "objective": GRPO, "optimizer": RATE})),
    "Policy that imitates": (TRAINED, lambda o: (Policy, {"model": o.model, "objective": NLL(), "optimizer": RATE})),
    "Reference": (PLACED, lambda o: (Reference, {"model": o.model})),
    "Teacher": (PLACED, lambda o: (Teacher, {"model": o.model, "student": o.model})),
    "Critic": (PLACED, lambda o: (Critic, {"model": o.model, "objective": PPO, "optimizer": RATE})),
    "RewardModel": (
        {name: values for name, values in TRAINED.items() if name != "apart_from"},
        lambda o: (RewardModel, {"model": o.model, "loss": preference_loss("bradley_terry"), "optimizer": RATE}),
    ),
    "Rollout": (
        {"workers": COUNTS, "turns": PLACED["turns"], "options": [{}, "vllm", 2]},
        lambda o: (Rollout, {"model": o.model}),
    ),
    "Ahead": (
        OF_AHEAD,
        lambda o: (
            Ahead,
            {"rollout": o.rollout, "policy": o.policy, "rows": Rows(PROMPTS), "reward": len}
            | {"sampling": SAMPLING, "prompts": 2, "steps": 2},
        ),
    ),
    "Run": (OF_RUN, lambda o: (Run, {"name": "run", "state": [Rows(PROMPTS)], "output": o.folder})),
    "score": (OF_SCORE, lambda o: (o.groups.score, {"reward": lambda completion, row: 1.0})),
    "Rows": (SEED | {"rows": [READ_ONCE, "rows", {"prompt": "x"}, {1}]}, lambda o: (Rows, {"rows": PROMPTS})),
    "load_rows": (OF_ROWS, lambda o: (load_rows, {"data": PROMPTS, "model": o.model})),
    "tiny_model": (SEED, lambda o: (tiny_model, {"rows": PROMPTS})),
    "preference_loss": (OF_LOSS, lambda o: (preference_loss, {})),
}


class Objects:
    """What a loop has."""

    def __init__(self, model, folder):
        self.model, self.folder = model, folder
        self.rollout, self.policy = Rollout(model), Policy(model, GRPO, RATE)
        self.groups = self.rollout.generate(PROMPTS[:2], SAMPLING)


@pytest.fixture(scope="module")
def objects(model, tmp_path_factory):
    objects = Objects(model, tmp_path_factory.mktemp("runs"))
    with objects.rollout, objects.policy:
        yield objects


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (wrong, _) in CALLS.items() for name in wrong])
def test_an_argument_of_another_kind_is_refused_by_its_name(objects, call, name):
    wrong, of = CALLS[call]
    function, right = of(objects)
    for value in wrong[name]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}\b") as refused:
            function(**{**right, name: value})
        assert "unexpected keyword" not in str(refused.value)
    assert not list(objects.folder.iterdir())
    assert objects.rollout.ahead is None


def test_objects_in_each_other_s_place_are_named(objects):
    with pytest.raises(TypeError, match=r"^rollout is Rollout\(…\), got Policy "):
        Ahead(objects.policy, objects.rollout, Rows(PROMPTS), len, SAMPLING, prompts=2, steps=2)


class Watching(Observer):
    """An observer that looks at nothing."""


def test_what_is_logged_has_numbers_by_name(objects, tmp_path):
    with Run("run", [Rows(PROMPTS)], output=tmp_path, observers=[Watching()]) as run:
        for _ in run.steps(1):
            for wrong in ([1, 2], 5, None, "loss", Rows(PROMPTS), type(objects.groups)):
                with pytest.raises(TypeError, match=r"^run\.log takes metrics of an update, groups, or a dictionary"):
                    run.log({"loss": 1.0}, wrong)
            run.log({"loss": 1.0}, objects.groups.score(lambda completion, row: 1.0))


def test_numbers_of_numpy_and_lists_of_any_kind_are_taken(objects, model):
    """And models that keep off each other's workers: here there is one, and it is refused for that alone."""
    assert len(load_rows(PROMPTS, model, seed=np.int64(3), new_tokens=np.int32(2))) == 8
    weights = np.array([1.0, 0.5])
    scored = objects.groups.score([lambda completion, row: 1.0, lambda completion, row: 2.0], weights)
    assert scored.rewards.tolist() == [[2.0, 2.0]] * 2
    for freeze in (["model.embed_tokens.*"], ("model.embed_tokens.*",)):
        with Policy(model, NLL(), RATE, freeze=freeze, seed=np.int64(1)) as policy:
            assert policy.freeze == ("model.embed_tokens.*",)
    with pytest.raises(ValueError) as refused:
        Reference(model, apart_from=(objects.rollout,))
    assert "apart_from is" not in str(refused.value)


class Dataset:
    """A data set of PyTorch's kind: rows by their places."""

    def __len__(self):
        return len(PROMPTS)

    def __getitem__(self, place):
        return PROMPTS[place]


@pytest.mark.parametrize("collate", [None, len])
@pytest.mark.parametrize(
    "rows", [PROMPTS, tuple(PROMPTS), np.array(PROMPTS), Dataset()], ids=lambda rows: type(rows).__name__
)
def test_rows_are_what_has_places(rows, collate):
    drawn = Rows(rows, seed=3, collate=collate).take(5)
    assert drawn == Rows(PROMPTS, seed=3).take(5) and drawn[0]["prompt"].endswith("+1=")


def test_a_step_has_at_most_one_update_a_completion(objects, model):
    """A part without a completion makes no update, which a schedule counts. A selection may leave fewer."""
    batch = objects.groups.score(lambda completion, row: float(len(completion))).batch().with_advantages(GRPO)
    with Critic(model, PPO, RATE) as critic:
        for trained in (objects.policy, critic):
            with pytest.raises(ValueError, match=r"^updates=5 are parts of a step's completions, and 4 were drawn: "):
                trained.update(batch, updates=5)
    one = objects.groups.score(lambda completion, row: float(len(completion))).select([0])
    objects.policy.update(one.batch().with_advantages(GRPO), updates=4)


class Trained:
    """An object of a run's state with an optimiser, without an engine."""

    kind = "critic"

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def parts(self):
        return {}

    settings = fingerprints = parts


def said_of(schedule, state, folder, capfd):
    """Whether the beginning of a run names the schedule, by the object's kind."""
    with Run("run", state, output=folder):
        pass
    line = f"AdamW(warmup={schedule['warmup']}) is longer than the schedule, total={schedule['total']}: the learning "
    return f"{state[0].kind}: {line}" in "".join(capfd.readouterr())


SCHEDULES = [
    {"warmup": warmup, "total": total, **more}
    for warmup in (0, 1, 9, 10, 11, 100)
    for total in (1, 9, 10, 11, None)
    for more in ({}, {"initial": 0.5}, {"initial": 1.0})
    if warmup or not more
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_warmup_beyond_the_schedule_is_remarked_on(tmp_path, capfd, schedule):
    """Where no update has the rate that the loop names, and nowhere else."""
    optimizer = AdamW(1e-3, **schedule)
    longest = max(optimizer.scale(step, optimizer.updates) for step in range(schedule["total"] or 1000))
    assert said_of(schedule, [Trained(optimizer)], tmp_path, capfd) == (longest < 1)


def test_every_trained_object_has_its_warmup_looked_at(model, tmp_path, capfd):
    schedule = {"warmup": 100, "total": 10}
    rate, loss = AdamW(1e-3, **schedule), preference_loss("bradley_terry")
    for make in (
        lambda: Policy(model, GRPO, rate),
        lambda: Policy(model, NLL(), rate),
        lambda: Critic(model, PPO, rate),
        lambda: RewardModel(model, loss, rate),
    ):
        with make() as trained:
            assert said_of(schedule, [trained], tmp_path, capfd)
