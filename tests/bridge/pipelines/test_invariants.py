"""What holds in every run, whatever its settings: the wiring of the pipeline, seen from outside."""

import pytest

from tests.bridge.pipelines.results import metrics

SETTINGS = {
    "plain": {},
    "cold": {"--grpo.sampling.temperature": 0.6},
    "hot": {"--grpo.sampling.temperature": 1.5},
    "truncated": {"--grpo.sampling.temperature": 0.7, "--grpo.sampling.top-k": 6, "--grpo.sampling.top-p": 0.9},
}
RECOMPUTED = "--grpo.recompute-old-logprobs"


REWARD = """
def even_digits(completion, row):
    return sum(character in "02468" for character in completion) + 0.01 * int(row["answer"])
"""


@pytest.fixture
def short(arguments, tmp_path):
    """The words of a run of two steps with a KL penalty, in which every row counts."""

    def words(name, *more, **changes):
        options = {"--sft.steps": 2, "--grpo.steps": 2, "--objective.algorithm": "grpo", "--held-out": 8}
        options |= {"--grpo.minibatches": 1, **changes}
        (tmp_path / "reward.py").write_text(REWARD)
        options["--reward"] = f"{tmp_path / 'reward.py'}:even_digits"
        return arguments(name, *more, **options)

    return words


@pytest.mark.parametrize("setting", SETTINGS)
def test_before_the_first_update_policy_reference_and_old_policy_are_one(setting, short, run_to_end):
    first = metrics(run_to_end(short("run", RECOMPUTED, **SETTINGS[setting])))[2]
    assert (first["stage"], first["step"]) == ("grpo", 0)
    assert first["kl"] == 0.0 and first["approx_kl"] == 0.0 and first["ratio_mean"] == 1.0
    assert first["clip_fraction"] == 0.0


@pytest.mark.parametrize("setting", ["plain", "cold", "hot"])
def test_log_probabilities_kept_from_sampling_are_the_policy_s(setting, short, run_to_end):
    first, second = metrics(run_to_end(short("run", **SETTINGS[setting])))[2:]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and first["approx_kl"] < 1e-9
    assert first["kl"] == 0.0
    assert second["kl"] > 1e-8  # and after an update the policy has left its reference
