"""Text that ends a completion: found as in the whole text, in any tokenizer, and by every decoder alike."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import Step
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.sampling import StopTexts, request_seeds
from tests.bridge.rollout.stopped import assert_cut_at_the_text, naive
from tests.support.chat_templates import bytes_tokenizer, pieces_tokenizer
from tests.support.trajectories import generate

TOKENIZERS = {
    "characters": character_tokenizer("0123456789+-=ab"),
    "bytes": bytes_tokenizer("chatml"),
    "pieces": pieces_tokenizer(),
}
PROMPTS = ["1+1=", "7", "12+34="]
SAMPLING = SamplingParams(max_new_tokens=24, n=3, seed=4)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_first_token_after_which_the_whole_text_has_a_stop_text_ends_it(name, data):
    tokenizer = TOKENIZERS[name]
    # Text with characters of several bytes, whose tokens are cut and put together anew: bytes of no character too.
    ids = tokenizer("11+23=5" if name == "characters" else "the answer é 漢 is 12 🙂 think", add_special_tokens=False)
    tokens = data.draw(st.lists(st.sampled_from(ids.input_ids) | st.integers(0, len(tokenizer) - 1), max_size=20))
    whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    parts = st.builds(lambda start, length: whole[start : start + length], st.integers(0, 40), st.integers(1, 6))
    texts = data.draw(st.lists(parts | st.text("1+ aé", min_size=1, max_size=3), max_size=3))
    texts = [text for text in texts if text and "\N{REPLACEMENT CHARACTER}" not in text]
    stops = StopTexts(tokenizer, texts)
    said = data.draw(st.integers(0, len(tokens)))
    count, found = naive(tokenizer, tokens, texts)
    if count is None or said < count:
        text = stops.begin(tokens[:said])
        ended = [(place, stop) for place, token in enumerate(tokens[said:], said + 1) if (stop := text.add(token))]
        assert (ended[0] if ended else (None, None)) == (count, found)
    assert bool(stops) == bool(texts) and stops.found(tokens[:count]) == found


@pytest.mark.parametrize("stop", [("3",), ("12", "=+"), ("0", "44", "1+")])
def test_a_completion_in_this_process_is_the_one_without_the_text_cut_behind_it(new_model, tokenizer, stop):
    model = new_model(seed=2).requires_grad_(False)
    model.lm_head.weight.mul_(3)
    rollout = InProcessRollout(StateSource(model), tokenizer)
    plain = generate(rollout, PROMPTS, SAMPLING)
    found = generate(rollout, PROMPTS, replace(SAMPLING, stop=stop))
    assert_cut_at_the_text(tokenizer, plain, found, stop)


def test_a_text_begins_in_the_tokens_that_a_row_had_when_it_went_in(new_model, tokenizer):
    model = new_model(seed=2).requires_grad_(False)
    rollout = InProcessRollout(StateSource(model), tokenizer)
    [whole] = generate(rollout, PROMPTS[:1], replace(SAMPLING, n=1))
    drawn = list(whole.sampled_tokens)
    text, seed = tokenizer.decode(drawn[1:3]), int(request_seeds([(4, 0)], 1))
    for said, wanted in ((2, drawn[2:3]), (0, drawn[2:])):
        decoder = rollout.decoder(replace(SAMPLING, stop=(text,)))
        decoder.add("row", [*whole.prompt_tokens, *drawn[:2]], seed=seed, drawn=2, limit=len(drawn) - 2, said=said)
        found = []
        while decoder.running or decoder.waiting:
            found += decoder.step()
        assert found[0].tokens == wanted and text not in tokenizer.decode(drawn[2:])


class Adds:
    """Answers one turn."""

    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        done = sum(message["role"] == "assistant" for message in messages) == 2
        return Step(messages=[{"role": "tool", "content": "+1="}], reward=1.0, done=done)


def test_a_conversation_goes_on_behind_a_text_with_the_token_that_was_not_drawn(new_model, tokenizer):
    """Every token between two turns that the policy did not draw is given, the end of the turn among them."""
    model = new_model(seed=2).requires_grad_(False)
    engine = InferenceEngine(lambda: InProcessRollout(StateSource(model), tokenizer)).build()
    stop = tuple("0123456789")  # any digit
    talks = engine.converse([{"prompt": "1+1="}], replace(SAMPLING, n=8, stop=stop), Adds, 2)
    assert any(talk.turns == 2 for talk in talks)
    for talk in talks:
        talk.require_sampled()
        if talk.turns == 2 and talk.messages[1]["content"][-1] in stop:
            before = tokenizer.decode(talk.tokens)
            assert talk.messages[1]["content"] + tokenizer.eos_token + "+1=" in before
    engine.release()


def test_between_two_turns_the_end_that_was_not_drawn_is_given():
    tokenizer = TOKENIZERS["bytes"]
    template = TurnTemplate(tokenizer)
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    answer = [{"role": "tool", "content": "12"}]
    behind = template.between(said, [1], answer)
    assert template.between(said, [1], answer, ended=False) == [tokenizer.eos_token_id, *behind]


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ("text", TypeError, "stop must be a sequence of texts, got 'text'"),
        ((1,), TypeError, r"got \(1,\)"),
        (("",), ValueError, r"a stop text has characters"),
        (("a\N{REPLACEMENT CHARACTER}",), ValueError, "no U\\+FFFD"),
    ],
)
def test_what_is_no_text_is_refused(stop, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(max_new_tokens=1, stop=stop)
