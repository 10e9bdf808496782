"""A rollout worker on a real engine of vLLM, one for the whole file.

The engine reads at most 64 tokens a step and runs 8 sequences at a time: prompts are read in pieces, and rows wait.
"""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import RowRequest, SamplingParams, requests_of
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import Step
from rl_bridge.executors.session import LocalExecutor
from rl_bridge.models.model_source import PretrainedSource, StateSource
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.rollout.sampling import request_seeds
from rl_bridge.rollout.vllm import VLLMOptions
from tests.bridge.rollout.distribution import truncated
from tests.bridge.rollout.stopped import assert_cut_at_the_text
from tests.support.trajectories import generate

pytestmark = pytest.mark.vllm
EOS = 1
PROMPTS = ["1+1=", "7", "12+34=", "a long prompt " * 9, "98-76+54=", "0=", "12+34="]
SAMPLING = SamplingParams(max_new_tokens=10, n=3, seed=4)
CUTS = {
    "plain": {},
    "cool": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    # Cut by min-p first, as vLLM does by itself, these would be other distributions (ROLL-8).
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
}


@pytest.fixture(scope="module")
def rollout(folder, tokenizer):
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    arguments = ("max_num_batched_tokens=64", "block_size=32")
    options = VLLMOptions(max_model_len=256, max_num_seqs=8, kv_cache_gib=0.02, arguments=arguments)
    rollout = VLLMRollout(PretrainedSource(str(folder)), tokenizer, options)
    yield rollout
    copies = rollout.updated.receiver.copies._root
    assert copies.is_dir()
    rollout.close()
    assert not copies.exists() and not rollout._folder.path.exists(), "ROLL-14"


@pytest.fixture(scope="module")
def drawn(rollout):
    """Trajectories of every way to sample."""
    return {name: generate(rollout, PROMPTS, replace(SAMPLING, **cuts)) for name, cuts in CUTS.items()}


def logits_of(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CUTS)
def test_logprobs_are_those_of_the_distribution_that_is_sampled(drawn, model, name):
    """Ours, in float64, from the weights' own logits; and over the recorded tokens, where sampling was truncated."""
    assert len(drawn[name]) == len(PROMPTS) * SAMPLING.n
    other = False
    for t in drawn[name]:
        logits, start = logits_of(model, t.tokens), len(t.prompt_tokens)
        wanted = [truncated(logits[start - 1 + i], **CUTS[name]) for i in range(len(t.sampled_tokens))]
        chosen = [float(np.log(p[token])) for p, token in zip(wanted, t.sampled_tokens, strict=True)]
        np.testing.assert_allclose(t.sampled_logprobs, chosen, atol=5e-5)
        if name in ("plain", "cool"):
            assert t.allowed_tokens is None
        else:
            assert t.allowed_tokens[:start] == ((),) * start
            found = [list(ids) for ids in t.allowed_tokens[start:]]
            assert found == [np.flatnonzero(p).tolist() for p in wanted]
            other |= name == "all" and found != [
                np.flatnonzero(min_p_first(logits[start - 1 + i])).tolist() for i in range(len(found))
            ]
    assert other == (name == "all"), "the order of truncations shows"


def min_p_first(logits):
    """vLLM's own order, of CUTS["all"]."""
    left = truncated(logits, temperature=1.3, min_p=0.1)
    with np.errstate(divide="ignore"):
        return truncated(np.log(left), top_k=20, top_p=0.8)


@pytest.mark.parametrize("name", CUTS)
def test_a_trainer_scores_what_was_drawn_as_it_was_drawn(drawn, model, name):
    """The ratio to the sampler's distribution is 1 before the first update."""
    scorer = TokenScorer(StateSource(model), ScoringConfig(temperature=CUTS[name].get("temperature", 1.0)))
    scorer.load_weights()
    batch = collate(drawn[name], 0)
    ratio = (scorer.token_logprobs(batch) - batch.rollout_logprobs)[batch.mask].exp()
    assert len(ratio) > 100
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=5e-5, rtol=0)


@pytest.mark.parametrize("stop", [("1", "a"), ("=", "lo", "2 ")])
def test_a_stop_text_cuts_behind_the_token_that_completed_it(rollout, drawn, tokenizer, stop):
    for name in ("plain", "all"):
        found = generate(rollout, PROMPTS, replace(SAMPLING, **CUTS[name], stop=stop))
        assert_cut_at_the_text(tokenizer, drawn[name], found, stop)
        for whole, cut in zip(drawn[name], found, strict=True):
            if cut.allowed_tokens is not None:
                assert list(map(list, cut.allowed_tokens)) == list(map(list, whole.allowed_tokens))[: len(cut.tokens)]


@pytest.mark.parametrize("name", ["plain", "all"])
def test_tokens_depend_on_the_request_alone(rollout, drawn, name):
    requests, sampling = requests_of(PROMPTS, SAMPLING.seed), replace(SAMPLING, **CUTS[name])
    wanted = [drawn[name][i : i + SAMPLING.n] for i in range(0, len(drawn[name]), SAMPLING.n)]
    for chosen in ([4], [3, 1], range(6, -1, -1)):
        made = rollout.generate([requests[i] for i in chosen], sampling)
        assert [[t.tokens for t in group] for group in made] == [[t.tokens for t in wanted[i]] for i in chosen]
        for i, group in zip(chosen, made, strict=True):
            for a, b in zip(group, wanted[i], strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=5e-5)
    fewer = rollout.generate(requests[2:4], replace(sampling, n=2))
    assert [[t.tokens for t in group] for group in fewer] == [[t.tokens for t in wanted[i][:2]] for i in (2, 3)]
    other = rollout.generate(requests_of(PROMPTS, 5), sampling)
    assert [[t.tokens for t in group] for group in other] != [[t.tokens for t in group] for group in wanted]


def test_a_sequence_that_goes_on_draws_what_it_would_have_drawn(rollout, drawn):
    """Tokens drawn before, by another request or engine, count: a row may be cut anywhere."""
    whole = max(drawn["all"], key=lambda t: len(t.sampled_tokens))
    prompt, tokens = whole.prompt_tokens, whole.sampled_tokens
    *request, number = whole.request_id
    seed = int(request_seeds([tuple(request)], SAMPLING.n)[0, number])
    decoder = rollout.decoder(replace(SAMPLING, **CUTS["all"]))
    for cut in range(len(tokens)):
        decoder.add(cut, [*prompt, *tokens[:cut]], seed=seed, drawn=cut, limit=len(tokens) - cut)
    found = {}
    while decoder.running or decoder.waiting:
        found |= {made.key: made for made in decoder.step()}
    for cut, made in found.items():
        assert tuple(made.tokens) == tokens[cut:]
        np.testing.assert_allclose(made.logprobs, whole.sampled_logprobs[cut:], atol=5e-5)
        assert set(made.versions) == {0}


def test_rows_that_are_withdrawn_go_on_elsewhere(rollout, drawn):
    whole = sorted(drawn["all"], key=lambda t: -len(t.sampled_tokens))[:12]
    decoder, sampling = rollout.decoder(replace(SAMPLING, **CUTS["all"])), replace(SAMPLING, **CUTS["all"])
    seeds = [int(request_seeds([t.request_id[:-1]], 3)[0, t.request_id[-1]]) for t in whole]
    for place, t in enumerate(whole):
        decoder.add(place, t.prompt_tokens, seed=seeds[place], limit=SAMPLING.max_new_tokens)
    found = {made.key: [made] for _ in range(8) for made in decoder.step()}
    out = decoder.withdraw([place for place in range(len(whole)) if place % 2])
    out += decoder.withdraw()
    assert not decoder.running and {made.reason for made in out} == {"abort"}
    assert 0 in {len(made.tokens) for made in out} and max(len(made.tokens) for made in out) > 2
    for first in out:
        tokens, left = [*whole[first.key].prompt_tokens, *first.tokens], SAMPLING.max_new_tokens - len(first.tokens)
        decoder = rollout.decoder(sampling)
        decoder.add(first.key, tokens, seed=seeds[first.key], drawn=len(first.tokens), limit=left)
        rest = []
        while decoder.running:
            rest += decoder.step()
        found[first.key] = [first, *rest]
    for place, t in enumerate(whole):
        assert tuple(token for made in found[place] for token in made.tokens) == t.sampled_tokens
        allowed = [list(ids) for made in found[place] for ids in made.allowed or ()]
        assert allowed == [list(ids) for ids in t.allowed_tokens[len(t.prompt_tokens) :]]


def test_greedy_is_the_argmax(rollout, model):
    for t in generate(rollout, PROMPTS, replace(SAMPLING, temperature=0.0, top_k=3, n=1)):
        logits = logits_of(model, t.tokens)[len(t.prompt_tokens) - 1 : -1]
        assert t.sampled_tokens == tuple(logits.argmax(-1).tolist())
        assert t.logprobs == (0.0,) * len(t.tokens) and t.allowed_tokens is None


@pytest.mark.parametrize("cuts", [{"top_p": 0.95}, CUTS["all"]], ids=["top-p", "top-k, top-p, min-p"])
def test_first_tokens_follow_the_model_s_distribution(rollout, model, tokenizer, cuts):
    """ROLL-8: in this library's order of truncations."""
    count, prompt = 4000, tokenizer("12+3=").input_ids
    made = generate(rollout, [prompt], SamplingParams(max_new_tokens=1, n=count, **cuts))
    wanted = count * truncated(logits_of(model, prompt)[-1], **cuts)
    observed = np.bincount([t.sampled_tokens[0] for t in made], minlength=len(wanted))
    common = wanted >= 5
    pooled = [np.append(x[common], x[~common].sum()) for x in (observed, wanted)]
    keep = pooled[1] > 0
    assert not observed[wanted == 0].any()
    assert scipy.stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue > 1e-3


def test_a_completion_ends_with_a_stop_token_or_for_want_of_room(drawn, tokenizer):
    made = [t for some in drawn.values() for t in some]
    assert {t.finish_reason for t in made} == {"stop", "length"}
    for t in made:
        assert (t.finish_reason == "stop") == (t.sampled_tokens[-1] == EOS) and EOS not in t.sampled_tokens[:-1]
        assert t.finish_reason == "stop" or len(t.sampled_tokens) == SAMPLING.max_new_tokens
        assert t.completion == tokenizer.decode([i for i in t.sampled_tokens if i != EOS])
        assert set(t.weights_versions[len(t.prompt_tokens) :]) == {0}


def test_a_stream_gives_what_generate_gives_as_it_finishes(rollout, drawn):
    from rl_bridge.rollout.vllm.vllm_decoder import VLLMDecoder

    requests = requests_of(PROMPTS, SAMPLING.seed)
    rollout.open_stream(requests, SAMPLING, 0)
    rollout.open_stream(requests[:1], SAMPLING, 1)
    first = rollout.next_completions(0)
    assert 0 < len(first) < len(drawn["plain"])
    found = list(first)
    while made := rollout.next_completions(0):
        found += made
    key = {t.request_id: t for t in found}
    assert len(key) == len(found) == len(drawn["plain"])
    for t in drawn["plain"]:
        # Rows beside a row change its log-probabilities by a rounding.
        np.testing.assert_allclose(key[t.request_id].logprobs, t.logprobs, atol=5e-5)
        assert replace(key[t.request_id], logprobs=t.logprobs) == t
    rollout.close_stream(0)
    assert rollout.next_completions(1), "finished beside the other stream"
    rollout.close_stream(1)
    left: VLLMDecoder = rollout.decoder(SAMPLING)
    left.add("never read", [5, 6], seed=1, limit=9)
    del left
    assert generate(rollout, ["7"], SAMPLING) and not rollout.updated.client.has_unfinished_requests()


class Repeats:
    """Says how many turns there were, and ends after two."""

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return Step(messages=[{"role": "tool", "content": f"-{turns}-"}], reward=1.0, done=turns == 2)


def test_conversations_of_several_turns(rollout, model):
    cuts = CUTS["all"]
    rows = [RowRequest({"prompt": prompt}, (4, i), i) for i, prompt in enumerate(PROMPTS)]
    made = rollout.converse(rows, replace(SAMPLING, n=8, **cuts), Repeats, 3)
    found = [t for group in made for t in group]
    assert {t.turns for t in found} >= {1, 2} and {t.finish_reason for t in found} >= {"stop", "length"}
    for t in found:
        logits = logits_of(model, t.tokens) / cuts["temperature"]
        places = [i for i, mine in enumerate(t.loss_mask) if mine]
        wanted = [logits[i - 1, t.tokens[i]] - logits[i - 1, list(t.allowed_tokens[i])].logsumexp(0) for i in places]
        np.testing.assert_allclose([t.logprobs[i] for i in places], wanted, atol=2e-5)
    alone = rollout.converse(rows[4:5], replace(SAMPLING, n=8, **cuts), Repeats, 3)
    assert [t.tokens for t in alone[0]] == [t.tokens for t in made[4]]


def test_what_the_engine_has_no_room_for_is_refused(rollout):
    with pytest.raises(ValueError, match=r"256 tokens leaves no room .* the engine holds 256 \(max_model_len, or"):
        rollout.decoder(SAMPLING).add("long", [5] * 256, seed=1, limit=1)
    with pytest.raises(
        ValueError, match=r"250 tokens and 10 new ones .* than the engine holds, 256 \(max_model_len, or"
    ):
        generate(rollout, [[5] * 250], SAMPLING)
    [cut] = rollout.converse(
        [RowRequest({"prompt": "1" * 252}, (1,))], SamplingParams(max_new_tokens=20, min_p=0.5), Repeats, 1
    )
    assert len(cut[0].tokens) <= 256
    with pytest.raises(ValueError, match=r"keeps its weights: release\(\) it"):
        rollout.move("weights", torch.device("meta"))
    rollout.move("kv_cache", torch.device("cpu"))


@pytest.mark.parametrize("ahead", [False, True], ids=["one batch", "batches ahead"])
def test_keys_and_values_leave_a_device_once_the_scheduler_is_paused(rollout, monkeypatch, ahead):
    """vLLM refuses otherwise; a stand-in for what frees the memory of a GPU, with vLLM's own conditions.

    On a GPU batches are scheduled ahead: a queue has the last one when the scheduler has no request left.
    """
    calls, engine = [], rollout._client.engine
    core = engine.engine_core.engine_core
    if ahead:
        monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
        monkeypatch.setattr(core, "batch_queue_size", 2)
        monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)

    def release():
        if not (core.is_scheduler_paused() and not core.scheduler.has_requests() and not core.batch_queue):
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        calls.append("release")

    monkeypatch.setattr(rollout, "_device", torch.device("cuda"))
    monkeypatch.setattr(rollout, "_options", replace(rollout._options, sleep=True))
    monkeypatch.setattr(rollout, "_asleep", set())
    monkeypatch.setattr(engine, "release_kv_cache_memory", release, raising=False)
    monkeypatch.setattr(engine, "wake_up", lambda tags: (calls.append(tags), core.resume_scheduler()))
    wanted = [t.tokens for t in generate(rollout, PROMPTS, SAMPLING)]  # the last one is in the scheduler
    decoder = rollout.decoder(SAMPLING)
    decoder.add("row", [5], seed=1, limit=3)
    with pytest.raises(ValueError, match="1 requests are in the engine"):
        rollout.move("kv_cache", torch.device("cpu"))
    decoder.withdraw()
    for device in ("cpu", "cpu", "cuda", "cuda"):
        rollout.move("kv_cache", torch.device(device))
    assert calls == ["release", ["kv_cache"]] and not core.is_scheduler_paused()

    def fails():
        raise RuntimeError("no")

    monkeypatch.setattr(engine, "release_kv_cache_memory", fails)
    with pytest.raises(RuntimeError, match="no"):
        rollout.move("kv_cache", torch.device("cpu"))
    assert [t.tokens for t in generate(rollout, PROMPTS, SAMPLING)] == wanted


@pytest.mark.parametrize("leave", [False, True], ids=["to the end", "withdrawn"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_rows_draw_nothing_beside_a_probe_and_go_on_as_if_there_were_none(rollout, tokenizer, name, leave):
    """They drew on meanwhile, behind the tokens with which their stop texts were complete."""
    sampling = replace(SAMPLING, **CUTS[name], stop=("1", "a"))

    def started():
        decoder = rollout.decoder(sampling)
        for number, prompt in enumerate(PROMPTS * 2):
            decoder.add(number, tokenizer.encode(prompt), seed=number, limit=40)
        return decoder

    def ended(decoder):
        return [drawn for _ in range(60) for drawn in decoder.step()]

    wanted = {drawn.key: drawn for drawn in ended(started())}
    assert sum(drawn.reason == "stop" and len(drawn.tokens) > 1 for drawn in wanted.values()) > 1
    decoder, client = started(), rollout._client
    assert not decoder.step()
    before = decoder.unfinished_tokens
    client.pause()
    client.generate([5, 6, 7], count=20, seed=1, temperature=1.0)
    client.resume()
    assert decoder.unfinished_tokens == before
    found = {drawn.key: drawn for drawn in (decoder.withdraw() if leave else ended(decoder))}
    assert found.keys() == wanted.keys() and not decoder.running
    for key, expected in wanted.items():
        count = len(found[key].tokens)
        assert (found[key].reason, found[key].tokens) == (
            ("abort", expected.tokens[:count]) if leave else (expected.reason, expected.tokens)
        )
        assert (found[key].allowed or []) == (expected.allowed or [])[:count]
        np.testing.assert_allclose(found[key].logprobs, expected.logprobs[:count], atol=5e-5)


@pytest.mark.parametrize("token", [-1, 60, 10**6])
def test_a_token_that_the_model_lacks_is_refused(rollout, token):
    """vLLM embeds a row of its padding, and gives completions."""
    vocabulary = rollout._client.limits().vocabulary
    token = token if token != 60 else vocabulary
    with pytest.raises(
        ValueError, match=f"{token} is no token of the model, which knows those from 0 to {vocabulary - 1}"
    ):
        rollout.decoder(SAMPLING).add("strange", [3, token], seed=1, limit=1)


def test_the_global_generators_are_left_alone(rollout):
    state = torch.get_rng_state()
    generate(rollout, PROMPTS, SAMPLING)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stream_is_what_generate_gives_and_one_closed_early_frees_its_requests(rollout, drawn):
    engine = InferenceEngine(lambda: rollout, executor=LocalExecutor(), name="stream").build()
    wanted = {t.request_id: t.tokens for t in drawn["plain"]}
    assert {t.request_id: t.tokens for t in engine.stream(PROMPTS, SAMPLING)} == wanted
    scheduler = rollout._client.engine.engine_core.engine_core.scheduler
    stream = engine.stream(PROMPTS, replace(SAMPLING, max_new_tokens=60))
    first = next(stream)
    assert first.finish_reason != "abort" and scheduler.requests
    stream.close()
    assert not scheduler.requests and not rollout._client.has_unfinished_requests() and not rollout._streams
    assert {t.request_id: t.tokens for t in engine.stream(PROMPTS, SAMPLING)} == wanted


def test_tokens_of_a_call_are_counted_in_the_engine(rollout, drawn):
    engine = InferenceEngine(lambda: rollout, executor=LocalExecutor(), name="counted").build()
    found = engine.generate(PROMPTS, SAMPLING, tokens=90)
    assert 90 <= sum(len(t.sampled_tokens) for t in found) < 90 + 8
    for t, whole in zip(found, drawn["plain"], strict=True):
        assert t.tokens == whole.tokens[: len(t.tokens)] and (t.finish_reason == "abort") == (t.tokens != whole.tokens)
