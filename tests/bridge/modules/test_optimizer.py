"""Every number of OptimizerConfig reaches the optimiser it is for."""

import copy
import itertools
from dataclasses import fields, replace

import pytest
import torch

from rl_bridge.modules.comparison import PreferenceModule, RewardModule
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import CausalLMModule, OptimizerConfig, Trainable
from rl_bridge.modules.value import ValueModule
from tests.support.ready import ready


def test_the_config_is_the_optimisers(new_model):
    config = OptimizerConfig(
        learning_rate=1e-3, warmup=0, decay="constant", beta1=0.7, beta2=0.95, weight_decay=0.3, max_grad_norm=2.0
    )
    module = ready(CausalLMModule, new_model(), config, updates=4)
    assert isinstance(module.optimizer, torch.optim.AdamW)
    (group,) = module.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.7, 0.95), 0.3)
    first = next(module.model.parameters())
    for parameter in module.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    first.grad = torch.ones_like(first)
    size = float(first.numel()) ** 0.5
    assert abs(module.optimizer_step()["grad_norm"] - size) < 1e-2 * size
    # After one update the first moment is (1 − β₁) of the clipped gradient.
    moment = module.optimizer.state[first]["exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(first, 0.3 * 2.0 / size), rtol=1e-3, atol=0.0)


def test_moments_follow_a_parameter_that_another_takes_the_place_of(new_model):
    module = ready(CausalLMModule, new_model(), OptimizerConfig(learning_rate=1e-3), updates=4)
    for place, parameter in enumerate(module.model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + place)
    module.optimizer_step()
    before = [module.optimizer.state[parameter]["exp_avg"] for parameter in module.model.parameters()]
    for device in ("meta", "cpu"):
        module.move("weights", torch.device(device))
        state = module.optimizer.state
        assert len(state) == len(before)
        for parameter, moment in zip(module.model.parameters(), before, strict=True):
            assert state[parameter]["exp_avg"] is moment


SAVED = OptimizerConfig(
    learning_rate=1e-3, warmup=6, initial=0.5, decay="cosine", beta1=0.8, beta2=0.9, weight_decay=0.1, max_grad_norm=1.0
)
CHANGES = {
    "learning_rate": 1e-4,
    "warmup": 2,
    "initial": 0.1,
    "decay": "linear",
    "final": 0.4,
    "beta1": 0.5,
    "beta2": 0.99,
    "weight_decay": 0.0,
    "max_grad_norm": 0.01,
}
DECAYED = ("decay", "final")
"""Options of updates after the warm-up."""


def updates(module, start, count):
    """``count`` updates by gradients of their numbers from ``start``; the metrics of each."""
    metrics = []
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.trained_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        metrics.append(module.optimizer_step())
    return metrics


@pytest.mark.parametrize("before", [3, 8])
@pytest.mark.parametrize("option", [*(field.name for field in fields(OptimizerConfig)), "updates", None])
def test_a_resumed_optimiser_goes_on_with_the_options_of_now(new_model, option, before):
    """Weights, moments and the number of updates are the checkpoint's; all else is what it would have been by now."""
    config = SAVED if option in ("updates", None) else replace(SAVED, **{option: CHANGES[option]})
    total = 40 if option == "updates" else 20
    saved = ready(CausalLMModule, new_model(), SAVED, updates=20)
    updates(saved, 0, before)
    state = copy.deepcopy(saved.checkpoint_state())
    expected, resumed = (ready(CausalLMModule, new_model(seed=seed), config, updates=total) for seed in (0, 1))
    updates(expected, 0, before)
    expected.model.load_state_dict(state["model"])
    for name, parameter in expected.model.named_parameters():
        for key, value in state["optimizer"]["state"].get(name, {}).items():
            expected.optimizer.state[parameter][key].copy_(value)
    updates(resumed, 0, 2)  # whose own updates are forgotten
    resumed.load_checkpoint_state(state)
    own, other = (dict(module.optimizer.param_groups[0], params=None) for module in (resumed, expected))
    assert own == other and resumed.scheduler.state_dict() == expected.scheduler.state_dict()
    metrics = updates(resumed, before, 3)
    assert metrics == updates(expected, before, 3)
    for a, b in zip(resumed.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(a, b)
    unchanged = updates(saved, before, 3) == metrics and all(
        torch.equal(a, b) for a, b in zip(resumed.model.parameters(), saved.model.parameters(), strict=True)
    )
    late = option in (*DECAYED, "updates") and before + 3 <= SAVED.warmup
    early = option == "initial" and before >= SAVED.warmup
    assert unchanged == (option is None or late or early)


@pytest.mark.parametrize("kind", [SupervisedModule, PreferenceModule, RewardModule, PolicyModule, ValueModule])
def test_every_trainer_resumes_its_optimiser_so(kind):
    assert kind.load_optimizer_states is Trainable.load_optimizer_states
    assert kind.on_weights_materialized is Trainable.on_weights_materialized


@pytest.mark.parametrize(
    ("options", "total", "wanted"),
    [
        ({"warmup": 4, "decay": "constant"}, 10, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 1.0, 50: 1.0}),
        ({"warmup": 0, "decay": "linear", "final": 0.1}, 10, {0: 1.0, 5: 0.55, 10: 0.1, 50: 0.1}),
        ({"warmup": 2, "decay": "linear", "final": 0.0}, 6, {1: 1.0, 2: 1.0, 3: 0.75, 4: 0.5, 5: 0.25, 6: 0.0}),
        ({"warmup": 0, "decay": "cosine", "final": 0.2}, 10, {0: 1.0, 5: 0.6, 10: 0.2, 50: 0.2}),
        ({"warmup": 10, "decay": "linear", "final": 0.1}, 5, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 11: 0.1}),
    ],
)
def test_the_schedule(options, total, wanted):
    config = OptimizerConfig(learning_rate=1.0, **options)
    assert {step: config.scale(step, total) for step in wanted} == pytest.approx(wanted, abs=1e-6)


def optax_schedule(config, total):
    """The same schedule of optax's own: a warm-up joined to a decay."""
    optax = pytest.importorskip("optax")
    rate, warmup, rest = config.learning_rate, config.warmup, total - config.warmup
    end = config.final * rate
    decay = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, end, rest),
        "cosine": optax.cosine_decay_schedule(rate, rest, alpha=config.final),
    }[config.decay]
    start = rate / max(1, warmup) if config.initial is None else config.initial * rate
    # Without `initial` the highest rate is that of the last update of the warm-up.
    rising = optax.linear_schedule(start, rate, warmup - (config.initial is None))
    return optax.join_schedules([rising, decay], [warmup])


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.25])
@pytest.mark.parametrize("warmup, initial", [(0, None), *itertools.product([2, 7], [None, 0.0, 0.4])])
def test_every_schedule_is_optaxs_at_every_step(decay, final, warmup, initial):
    config, total = OptimizerConfig(learning_rate=3e-4, warmup=warmup, initial=initial, decay=decay, final=final), 23
    wanted = optax_schedule(config, total)
    for step in range(total + 5):
        rate = config.learning_rate * config.scale(step, total)
        assert rate == pytest.approx(float(wanted(step)), rel=2e-5, abs=1e-10), step


@pytest.mark.parametrize("decay", ["constant", "linear"])
@pytest.mark.parametrize("warmup, initial", [(0, None), *itertools.product([1, 2, 7], [None, 0.0, 0.4, 1.0])])
def test_the_highest_share_of_a_run_is_the_largest_of_its_updates(decay, warmup, initial):
    config = OptimizerConfig(learning_rate=3e-4, warmup=warmup, initial=initial, decay=decay, final=0.25)
    for updates in range(1, 20):
        shares = [config.scale(step, updates) for step in range(updates)]
        assert config.highest(updates) == max(shares), updates


@pytest.mark.parametrize("warmup", [1, 5])  # at 0 optax's own stay at the initial rate for ever
def test_optaxs_named_schedules_are_among_them(warmup):
    optax = pytest.importorskip("optax")
    config = OptimizerConfig(learning_rate=2e-3, warmup=warmup, initial=0.1, decay="cosine", final=0.2)
    cosine = optax.warmup_cosine_decay_schedule(2e-4, 2e-3, warmup, 30, 4e-4)
    constant = optax.warmup_constant_schedule(2e-4, 2e-3, warmup)
    flat = OptimizerConfig(learning_rate=2e-3, warmup=warmup, initial=0.1, decay="constant")
    for step in range(35):
        assert 2e-3 * config.scale(step, 30) == pytest.approx(float(cosine(step)), rel=2e-5)
        assert 2e-3 * flat.scale(step, 30) == pytest.approx(float(constant(step)), rel=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"max_grad_norm": 0.0},
        {"warmup": -1},
        {"final": 1.5},
        {"final": -0.1},
        {"initial": -0.1},
        {"initial": 2.0},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"weight_decay": -1.0},
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(options):
    with pytest.raises(ValueError, match=r"need .*got \w+="):
        OptimizerConfig(**{"learning_rate": 1.0} | options)
