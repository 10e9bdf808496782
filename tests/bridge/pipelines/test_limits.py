"""Limits of a step and texts that end a completion, from the command line to the records of a run."""

import json

import pytest

from rl_tools.cli import main
from tests.bridge.pipelines.processes import REWARD
from tests.support.results import metrics


@pytest.mark.long
def test_a_run_with_a_budget_of_tokens_trains_on_what_is_finished(tmp_path, arguments, run_to_end):
    (tmp_path / "reward.py").write_text(REWARD)
    limits = {"--rollout.step-tokens": 40, "--rollout.step-seconds": 600, "--policy.sampling.stop": "7"}
    options = {**limits, "--policy.steps": 2, "--sft.steps": 2, "--reward": f"{tmp_path / 'reward.py'}:even_digits"}
    run = run_to_end(arguments("limited", **options))
    steps = [record for record in metrics(run) if record["stage"] == "policy"]
    assert len(steps) == 2
    for record in steps:
        # 16 completions; the last step of the decoder draws one token for each that is left. The mean
        # is of those that ended.
        assert 0 < record["aborted"] < 1 and 0 < record["tokens"] * 16 * (1 - record["aborted"]) < 40 + 16
    samples = json.loads((run / "samples.json").read_text())
    assert all("7" not in sample["completion"][:-1] for sample in samples["after"]["sampled"])


@pytest.mark.long
def test_usr_6_completions_that_are_cut_are_a_metric_and_a_warning(tmp_path, arguments, run_to_end, capsys):
    (tmp_path / "reward.py").write_text(REWARD)
    short = {"--policy.steps": 2, "--sft.steps": 0, "--policy.sampling.max-new-tokens": 1}
    run = run_to_end(arguments("cut", **short, **{"--reward": f"{tmp_path / 'reward.py'}:even_digits"}))
    shares = [record["truncated"] for record in metrics(run) if "stage" in record]
    drawn = sum(share * 16 for share in shares)
    assert len(shares) == 2 and all(0.5 <= share <= 1 for share in shares) and drawn == int(drawn)
    said = capsys.readouterr().out
    assert said.count("of the completions were cut at max_new_tokens=1") == 1


def test_limits_of_a_step_go_with_no_rollouts_ahead(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments("never", **{"--rollout.step-tokens": 60, "--asynchronous.max-staleness": 1}))
    said = " ".join(capsys.readouterr().err.split())
    assert "have --asynchronous.request-seconds and no limits of a step, got {'tokens': 60}" in said
