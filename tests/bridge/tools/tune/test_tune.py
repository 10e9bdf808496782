"""``rl-fn tune`` over the real trainer, with a sampler that learns."""

import json

import pytest

from rl_tools.cli import main
from rl_tools.tune.study_report import read_study, summary_of
from tests.support.short_policy import short_words

pytestmark = pytest.mark.long


def test_a_study_over_the_trainer_with_a_constraint_a_recipe_and_two_goals(tmp_path, capsys):
    words = ["--space.objective", "gspo,dapo", "--space.optimizer.learning-rate", "log:1e-5..1e-3", "--sampler", "tpe"]
    words += ["--maximize", "held_out", "--minimize", "tokens", "--constraint", "seconds<=600", "--trials", "2"]
    words += ["--parallel", "2", "--output", str(tmp_path), "--name", "study"]
    words += short_words(tmp_path)
    assert main(["tune", "policy", *words]) == 0
    printed = capsys.readouterr().out
    assert "2 trials: 2 complete" in printed and "Pareto front" in printed and "one seed: no interval" in printed
    found = summary_of(read_study(tmp_path / "study"))
    for trial in found["trials"]:
        run = tmp_path / "study/runs" / f"trial-{trial['number']:04d}-seed-0"
        config = json.loads((run / "config.json").read_text())
        assert config["objective"]["algorithm"] == trial["assignment"]["objective"]
        assert config["optimizer"]["learning_rate"] == trial["assignment"]["optimizer.learning-rate"]
        assert trial["values"]["tokens"]["mean"] > 0 and trial["feasible"]
    assert main(["tune", "policy", *words]) == 1 and "exists: go on with --resume" in capsys.readouterr().err
    assert main(["tune", "policy", *words, "--resume"]) == 0, "there is nothing left to do"
