"""What one pass reads, which rows leave with what, and how many tokens have been drawn: a decoder in this process."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.decoder import Decoder, check_row
from rl_bridge.rollout.row_cache import RowCache

SAMPLING = SamplingParams(max_new_tokens=1)
CONFIG = LlamaConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    MODEL = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)


def decoder_of(sampling=SAMPLING, **options):
    return CachedDecoder(MODEL, sampling, stop=[], **options)


def passes(decoder):
    """The lengths of the sequences that each pass reads, until nothing waits."""
    reads, read = [], decoder._model.read

    def recorded(sequences, of_rows, first, room):
        reads.append([len(sequence) for sequence in sequences])
        longest = max(len(sequences[number]) for number in of_rows)
        assert room > longest, "each row has room for a token more"
        return read(sequences, of_rows, first, room)

    decoder._model.read = recorded
    while decoder.waiting:
        decoder.step()
    return reads


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), budget=st.integers(1, 20))
@example(lengths=[3, 4, 7, 8], budget=7)
def test_a_pass_reads_as_many_sequences_as_have_room_in_their_order(lengths, budget):
    decoder = decoder_of(read_tokens=budget)
    for key, length in enumerate(lengths):
        decoder.add(key, [key] + [11] * (length - 1), seed=key, limit=2)
    reads = passes(decoder)
    assert [length for read in reads for length in read] == lengths
    for read, following in zip(reads, [*reads[1:], None], strict=True):
        assert len(read) == 1 or sum(read) <= budget
        assert following is None or sum(read) + following[0] > budget


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"read_tokens": 0}, {"read_tokens": -1}], ids=str)
def test_room_for_nothing_is_refused(options):
    with pytest.raises(ValueError, match="max_rows and read_tokens must be ≥ 1"):
        decoder_of(**options)
    assert passes_one_by_one() == [[1], [2]]


def passes_one_by_one():
    decoder = decoder_of(max_rows=2, read_tokens=1)
    for key in range(2):
        decoder.add(key, [5] * (1 + key), seed=key, limit=2)
    return passes(decoder)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), limits=st.lists(st.integers(1, 6), min_size=1, max_size=6), most=st.integers(1, 6))
def test_tokens_that_have_not_ended_are_those_drawn_of_rows_that_have_not(data, limits, most):
    decoder, steps = decoder_of(max_rows=most), data.draw(st.integers(0, 8))
    for key, limit in enumerate(limits):
        decoder.add(key, [5, 6, 7], seed=key, limit=limit)
    ended = [drawn for _ in range(steps) for drawn in decoder.step()]
    drawn = decoder.unfinished_tokens
    left = decoder.withdraw()
    assert sum(len(row.tokens) for row in left) == drawn and {row.reason for row in left} <= {"abort"}
    assert sorted(row.key for row in (*ended, *left)) == list(range(len(limits)))
    assert (decoder.running, decoder.waiting, decoder.unfinished_tokens) == (0, 0, 0)


def test_rows_that_are_withdrawn_leave_the_others_their_order_and_take_all_that_is_theirs():
    decoder = decoder_of(SamplingParams(max_new_tokens=1, top_k=3), max_rows=3)
    for key in range(7):
        decoder.add(key, [5, key], seed=key, limit=4)
    for _ in range(2):
        decoder.step()
    left = {drawn.key: drawn for drawn in decoder.withdraw({1, 4, 6})}
    assert left.keys() == {1, 4, 6} and [len(left[key].tokens) for key in (1, 4, 6)] == [2, 0, 0]
    assert [len(ids) for ids in left[1].allowed] == [3, 3] and len(left[1].logprobs) == 2
    assert all(token in ids for token, ids in zip(left[1].tokens, left[1].allowed, strict=True))
    assert left[4].allowed is None and left[6].logprobs == []
    assert (decoder.running, decoder.waiting) == (2, 2)
    order = []
    while decoder.running or decoder.waiting:
        order += [drawn.key for drawn in decoder.step()]
    assert sorted(order[:2]) == [0, 2] and order[2:] == [3, 5]
    assert decoder.withdraw() == decoder.withdraw([0]) == []


class Counting(Decoder):
    """Rows that an engine has, or that wait for it; one waiting row begins a step, and is running in the next."""

    unfinished_tokens = 0

    def __init__(self, running, waiting):
        self.left, self.begun, self.steps = waiting, running, 0

    running = property(lambda self: self.begun)
    waiting = property(lambda self: self.left)

    def add(self, key, tokens, *, seed, drawn=0, limit, said=0, greedy=False):
        self.left += 1

    def step(self):
        self.steps += 1
        ended, self.begun = self.begun, 1 if self.left else 0
        self.left -= self.begun
        return ["row"] * ended

    def withdraw(self, keys=None):
        return []


@pytest.mark.parametrize(("running", "waiting", "steps"), [(0, 0, 0), (1, 0, 1), (0, 1, 2), (0, 3, 4), (2, 9, 5)])
def test_a_round_goes_on_while_any_row_runs_or_waits(running, waiting, steps):
    decoder = Counting(running, waiting)
    ended = decoder.round(5)
    assert decoder.steps == steps and len(ended) == min(running + waiting, running + max(0, steps - 1))


@pytest.mark.parametrize(
    ("tokens", "options", "fits"),
    [
        (1, {"limit": 1, "drawn": 0}, True),
        (0, {"limit": 1, "drawn": 0}, False),
        (1, {"limit": 0, "drawn": 0}, False),
        (1, {"limit": 1, "drawn": -1}, False),
        (7, {"limit": 1, "drawn": 0, "longest": 8}, True),
        (8, {"limit": 1, "drawn": 0, "longest": 8}, False),
    ],
)
def test_a_row_has_tokens_and_room_for_one_more(tokens, options, fits):
    if fits:
        assert check_row([5] * tokens, **options) is None
    else:
        with pytest.raises(ValueError, match=f"{tokens} tokens"):
            check_row([5] * tokens, **options)


@pytest.mark.parametrize("strange", [-1, 16, 99999])
def test_a_token_that_the_model_does_not_know_is_named(strange):
    """On a GPU the look-up of one would end the process."""
    check_row([0, 15], limit=1, drawn=0, vocabulary=16)
    with pytest.raises(ValueError, match=f"^{strange} is no token of the model, which knows those from 0 to 15$"):
        check_row([3, strange, 4], limit=1, drawn=0, vocabulary=16)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5))
def test_what_a_cache_holds_stays_as_it_grows_and_what_nobody_wrote_is_zero(steps):
    cache, layer = RowCache(), 0
    rows, capacity = 1, 2
    cache.reserve(rows, capacity)
    cache.reading(torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.tensor([[0, 0]]))
    keys = torch.arange(1.0, 9.0).view(1, 2, 2, 2)  # [rows of the batch, heads, tokens, width]
    cache.update(keys, keys, layer)
    cache.update_recurrent_state(torch.ones(1, 3), layer)
    for more, tokens in steps:
        cache.reserve(rows + more, tokens)
        values, states = cache.layers[0].tokens["keys"], cache.layers[0].states["recurrent", 0]
        assert (
            values.shape[0] == len(states) == cache.rows >= rows + more and values.shape[2] == cache.capacity >= tokens
        )
        assert torch.equal(values[:1, :, :2], keys) and float(values.sum()) == float(keys.sum())
        assert torch.equal(states[:1], torch.ones(1, 3)) and float(states.sum()) == 3
