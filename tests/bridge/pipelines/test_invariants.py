"""What holds in every run, whatever its settings: the wiring of the pipeline, seen from outside."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from rl_bridge.data.rows import RowStream
from rl_bridge.data.tasks import split_rows
from rl_bridge.models.pretrained import load_pretrained
from rl_bridge.modules.trainable import OptimizerConfig
from rl_tools.cli import main
from tests.bridge.pipelines.conftest import OPTIONS, words_of
from tests.support.results import metrics
from tests.support.tracing import REWARD, same, trace_calls

pytestmark = pytest.mark.long

SETTINGS = {
    "plain": {},
    "cold": {"--policy.sampling.temperature": 0.6},
    "hot": {"--policy.sampling.temperature": 1.5},
    "truncated": {"--policy.sampling.temperature": 0.7, "--policy.sampling.top-k": 6, "--policy.sampling.top-p": 0.9},
}
RECOMPUTED = "--policy.recompute-old-logprobs"


# Two steps with a KL penalty, in which every row has a gradient.
SHORT = {"--sft.steps": 2, "--policy.steps": 2, "--policy.updates-per-step": 1, "--held-out": 8}


def short_words(folder, model_folder, *more, **changes):
    (folder / "reward.py").write_text(REWARD)
    options = {**SHORT, "--reward": f"{folder / 'reward.py'}:even_digits", **changes}
    return words_of(folder, model_folder, "run", "objective:grpo", *more, **options)


@pytest.fixture
def short(tmp_path, model_folder):
    """The words of a short run."""
    return functools.partial(short_words, tmp_path, model_folder)


# Eight rows are held out, and the two steps go once through the other eight.
SEED = 5
PROBLEMS = [{"prompt": f"{a}+{2 * a}=", "answer": 3 * a} for a in range(16)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory, model_folder):
    """A run at a temperature, with two updates a step and an evaluation after each: its folder and its trace."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    # A rate at which two steps change what the policy says.
    options = {"--data": folder / "problems.jsonl", "--optimizer.learning-rate": 0.02, "--optimizer.warmup": 0}
    options |= {
        "--seed": SEED,
        "--policy.sampling.temperature": 0.6,
        "--policy.updates-per-step": 2,
        "--policy.evaluate-every": 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        trace = trace_calls(patch)
        patch.setattr("rl_bridge.run.recorder.draw_curves", lambda *_, **__: None)
        assert main(short_words(folder, model_folder, **options)) == 0
    asked = [eval(line) for line in (folder / "asked").read_text().splitlines()]
    # The trial of the reward comes first: two rows, each with its answer and with nothing as the completion.
    assert [completion for _, _, completion, _ in asked[:4]] == [str(asked[0][1]), "", str(asked[2][1]), ""]
    trace.asked = asked[4:]
    return folder / "run", trace


@pytest.mark.parametrize("setting", SETTINGS)
def test_before_the_first_update_policy_reference_and_old_policy_are_one(setting, short, run_to_end):
    first = metrics(run_to_end(short(RECOMPUTED, **SETTINGS[setting])))[2]
    assert (first["stage"], first["step"]) == ("policy", 0)
    assert first["kl"] == 0.0 and first["approx_kl"] == 0.0 and first["ratio_mean"] == 1.0
    assert first["clip_fraction"] == 0.0


@pytest.mark.parametrize("setting", SETTINGS)
def test_log_probabilities_kept_from_sampling_are_the_policy_s(setting, short, run_to_end):
    first, second = metrics(run_to_end(short(**SETTINGS[setting], **{"--optimizer.learning-rate": 0.002})))[2:]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5) and first["approx_kl"] < 1e-9
    assert first["kl"] == 0.0
    assert second["kl"] > 1e-8  # after an update the policy has left its reference


def test_the_reference_of_adapters_is_the_model_after_supervision_too(short, run_to_end):
    """S38: the base alone is another policy, of which the KL of the first step would be."""
    options = {"--lora.rank": 2, "--sft.optimizer.learning-rate": 0.1, "--sft.optimizer.warmup": 0}
    records = metrics(run_to_end(short(**options, **{"--optimizer.learning-rate": 0.05, "--optimizer.warmup": 0})))
    first, second = (record for record in records if record["stage"] == "policy")
    assert abs(first["kl"]) < 1e-9 and second["kl"] > 1e-7


def test_the_reference_is_the_policy_of_before_grpo_and_never_moves(traced, model_folder):
    _, trace = traced
    assert same(trace.reference_at_start, trace.policy_at_start)
    assert same(trace.reference_at_start, list(trace.reference.model.parameters()))
    assert not same(trace.policy_at_start, list(trace.policy.model.parameters()))
    assert not any(p.requires_grad for p in trace.reference.parameters())
    loaded, _ = load_pretrained(str(model_folder))
    assert not same(trace.reference_at_start, list(loaded.parameters()))  # supervision came before


def test_supervision_has_no_temperature_and_scores_as_the_policy_does_otherwise(traced):
    _, trace = traced
    assert trace.policy.scoring.temperature == 0.6 and trace.policy.scoring is trace.reference.scoring
    assert trace.supervised.scoring == dataclasses.replace(trace.policy.scoring, temperature=1.0)


def test_completions_come_from_the_trainer_s_present_weights(traced):
    folder, trace = traced
    during = [call for call in trace.generated if call[4] is not None]
    assert len(during) == 2 + 2 + 2 and all(same(rollout, trainer) for *_, rollout, trainer in during)
    versions = [call[2][0].weights_versions[-1] for call in trace.generated]
    assert versions == [2, 2, 2, 4, 4, 6, 6, 6]  # before: sampled and greedy; a step, its evaluation, twice; after
    saved, _ = load_pretrained(str(folder / "model"))
    assert same(list(saved.parameters()), trace.generated[-1][3])


def test_prompts_that_evaluate_are_not_trained_on_and_all_are_asked(traced):
    _, trace = traced
    trained = {prompt for call in trace.training() for prompt in call[0]}
    held_out = [set(call[0]) for call in trace.evaluation()]
    assert len(held_out) == 6 and trained == {row["prompt"] for row in PROBLEMS} - held_out[0]
    assert all(prompts == held_out[0] and len(prompts) == 8 for prompts in held_out)
    assert not trained & held_out[0]


def test_the_order_of_prompts_and_their_samples_are_the_seed_s(traced):
    _, trace = traced
    train, _ = split_rows(PROBLEMS, 8, SEED)
    stream = RowStream(train, seed=SEED)
    stream.take(2 * OPTIONS["--sft.rows-per-step"])
    prompts = [[row["prompt"] for row in stream.take(4)] for _ in range(2)]
    assert [call[0] for call in trace.training()] == prompts
    assert [call[1].seed for call in trace.training()] == [SEED * 1_000_003, SEED * 1_000_003 + 1]


def test_evaluation_is_greedy_but_for_the_sampled_one(traced):
    _, trace = traced
    assert [call[1].temperature for call in trace.evaluation()] == [0.6, 0.0, 0.0, 0.0, 0.6, 0.0]
    assert {call[1].temperature for call in trace.training()} == {0.6}


def test_each_reward_sees_its_own_row_and_completion(traced):
    _, trace = traced
    generated = [
        (prompt, completion.completion)
        for prompts, sampling, completions, *_ in trace.generated
        for prompt, completion in zip([p for p in prompts for _ in range(sampling.n)], completions, strict=True)
    ]
    assert [(prompt, completion) for prompt, _, completion, _ in trace.asked] == generated
    assert all(int(answer) == eval(prompt.rstrip("=")) for prompt, answer, *_ in trace.asked)


def test_every_row_trains_with_the_advantage_of_its_own_completion(traced):
    _, trace = traced
    rewards = {(prompt, completion): reward for prompt, _, completion, reward in trace.asked}
    wanted = {}
    for prompts, sampling, completions, *_ in trace.training():
        for i, prompt in enumerate(prompts):
            group = completions[i * sampling.n : (i + 1) * sampling.n]
            scores = np.array([rewards[prompt, c.completion] for c in group])
            for c, advantage in zip(group, (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6), strict=True):
                wanted[c.tokens] = advantage, c.sampled_logprobs
    found = []
    for batch, denominator in trace.trained:
        assert denominator == len(batch.mask)  # GRPO's: completions
        for i, length in enumerate(batch.lengths.tolist()):
            tokens, counted = batch.tokens[i, :length].tolist(), batch.mask[i]
            advantage, logprobs = wanted[tuple(tokens)]
            np.testing.assert_allclose(batch.advantages[i, counted], advantage, rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(batch.rollout_logprobs[i, counted], logprobs, rtol=1e-6)
            assert torch.equal(batch.old_logprobs[i], batch.rollout_logprobs[i])
            found.append(tuple(tokens))
    assert len(found) == 2 * 4 * 4 and set(found) == set(wanted) and len(trace.trained) == 4


def test_a_run_resumed_after_its_last_step_evaluates_the_trained_weights(short, run_to_end, monkeypatch):
    folder = run_to_end(short())
    (folder / "summary.json").unlink()
    trace = trace_calls(monkeypatch)
    run_to_end(short("--resume"))
    saved, _ = load_pretrained(str(folder / "model"))
    assert not trace.trained and [call[1].n for call in trace.generated] == [1, 1]
    assert all(same(list(saved.parameters()), call[3]) for call in trace.generated)


def test_the_summary_compares_the_same_rows_before_and_after(traced):
    folder, trace = traced
    summary = json.loads((folder / "summary.json").read_text())
    scores = [reward for *_, reward in trace.asked]
    sampled, greedy = np.mean(scores[:8]), np.mean(scores[8:16])
    assert (summary["accuracy_before"], summary["sampled_before"]) == pytest.approx((greedy, sampled))
    sampled, greedy = np.mean(scores[-16:-8]), np.mean(scores[-8:])
    assert (summary["accuracy_after"], summary["sampled_after"]) == pytest.approx((greedy, sampled))
    for gain, kind in (("gain", "accuracy"), ("sampled_gain", "sampled")):
        difference = summary[f"{kind}_after"] - summary[f"{kind}_before"]
        assert abs(difference) > 1e-3 and summary[gain]["mean"] == pytest.approx(difference)
    assert metrics(folder)[-1]["held_out"] == pytest.approx(summary["accuracy_after"])


def test_old_and_reference_log_probabilities_are_of_their_own_weights(short, run_to_end, monkeypatch):
    trace = trace_calls(monkeypatch)
    run_to_end(short(RECOMPUTED, **{"--policy.updates-per-step": 2, "--policy.sampling.temperature": 0.7}))
    for step in (0, 2):
        for batch, _ in trace.trained[step : step + 2]:
            reference = trace.reference.token_logprobs(batch)
            assert torch.equal(batch.ref_logprobs, reference)
            assert torch.equal(batch.old_logprobs, reference) == (step == 0)


@pytest.mark.parametrize(("minibatches", "setting"), [(1, "plain"), (3, "truncated")])
def test_the_last_learning_rate_is_the_schedule_s_last(minibatches, setting, short, run_to_end):
    # The objective's own KL term asks for a reference, whether or not the KL is to be shown.
    words = short(RECOMPUTED, "--no-track-kl", **{"--policy.updates-per-step": minibatches, "--policy.steps": 4})
    folder = run_to_end([*words, *(str(word) for pair in SETTINGS[setting].items() for word in pair)])
    config = json.loads((folder / "config.json").read_text())
    optimizer, updates = OptimizerConfig(**config["optimizer"]), 4 * minibatches
    rates = [record["learning_rate"] for record in metrics(folder)[2:]]
    last_of_step = [minibatches * (step + 1) - 1 for step in range(4)]
    wanted = [optimizer.learning_rate * optimizer.scale(update, updates) for update in last_of_step]
    assert rates == pytest.approx(wanted, rel=1e-6)
