import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Budget, SamplingParams, Spending, requests_of
from rl_bridge.models.model_source import PretrainedSource, StateSource, fill
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.stored_tensors import TensorsInHand
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout import InProcessRollout
from tests.bridge.rollout.distribution import HOSTILE, truncated
from tests.support.trajectories import generate

EOS = 1
PROMPTS = ["1+1=", "7", "12+34=", "98-76+54=", "0=", "12+34="]
SAMPLING = SamplingParams(max_new_tokens=12, n=3, seed=4)
TRUNCATED = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05}


@pytest.fixture
def model(new_model):
    """Sharper than at its start, so that truncation cuts something, and not just repeating its last token.

    Sharper still, float32's rounding would reach 1e-5 of a log-probability in any way of computing it.
    """
    model = new_model(seed=2).requires_grad_(False)
    model.lm_head.weight.mul_(6)
    for weight in model.model.layers.parameters():
        weight.mul_(8 if weight.dim() == 2 else 1)
    return model


@pytest.fixture
def rollout(model, tokenizer):
    return InProcessRollout(StateSource(model), tokenizer)


def next_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_an_engine_s_model_is_for_drawing_alone(rollout):
    assert not rollout._model.training and not any(weight.requires_grad for weight in rollout._model.parameters())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, TRUNCATED], ids=["plain", "temperature", "truncated"])
def test_logprobs_are_those_of_a_full_forward(rollout, model, options):
    completions = generate(rollout, PROMPTS, replace(SAMPLING, **options))
    assert len(completions) == len(PROMPTS) * SAMPLING.n
    for completion in completions:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([completion.tokens]), use_cache=False).logits[0]
        start = len(completion.prompt_tokens) - 1
        wanted = [
            np.log(truncated(logits[start + t], **options)[token]) for t, token in enumerate(completion.sampled_tokens)
        ]
        np.testing.assert_allclose(completion.sampled_logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize("options", [{}, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_how_rows_are_batched_changes_no_token(rollout, model, tokenizer, rows, options):
    sampling = replace(SAMPLING, **options)
    together = generate(rollout, PROMPTS, sampling)
    apart = generate(InProcessRollout(StateSource(model), tokenizer, max_batch_rows=rows), PROMPTS, sampling)
    assert [c.sampled_tokens for c in apart] == [c.sampled_tokens for c in together]
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_token_depends_on_seed_place_and_sample_alone(rollout):
    wanted = generate(rollout, PROMPTS, SAMPLING)
    fewer = generate(rollout, PROMPTS[:2], replace(SAMPLING, n=2))
    assert [c.sampled_tokens for c in fewer] == [wanted[i].sampled_tokens for i in (0, 1, 3, 4)]
    others = generate(rollout, ["5", "5-5-5-5-5=", *PROMPTS[2:]], SAMPLING)
    assert [c.sampled_tokens for c in others[6:]] == [c.sampled_tokens for c in wanted[6:]]
    assert generate(rollout, PROMPTS, SAMPLING) == wanted
    assert [c.sampled_tokens for c in generate(rollout, PROMPTS, replace(SAMPLING, seed=5))] != [
        c.sampled_tokens for c in wanted
    ]
    # The same prompt at two places, and the samples of one prompt, are sampled independently.
    assert len({tuple(c.sampled_tokens) for c in wanted[6:9] + wanted[15:18]}) > 3


def test_a_folders_own_sampling_changes_nothing(rollout, model, tokenizer, tmp_path):
    """S24: penalty, temperature, truncations and suppressed ids of generation_config.json, as in every engine."""
    model.generation_config.update(**HOSTILE)
    model.save_pretrained(tmp_path)
    folder = InProcessRollout(PretrainedSource(str(tmp_path)), tokenizer)
    for cuts in ({}, TRUNCATED, {"temperature": 0.0}):
        sampling = replace(SAMPLING, **cuts)
        for ours, wanted in zip(generate(folder, PROMPTS, sampling), generate(rollout, PROMPTS, sampling), strict=True):
            assert ours.sampled_tokens == wanted.sampled_tokens
            np.testing.assert_allclose(ours.logprobs, wanted.logprobs, atol=1e-5)


def test_a_trajectory_depends_on_its_request_alone(rollout):
    requests = requests_of(PROMPTS, 4)
    wanted = rollout.generate(requests, SAMPLING)
    assert [[t.request_id for t in group] for group in wanted] == [[(4, i, s) for s in range(3)] for i in range(6)]
    assert [[t.group for t in group] for group in wanted] == [[i] * 3 for i in range(6)]
    chosen = rollout.generate([requests[i] for i in (4, 1)], SAMPLING)
    assert [[t.tokens for t in group] for group in chosen] == [[t.tokens for t in wanted[i]] for i in (4, 1)]


def test_greedy_is_the_argmax_whatever_stands_beside_it(rollout, model):
    for completion in generate(rollout, PROMPTS, replace(SAMPLING, temperature=0.0, n=1)):
        ids = list(completion.prompt_tokens)
        for token in completion.sampled_tokens:
            assert token == int(next_logits(model, ids).argmax())
            ids.append(token)
        assert completion.logprobs == (0.0,) * len(completion.tokens)


@pytest.mark.long
def test_the_first_two_tokens_follow_the_model_s_distribution(rollout, model):
    count, prompt = 20_000, rollout._tokenizer("12+3=").input_ids
    completions = generate(rollout, [prompt], SamplingParams(max_new_tokens=2, n=count))
    first = truncated(next_logits(model, prompt))
    observed = np.bincount([c.sampled_tokens[0] for c in completions], minlength=len(first))
    assert scipy.stats.chisquare(observed, count * first).pvalue > 1e-3
    likeliest = int(np.argmax(np.where(np.arange(len(first)) == EOS, 0, first)))
    after = [c.sampled_tokens[1] for c in completions if c.sampled_tokens[0] == likeliest]
    second = truncated(next_logits(model, [*prompt, likeliest]))
    expected = len(after) * second
    common = expected >= 5
    observed = np.bincount(after, minlength=len(second))
    pooled = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    keep = pooled[1] > 0
    assert scipy.stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > 1e-3


def test_an_answer_ends_with_the_end_of_sequence_or_for_want_of_room(rollout, tokenizer):
    completions = generate(rollout, PROMPTS, replace(SAMPLING, n=20))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert len({len(c.sampled_tokens) for c in completions}) > 4
    for c in completions:
        assert (c.finish_reason == "stop") == (c.sampled_tokens[-1] == EOS)
        assert EOS not in c.sampled_tokens[:-1]
        assert len(c.sampled_tokens) == len(c.sampled_logprobs) <= SAMPLING.max_new_tokens
        assert c.finish_reason == "stop" or len(c.sampled_tokens) == SAMPLING.max_new_tokens
        assert c.completion == tokenizer.decode([t for t in c.sampled_tokens if t != EOS])


def test_a_longer_limit_goes_on_where_a_shorter_one_stopped(rollout):
    short = generate(rollout, PROMPTS, replace(SAMPLING, max_new_tokens=3))
    for cut, whole in zip(short, generate(rollout, PROMPTS, SAMPLING), strict=True):
        assert whole.sampled_tokens[: len(cut.sampled_tokens)] == cut.sampled_tokens
        ended = cut.sampled_tokens == whole.sampled_tokens and whole.finish_reason == "stop"
        assert (cut.finish_reason == "stop") == ended


def test_text_messages_and_ids_are_the_same_prompt(model):
    tokenizer = character_tokenizer("0123456789+-=")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    rollout = InProcessRollout(StateSource(model), tokenizer)
    forms = ["1+1=", [{"role": "user", "content": "1+1"}], tokenizer("1+1=").input_ids]
    completions = [generate(rollout, [form], SAMPLING) for form in forms]
    assert len({tuple(c.tokens for c in of_form) for of_form in completions}) == 1
    prompts = [of_form[0].messages[:-1] for of_form in completions]
    assert prompts == [({"role": "user", "content": "1+1="},), (*forms[1],), ()]


def test_token_ids_are_used_as_they_are_and_never_made_again(model, tokenizer):
    class Counting:
        eos_token_id, pad_token_id, bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
        encoded, chat_template = 0, None

        def __call__(self, text, **options):
            self.encoded += 1
            return tokenizer(text, **options)

        def decode(self, ids):
            return "not what was sampled"

    counting = Counting()
    rollout = InProcessRollout(StateSource(model), counting)
    ids = [5, 0, EOS, 6]  # would not survive text
    completions = generate(rollout, [ids], SAMPLING)
    assert counting.encoded == 0
    assert all(c.tokens[: len(ids)] == tuple(ids) and not any(c.loss_mask[: len(ids)]) for c in completions)
    wanted = generate(InProcessRollout(StateSource(model), tokenizer), [ids], SAMPLING)
    assert [c.sampled_tokens for c in completions] == [c.sampled_tokens for c in wanted]
    generate(rollout, ["1", "2"], SAMPLING)
    assert counting.encoded > 0


def test_no_prompts_no_answers(rollout):
    assert generate(rollout, [], SAMPLING) == []


def test_an_empty_prompt_is_refused(rollout):
    with pytest.raises(ValueError, match="must be text, messages or token ids and not be empty, got ''"):
        generate(rollout, ["1+1=", ""], SAMPLING)


def test_a_prompt_of_tokens_that_are_none_is_refused(rollout, tokenizer):
    with pytest.raises(ValueError, match=f"^{len(tokenizer)} is no token of the model"):
        generate(rollout, ["1+1=", [3, len(tokenizer)]], SAMPLING)


def test_the_global_generators_are_left_alone(rollout):
    state = torch.get_rng_state()
    generate(rollout, PROMPTS, SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trainer_scores_what_was_drawn_as_it_was_drawn(rollout, model, tokenizer):
    """Over the recorded sets the ratio to the sampler's distribution is 1; over the vocabulary it is not."""
    trajectories = generate(rollout, PROMPTS, replace(SAMPLING, **TRUNCATED))
    assert all(
        token in ids and len(ids) <= TRUNCATED["top_k"]
        for t in trajectories
        for token, ids, drawn in zip(t.tokens, t.allowed_tokens, t.loss_mask, strict=True)
        if drawn
    )
    batch = collate(trajectories, tokenizer.pad_token_id)
    scorer = TokenScorer(StateSource(model), ScoringConfig(temperature=TRUNCATED["temperature"]))
    scorer.load_weights()
    scored = scorer.token_logprobs(batch)
    torch.testing.assert_close(scored[batch.mask], batch.rollout_logprobs[batch.mask], rtol=0, atol=1e-5)
    whole = scorer.token_logprobs(batch._replace(allowed_tokens=None))
    assert ((whole - batch.rollout_logprobs)[batch.mask] < -0.01).any()
    assert all(t.allowed_tokens is None for t in generate(rollout, PROMPTS, SAMPLING))


def test_every_end_that_the_generation_config_names_ends_a_completion(model, tokenizer):
    model.generation_config.eos_token_id = [EOS, 7]
    trajectories = generate(InProcessRollout(StateSource(model), tokenizer), PROMPTS, replace(SAMPLING, n=20))
    ends = [t.sampled_tokens[-1] for t in trajectories if t.finish_reason == "stop"]
    assert set(ends) == {EOS, 7}
    assert all(EOS not in t.sampled_tokens[:-1] and 7 not in t.sampled_tokens[:-1] for t in trajectories)


def test_tokens_bear_the_version_of_the_weights_that_drew_them(rollout, model):
    before = generate(rollout, PROMPTS[:1], SAMPLING)
    receiver = rollout.weight_receiver()
    model.lm_head.weight.neg_()
    fill(rollout._model, TensorsInHand(model.state_dict()))
    receiver.version = 3
    after = generate(rollout, PROMPTS[:1], SAMPLING)
    assert {v for t in before for v, drawn in zip(t.weights_versions, t.loss_mask, strict=True) if drawn} == {0}
    for t in after:
        assert t.weights_versions == tuple(3 if drawn else -1 for drawn in t.loss_mask)
        first = truncated(next_logits(model, list(t.prompt_tokens)))
        np.testing.assert_allclose(t.sampled_logprobs[0], np.log(first[t.sampled_tokens[0]]), atol=1e-5)


def test_a_tokenizer_must_name_its_end(model):
    tokenizer = character_tokenizer("0123456789+-=")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer needs an eos_token with one id"):
        InProcessRollout(StateSource(model), tokenizer)


def test_what_is_not_finished_in_time_comes_back_with_what_it_has(rollout, monkeypatch):
    """The clock counts how often it is read: once at the start, and once a token."""
    whole = generate(rollout, PROMPTS, SAMPLING)
    clock = itertools.count()
    monkeypatch.setattr(
        "rl_bridge.rollout.rollout_worker.Spending", lambda budget: Spending(budget, lambda: next(clock))
    )
    found = [
        t for row in rollout.generate(requests_of(PROMPTS, SAMPLING.seed), SAMPLING, Budget(seconds=3.5)) for t in row
    ]
    for t, all_of_it in zip(found, whole, strict=True):
        length = len(t.sampled_tokens)
        assert t.sampled_tokens == all_of_it.sampled_tokens[:length] and t.request_id == all_of_it.request_id
        assert length == min(3, len(all_of_it.sampled_tokens))
        assert t.finish_reason == ("abort" if length == 3 and all_of_it.sampled_tokens[2] != EOS else "stop")
    assert {t.finish_reason for t in found} == {"stop", "abort"}
    collate(found, 0)
    assert [t.tokens for t in generate(rollout, PROMPTS, SAMPLING)] == [t.tokens for t in whole], (
        "nothing was left behind"
    )
