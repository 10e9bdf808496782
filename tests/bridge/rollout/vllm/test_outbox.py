"""Decoders that share one engine of vLLM: each gets its own requests, and those of a decoder that is gone end."""

from types import SimpleNamespace

from rl_bridge.rollout.vllm.vllm_decoder import Outbox


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
