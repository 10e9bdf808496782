"""How often prompts are sampled, what sets a coefficient, and what an evaluation leaves."""

import dataclasses
import json
import math

import pytest
import torch

import rl_fn
from rl_bridge import AdamW, Policy, ScoringConfig, load_rows
from rl_bridge.algorithms.completions import overlong, without_signal
from rl_bridge.algorithms.evaluation import Archive, Evaluator, evaluate_both, pass_rates
from rl_bridge.algorithms.policy_setup import Coefficients, Controlled, PolicyConfig, constraint
from rl_bridge.data.trajectory import SamplingParams, Trajectory, single_turn
from rl_bridge.loop.rollout import Rollout
from rl_bridge.loop.trained import controlled_terms
from rl_bridge.pipelines.objective_options import ControlOptions, KLOptions, controlled, objective_options
from rl_bridge.rewards import load
from rl_fn import components
from tests.bridge.algorithms.fake_engines import MODEL, FakePolicy, FakeRollout, drawn, given

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(6)]
COUNTS = {"steps": 2, "prompts_per_step": 3, "updates_per_step": 2}


class Asked:
    """Rewards by prompt: 1 for every second completion of an odd prompt, all equal for an even one."""

    def __init__(self):
        self.calls = []

    def __call__(self, rows, sampling):
        self.calls.append((len(rows), sampling.seed))
        return [
            single_turn([2], [3], group=i, messages=({"role": "assistant", "content": str(s)},))
            for i in range(len(rows))
            for s in range(sampling.n)
        ]

    def generate(self, prompts, sampling):
        return self(prompts, sampling)


def test_refilling_samples_until_enough_groups_have_a_signal():
    def mixed(completion, row):
        return float(completion == "1" and int(row["answer"]) % 4 == 2)

    def sampled_by(reward, rounds, asked):
        sampling = SamplingParams(n=4, max_new_tokens=4)
        config = PolicyConfig(**COUNTS, sampling=sampling, sampling_rounds=rounds)
        return drawn(asked, reward, config, ROWS, step=1).scored

    asked = Asked()
    sampled = sampled_by(mixed, 4, asked)
    # The seeds of further rounds are those of no step.
    assert asked.calls == [(3, 5 * 1_000_003 + 1), (3, 5 * 1_000_003 + 1 + (1 << 48))]
    assert sampled.sampled_groups == 6 and sampled.rewards.shape == (3, 4)
    assert sampled.rewards.sum(1).tolist() == [1.0, 1.0, 1.0]
    assert [t.group for t in sampled.trajectories] == [0] * 4 + [1] * 4 + [2] * 4
    assert all(int(t.row["answer"]) % 4 == 2 for t in sampled.trajectories)
    # One round is what it was; two groups too few are fewer groups.
    assert sampled_by(mixed, 1, Asked()).rewards.shape == (3, 4)
    asked = Asked()
    none = sampled_by(lambda completion, row: 1.0, 3, asked)
    assert len(asked.calls) == 3 and none.rewards.shape == (3, 4)
    assert without_signal(none) == "no update, 9 groups of 4 completions: every reward is 1"
    unequal = sampled_by(lambda completion, row: float(row["answer"]), 1, Asked())
    assert "the rewards of each group are equal (" in without_signal(unequal)


def test_a_failure_is_no_signal():
    """A group whose rewards differ by that of a failed environment alone is left out, as an update would."""

    class Failing(Asked):
        def generate(self, prompts, sampling):
            made = self(prompts, sampling)
            return [dataclasses.replace(t, finish_reason="error" if i % 4 == 0 else "stop") for i, t in enumerate(made)]

    def reward(completion, row):
        return float(completion == "0") if int(row["answer"]) % 4 else float(int(completion) % 2)

    config = PolicyConfig(**COUNTS, sampling=SamplingParams(n=4, max_new_tokens=4), sampling_rounds=2)
    sampled = drawn(Failing(), reward, config, ROWS).scored
    assert 0 < len(sampled.rewards) < 6
    assert all(int(t.row["answer"]) % 4 == 0 for t in sampled.trajectories)


def test_long_completions_are_penalised():
    sampling = SamplingParams(n=4, max_new_tokens=2)
    config = PolicyConfig(**COUNTS, sampling=sampling, overlong_buffer=2)
    sampled = drawn(Asked(), lambda c, row: 1.0, config, ROWS, rl_fn.recipes.grpo()).scored
    assert sampled.names == ("reward", "overlong") and sampled.matrix.shape == (3, 2, 4)
    assert bool((sampled.earned == 1).all()) and bool((sampled.rewards == 0.5).all())


def conversation(*turns, between=3):
    """Turns of so many drawn tokens, with an environment's words between them."""
    mask = [False]
    for place, length in enumerate(turns):
        mask += [False] * (between if place else 0) + [True] * length
    return Trajectory(
        tokens=tuple(range(len(mask))),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * len(mask),
        weights_versions=tuple(0 if drawn else -1 for drawn in mask),
        finish_reason="stop",
        turns=len(turns),
    )


@pytest.mark.parametrize(("turns", "penalty"), [((4, 4, 4), 0.0), ((4, 7, 1), -0.5), ((8,), -1.0), ((2, 8), -1.0)])
def test_a_conversation_is_penalised_for_the_turn_that_nears_its_limit(turns, penalty):
    """MUS-3: max_new_tokens is of a turn. Words of an environment between two turns are no turn's (L12)."""
    found = overlong([conversation(*turns), conversation(1)], 2, max_length=8, buffer=2)
    assert found.tolist() == [[penalty, 0.0]]


def test_the_seed_of_a_run_is_that_of_its_evaluations(tmp_path):
    """MUSB-4: sampled evaluations and pass@k drew by seed 0 whatever --seed said."""
    rewards, calls = load(lambda completion, row: 1.0), []
    config = PolicyConfig(**COUNTS, sampling=SamplingParams(n=4, max_new_tokens=4), pass_at=(1, 2))
    for seed in (0, 5):
        asked = Asked()
        evaluate_both(asked, ROWS, rewards, config, seed)
        Evaluator(asked, rewards, ROWS, config, tmp_path, seed=seed).metrics(0)
        calls.append([own for _, own in asked.calls])
    assert calls == [[0] * 4, [5] * 4]


CONTROLLERS = {
    "linear": Controlled(rl_fn.linear_kl(0.1, 0.5), "kl"),
    "exponential": Controlled(rl_fn.exponential_kl(0.1, 0.5), "kl"),
    "pid": Controlled(rl_fn.pid_kl(0.1, 0.5), "kl"),
    "scheduled": Controlled(rl_fn.scheduled_kl("linear", start=0.5, end=0.1, steps=4), "kl"),
    "constraint": Controlled(constraint(0.1, "<=", lr=0.3, penalty=0.5, start=0.5), "kl"),
    "adaptive": Controlled(rl_fn.adaptive_entropy(0.5), "kl"),
}


@pytest.mark.parametrize("measured", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_what_is_not_finite_is_no_measurement(name, measured):
    spoiled, without = Coefficients({"kl": CONTROLLERS[name]}), Coefficients({"kl": CONTROLLERS[name]})
    spoiled.update({"kl": measured})  # of a step whose update was skipped
    without.update({})
    for coefficients in (spoiled, without):
        coefficients.update({"kl": 0.4})
    assert spoiled.values() == without.values() and math.isfinite(spoiled.values()["kl"])


class Measuring(FakePolicy):
    """Measures an entropy in each update, and skips those that are told."""

    skips = False

    def train_step(self, batch, denominator, coefficients=None):
        super().train_step(batch, denominator, coefficients)
        return {"entropy": rl_fn.Ratio(torch.tensor(float("nan") if self.skips else 4.0), torch.tensor(10.0))}

    def optimizer_step(self):
        return super().optimizer_step() | ({"skipped": 1.0} if self.skips else {})


IDLE = {
    "warm-up": {"updates": 0},
    "no signal": {"reward": lambda completion, row: 1.0},
    "skipped": {"skips": True},
    "all skipped": {"skips": True, "updates": 3},
}


def last_digit(completion, row):
    """A reward that differs in every group."""
    return float(completion[-1])


def coefficients_of(steps, controller):
    """The coefficient after each of these steps of a policy whose entropy bonus the controller sets."""
    objective = rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.0))
    engine, coefs = Measuring(), []
    with given(policy=engine, rollout=FakeRollout()):
        rollout = Rollout(MODEL)
        policy = Policy(
            MODEL,
            objective,
            AdamW(1e-3),
            control={"entropy": controller},
            scoring=ScoringConfig(temperature=0.8),
            rehearsed=True,
        )
    for seed, step in enumerate(steps):
        engine.skips = step.get("skips", False)
        policy.sync_weights(rollout)
        sampling = SamplingParams(n=4, max_new_tokens=4, temperature=0.8, seed=seed)
        groups = rollout.generate(load_rows(ROWS).take(3), sampling)
        groups = groups.score(step.get("reward", last_digit))
        policy.update(groups.batch().with_advantages(objective), updates=step.get("updates", 1))
        coefs.append(policy.coefficients["entropy"])
    return coefs


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_step_that_leaves_the_policy_as_it_is_leaves_every_coefficient_so(name, idle):
    """Also that of a schedule, which counts the policy's updates."""
    controller = CONTROLLERS[name].controller
    moved = coefficients_of([{}, {}], controller)
    start = float(controller.init().coef)
    assert moved[0] != start
    steps = [IDLE[idle], IDLE[idle], {}, IDLE[idle], {}]
    assert coefficients_of(steps, controller) == [start, start, moved[0], moved[0], moved[1]]


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_moves_and_goes_on_from_its_checkpoint(name):
    whole, killed = Coefficients({"kl": CONTROLLERS[name]}), Coefficients({"kl": CONTROLLERS[name]})
    start = whole.values()["kl"]
    for coefficients in (whole, killed):
        coefficients.update({"kl": 0.4})
    state = json.loads(json.dumps(killed.checkpoint_state()))
    resumed = Coefficients({"kl": CONTROLLERS[name]})
    resumed.load_checkpoint_state(state)
    assert resumed.values() == whole.values() != {"kl": start}
    for coefficients in (whole, resumed):
        coefficients.update({"kl": 0.02})
        coefficients.update({})  # a step without a measurement
    assert resumed.values() == whole.values()
    with pytest.raises(ValueError, match="this run controls"):
        Coefficients({}).load_checkpoint_state(state)


def test_a_constraint_s_coefficient_is_its_multiplier_and_the_slope_of_the_penalty():
    floor = constraint(2.0, ">=", lr=0.5, penalty=0.1)
    low = floor.update(floor.init(), 1.0)
    assert float(low.coef) == pytest.approx(0.5 + 0.1)
    high = floor.update(low, 2.5)
    assert float(high.coef) == pytest.approx(0.25)  # above the floor the penalty acts no more


def test_options_of_controllers():
    def with_coefficients(*arguments):
        objective, control = controlled(*arguments)
        return objective, controlled_terms(objective, control)

    options = ControlOptions(kind="linear", target=0.1, horizon=100.0, clip=0.5)
    objective, coefficients = with_coefficients(rl_fn.recipes.grpo(), options, ControlOptions(), 10)
    assert objective == rl_fn.recipes.grpo() and coefficients.values() == {"kl": pytest.approx(0.04)}
    coefficients.update({"kl": 1.0})
    assert coefficients.values()["kl"] == pytest.approx(0.04 * (1 + 0.5 * 10 / 100))
    floor = ControlOptions(kind="constraint", target=1.0, lr=0.1)
    objective, coefficients = with_coefficients(rl_fn.recipes.dapo(), ControlOptions(), floor, 10)
    assert objective.entropy == components.EntropyBonus(0.0) and coefficients.values() == {"entropy": 0.0}
    pid = ControlOptions(kind="pid", target=0.1)
    objective, coefficients = with_coefficients(rl_fn.recipes.dapo(), pid, ControlOptions(), 10)
    assert objective.kl == components.KL("k3", 0.0) and coefficients.values() == {"kl": pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ControlOptions(target=0.1), "KL control has options and no kind"),
        (ControlOptions(kind="linear"), "KL control of kind linear needs --kl-control.target"),
        (ControlOptions(kind="constraint"), "KL control of kind constraint needs --kl-control.lr, --kl-control.target"),
        (ControlOptions(kind="pid", target=0.1, up=2.0), "KL control of kind pid does not take up"),
        (ControlOptions(kind="adaptive", target=0.1), "KL control of kind adaptive: there are constraint, exponential"),
        (ControlOptions(kind="linear", target=-1.0), "target must be"),
    ],
)
def test_options_that_no_controller_takes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        controlled(rl_fn.recipes.grpo(), options, ControlOptions(), 10)


def test_the_penalty_moves_from_the_loss_into_the_reward():
    kl = objective_options("grpo", kl=KLOptions(place="reward")).build()
    assert (kl.kl, kl.reward_kl) == (None, components.KL("k3", 0.04))
    kl = objective_options("rloo", kl=KLOptions(place="reward", coef=0.1)).build()
    assert (kl.kl, kl.reward_kl) == (None, components.KL("k1", 0.1))
    with pytest.raises(ValueError, match="value_clip is for ppo and vapo"):
        objective_options("grpo", value_clip=0.1).build()
    assert objective_options("ppo", value_clip=0.1).build().value == components.ValueLoss(0.1)


def test_the_archive_keeps_what_no_step_beats_and_goes_on(tmp_path):
    points = [(1.0, 1.0), (2.0, 0.0), (1.0, 2.0), (0.0, 0.0)]
    archive, later = Archive(("a", "b"), tmp_path), Archive(("a", "b"), tmp_path)
    for step, (a, b) in enumerate(points[:2]):
        archive.insert({"a": a, "b": b}, step)
    later.load_checkpoint_state(json.loads(json.dumps(archive.checkpoint_state())))
    for step, (a, b) in enumerate(points[2:], 2):
        later.insert({"a": a, "b": b}, step)
    later.draw()
    found = json.loads((tmp_path / "pareto.json").read_text())
    assert found["front"] == [{"step": 1, "a": 2.0, "b": 0.0}, {"step": 2, "a": 1.0, "b": 2.0}]
    assert len(found["evaluations"]) == 4 and (tmp_path / "pareto.png").stat().st_size > 1000


def test_pass_at_k_counts_correct_completions():
    config = PolicyConfig(**COUNTS, sampling=SamplingParams(n=4, max_new_tokens=4), pass_at=(1, 4), pass_samples=4)
    asked = Asked()
    rewards = load(lambda completion, row: float(completion == "1" and row["answer"] in ("2", "6")))
    found = pass_rates(asked, ROWS, rewards, config)
    assert asked.calls == [(6, 0)] and found.keys() == {"pass@1", "pass@4"}
    assert found["pass@1"]["mean"] == pytest.approx(2 / 6 / 4) and found["pass@4"]["mean"] == pytest.approx(2 / 6)
    assert (
        found["pass@4"]["low"] <= 2 / 6 <= found["pass@4"]["high"] and found["pass@4"]["low"] < found["pass@4"]["high"]
    )
