"""Decoders that share one engine of vLLM: each gets its own requests, and those of a decoder that is gone end."""

from types import SimpleNamespace

from rl_bridge.models.small import character_tokenizer
from rl_bridge.rollout.sampling import StopTexts
from rl_bridge.rollout.vllm.vllm_decoder import Outbox, _Said


class Engine:
    """Notes what it is told; its steps finish the requests in ``ends``."""

    def __init__(self):
        self.begun, self.aborted, self.ends = [], [], []

    def add_request(self, name, prompt, params):
        self.begun.append((name, prompt["prompt_token_ids"]))

    def abort_request(self, names):
        self.aborted += names

    def step(self):
        ends, self.ends = self.ends, []
        return [SimpleNamespace(request_id=name, finished=True) for name in ends]


class Owner:
    """A decoder, as far as the outbox sees it."""

    def __init__(self):
        self.got = []

    def finished(self, output):
        self.got.append(output.request_id)


def test_requests_of_a_decoder_that_is_gone_are_aborted_and_no_others():
    engine, forgotten = Engine(), []
    outbox = Outbox(engine, SimpleNamespace(forget=forgotten.append))
    one, other = Owner(), Owner()
    names = [outbox.add(owner, [number], None) for number, owner in enumerate((one, other, one, other))]
    assert engine.begun == [(name, [number]) for number, name in enumerate(names)] and len({*names}) == 4
    outbox.step()
    assert engine.aborted == forgotten == []
    engine.ends = names[:2]
    outbox.step()
    assert (one.got, other.got) == (names[:1], names[1:2])
    del other
    outbox.step()
    assert engine.aborted == forgotten == names[3:]
    engine.ends = names[2:]  # the engine had finished this one, too, before it was aborted
    outbox.step()
    assert one.got == [names[0], names[2]] and engine.aborted == names[3:]


def test_a_row_ends_with_the_first_token_that_completes_a_text_however_many_come_at_once():
    tokenizer = character_tokenizer("0123456789+=")
    texts, drawn = StopTexts(tokenizer, ["12", "="]), tokenizer.encode("3123=45", add_special_tokens=False)
    for steps in ([7], [3, 7], [2, 3, 7], [1, 5, 7], [2, 2, 6]):
        said = _Said(texts, ())
        ends = [said.end(drawn[:count]) for count in steps]
        assert ends == [3 if count >= 3 else None for count in steps]
    assert said.end(drawn[3:]) == 2, "an engine in its place draws the row anew"
