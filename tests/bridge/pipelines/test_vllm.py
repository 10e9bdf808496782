"""The command trains with rollouts by real vLLM: exact, resumed, and on two ranks of torchrun with an engine each."""

import math
import shutil

import pytest

from tests.bridge.pipelines.processes import assert_same_run, in_a_process
from tests.bridge.pipelines.vllm_words import TRUNCATED, model_folder, model_of, words
from tests.support.results import metrics

__all__ = ["model_folder", "words"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_run_is_exact_and_goes_on_from_a_checkpoint(tmp_path, words, run_to_end):
    """Trainer and engine agree on every token that is drawn, before and after updates, with truncated sampling."""
    more = {**TRUNCATED, "--checkpoint-every": 1}
    run = run_to_end(["train", "policy", *words("short", "--policy.recompute-old-logprobs", **more)])
    records = [record for record in metrics(run) if record["stage"] == "policy"]
    assert [record["weights_version"] for record in records] == [3, 4, 5]
    for record in records:
        assert record["mismatch/probability_gap_max"] < 1e-5 and abs(record["mismatch/k1"]) < 1e-5, record
        assert math.isfinite(record["kl"])
    assert records[-1]["kl"] > 1e-4
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    run_to_end(["train", "policy", *words("short", "--policy.recompute-old-logprobs", **more), "--resume"])
    again = [record for record in metrics(run) if record["stage"] == "policy"]
    for a, b in zip(again, records, strict=True):
        assert (a["weights_version"], a["reward"]) == (b["weights_version"], b["reward"])


@pytest.mark.slow
def test_two_ranks_of_torchrun_with_an_engine_each_end_as_one_process_does(tmp_path, words, run_to_end):
    one = run_to_end(["train", "policy", *words("one")])
    in_a_process(words("two"), ranks=2, timeout=250)
    assert_same_run(tmp_path / "two", one)


@pytest.mark.slow
def test_actors_of_ray_with_an_engine_each_end_as_one_process_does(tmp_path, words, run_to_end):
    one = run_to_end(["train", "policy", *words("one")])
    in_a_process(words("two", "--executor", "ray", "--workers", "2"), timeout=250)
    assert_same_run(tmp_path / "two", one)


@pytest.mark.slow
def test_an_engine_of_two_tensor_ranks_samples_what_is_trained(tmp_path, words):
    model = model_of(tmp_path / "two_heads", heads=2)
    more = {"--model": model, "--policy.steps": 2, "--rollout.vllm.tensor-parallel-size": 2}
    in_a_process(words("ranks", "--policy.recompute-old-logprobs", **TRUNCATED, **more), timeout=250)
    records = [record for record in metrics(tmp_path / "ranks") if record["stage"] == "policy"]
    assert [record["weights_version"] for record in records] == [3, 4]
    for record in records:
        assert record["mismatch/probability_gap_max"] < 1e-5, record
        assert (record["weights/engine_replaced"], record["weights/not_compared"]) == (0, 0)


@pytest.mark.slow
def test_two_ranks_of_two_precisions_train_together(tmp_path, words):
    """Each engine is sent the same weights, and its updates are proved to its own tolerance."""
    precisions = ["--rollout.vllm.rank-precisions", "fp32", "int8", "--policy.recompute-old-logprobs"]
    in_a_process(words("mixed", *precisions), ranks=2, timeout=250)
    records = [record for record in metrics(tmp_path / "mixed") if record["stage"] == "policy"]
    assert [record["weights_version"] for record in records] == [3, 4, 5]
    for record in records:
        # The int8 rank drew with other matrices than the trainer's: more than rounding, less than another policy.
        assert 5e-5 < record["mismatch/probability_gap_max"] < 0.5, record
