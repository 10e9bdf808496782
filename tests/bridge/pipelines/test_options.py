"""Options that cannot be, and options that nothing would read: refused by name, whoever makes the options."""

import ast
import dataclasses
import json
import math
import re
import typing
from pathlib import Path

import pytest

from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import ALGORITHMS
from rl_bridge.pipelines.placement import workers_left
from rl_bridge.pipelines.training import LoRAOptions
from rl_tools.trainer_options import TRAINERS, load
from rl_tools.trainers import config_of, parse
from rl_train.compared import LOSSES, REWARD_MODEL_LOSSES
from rl_train.policy_configs import policy, quickstart
from rl_train.policy_inputs import rows_of


def _has_float(kind):
    return kind is float or any(_has_float(part) for part in typing.get_args(kind))


def _numbers(options, path=()):
    """(path, whether in a tuple) of every option that may be a number with a fraction."""
    for option in dataclasses.fields(options):
        value, here = getattr(options, option.name), (*path, option.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, here)
        elif option.init and _has_float(option.type):
            yield here, "tuple" in str(option.type)


def _with(options, path, value):
    inner = value if len(path) == 1 else _with(getattr(options, path[0]), path[1:], value)
    return dataclasses.replace(options, **{path[0]: inner})


@pytest.mark.parametrize("name", TRAINERS)
def test_usr_5_no_number_of_any_option_may_be_nan_or_infinite(name):
    default = load(TRAINERS[name].default)()
    kinds = {"policy": ALGORITHMS, "preference": LOSSES, "reward-model": REWARD_MODEL_LOSSES}.get(name, {})
    parts = [(None, default), *(("objective" if name == "policy" else "loss", made()) for made in kinds.values())]
    seen = set()
    for choice, options in parts:
        for path, several in _numbers(options):
            seen.add((choice, path[-1]))
            for bad in (math.nan, math.inf, -math.inf, 1e39):
                with pytest.raises(ValueError) as refused:
                    part = _with(options, path, (1.0, bad) if several else bad)
                    dataclasses.replace(default, **({choice: part} if choice else {}))
                said = str(refused.value).replace("-", "_")
                assert any(word in said for word in path[-1].split("_")), (path, bad, refused.value)
    assert (None, "learning_rate") in seen and (name == "sft" or len({c for c, _ in seen}) == 2)
    if name == "policy":
        assert {(None, "reward_weights"), (None, "coef"), (None, "ideal"), ("objective", "clip_high")} <= seen


BRIDGE = Path(__file__).parents[3] / "bridge"
SIMPO, GRPO, PPO = LOSSES["simpo"](), ALGORITHMS["grpo"](), ALGORITHMS["ppo"]()
USELESS = [
    ("sft", {"lora.target_modules": ("q_proj",)}, "without a --lora.rank"),
    ("policy", {"lora.use_rslora": True}, "without a --lora.rank"),
    ("preference", {"lora.alpha": 8.0}, "without a --lora.rank"),
    ("policy", {"teacher": "x"}, "with dapo, which learns from no teacher"),
    ("policy", {"critic.model": "x"}, "with dapo, which has no critic"),
    ("policy", {"critic.optimizer": OptimizerConfig(learning_rate=1.0)}, "with dapo, which has no critic"),
    ("policy", {"max_turns": 5}, "without --environment"),
    ("policy", {"max_trajectory_tokens": 9}, "without --environment"),
    ("policy", {"environment_timeout": 9.0}, "without --environment"),
    ("policy", {"environment_processes": 2}, "without --environment"),
    ("sft", {"held_out": 7, "eval_data": "x.jsonl"}, "beside --eval-data x.jsonl"),
    ("sft", {"steps": 7, "epochs": 1.0}, "beside --epochs 1.0"),
    ("preference", {"steps": 7, "epochs": 1.0}, "beside --epochs 1.0"),
    ("reward-model", {"steps": 7, "epochs": 1.0}, "beside --epochs 1.0"),
    ("preference", {"cache_reference": False, "loss": SIMPO}, "with loss:simpo, which has no reference"),
    ("policy", {"policy.pass_samples": 4}, "without --policy.pass-at"),
    ("policy", {"policy.least_effective_share": 0.4}, "without --policy.recompute-old-logprobs"),
    ("policy", {"samples_kept": 2, "samples_every": 0}, "with --samples-every 0"),
    ("sft", {"tracker_project": "x"}, "without --trackers"),
    ("policy", {"reward_weights": (1.0,), "policy.scalar.weights": (2.0,)}, "beside --policy.scalar.weights"),
    ("policy", {"reward_timeout": 3.0}, "without a reward FILE.py:function"),
    ("policy", {"reward_protocol": "trl", "reward": ("exact", "http://x")}, "without a reward FILE.py:function"),
]


def refusal(trainer, changes):
    """What is said about a trainer's default options with these changes, all made at once."""
    default = load(TRAINERS[trainer].default)()
    outer = {}
    with pytest.raises(ValueError) as refused:
        for place, value in changes.items():
            name, _, inner = place.partition(".")
            outer[name] = _with(getattr(default, name), inner.split("."), value) if inner else value
        dataclasses.replace(default, **outer)
    assert not re.search(r"[A-Z]\w+\(\w+=", str(refused.value)), "the whole of the options"
    return str(refused.value)


def test_no_message_has_the_whole_of_the_options_usr_17():
    """As PolicyConfig(steps=2, …): an error of a dataclass of options shows those that it is about."""
    places = []
    for path in sorted(BRIDGE.rglob("*.py")):
        classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
        for made in classes:
            written = {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
            decorators = {ast.unparse(decorator).partition("(")[0] for decorator in made.decorator_list}
            if "dataclass" not in decorators or not written.isdisjoint({"__str__", "__repr__"}):
                continue
            raised = [node for node in ast.walk(made) if isinstance(node, ast.Raise)]
            shown = [node for each in raised for node in ast.walk(each) if isinstance(node, ast.FormattedValue)]
            places += [f"{path.name}: {made.name}" for node in shown if ast.unparse(node.value) in ("self", "options")]
    assert places == []


@pytest.mark.parametrize(("trainer", "changes", "reason"), USELESS, ids=[next(iter(c)) for _, c, _ in USELESS])
def test_usr_9_an_option_that_nothing_would_read_is_refused(trainer, changes, reason):
    said = refusal(trainer, changes)
    assert f"--{next(iter(changes)).replace('_', '-')}" in said and f"has no effect {reason}" in said, said


IN_VAIN = [
    ("sft", "--optimizer.decay constant", "--optimizer.final 0.3"),
    ("policy", "--optimizer.decay constant", "--optimizer.final 0.3"),
    ("policy", "--model x", "--optimizer.final 0.3"),  # its decay is constant from the start
    ("policy", "--sft.optimizer.decay constant", "--sft.optimizer.final 0.3"),
    ("policy", "--critic.optimizer.decay constant objective:ppo", "--critic.optimizer.final 0.3"),
    ("policy", "--sft.steps 0", "--sft.rows-per-step 7"),
    ("policy", "--sft.steps 0", "--sft.optimizer.learning-rate 0.5"),
    ("policy", "--model x", "--sft.optimizer.warmup 3"),
    ("sft", "--optimizer.warmup 0", "--optimizer.initial 0.1"),
    ("policy", "--optimizer.warmup 0", "--optimizer.initial 0.1"),
    ("sft", "", "--offload phases"),
    ("preference", "", "--offload phases"),
    ("reward-model", "", "--offload phases"),
    ("policy", "", "--asynchronous.round-tokens 4"),
    ("policy", "", "--policy.correct-reward 0.5"),
    ("policy", "objective:dapo --objective.kl.coef 0.1", "--no-track-kl"),
]


@pytest.mark.parametrize(("trainer", "others", "given"), IN_VAIN, ids=[f"{t} {o} {g}" for t, o, g in IN_VAIN])
def test_an_option_in_vain_is_remarked_on(trainer, others, given, capsys):
    """USR-9. The command's own default values pass beside the same options: nobody has given them."""

    def remarks(*words):
        _, options = config_of([trainer, *words, *others.split()], "train")
        text = capsys.readouterr().out
        assert options.adamw(9).total == 9, "the run begins"
        return text

    assert remarks() == ""
    named = given.replace("--no-track-kl", "--track-kl False")
    assert re.fullmatch(rf"{named} has no effect (with|here).*\n", remarks(*given.split()))


def test_what_an_option_in_vain_needs_makes_it_good(capsys):
    words = "policy --model x --sft.steps 2 --sft.rows-per-step 7 --optimizer.decay linear --optimizer.final 0.3"
    _, options = config_of(words.split(), "train")
    assert (options.sft.rows_per_step, options.optimizer.final) == (7, 0.3)
    config_of(["policy", "objective:vapo", "--policy.correct-reward", "0.5", "--optimizer.initial", "0.1"], "train")
    assert capsys.readouterr().out == ""


def test_other_ranks_than_the_first_repeat_no_remark(monkeypatch, capsys):
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        config_of(["sft", "--offload", "phases"], "train")
        assert capsys.readouterr().out.count("has no effect") == count


@pytest.mark.parametrize(("updates", "highest"), [(10, None), (9, "9e-05"), (1, "1e-05")])
def test_a_warm_up_that_outlasts_the_run_is_remarked_on(updates, highest, capsys):
    sft = load(TRAINERS["sft"].default)()
    sft.remark_on_warmup(updates)
    remark = f"--optimizer.warmup 10 is longer than the run (updates: {updates}): the learning rate comes to "
    assert capsys.readouterr().out == ("" if highest is None else f"{remark}{highest}, and never to 0.0001\n")
    for initial, others in ((1.0, ""), (0.5, f"{remark}{5e-5 + 5e-6 * (updates - 1):.3g}, and never to 0.0001\n")):
        sft.remark_on_warmup(updates, optimizer=dataclasses.replace(sft.optimizer, initial=initial))
        assert capsys.readouterr().out == others


IMPOSSIBLE = [
    ("policy", {"policy.critic_warmup": 240, "objective": PPO}, "critic_warmup=240 of 240 steps"),
    ("policy", {"policy.sampling_rounds": 4, "objective": GRPO}, "sampling_rounds=4"),
    ("policy", {"policy.sampling_rounds": 4, "asynchronous.max_staleness": 1}, "--policy.sampling-rounds"),
    ("policy", {"sft.steps": -1}, "need steps ≥ 0"),
    ("sft", {"micro_batch_tokens": 0}, "micro_batch_tokens > 0"),
    ("policy", {"softcap": 0.0}, "softcap > 0"),
    ("preference", {"loss.beta": 0.0}, "loss dpo: beta must be positive, got 0.0"),
    ("preference", {"loss.label_smoothing": 0.7}, "label_smoothing"),
    ("preference", {"loss": LOSSES["discopop"](tau=0.0)}, "tau must be positive"),
    ("preference", {"loss": LOSSES["kto"](desirable_weight=-1.0)}, "weights must not be negative"),
    ("reward-model", {"loss.center": -1.0}, "center must not be negative"),
    ("preference", {"loss": LOSSES["sppo"](chosen_win_rate=7.0)}, "chosen_win_rate must be in [0, 1], got 7.0"),
    ("policy", {"asynchronous.max_staleness": 1, "asynchronous.rollout_workers": 0}, "counts must be ≥ 1"),
    ("sft", {"checkpoint_every": 10**20}, "--checkpoint-every must be a whole number up to 9223372036854775807, got"),
    ("policy", {"policy.pass_at": (1, 10**20)}, "--policy.pass-at must be a whole number up to"),
    ("sft", {"data": ""}, "data names a file, a folder or an id of the hub, and is empty"),
    ("policy", {"reward": ("a.py:f",), "reward_timeout": 0.0}, "reward_timeout must be > 0 seconds, got 0.0"),
    ("policy", {"reward": ("environment",)}, "the reward environment is what --environment gives"),
    ("sft", {"threads": 100_000}, "threads must be at most"),
    ("sft", {"mesh.tensor": 0}, "at least one rank, got tensor 0"),
    ("policy", {"mesh.replicate": 0}, "at least one rank, got replicate 0"),
    ("policy", {"max_trajectory_tokens": 0}, "max_trajectory_tokens must be at least 1"),
]


@pytest.mark.parametrize(("trainer", "changes", "message"), IMPOSSIBLE, ids=[message for *_, message in IMPOSSIBLE])
def test_usr_15_what_cannot_be_is_refused_before_anything_is_read(trainer, changes, message):
    assert message in refusal(trainer, changes)


NAMES = [
    ("org/Small-1B", None, "Small-1B"),
    ("runs/first/model", "data/problems.jsonl", "first-problems"),
    ("here/", "org/name@train[:9]", "here-name"),
    ("model", None, "model"),
]


def test_usr_6_a_users_model_has_defaults_of_its_own():
    """No supervised steps, 512 tokens, the rate of a pretrained model; the quickstart's are its own."""
    for words in (["--model", "org/Small-1B"], ["--seed", "3", "--model=org/Small-1B", "--lora.rank", "0"]):
        made = policy(words)
        assert (made.sft.steps, made.policy.sampling.max_new_tokens) == (0, 512) and made != quickstart()
        assert (made.optimizer.learning_rate, made.model, made.data) == (1e-6, "org/Small-1B", None)
    assert policy(["--model", "x", "--lora.rank", "8"]).optimizer.learning_rate == 1e-5
    for model, data, name in NAMES:
        assert policy(["--model", model, *(["--data", data] if data else [])]).name == name
    assert policy(["--data", "x.jsonl", "--lora.rank", "8"]) == policy() == quickstart()
    given = parse(policy, ["--model", "x", "--data", "y.csv", "--policy.sampling.max-new-tokens", "9"], prog="x")
    assert (given.name, given.policy.sampling.max_new_tokens, given.sft.steps) == ("x-y", 9, 0)


@pytest.mark.parametrize("reward", [(), ("exact",), ("right=exact",)])
@pytest.mark.parametrize("answer", [None, {"a": 1}, [1]])
def test_usr_18_an_answer_that_cannot_be_compared_is_refused_by_its_row(tmp_path, reward, answer):
    """In any row, before anything is drawn: the reward would fail at it, or compare with the text "None"."""
    (data := tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": answer if n == 5 else str(n + 1)}) + "\n" for n in range(9))
    )
    made = dataclasses.replace(load(TRAINERS["policy"].default)(), data=str(data), reward=reward)
    with pytest.raises(ValueError, match=r"asked\.jsonl, row 6: .*answer"):
        rows_of(made)


@pytest.mark.parametrize("targets", [("q_proj,v_proj",), ("q_proj,", "v_proj"), ("q_proj, v_proj",), "q_proj,v_proj"])
def test_targets_with_commas_are_refused_with_the_words_that_they_are(targets):
    with pytest.raises(ValueError, match="target_modules are separated by spaces, as q_proj") as refused:
        LoRAOptions(rank=4, target_modules=targets)
    advised = str(refused.value).partition("spaces, as ")[2].partition(", got")[0]
    assert LoRAOptions(rank=4, target_modules=tuple(advised.split(" "))).target_modules[0] == "q_proj"


@pytest.mark.parametrize("rate", [1e-60, 1e-300, 1e-39, 5e-324])
def test_a_rate_at_which_no_weight_moves_is_refused(rate):
    with pytest.raises(ValueError, match=r"learning_rate must be at least 1.175e-38, float32's smallest normal number"):
        OptimizerConfig(learning_rate=rate)
    assert OptimizerConfig(learning_rate=1.2e-38).learning_rate == 1.2e-38


ENDLESS = [{"epochs": 1e30}, {"epochs": 2e8}, {"steps": 10**9 + 1}, {"steps": 2**62}]
SUPERVISED = [name for name in TRAINERS if name != "policy"]


@pytest.mark.parametrize("endless", ENDLESS, ids=str)
@pytest.mark.parametrize("trainer", SUPERVISED)
def test_a_run_that_never_ends_is_refused_with_its_number_of_steps(trainer, endless):
    options = load(TRAINERS[trainer].default)(rows_per_step=2, **endless)
    steps = endless.get("steps") or math.ceil(endless["epochs"] * 20 / 2)
    with pytest.raises(ValueError, match=rf"^--{next(iter(endless))} .*: a run of {re.escape(f'{steps:.4g}')} steps"):
        options.steps_for(20)
    assert load(TRAINERS[trainer].default)(rows_per_step=2, epochs=1e8).steps_for(20) == 10**9


def test_steps_of_reinforcement_learning_that_never_end_are_refused_too():
    config = quickstart().policy
    assert dataclasses.replace(config, steps=10**9).steps == 10**9
    with pytest.raises(ValueError, match=r"^steps=1000000001: a run of so many never ends; give 1e\+09 at most$"):
        dataclasses.replace(config, steps=10**9 + 1)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_rollout_with_all_workers_to_itself_is_refused_with_the_numbers_to_give(workers):
    for apart in range(workers):
        assert workers_left(workers, apart) == workers - apart
    for apart in (workers, workers + 3):
        with pytest.raises(ValueError) as refused:
            workers_left(workers, apart)
        message = (
            f"--asynchronous.rollout-workers {apart}: of the executor's {workers} workers none is left that trains"
        )
        assert message in str(refused.value) and f"--executor ray --workers {apart + 1}" in str(refused.value)


def test_a_run_asks_whether_a_worker_is_left():
    options = policy(["--asynchronous.max-staleness", "1"])
    beside = dataclasses.replace(options.asynchronous, max_staleness=1, rollout_workers=1)
    with pytest.raises(ValueError, match=r"--asynchronous.rollout-workers 1: of the executor's 1 workers none is left"):
        dataclasses.replace(options, asynchronous=beside).shared()


CLIPPED = [name for name, kind in ALGORITHMS.items() if "clip_low" in {each.name for each in dataclasses.fields(kind)}]
BY_LOGARITHMS = ("gmpo",)
"""Algorithms whose clip is of a logarithm, which has no least value."""


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_from_below_that_no_ratio_reaches_is_refused(name):
    assert len(CLIPPED) >= 8 and set(BY_LOGARITHMS) < set(CLIPPED)
    for clip in (0.2, 1.0):
        assert ALGORITHMS[name](clip_low=clip).build()
    for clip in (1.0001, 1.5, 1e9):
        if name in BY_LOGARITHMS:
            assert ALGORITHMS[name](clip_low=clip).build()
        else:
            with pytest.raises(ValueError) as refused:
                ALGORITHMS[name](clip_low=clip).build()
            assert str(refused.value).startswith(f"--objective.clip-low must be at most 1, got {clip:g}: no ratio")
