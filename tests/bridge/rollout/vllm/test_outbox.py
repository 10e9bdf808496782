"""Decoders that share one engine of vLLM: each gets its own requests, and those of a decoder that is gone end."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.small import character_tokenizer
from rl_bridge.rollout.sampling import StopTexts
from rl_bridge.rollout.vllm.client import InProcessEngine
from rl_bridge.rollout.vllm.vllm_decoder import Outbox, VLLMDecoder, _Said


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


STOP, GREEDY = 7, SamplingParams(max_new_tokens=8, temperature=0)


class Inside:
    """As much of vLLM's engine as a withdrawal looks at. A step ends the requests in ``ends``: name → tokens."""

    def __init__(self, folder):
        model, cache = SimpleNamespace(get_vocab_size=lambda: 20, max_model_len=30), SimpleNamespace()
        cache.block_size, cache.enable_prefix_caching = 8, False
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache)
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.engine_core = SimpleNamespace(engine_core=self)
        self.scheduler = SimpleNamespace(waiting=[])
        self.begun, self.ends = {}, {}

    def collective_rpc(self, *of, **how):
        pass

    def is_scheduler_paused(self):
        return False

    def pause_scheduler(self, mode, clear_cache):
        pass

    def resume_scheduler(self):
        pass

    def set_weight_version(self, version):
        pass

    def add_request(self, name, prompt, params):
        self.begun[name] = params
        self.output_processor.external_req_ids[name] = [f"{name} inside"]
        self.output_processor.request_states[f"{name} inside"] = SimpleNamespace(queue=None)

    def abort_request(self, names):
        for name in names:
            self.left(name).queue.put(output(name, [3], "abort"))

    def step(self):
        ends, self.ends = self.ends, {}
        for name in ends:
            self.left(name)
        return [output(name, tokens, "stop" if tokens[-1] == STOP else "length") for name, tokens in ends.items()]

    def left(self, name):
        del self.output_processor.external_req_ids[name]
        return self.output_processor.request_states.pop(f"{name} inside")


def output(name, tokens, reason):
    logprobs = [{token: SimpleNamespace(logprob=0.0)} for token in tokens]
    drawn = SimpleNamespace(token_ids=tokens, logprobs=logprobs, weight_versions=[], finish_reason=reason)
    return SimpleNamespace(request_id=name, finished=True, outputs=[drawn], num_cached_tokens=0)


@pytest.fixture
def client(monkeypatch):
    def params(sampling, *, limit, **how):
        return SimpleNamespace(limit=limit, clone=lambda: SimpleNamespace(limit=limit))

    without_vllm = SimpleNamespace(vllm_sampling=params)
    monkeypatch.setitem(sys.modules, "rl_bridge.rollout.vllm.vllm_engine", without_vllm)
    return InProcessEngine(Inside, lambda engine: None, Path(), sampling=lambda **how: params(None, limit=1))


def in_the_client(client, outbox):
    """A probe steps the engine, and the outputs of others wait for the next step."""
    client.engine.ends["rl_fn-probe-1"] = [5]
    client.generate([5], count=1, seed=1, temperature=1.0)


def in_the_decoder(client, outbox):
    """Another decoder of the engine steps it."""
    outbox.step()


@pytest.mark.parametrize("keys", [None, {0, 1, 2, 3}, {0, 2}])
@pytest.mark.parametrize("where", [in_the_client, in_the_decoder])
def test_rows_that_have_ended_are_withdrawn_too_with_their_own_reasons(client, where, keys):
    outbox = Outbox(client, SimpleNamespace())
    decoder = VLLMDecoder(outbox, GREEDY, stop={STOP}, longest=30)
    for key in range(6):
        decoder.add(key, [5], seed=key, limit=8)
    names = list(client.engine.begun)
    client.engine.ends = {names[0]: [4, STOP], names[1]: [4] * 8, names[4]: [STOP]}
    where(client, outbox)
    wanted = {0: "stop", 1: "length", 2: "abort", 3: "abort", 4: "stop", 5: "abort"}
    chosen = set(wanted) if keys is None else keys
    assert {row.key: row.reason for row in decoder.withdraw(keys)} == {key: wanted[key] for key in chosen}
    assert decoder.running == 6 - len(chosen)
    left = decoder.step() if {0, 1, 4} - chosen else []
    assert {row.key: row.reason for row in left} == {key: wanted[key] for key in {0, 1, 4} - chosen}


def test_a_fresh_engine_gets_what_has_not_ended_and_nothing_else(client):
    """A batch that was on its way when the engine was paused has ended a request, which the client still holds."""
    outbox = Outbox(client, SimpleNamespace())
    decoder = VLLMDecoder(outbox, GREEDY, stop={STOP}, longest=30)
    for key in range(3):
        decoder.add(key, [5], seed=key, limit=8)
    names = list(client.engine.begun)
    client.engine.ends = {names[1]: [4, STOP]}
    in_the_client(client, outbox)
    client.replace(Path(), "1")
    assert list(client.engine.begun) == [names[0], names[2]]
    assert [row.key for row in decoder.step()] == [1] and decoder.running == 2


def test_rows_outlive_a_fresh_engine_that_takes_no_adapter(client, monkeypatch):
    """The engine that the client went back to had none of them, and a stream waited for ever."""

    def fails(*adapter):
        raise MemoryError("no room for the adapter")

    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LoRARequest=lambda *of, **how: None))
    monkeypatch.setattr(Inside, "add_lora", fails, raising=False)
    decoder = VLLMDecoder(Outbox(client, SimpleNamespace()), GREEDY, stop={STOP}, longest=30)
    for key in range(2):
        decoder.add(key, [5], seed=key, limit=8)
    names = list(client.engine.begun)
    with pytest.raises(MemoryError):
        client.replace(Path(), "1", Path())
    client.replace(Path(), "0")
    assert list(client.engine.begun) == names and client.running == decoder.running == 2


@pytest.mark.parametrize("positions", [6, 12, 30])
@pytest.mark.parametrize("limit", [1, 8, 40])
def test_a_row_has_no_more_tokens_than_the_model_has_positions(client, positions, limit):
    decoder = VLLMDecoder(Outbox(client, SimpleNamespace()), GREEDY, stop={STOP}, longest=positions)
    decoder.add("row", [5] * 5, seed=1, limit=limit)
    [params] = client.engine.begun.values()
    assert params.limit == min(limit, positions - 5)
