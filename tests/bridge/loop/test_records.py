"""Numbers of a loop's own in its records and its summary: those of every library, or refused by name."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_bridge
from tests.support.results import metrics


class Part:
    """An object of a run's state without an engine."""

    kind = "numbers"
    parts = settings = fingerprints = lambda self: {}


SCALARS = {
    "python": 0.5,
    "bool": True,
    "torch": torch.tensor(0.5),
    "torch with a gradient": torch.tensor(0.5, requires_grad=True),
    "torch bool": torch.tensor(True),
    "numpy": np.float32(0.5),
    "numpy whole": np.int64(3),
    "numpy array": np.array(0.5),
    "jax": jnp.float32(0.5),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_a_scalar_of_any_library_is_a_number_of_the_record_and_of_the_summary(kind, tmp_path):
    value, number = SCALARS[kind], {"numpy whole": 3.0}.get(kind, 1.0 if "bool" in kind else 0.5)
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        for _ in run.steps(1):
            run.log({"acc": value})
        assert run.once("before", lambda: {"acc": [value]}) == {"acc": [number]}
        run.finish("done", accuracy=value, several={"list": (value, 1.0)}, folder=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert metrics(tmp_path / "run")[-1]["acc"] == summary["accuracy"] == number
    assert summary["several"] == {"list": [number, 1.0]} and summary["folder"] == str(tmp_path)


def test_what_is_no_number_is_refused_by_its_name(tmp_path):
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        for _ in run.steps(1):
            for value, kind in ((torch.ones(2), r"a Tensor of shape \[2\]"), ("0.5", "a str"), (None, "a NoneType")):
                with pytest.raises(TypeError, match=f"run.log takes numbers: 'acc' is {kind}"):
                    run.log({"acc": value})
            run.log({"acc": 1.0})
        for refused in ({"a": object()}, {"a": {(1, 2): 3}}, {"a": {1, 2}}):
            with pytest.raises(TypeError, match="'a' cannot be kept as JSON"):
                run.finish("done", **refused)
        with pytest.raises(TypeError, match="'kinds' cannot be kept as JSON"):
            run.once("kinds", object)
        for name in ("seconds", "census"):
            with pytest.raises(ValueError, match=f"'{name}' is the run's own in summary.json"):
                run.finish("done", **{name: 1.0})
    assert metrics(tmp_path / "run")[-1]["acc"] == 1.0


OWN = {"stage", "step", "seconds", "weights_version", "optimizer_step"}
OF_UPDATES = {"tokens_per_second", "trained_tokens"}


def test_names_that_the_run_writes_itself_are_refused(tmp_path):
    tokens = rl_bridge.loop.data.collate([rl_bridge.data.trajectory.single_turn([1], [2])], 0)
    update = rl_bridge.loop.scored.Metrics({"loss": 1.0}, tokens)
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        for _ in run.steps(2):
            for name in OWN | OF_UPDATES:
                with pytest.raises(ValueError, match=f"two numbers named '{name}'"):
                    run.log(update, {name: 1.0})
            for name in OWN:
                with pytest.raises(ValueError, match=f"two numbers named '{name}'"):
                    run.log({name: 1.0})
            run.log(dict.fromkeys(OF_UPDATES, 0.5))
    own = metrics(tmp_path / "run")[0].keys() - {"acc", *OF_UPDATES}
    assert own <= OWN


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_the_summary_counts_the_steps_that_have_a_record(logged, bound, tmp_path):
    first, second = Part(), Part()
    with rl_bridge.Run("run", [first, second], output=tmp_path) as run:
        steps = run.steps(200, [first])
        for step in steps if bound else run.steps(200, [first]):
            if logged or step < 2:
                run.log({"acc": 1.0})
            if step == 2:
                break
        list(run.steps(4, [second]))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["result"] == f"{7 if logged else 6} steps" and len(metrics(tmp_path / "run")) == (7 if logged else 6)


@pytest.mark.parametrize("total", [-1, 2.5, "3", None])
def test_what_is_no_number_of_steps_is_refused(total, tmp_path):
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        with pytest.raises(ValueError, match="the number of steps, whole and not negative, got"):
            next(run.steps(total))
        assert list(run.steps(np.int64(1))) == [0]


@pytest.mark.parametrize("state", [Part(), None, {Part()}], ids=["a part alone", "None", "a set"])
def test_what_is_no_list_of_objects_is_refused(state, tmp_path):
    with pytest.raises(TypeError, match=r"state is a list of the objects .* as \[policy, rows\], got"):
        rl_bridge.Run("run", state, output=tmp_path)
    stage = [] if state is None else [state]  # without a state a stage has that of the run
    for one in stage:
        run, words = rl_bridge.Run("run", [Part()], output=tmp_path), r"state is a list of the objects"
        with run, pytest.raises(TypeError, match=words):
            next(run.steps(1, one))


AFTER = {
    "entered again": (lambda run: run.__enter__(), r"has ended: Run\('run', …, resume=True\) goes on"),
    "steps": (lambda run: next(run.steps(1)), r"in its block: with Run\(…\) as run"),
    "log": (lambda run: run.log({"a": 1.0}), "in each step of run.steps"),
}


@pytest.mark.parametrize("call", AFTER)
def test_a_run_whose_block_has_ended_says_so(call, tmp_path):
    use, words = AFTER[call]
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        for _ in run.steps(1):
            run.log({"a": 1.0})
    with pytest.raises(RuntimeError, match=words):
        use(run)


BEST = {
    "never watched": (None, r"run\.keep_best\(metric\) comes before the steps"),
    "misspelt": ("held_outt", "no record has 'held_outt', by which .* is held_out, other$"),
    "not finite": ("other", r"run\.keep_best\('other'\) comes before the steps, and a best number is finite"),
    "there": ("held_out", None),
}


@pytest.mark.parametrize("name", BEST)
def test_a_best_checkpoint_that_is_not_there_is_said(name, tmp_path, capsys):
    metric, words = BEST[name]
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        if metric is not None:
            run.keep_best(metric)
        for _ in run.steps(2):
            run.log({"held_out": 1.0, "other": float("nan")})
        assert (run.load_best() is None) == (words is not None)
    lines = [line for line in "".join(capsys.readouterr()).splitlines() if "load_best" in line]
    assert [bool(re.search(words or "", line)) for line in lines] == ([] if words is None else [True])
    notes = [line["note"] for line in metrics_and_notes(tmp_path / "run") if "note" in line]
    assert [note for note in notes if "load_best" in note] == lines


def metrics_and_notes(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_best_checkpoint_that_is_lost_is_said_once_and_as_what_it_is(tmp_path, capsys):
    with rl_bridge.Run("run", [Part()], output=tmp_path) as run:
        run.keep_best("held_out")
        for step in run.steps(2):
            run.log({"held_out": -float(step)})
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
        assert run.load_best() is None
    printed = "".join(capsys.readouterr()).splitlines()
    lines = [line for line in printed if "is lost" in line or "load_best" in line]
    assert [bool(re.search(r"is lost, .*step-00000001 is missing: the engines stay", line)) for line in lines] == [True]
