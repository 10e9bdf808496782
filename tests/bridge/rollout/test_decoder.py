"""Rows that join and leave draw what each would draw alone, by full forward passes without a cache."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.decoder import Decoder
from rl_bridge.rollout.sampling import draw
from rl_bridge.rollout.served.served_engine import ServedDecoder
from rl_bridge.rollout.vllm.vllm_decoder import VLLMDecoder

STOP = 1
SAMPLING = SamplingParams(max_new_tokens=1, temperature=0.8)
SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": STOP,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)),
    "windows and full": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=5, layer_types=MIXED)
    ),
}
PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22]]


def model(family="qwen2", attention="rl_fn"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = FAMILIES[family]().eval().requires_grad_(False)
    use_rl_fn_attention(made) if attention == "rl_fn" else made.set_attn_implementation(attention)
    return made


def alone(model, prompt, seed, limit, drawn=0, sampling=SAMPLING):
    """Tokens and log-probabilities of a row by itself, the whole sequence computed again for every token."""
    tokens, logprobs = [], []
    while len(tokens) < limit and STOP not in tokens:
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[:, -1]
        result = draw(logits, torch.tensor([seed]), torch.tensor([drawn + len(tokens)]), sampling)
        tokens.append(int(result.tokens))
        logprobs.append(float(result.logprobs))
    return tokens, logprobs


def finish(decoder):
    """What is drawn from here on, by key."""
    found = {}
    while decoder.running or decoder.waiting:
        found |= {drawn.key: drawn for drawn in decoder.step()}
    return found


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for key, (tokens, logprobs) in wanted.items():
        assert found[key].tokens == tokens, key
        np.testing.assert_allclose(found[key].logprobs, logprobs, atol=1e-5)
        assert found[key].reason == ("stop" if tokens[-1] == STOP else "length") and found[key].allowed is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "rl_fn") for family in FAMILIES), ("qwen2", "sdpa"), ("windows and full", "eager")],
)
def test_rows_that_join_and_leave_draw_what_each_draws_alone(family, attention):
    net = model(family, attention)
    decoder = CachedDecoder(net, SAMPLING, stop=[STOP], max_rows=4, read_tokens=7)
    limits = [3, 40, 12, 20, 9]
    for key, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        decoder.add(key, prompt, seed=100 + key, limit=limit)
    found = {}
    for _ in range(5):
        found |= {drawn.key: drawn for drawn in decoder.step()}
    decoder.add("later", [30, 31], seed=7, drawn=2, limit=6)
    found |= finish(decoder)
    wanted = {key: alone(net, PROMPTS[key], 100 + key, limit) for key, limit in enumerate(limits)}
    check(found, wanted | {"later": alone(net, [30, 31], 7, 6, drawn=2)})
    assert len({len(tokens) for tokens, _ in wanted.values()}) > 3


def test_rows_wait_for_room_in_their_order():
    decoder = CachedDecoder(model(), SAMPLING, stop=[], max_rows=2)
    for key in range(5):
        decoder.add(key, PROMPTS[key], seed=key, limit=key + 1)
    order, running = [], []
    while decoder.running or decoder.waiting:
        order += [drawn.key for drawn in decoder.step()]
        running.append((decoder.running, decoder.waiting))
    assert order == [0, 1, 2, 3, 4]
    # Row 0 ends with its first token, so row 2 joins in the same step: its room is free.
    assert running[0] == (2, 2) and max(count for count, _ in running) == 2 and running[-1] == (0, 0)


def test_a_round_is_so_many_steps_or_fewer():
    rounds, steps = (CachedDecoder(model(), SAMPLING, stop=[STOP], max_rows=4) for _ in range(2))
    for decoder in (rounds, steps):
        decoder.draw_in_rounds()
        for key, prompt in enumerate(PROMPTS):
            decoder.add(key, prompt, seed=key, limit=3 * key + 2)
    for count in (1, 4, 100):
        wanted = [drawn for _ in range(count) if steps.running or steps.waiting for drawn in steps.step()]
        assert rounds.round(count) == wanted and rounds.running == steps.running
    assert rounds.running == rounds.waiting == 0 and rounds.round(3) == []


@pytest.mark.parametrize("kind", [CachedDecoder, VLLMDecoder, ServedDecoder])
def test_every_decoder_is_asked_in_the_same_words(kind):
    assert Decoder in kind.__mro__ and not inspect.isabstract(kind)
    for name, word in inspect.getmembers(Decoder, inspect.isfunction):
        if not name.startswith("_"):
            parameters = [
                [(p.name, p.kind, p.default) for p in inspect.signature(asked).parameters.values()]
                for asked in (word, getattr(kind, name))
            ]
            assert parameters[0] == parameters[1], name


def test_a_later_turn_goes_on_with_the_random_numbers_of_the_first():
    net = model()
    whole = CachedDecoder(net, SAMPLING, stop=[])
    whole.add("whole", PROMPTS[0], seed=3, limit=8)
    tokens = finish(whole)["whole"].tokens
    cut = CachedDecoder(net, SAMPLING, stop=[])
    cut.add("cut", [*PROMPTS[0], *tokens[:3]], seed=3, drawn=3, limit=5)
    assert finish(cut)["cut"].tokens == tokens[3:]


@pytest.mark.parametrize("cuts", [{}, {"top_k": 5}], ids=["plain", "top_k"])
def test_a_greedy_row_beside_sampled_ones_draws_what_is_most_likely(cuts):
    net, sampling = model(), replace(SAMPLING, **cuts)
    alike, alone = CachedDecoder(net, sampling, stop=[STOP]), CachedDecoder(net, sampling.greedily(), stop=[STOP])
    mixed = CachedDecoder(net, sampling, stop=[STOP], max_rows=4)
    for key, prompt in enumerate(PROMPTS):
        greedy = key % 2 == 1
        mixed.add(key, prompt, seed=key, limit=9, greedy=greedy)
        (alone if greedy else alike).add(key, prompt, seed=key, limit=9)
    found, wanted = finish(mixed), finish(alike) | finish(alone)
    assert found.keys() == wanted.keys()
    for key, drawn in found.items():
        assert drawn._replace(logprobs=[]) == wanted[key]._replace(logprobs=[])
        np.testing.assert_allclose(drawn.logprobs, wanted[key].logprobs, atol=1e-5)
        assert (drawn.allowed is None) == (key % 2 == 1 or not cuts)
    assert found[1].logprobs == [0.0] * len(found[1].tokens)


def test_equal_sequences_are_read_once():
    """Lengths 3, 9 and 1: the order in which they are read is not undone by itself."""
    net, calls, prompts = model(), [], [PROMPTS[0], PROMPTS[3], PROMPTS[1]]
    net.register_forward_pre_hook(lambda _, __, inputs: calls.append(inputs["input_ids"].numel()), with_kwargs=True)
    decoder = CachedDecoder(net, SAMPLING, stop=[])
    for key in range(30):
        decoder.add(key, prompts[key % 3], seed=key, limit=2)
    found = finish(decoder)
    assert calls == [3 + 9 + 1, 30]
    for key in (0, 1, 2, 28, 29):
        tokens, logprobs = alone(net, prompts[key % 3], key, 1)
        assert found[key].tokens[:1] == tokens and len(found[key].tokens) == 2
        np.testing.assert_allclose(found[key].logprobs[:1], logprobs, atol=1e-5)


def test_the_sets_of_a_truncated_sampler_are_recorded():
    net, sampling = model(), SamplingParams(max_new_tokens=1, top_k=5, top_p=0.8)
    decoder = CachedDecoder(net, sampling, stop=[])
    for key, prompt in enumerate(PROMPTS):
        decoder.add(key, prompt, seed=key, limit=4)
    for key, drawn in finish(decoder).items():
        assert [len(ids) for ids in drawn.allowed] and len(drawn.allowed) == 4
        for n, ids in enumerate(drawn.allowed):
            sequence = [*PROMPTS[key], *drawn.tokens[:n]]
            logits = net(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1]
            largest = logits.topk(len(ids)).indices.sort().values
            assert ids.tolist() == largest.tolist() and drawn.tokens[n] in ids and len(ids) <= 5
            logprob = logits.float()[largest].log_softmax(0)[ids.index(drawn.tokens[n])]
            np.testing.assert_allclose(drawn.logprobs[n], logprob, atol=1e-5)


def test_models_without_a_cache_are_refused():
    net = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(NotImplementedError, match=r"OpenAIGPTLMHeadModel .* takes no past_key_values .* vLLM"):
        CachedDecoder(net, SAMPLING, stop=[])


def test_an_attention_without_masks_is_refused():
    net = model()
    net.config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="rl_fn, sdpa or eager, and the model has flash_attention_2"):
        CachedDecoder(net, SAMPLING, stop=[])


def test_what_cannot_be_decoded():
    net = model()
    with pytest.raises(ValueError, match="max_rows and read_tokens must be ≥ 1, got 0 and 8192"):
        CachedDecoder(net, SAMPLING, stop=[], max_rows=0)
    decoder = CachedDecoder(net, SAMPLING, stop=[])
    for tokens, limit, drawn in ([], 1, 0), ([5], 0, 0), ([5], 1, -1):
        with pytest.raises(ValueError, match=f"got {len(tokens)} tokens, limit {limit}, drawn {drawn}"):
            decoder.add(0, tokens, seed=0, drawn=drawn, limit=limit)
    net.lm_head.weight.fill_(torch.nan)
    decoder.add(0, [5], seed=0, limit=1)
    with pytest.raises(ValueError, match="NaN"):
        decoder.step()
