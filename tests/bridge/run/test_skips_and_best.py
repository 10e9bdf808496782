"""Steps that were not finite, and the step that was the best."""

import errno
import json
import math
import re
import shutil
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from rl_bridge.common import step_folders
from rl_bridge.engines import Mesh, TrainEngine
from rl_bridge.run import recorder
from rl_bridge.run.recorder import KEPT
from rl_bridge.run.run import Run


@dataclass(frozen=True)
class Options:
    seed: int = 0


class Tokens(NamedTuple):
    tokens: torch.Tensor
    values: torch.Tensor | None


class Pairs(NamedTuple):
    chosen: Tokens
    weights: list


class Model(torch.nn.Module):
    """An engine's module whose version counts its updates, as a trainer's does."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.version = 0

    def weights_version(self):
        return self.version

    def optimizer_step(self, value):
        with torch.no_grad():
            self.weight.fill_(value)
        self.version += 1

    def value(self):
        return self.weight.item()

    def checkpoint_state(self):
        return {"weight": self.weight.detach(), "version": self.version}

    def load_checkpoint_state(self, state):
        self.version = state["version"]
        with torch.no_grad():
            self.weight.copy_(state["weight"])


@pytest.fixture
def engine():
    made = TrainEngine(Model).build()
    yield made
    made.release()


def go(folder, engine, *, skip=(), scores=None, total=8, watch=None, **how):
    """A run whose weight is its step; the steps of ``skip`` leave it as it was."""
    with Run(folder, Options(), checkpoint_every=100, **how) as run:
        if watch:
            run.keep_best(*watch)
        for step in run.steps("only", total, state={"policy": engine}):
            metrics = {"reward": 1.0}
            if step in skip:
                metrics["skipped"] = 1.0
            else:
                engine.optimizer_step(float(step))
            if scores is not None:
                metrics["held_out"] = scores[step]
            run.log(step, metrics, batch=Pairs(Tokens(torch.full((2, 3), step), None), ["a"]))
        best = run.load_best({"policy": engine})
        run.finish({})
    return best


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_three_in_a_row_stop_the_run_with_a_checkpoint_and_the_cause(tmp_path, engine):
    folder = tmp_path / "run"
    with pytest.raises(FloatingPointError) as stopped:
        go(folder, engine, skip=(1, 3, 4, 5, 6))
    said = f"{stopped.value} {stopped.value.__notes__}"
    assert "not finite in 3 steps in a row" in said and "stopped after step 6 of 8 of only" in said
    assert f"{folder / 'skipped'}" in said and "--name run --resume" in said
    newest = folder / "checkpoints" / "step-00000006"
    assert str(newest) in said and step_folders.damage(newest) is None
    assert [line["skipped"] for line in lines(folder) if "skipped" in line] == [1.0] * 4
    # A skipped step updates nothing.
    assert [(line["optimizer_step"], line["weights_version"]) for line in lines(folder)] == [
        (done, done) for done in (1, 1, 2, 2, 2, 2)
    ]
    # The batches of the last skips, each as it was.
    kept = [f"step-{step:08d}-0.safetensors" for step in (1, 3, 4, 5)]
    assert names(folder / "skipped") == kept
    with safe_open(folder / "skipped" / kept[-1], "pt") as file:
        assert torch.equal(file.get_tensor("chosen.tokens"), torch.full((2, 3), 5))
        about = {"stage": "only", "step": 5, "skipped": ["the trained model"], "others": {"weights": ["a"]}}
        assert json.loads(file.metadata()["about"]) == about
    # It goes on where it stopped, with as many skips ahead as at the start; the newest batches stay.
    go(folder, engine, skip=(6, 7), resume=True)
    assert [line["step"] for line in lines(folder)] == list(range(8))
    kept += [f"step-{step:08d}-0.safetensors" for step in (6, 7)]
    assert names(folder / "skipped") == kept[-KEPT:]


def test_how_many_in_a_row_is_an_option_and_a_record_alone_counts(tmp_path, engine):
    with Run(tmp_path / "run", Options(), stop_after_skips=1) as run, pytest.raises(FloatingPointError, match="step 3"):
        for step in run.steps("only", 5, state={}):
            run.log(step, {"reward": 1.0, "skipped": float(step == 2)})
    assert not (tmp_path / "run" / "skipped").exists()


def test_optimizer_steps_count_from_the_beginning_of_their_stage(tmp_path, engine):
    for _ in range(3):
        engine.optimizer_step(0.0)
    go(tmp_path / "run", engine, total=2)
    assert [(line["optimizer_step"], line["weights_version"]) for line in lines(tmp_path / "run")] == [(1, 4), (2, 5)]


def test_another_mesh_is_said_once(tmp_path, engine, capsys, monkeypatch):
    def until(step, **how):
        with Run(tmp_path / "run", Options(), checkpoint_every=2, **how) as run:
            for done in run.steps("only", 6, state={"policy": engine}):
                if done == step:
                    break
                run.log(done, {"reward": 1.0})

    until(2)
    until(4, resume=True)
    assert "another mesh:" not in capsys.readouterr().out
    monkeypatch.setattr(type(engine), "mesh", Mesh(shard=2))
    until(6, resume=True)
    words = f"policy from {Mesh()} to {Mesh(shard=2)}"
    assert capsys.readouterr().out.count(f"another mesh: {words}; the numbers are the same to rounding") == 1
    notes = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(note["step"], note["meshes"]) for note in notes if "meshes" in note] == [(4, [words])]


SCORES = [0.1, 0.5, math.nan, 0.5, 0.2, 0.4, 0.3, 0.3]


def test_the_best_step_stays_and_comes_back(tmp_path, engine):
    folder = tmp_path / "run"
    assert go(folder, engine, scores=SCORES, watch=("held_out",), keep=1) == 0.5
    # The first of equals, and the last.
    assert names(folder / "checkpoints") == ["step-00000002", "step-00000008"]
    assert engine.value() == 1.0
    # A run that is taken up again remembers.
    go(folder, engine, scores=SCORES, watch=("held_out",), keep=1, resume=True)
    assert names(folder / "checkpoints") == ["step-00000002", "step-00000008"] and engine.value() == 1.0


@pytest.mark.parametrize("after", ["nothing", "a step without a record", "another stage"])
def test_the_best_step_comes_back_where_the_loop_leaves_behind_its_record(tmp_path, engine, after):
    """Its checkpoint is written at the step's end, which such a loop does not reach: the best was called lost."""
    with Run(tmp_path / "run", Options(), checkpoint_every=100) as run:
        run.keep_best("held_out")
        for step in run.steps("only", 8, state={"policy": engine}):
            if after == "a step without a record" and step == 3:
                engine.optimizer_step(9.0)
                break
            engine.optimizer_step(float(step))
            run.log(step, {"held_out": SCORES[step] if step < 2 else 0.7})
            if after != "a step without a record" and step == 2:
                break
        if after == "another stage":
            for step in run.steps("next", 2, state={"policy": engine}):
                engine.optimizer_step(7.0)
                run.log(step, {"reward": 1.0})
        assert run.load_best({"policy": engine}) == 0.7 and run.best_lost is None
        assert engine.value() == 2.0
    assert not [line for line in lines(tmp_path / "run") if "note" in line]
    # A run that is taken up does not go on where this one did not.
    with Run(tmp_path / "run", Options(), resume=True) as run:
        stage, rest = ("next", range(2, 8)) if after == "another stage" else ("only", range(3, 8))
        assert list(run.steps(stage, 8, state={"policy": engine})) == ([] if after == "nothing" else list(rest))
        assert run.done == (3 if after == "nothing" else 8)
    assert engine.value() == (7.0 if after == "another stage" else 2.0)


def test_a_best_step_that_was_left_is_lost_with_weights_that_moved_or_are_gone(tmp_path, engine):
    for way in ("moved before", "moved", "released"):
        with Run(tmp_path / way, Options()) as run:
            run.keep_best("held_out")
            for step in run.steps("only", 8, state={"policy": engine}):
                engine.optimizer_step(1.0)
                run.log(step, {"held_out": float(step)})
                if step == 1:
                    if way == "moved before":
                        engine.optimizer_step(3.0)
                    break
            if way == "moved":
                engine.optimizer_step(2.0)
            elif way == "released":
                engine.release()
            assert run.load_best({}) is None
            run.finish({})
        [note] = [line["note"] for line in lines(tmp_path / way) if "note" in line]
        why = "gave its memory back" if way == "released" else "the weights have moved since then"
        words = "the best checkpoint is lost, the loop left step 1 of only before it was written: "
        assert note.startswith(words) and why in note
        assert names(tmp_path / way / "checkpoints") == ["step-00000001"]


@pytest.mark.parametrize("anyway", [False, True])
def test_a_stage_that_was_left_at_its_best_step_says_so_and_goes_on_anyway(tmp_path, engine, capsys, anyway):
    """A loop that leaves for want of time would have trained no step more, without a word."""
    with Run(tmp_path / "run", Options()) as run:
        run.keep_best("held_out")
        for step in run.steps("only", 8, state={"policy": engine}):
            engine.optimizer_step(1.0)
            run.log(step, {"held_out": float(step)})
            if step == 2:
                break
        assert run.done == 3 and run.load_best({"policy": engine}) == 2.0
    capsys.readouterr()
    with Run(tmp_path / "run", Options(), resume=not anyway, resume_anyway=anyway) as run:
        assert list(run.steps("only", 8, state={"policy": engine})) == (list(range(3, 8)) if anyway else [])
    words = "only ended behind step 2, its best so far, where the loop left it: its steps go on with --resume-anyway"
    assert (words in capsys.readouterr().out) is not anyway


@pytest.mark.parametrize("left", [False, True])
def test_a_stage_has_the_same_number_of_steps_when_the_next_one_is_resumed(tmp_path, engine, left):
    def go(until, **how):
        with Run(tmp_path / "run", Options(), checkpoint_every=1, **how) as run:
            for step in run.steps("first", 8, state={"policy": engine}):
                engine.optimizer_step(1.0)
                run.log(step, {"reward": 1.0})
                if left and step == 2:
                    break
            done = run.done
            for step in run.steps("second", until, state={"policy": engine}):
                engine.optimizer_step(1.0)
                run.log(step, {"reward": 1.0})
            return done, run.done

    assert go(2) == ((3 if left else 8), 2)
    assert go(4, resume=True) == ((3 if left else 8), 4)


@pytest.mark.parametrize("way", ["moved", "moved before", "released"])
def test_a_best_step_that_was_left_is_of_all_engines(tmp_path, engine, way):
    """The critic, or a reference that follows, was saved as it was later; a released one ended the run."""
    critic = TrainEngine(Model).build()
    with Run(tmp_path / "run", Options()) as run:
        run.keep_best("held_out")
        for step in run.steps("only", 8, state={"policy": engine, "critic": critic}):
            engine.optimizer_step(1.0)
            run.log(step, {"held_out": float(step)})
            if step == 1:
                if way == "moved before":
                    critic.optimizer_step(2.0)
                break
        if way == "moved":
            critic.optimizer_step(2.0)
        elif way == "released":
            critic.release()
        assert run.load_best({"policy": engine}) is None and "step 1 of only" in str(run.best_lost)


@pytest.mark.parametrize("ends", ["steps", "another stage", "checkpoint", "stop"])
def test_steps_without_a_record_leave_the_best_checkpoint_as_it_is(tmp_path, engine, ends):
    """They were saved under its number: load_best gave the last weights, and the best's value."""
    every = 2 if ends == "checkpoint" else 100
    with Run(tmp_path / "run", Options(), checkpoint_every=every) as run:
        run.keep_best("held_out")
        for step in run.steps("only", 8 if ends == "steps" else 4, state={"policy": engine}):
            engine.optimizer_step(float(step))
            if step < 2:
                run.log(step, {"held_out": float(step)})
            if ends == "stop" and step == 3:
                break
        if ends == "another stage":
            for _ in run.steps("next", 3, state={"policy": engine}):
                engine.optimizer_step(9.0)
        assert run.load_best({"policy": engine}) == 1.0 and run.best_lost is None
        assert engine.value() == 1.0
    # A run that is taken up goes on behind its last record.
    with Run(tmp_path / "run", Options(), resume=True) as run:
        assert next(iter(run.steps("only", 8, state={"policy": engine}))) == 2
        assert engine.value() == 1.0


@pytest.mark.parametrize("moves", ["policy", "critic"])
def test_weights_that_move_behind_the_record_of_a_best_step_are_remarked_on(tmp_path, engine, moves):
    """Its checkpoint has the weights of the step's end, which its record did not measure."""
    critic = TrainEngine(Model).build()
    with Run(tmp_path / "run", Options()) as run:
        run.keep_best("held_out")
        for step in run.steps("only", 4, state={"policy": engine, "critic": critic}):
            run.log(step, {"held_out": float(step)})
            {"policy": engine, "critic": critic}[moves].optimizer_step(float(step))
    [note] = [line["note"] for line in lines(tmp_path / "run") if "note" in line]
    assert note.startswith("weights moved between run.log and the end of the step: the best checkpoint")
    critic.release()


def flip(path):
    file = next(path.glob("*/rank-00000.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")


LOST = {"flipped": flip, "gone": shutil.rmtree, "half gone": lambda path: (path / "manifest.json").unlink()}


@pytest.mark.parametrize("lost", LOST)
def test_a_best_checkpoint_that_is_lost_is_told_and_a_later_one_takes_its_place(tmp_path, engine, lost, capsys):
    """The run trained to its end, and had no summary, however often it was resumed."""
    folder = tmp_path / "run"
    go(folder, engine, scores=SCORES, total=4, watch=("held_out",), keep=1)
    LOST[lost](folder / "checkpoints" / "step-00000002")
    assert go(folder, engine, scores=SCORES, watch=("held_out",), keep=1, resume=True) == 0.4
    assert engine.value() == 5.0 and (folder / "summary.json").exists()
    [note] = [line["note"] for line in lines(folder) if "note" in line]
    assert note in capsys.readouterr().out
    assert re.match(r"the best checkpoint is lost, .*step-00000002.*: the best of the steps that follow takes", note)


@pytest.mark.parametrize("when", ["before the resume", "at the end"])
@pytest.mark.parametrize("lost", LOST)
def test_a_run_whose_best_checkpoint_is_lost_has_its_summary(tmp_path, engine, lost, when, monkeypatch):
    folder, best, load_best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000002", Run.load_best
    if when == "at the end":
        monkeypatch.setattr(Run, "load_best", lambda run, engines: LOST[lost](best) or load_best(run, engines))
    go(folder, engine, scores=SCORES, watch=("held_out",), keep=1)
    if when == "before the resume":
        LOST[lost](best)
        assert go(folder, engine, scores=SCORES, watch=("held_out",), keep=1, resume=True) is None
    assert engine.value() == 7.0 and (folder / "summary.json").exists()
    note = [line["note"] for line in lines(folder) if "note" in line][-1]
    assert re.match(r"the best checkpoint is lost, .*step-00000002.*: the engines stay as they are$", note)


@pytest.fixture
def warm():
    made = TrainEngine(Model).build()
    yield made
    made.release()


def two_stages(folder, warm, engine, first, second, *, stop=None, leave=None, metrics=("held_out",) * 2, **how):
    """A stage of other weights, and then one of the engine, whose weight is 100 and its step.

    ``stop``: records after which the process ends. ``leave``: the step of the first stage that the loop leaves.
    """
    with Run(folder, Options(), checkpoint_every=1, keep=1, **how) as run:
        for stage, state, scores, metric, by in (
            ("sft", {"sft": warm}, first, metrics[0], 0),
            ("policy", {"policy": engine}, second, metrics[1], 100),
        ):
            run.keep_best(metric)
            for step in run.steps(stage, len(scores), state=state):
                if sum("stage" in line for line in lines(folder)) == stop:
                    return run, None
                next(iter(state.values())).optimizer_step(float(by + step))
                run.log(step, {} if scores[step] is None else {metric: scores[step]})
                if stage == "sft" and step == leave:
                    break
        best = run.load_best({"policy": engine})
        run.finish({})
    return run, best


@pytest.mark.parametrize("metrics", [("held_out", "held_out"), ("nll", "held_out")], ids=" then ".join)
@pytest.mark.parametrize("stop", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("leave", [None, 1])
def test_a_later_stage_has_a_best_of_its_own(tmp_path, warm, engine, leave, stop, metrics):
    """A best step of the first stage, whose checkpoint has no engine of the second, made every end of the run fail."""
    folder, how = tmp_path / "run", {"leave": leave, "metrics": metrics}
    if stop is not None:
        two_stages(folder, warm, engine, [0.1, 0.9, 0.3], [0.2, 0.5, 0.4], stop=stop, **how)
    run, best = two_stages(folder, warm, engine, [0.1, 0.9, 0.3], [0.2, 0.5, 0.4], resume=stop is not None, **how)
    assert (best, engine.value(), run.best_lost) == (0.5, 101.0, None)
    first = sum(line.get("stage") == "sft" for line in lines(folder))
    assert first == (3 if leave is None else 2), "as without a stop"
    assert names(folder / "checkpoints") == [f"step-{first + 2:08d}", f"step-{first + 3:08d}"]
    assert not [line for line in lines(folder) if "note" in line]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("of", ["the first stage", "the second"])
def test_a_best_checkpoint_that_is_lost_has_a_successor_in_its_stage_or_the_next(tmp_path, warm, engine, of, lost):
    folder, stop, best = tmp_path / "run", *((3, 1) if of == "the first stage" else (5, 4))
    scores = [0.9, 0.1, 0.1], [0.8, 0.3, 0.5]
    two_stages(folder, warm, engine, *scores, stop=stop)
    LOST[lost](folder / "checkpoints" / f"step-{best:08d}")
    run, value = two_stages(folder, warm, engine, *scores, resume=True)
    expected = (0.8, 100.0) if of == "the first stage" else (0.5, 102.0)
    assert (value, engine.value()) == expected and run.best_lost is None


def test_the_best_step_of_a_stage_with_other_engines_is_no_candidate(tmp_path, warm, engine):
    folder = tmp_path / "run"
    for how in ({}, {"resume": True}):
        run, best = two_stages(folder, warm, engine, [0.1, 0.9], [None, None], **how)
        assert (best, engine.value()) == (None, 101.0) and (folder / "summary.json").exists()
        note = "the best step is of the stage 'sft', which has no 'policy'"
        assert run.best_lost == note and lines(folder)[-1]["note"] == f"{note}: the engines stay as they are"


def test_the_lowest_can_be_the_best_and_without_a_metric_there_is_none(tmp_path, engine):
    assert go(tmp_path / "low", engine, scores=SCORES, watch=("held_out", "min"), keep=1) == 0.1
    assert names(tmp_path / "low" / "checkpoints") == ["step-00000001", "step-00000008"]
    assert go(tmp_path / "none", engine, watch=("held_out",)) is None
    assert go(tmp_path / "unwatched", engine, scores=SCORES) is None
    with Run(tmp_path / "x", Options()) as run, pytest.raises(ValueError, match="mode is 'max' or 'min', got 'most'"):
        run.keep_best("reward", "most")


def test_weights_that_are_not_finite_end_the_run_and_the_checkpoint_before_stays(tmp_path, engine):
    folder = tmp_path / "run"
    with Run(folder, Options(), checkpoint_every=2) as run, pytest.raises(Exception) as stopped:
        for step in run.steps("only", 6, state={"policy": engine}):
            engine.optimizer_step(math.inf if step == 3 else float(step))
            run.log(step, {"reward": 1.0})
    assert "values of weight are not finite" in str(stopped.value) and "step-00000002" in str(stopped.value)
    assert names(folder / "checkpoints") == ["step-00000002"]
    go(folder, engine, resume=True, total=6)
    assert engine.value() == 5.0 and len(lines(folder)) == 6


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS])
def test_a_record_that_cannot_be_written_ends_the_run_and_says_how_to_go_on(tmp_path, engine, failure):
    folder, written = tmp_path / "run", recorder.Recorder.write

    def fails(self, record):
        if record["step"] == 5:
            raise OSError(failure, "full or read-only", str(folder))
        written(self, record)

    with (
        patch.object(recorder.Recorder, "write", fails),
        pytest.raises(OSError, match="full or read-only") as stopped,
        Run(folder, Options(), checkpoint_every=2) as run,
    ):
        for step in run.steps("only", 8, state={"policy": engine}):
            engine.optimizer_step(float(step))
            run.log(step, {"reward": 1.0})
    [hint] = stopped.value.__notes__
    assert hint == (
        f"the newest checkpoint is {folder / 'checkpoints' / 'step-00000004'}; "
        "go on with the same command and --name run --resume"
    )
    go(folder, engine, resume=True)
    assert [line["step"] for line in lines(folder)] == list(range(8))
