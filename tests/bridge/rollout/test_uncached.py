"""A model class of the user's own draws without a cache: what rows draw together is what each would draw alone."""

import logging

import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.own_model import own_source
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout import inprocess
from rl_bridge.rollout.cached_decoder import CachedDecoder
from rl_bridge.rollout.inprocess import InProcessRollout, check_decoder
from tests.support.own_models import BothWays, NoMask, RunningMean, Tiny, tokenizer

PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 2], [2, 3, 4], [9, 9]]
LIMITS = [6, 9, 3, 4, 7]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(inprocess, "_found", {})


def model_of(factory):
    with torch.device("meta"):
        model = (source := own_source(factory, tokenizer(), seed=3)).empty()
    source.load(model)
    return model


def decoder_of(model, **options):
    return CachedDecoder(model, SamplingParams(max_new_tokens=9), stop=[1], **options)


def drawn(decoder, rows):
    """The rows as drawn together, of which the last joins two steps late."""
    *early, late = rows
    ended = []
    for number in early:
        decoder.add(number, PROMPTS[number], seed=number, limit=LIMITS[number])
    for _ in range(2 if early else 0):
        ended += decoder.step()
    decoder.add(late, PROMPTS[late], seed=late, limit=LIMITS[late])
    while decoder.running or decoder.waiting:
        ended += decoder.step()
    return {row.key: row for row in ended}


@pytest.mark.parametrize("factory", [Tiny, NoMask, RunningMean])
@pytest.mark.parametrize("options", [{}, {"read_tokens": 8}, {"max_rows": 2}], ids=str)
def test_rows_that_join_and_leave_draw_what_each_draws_alone(factory, options):
    model = model_of(factory)
    together = drawn(decoder_of(model, **options), range(len(PROMPTS)))
    for number, row in together.items():
        (alone,) = drawn(decoder_of(model), [number]).values()
        assert row.tokens == alone.tokens and row.reason == alone.reason
        ids = torch.tensor([[*PROMPTS[number], *row.tokens]])
        with torch.no_grad():
            logits = model.own(ids, torch.arange(ids.shape[1])[None])[0, len(PROMPTS[number]) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, rtol=1e-5, atol=1e-5)
    assert sum(len(row.tokens) for row in together.values()) > 10


def test_no_call_has_more_tokens_than_are_read_at_a_time(monkeypatch):
    model, sizes = model_of(Tiny), []
    forward = model.own.forward
    model.own.forward = lambda input_ids, **options: (
        sizes.append(tuple(input_ids.shape)) or forward(input_ids, **options)
    )
    drawn(decoder_of(model, read_tokens=12), range(len(PROMPTS)))
    assert all(rows == 1 or rows * columns <= 12 for rows, columns in sizes) and max(rows for rows, _ in sizes) > 1


def test_it_is_said_that_there_is_no_cache(caplog):
    with caplog.at_level(logging.WARNING):
        check_decoder(model_of(Tiny))
        check_decoder(model_of(Tiny))
    (record,) = caplog.records
    assert record.getMessage() == "Tiny has no cache: each token of a row is read again for every new one"


def test_a_class_whose_rows_depend_on_padding_draws_nothing():
    with pytest.raises(NotImplementedError, match=r"cannot sample from BothWays in this process.*alone \(.*\)\.$"):
        check_decoder(model_of(BothWays))


def test_a_rollout_stops_at_the_tokenizer_s_end():
    rollout = InProcessRollout(own_source(Tiny, tokenizer()), tokenizer())
    assert rollout._stop == {1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RolloutOptions(backend="vllm"), "vLLM has no model Tiny, a class of your own: backend in_process"),
        (RolloutOptions(backend="vllm_server"), "vLLM has no model Tiny"),
        (RolloutOptions(precision="int8"), "Tiny is a class of your own: which of its layers is the head"),
    ],
    ids=str,
)
def test_engines_that_have_to_know_the_layers_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        options.factory(own_source(Tiny, tokenizer()), tokenizer(), sleep=False)
