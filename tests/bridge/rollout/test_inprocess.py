from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from rl_bridge.models.characters import character_tokenizer
from rl_bridge.rollout import InProcessRollout
from rl_bridge.types import SamplingParams
from tests.bridge.rollout.distribution import truncated

EOS = 1
PROMPTS = ["1+1=", "7", "12+34=", "98-76+54=", "0=", "12+34="]
SAMPLING = SamplingParams(max_new_tokens=12, n=3, seed=4)
TRUNCATED = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05}


@pytest.fixture
def model(new_model):
    """Sharper than at its start, so that truncation cuts something, and not just repeating its last token."""
    model = new_model(seed=2).requires_grad_(False)
    model.lm_head.weight.mul_(6)
    for weight in model.model.layers.parameters():
        weight.mul_(20 if weight.dim() == 2 else 1)
    return model


@pytest.fixture
def rollout(model, tokenizer):
    return InProcessRollout(model, tokenizer)


def next_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, TRUNCATED], ids=["plain", "temperature", "truncated"])
def test_logprobs_are_those_of_a_full_forward(rollout, model, options):
    completions = rollout.generate(PROMPTS, replace(SAMPLING, **options))
    assert len(completions) == len(PROMPTS) * SAMPLING.n
    for completion in completions:
        ids = completion.prompt_ids + completion.token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        start = len(completion.prompt_ids) - 1
        wanted = [
            np.log(truncated(logits[start + t], **options)[token]) for t, token in enumerate(completion.token_ids)
        ]
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize("options", [{}, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_how_rows_are_batched_changes_no_token(rollout, model, tokenizer, rows, options):
    sampling = replace(SAMPLING, **options)
    together = rollout.generate(PROMPTS, sampling)
    apart = InProcessRollout(model, tokenizer, max_batch_rows=rows).generate(PROMPTS, sampling)
    assert [c.token_ids for c in apart] == [c.token_ids for c in together]
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_token_depends_on_seed_place_and_sample_alone(rollout):
    wanted = rollout.generate(PROMPTS, SAMPLING)
    fewer = rollout.generate(PROMPTS[:2], replace(SAMPLING, n=2))
    assert [c.token_ids for c in fewer] == [wanted[i].token_ids for i in (0, 1, 3, 4)]
    others = rollout.generate(["5", "5-5-5-5-5=", *PROMPTS[2:]], SAMPLING)
    assert [c.token_ids for c in others[6:]] == [c.token_ids for c in wanted[6:]]
    assert rollout.generate(PROMPTS, SAMPLING) == wanted
    assert [c.token_ids for c in rollout.generate(PROMPTS, replace(SAMPLING, seed=5))] != [c.token_ids for c in wanted]
    # The same prompt at two places, and the samples of one prompt, are sampled independently.
    assert len({tuple(c.token_ids) for c in wanted[6:9] + wanted[15:18]}) > 3


def test_greedy_is_the_argmax_whatever_stands_beside_it(rollout, model):
    for completion in rollout.generate(PROMPTS, replace(SAMPLING, temperature=0.0, n=1)):
        ids = list(completion.prompt_ids)
        for token in completion.token_ids:
            assert token == int(next_logits(model, ids).argmax())
            ids.append(token)
        assert completion.logprobs == [0.0] * len(completion.token_ids)


def test_the_first_two_tokens_follow_the_model_s_distribution(rollout, model):
    count, prompt = 20_000, rollout._tokenizer("12+3=").input_ids
    completions = rollout.generate([prompt], SamplingParams(max_new_tokens=2, n=count))
    first = truncated(next_logits(model, prompt))
    observed = np.bincount([c.token_ids[0] for c in completions], minlength=len(first))
    assert scipy.stats.chisquare(observed, count * first).pvalue > 1e-3
    likeliest = int(np.argmax(np.where(np.arange(len(first)) == EOS, 0, first)))
    after = [c.token_ids[1] for c in completions if c.token_ids[0] == likeliest]
    second = truncated(next_logits(model, [*prompt, likeliest]))
    expected = len(after) * second
    common = expected >= 5
    observed = np.bincount(after, minlength=len(second))
    pooled = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
    keep = pooled[1] > 0
    assert scipy.stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > 1e-3


def test_an_answer_ends_with_the_end_of_sequence_or_for_want_of_room(rollout, tokenizer):
    completions = rollout.generate(PROMPTS, replace(SAMPLING, n=20))
    assert {c.finished for c in completions} == {True, False}
    assert len({len(c.token_ids) for c in completions}) > 4
    for c in completions:
        assert c.finished == (c.token_ids[-1] == EOS)
        assert EOS not in c.token_ids[:-1]
        assert len(c.token_ids) == len(c.logprobs) <= SAMPLING.max_new_tokens
        assert c.finished or len(c.token_ids) == SAMPLING.max_new_tokens
        assert c.text == tokenizer.decode([t for t in c.token_ids if t != EOS])


def test_a_longer_limit_goes_on_where_a_shorter_one_stopped(rollout):
    short = rollout.generate(PROMPTS, replace(SAMPLING, max_new_tokens=3))
    for cut, whole in zip(short, rollout.generate(PROMPTS, SAMPLING), strict=True):
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert cut.finished == (cut.token_ids == whole.token_ids and whole.finished)


def test_text_messages_and_ids_are_the_same_prompt(model):
    tokenizer = character_tokenizer("0123456789+-=")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    rollout = InProcessRollout(model, tokenizer)
    forms = ["1+1=", [{"role": "user", "content": "1+1"}], tokenizer("1+1=").input_ids]
    completions = [rollout.generate([form], SAMPLING) for form in forms]
    assert completions[0] == completions[1] == completions[2]


def test_token_ids_are_used_as_they_are_and_never_made_again(model, tokenizer):
    class Counting:
        eos_token_id, pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        encoded = 0

        def __call__(self, text, **options):
            self.encoded += 1
            return tokenizer(text, **options)

        def decode(self, ids):
            return "not what was sampled"

    counting = Counting()
    rollout = InProcessRollout(model, counting)
    ids = [5, 0, EOS, 6]  # would not survive text
    completions = rollout.generate([ids], SAMPLING)
    assert counting.encoded == 0
    assert all(c.prompt_ids == ids for c in completions)
    wanted = InProcessRollout(model, tokenizer).generate([ids], SAMPLING)
    assert [c.token_ids for c in completions] == [c.token_ids for c in wanted]
    rollout.generate(["1", "2"], SAMPLING)
    assert counting.encoded == 2


def test_no_prompts_no_answers(rollout):
    assert rollout.generate([], SAMPLING) == []


def test_an_empty_prompt_is_refused(rollout):
    with pytest.raises(ValueError, match="must be text, messages or token ids and not be empty, got ''"):
        rollout.generate(["1+1=", ""], SAMPLING)


def test_the_global_generators_are_left_alone(rollout):
    state = torch.get_rng_state()
    rollout.generate(PROMPTS, SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("missing", ["eos_token", "pad_token"])
def test_a_tokenizer_must_name_its_end_and_its_padding(model, missing):
    tokenizer = character_tokenizer("0123456789+-=")
    setattr(tokenizer, missing, None)
    with pytest.raises(ValueError, match=f"the tokenizer needs an {missing} with one id"):
        InProcessRollout(model, tokenizer)
