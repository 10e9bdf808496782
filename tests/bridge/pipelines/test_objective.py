"""An algorithm is a sub-command with its recipe's constants and the terms that all share."""

import dataclasses
import inspect
import pickle

import pytest
import tyro

import rl_fn
from rl_bridge.modules.own_loss import load_loss
from rl_bridge.pipelines.objective_options import (
    ALGORITHMS,
    AggregationOptions,
    CorrectionOptions,
    KLOptions,
    ObjectiveOptions,
    objective_options,
)
from rl_fn import components
from rl_tools.trainers import parse
from rl_train.policy_configs import quickstart


def built(*words):
    if "objective:on_policy_distillation" in words:
        words = (*words, "--teacher", "some/model")
    # Corrections by π_old/μ, and decoupled_ppo, are refused without the first, sets of k of n without an n above k.
    words = ("--policy.recompute-old-logprobs", "--policy.sampling.n", "8", *words)
    return parse(quickstart(), words, prog="rl-fn train policy").objective.build()


def test_every_recipe_is_there_with_its_own_options_and_the_shared_ones():
    assert list(ALGORITHMS) == list(rl_fn.recipes.__all__)
    shared = {option.name for option in dataclasses.fields(ObjectiveOptions)}
    for name, options in ALGORITHMS.items():
        own = set(inspect.signature(getattr(rl_fn.recipes, name)).parameters)
        assert {option.name for option in dataclasses.fields(options)} == own | shared and not own & shared
        assert options().algorithm == name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_by_name_is_its_recipe(algorithm):
    objective = built(f"objective:{algorithm}")
    assert objective == getattr(rl_fn.recipes, algorithm)() == objective_options(algorithm).build()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_constant_reaches_its_recipe(algorithm):
    recipe, words, constants = getattr(rl_fn.recipes, algorithm), [], {}
    for name, parameter in inspect.signature(recipe).parameters.items():
        value = other(name, parameter.default)
        constants[name] = value
        flag = f"--objective.{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--objective.no-{name.replace('_', '-')}")
        else:
            words += [flag, *([str(x) for x in value] if isinstance(value, tuple) else [str(value)])]
    assert built(f"objective:{algorithm}", *words) == recipe(**constants)
    assert not constants or recipe(**constants) != recipe()


def other(name, default):
    """Another value than the default that the recipe takes too."""
    words = {"scale": "none", "behaviour": "old", "level": "token", "divergence": "kl", "alpha": "nonzero"}
    if isinstance(default, str):
        return words[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    absent = 0.75 if name == "clip_low" else 3.0  # a clip from below by more than 1 is refused
    return (0.5, 2.0) if name == "weights" else absent if default is None else default * 0.5 if default else 0.25


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--objective.kl.coef", "0.1"], {"kl": components.KL("k3", 0.1)}),
        (["--objective.kl.coef", "0.1", "--objective.kl.estimator", "k1+"], {"kl": components.KL("k1+", 0.1)}),
        (["--objective.kl.coef", "0"], {}),
        (["--objective.entropy.coef", "0.01"], {"entropy": components.EntropyBonus(0.01)}),
        (["--objective.entropy.coef", "0"], {}),
        (["--objective.correction.kind", "none"], {}),
        (["--objective.correction.kind", "tis"], {"correction": components.TIS()}),
        (
            ["--objective.correction.kind", "tis", "--objective.correction.cap", "3"],
            {"correction": components.TIS(3.0)},
        ),
        (
            ["--objective.correction.kind", "icepop", "--objective.correction.level", "sequence"],
            {"correction": components.IcePop(level="sequence")},
        ),
        (["--objective.dynamic-sampling", "True"], {"dynamic_sampling": components.DynamicSampling()}),
        (["--objective.dynamic-sampling", "False"], {"dynamic_sampling": None}),
        (["--objective.aggregation.mode", "token-sum"], {"aggregation": components.Aggregation("token-sum")}),
    ],
)
def test_terms_are_replaced_in_any_recipe(words, changes):
    for algorithm in ("dapo", "sapo"):
        assert built(f"objective:{algorithm}", *words) == getattr(rl_fn.recipes, algorithm)().replace(**changes)


@pytest.mark.long
def test_terms_that_a_recipe_has_are_changed_one_by_one_or_taken_away():
    grpo, dr_grpo = rl_fn.recipes.grpo(), rl_fn.recipes.dr_grpo(max_completion_length=8.0)
    assert built("objective:grpo", "--objective.kl.estimator", "k2") == grpo.replace(kl=components.KL("k2", 0.04))
    m2po = rl_fn.recipes.m2po()
    both = components.Product((m2po.correction, components.TIS(1.5)))
    tis = CorrectionOptions(kind="tis", cap=1.5)
    assert objective_options("m2po", correction=tis).build() == m2po.replace(correction=both)
    dual = rl_fn.recipes.gspo().loss
    assert built("objective:gspo", "--objective.dual-clip", "3").loss == dataclasses.replace(dual, dual_clip=3.0)
    assert built("objective:grpo", "--objective.kl.coef", "0") == grpo.replace(kl=None)
    kept = objective_options(
        "dr_grpo", max_completion_length=8.0, aggregation=AggregationOptions(max_completion_length=9.0)
    )
    assert kept.build() == dr_grpo.replace(aggregation=components.Aggregation("seq-mean-token-sum-norm", 9.0))
    with pytest.raises(ValueError, match=r"the objective has no KL penalty: give --objective\.kl\.coef"):
        objective_options("dapo", kl=KLOptions(estimator="k1")).build()
    for options in (KLOptions(place="reward"), KLOptions(place="reward", estimator="k3")):
        with pytest.raises(ValueError, match=r"no KL penalty to take off the reward: give --objective\.kl\.coef"):
            objective_options("dapo", kl=options).build()
        controlled = objective_options("dapo", kl=options).build(controlled=True)
        assert controlled.reward_kl == components.KL(options.estimator or "k1", 0.0) and controlled.kl is None
    none = objective_options("dapo", kl=KLOptions(place="reward", coef=0.0))
    assert none.build() == rl_fn.recipes.dapo() and none.build(controlled=True).reward_kl == components.KL("k1", 0.0)
    for options, refused in (({"kind": "tis", "high": 3.0}, "high"), ({"cap": 2.0, "level": "token"}, "cap, level")):
        with pytest.raises(ValueError, match=f"does not take {refused}"):
            objective_options("dapo", correction=CorrectionOptions(**options)).build()
    assert KLOptions(coef=0.5).component(components.KL("k1", 0.1)) == components.KL("k1", 0.5)
    with pytest.raises(ValueError, match="the loss of sapo has no dual_clip"):
        objective_options("sapo", dual_clip=3.0).build()
    with pytest.raises(ValueError, match="unknown algorithm 'nope'; there is: cispo, clip_cov"):
        objective_options("nope")


LOSSES = """
import torch
from rl_bridge import torch_loss

def plain(batch):
    return -batch.advantages * batch.logprobs

@torch_loss
def in_torch(batch):
    return -batch.advantages * batch.logprobs
"""


@pytest.fixture
def losses(tmp_path):
    """A file with losses of the user's own."""
    file = tmp_path / "losses.py"
    file.write_text(LOSSES)
    return file


@pytest.mark.parametrize("name", ["plain", "in_torch"])
def test_a_loss_of_a_file_takes_the_place_of_the_recipe_s(losses, name):
    objective = built("objective:grpo", "--objective.loss", f"{losses}:{name}", "--objective.kl.coef", "0.5")
    assert objective == rl_fn.recipes.grpo().replace(loss=load_loss(f"{losses}:{name}"), kl=components.KL("k3", 0.5))
    assert name in objective.explain()


def test_a_constant_of_the_loss_that_is_gone_is_refused(losses):
    options = {"loss": f"{losses}:in_torch"}
    with pytest.raises(ValueError, match=r"--objective\.clip-low is of the loss of dapo, and --objective\.loss takes"):
        objective_options("dapo", clip_low=0.1, **options).build()
    with pytest.raises(ValueError, match="the loss of dapo has no dual_clip"):
        objective_options("dapo", dual_clip=3.0, **options).build()
    kept = objective_options("dr_grpo", max_completion_length=8.0, **options).build()
    assert kept.aggregation == rl_fn.recipes.dr_grpo(max_completion_length=8.0).aggregation


def test_a_resumed_run_compares_the_file_of_its_loss(losses):
    pipeline = dataclasses.replace(quickstart(), objective=objective_options("dapo", loss=f"{losses}:plain"))
    before = pipeline.fingerprints()
    losses.write_text(LOSSES + "\n")
    assert before["loss"] != pipeline.fingerprints()["loss"] and "loss" not in quickstart().fingerprints()


def test_options_stand_before_and_after_the_algorithm():
    words = ["--seed", "5", "objective:gspo", "--objective.clip-high", "0.5", "--policy.steps", "7"]
    pipeline = parse(quickstart(), words, prog="rl-fn train policy")
    assert (pipeline.seed, pipeline.policy.steps) == (5, 7)
    assert pipeline.objective.build() == rl_fn.recipes.gspo(clip_high=0.5)
    assert dataclasses.asdict(pipeline)["objective"]["algorithm"] == "gspo"
    assert parse(quickstart(), [], prog="rl-fn train policy") == quickstart()


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["objective:sapo", "--objective.clip-low", "0.1"], "--objective.clip-low"),
        (["objective:nope"], "objective:nope"),
        (["objective:dppo", "--objective.threshold", "big"], "big"),
    ],
)
def test_an_option_of_another_algorithm_is_refused(words, printed, capsys):
    with pytest.raises(SystemExit) as stopped:
        built(*words)
    assert stopped.value.code == 2 and printed in capsys.readouterr().err


def test_the_help_of_an_algorithm_is_its_recipe_s(capsys):
    with pytest.raises(SystemExit):
        built("objective:sapo", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert "--objective.tau-neg" in printed and "--objective.clip-low" not in printed
    assert inspect.getdoc(rl_fn.recipes.sapo).partition("\n")[0].split(":")[0] in printed


def test_options_travel_to_other_processes():
    options = objective_options("gspo", clip_high=0.001)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.long
def test_tyro_is_given_no_type_that_it_cannot_read():
    for options in ALGORITHMS.values():
        assert tyro.cli(options, args=[]) == options()
