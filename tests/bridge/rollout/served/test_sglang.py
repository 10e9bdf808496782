"""SGLang's HTTP API as its 0.5.23 publishes it, by a recorded server: fields and their types are those of its wheel."""

import threading
import time
from array import array

import pytest

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import Ask, MalformedReply
from rl_bridge.rollout.served.served_engine import ServedDecoder, ServedEngine
from rl_bridge.rollout.served.sglang import SGLangOptions, SGLangServer, completion_of, request_of
from tests.bridge.rollout.served.recorded import recorded

INT, FLOAT, TEXT, FLAG, IDS = int, float, str, bool, list
# sglang/srt/managers/io_struct.py and sampling/sampling_params.py: what this package sends, and of which type.
FIELDS = {
    "/generate": {
        "rid": TEXT,
        "input_ids": IDS,
        "sampling_params": dict,
        "return_logprob": FLAG,
        "stream": FLAG,
        "return_sampling_mask": FLAG,
        "sampling_logprobs_mode": TEXT,
    },
    "/pause_generation": {"mode": TEXT},
    "/continue_generation": {"torch_empty_cache": FLAG},
    "/abort_request": {"rid": TEXT},
    "/begin_weight_update": {"selector": TEXT},
    "/end_weight_update": {},
    "/update_weights_from_disk": {
        "model_path": TEXT,
        "flush_cache": FLAG,
        "keep_pause": FLAG,
        "abort_all_requests": FLAG,
    },
    "/update_weight_version": {"new_version": TEXT, "abort_all_requests": FLAG},
}
SAMPLING_FIELDS = {
    "max_new_tokens": INT,
    "temperature": FLOAT,
    "top_k": INT,
    "top_p": FLOAT,
    "min_p": FLOAT,
    "repetition_penalty": FLOAT,
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
    "stop_token_ids": IDS,
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "no_stop_trim": FLAG,
    "sampling_seed": INT,
}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def check_fields(payload, wanted):
    assert payload.keys() <= wanted.keys(), payload.keys() - wanted.keys()
    for name, value in payload.items():
        assert type(value) is wanted[name], (name, value)


class Fake:
    """Replies with the keys of 0.5.23's tokenizer manager; draws the prompt's length, then counts.

    A stop token is cut off the tokens of a reply unless the request asks for the whole of it. An id aborts all requests
    that begin so, and a flush of the cache ends the server while a request waits. Paused in place it replies to nobody.
    """

    def __init__(self):
        self.version, self.fails, self.weights, self.waits = "default", "", [], threading.Event()
        self.status = 400
        self.waits.set()
        self.aborted, self.waiting, self.still = set(), [], False

    def __call__(self, path, payload):
        if path == "/model_info":
            return 200, {"model_path": "x", "weight_version": self.version, "is_generation": True}
        check_fields(payload, FIELDS[path])
        if path == "/generate" and self.fails == path:
            return self.status, {"message": "no"}
        if path == "/generate":
            check_fields(payload["sampling_params"], SAMPLING_FIELDS)
            rid = payload["rid"]
            self.aborted = {start for start in self.aborted if not rid.startswith(start)}
            self.waiting.append(rid)
            runs = (lambda: True) if "probe" in rid else self.waits.is_set
            while self.still or not (runs() or rid.startswith(tuple(self.aborted))):
                time.sleep(0.01)
            self.waiting.remove(rid)
            return 200, self.drawn(payload)
        if path == "/abort_request":
            self.aborted.add(payload["rid"])
            return 200, b""
        if path in ("/pause_generation", "/continue_generation"):
            self.still = payload.get("mode") == "in_place"
        if payload.get("flush_cache") and self.waiting:
            self.weights.append("the scheduler ended")
            return 500, b"flush_cache failed"
        if path == self.fails:
            return self.status, {"success": False, "message": "no such folder"}
        if path == "/update_weights_from_disk":
            self.weights.append(payload["model_path"])
        if path == "/update_weight_version":
            self.version = payload["new_version"]
        return 200, {"success": True, "message": "done", "status": "ok"}

    def drawn(self, payload):
        wanted = payload["sampling_params"]
        tokens = [(len(payload["input_ids"]) + n) % 13 for n in range(wanted["max_new_tokens"])]
        ends = [n for n, token in enumerate(tokens) if token in wanted["stop_token_ids"]]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        finish = {"type": "stop", "matched": tokens[-1]} if ends else {"type": "length", "length": len(tokens)}
        if payload["rid"].startswith(tuple(self.aborted)):
            tokens, finish = tokens[:1], {"type": "abort", "message": "Aborted"}
        meta = {
            "id": payload["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
        }
        if payload.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token + 1, token] for token in tokens]
            meta["output_token_sampling_logprobs"] = [-0.25] * len(tokens)
        trims = finish["type"] == "stop" and not wanted.get("no_stop_trim")
        return {"text": "", "output_ids": tokens[:-1] if trims else tokens, "meta_info": meta}


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 13}')
    return tmp_path


def engine_at(url, folder, seconds=5.0, at_once=4):
    options = SGLangOptions(url=url, max_model_len=64, start_seconds=seconds)
    return ServedEngine(lambda place: SGLangServer(options, place), folder, at_once=at_once, restarts=1)


def finish(decoder):
    found = []
    while decoder.running:
        found += decoder.step()
    return {drawn.key: drawn for drawn in found}


@pytest.mark.parametrize("truncated", [{}, {"min_p": 0.1, "top_k": 4}], ids=["plain", "truncated"])
def test_completions(fake, folder, truncated):
    with recorded(fake) as (url, asked):
        engine = engine_at(url, folder)
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9, **truncated), stop=[7])
        for key, length in enumerate([2, 5, 9]):
            decoder.add(key, [1] * length, seed=key, limit=4)
        found = finish(decoder)
        engine.close()
    assert [path for path, _ in asked[:6]] == [
        "/model_info",
        "/begin_weight_update",
        "/update_weights_from_disk",
        "/end_weight_update",
        "/continue_generation",
        "/update_weight_version",
    ], "the server gets the weights that this run begins with"
    assert fake.weights == [str(folder)] and fake.version == "0"
    assert {key: (drawn.tokens, drawn.reason) for key, drawn in found.items()} == {
        0: ([2, 3, 4, 5], "length"),
        1: ([5, 6, 7], "stop"),
        2: ([9, 10, 11, 12], "length"),
    }
    for drawn in found.values():
        assert drawn.versions == [0] * len(drawn.tokens)
        if truncated:
            assert drawn.logprobs == [-0.25] * len(drawn.tokens), "under the truncated distribution"
            assert drawn.allowed == [array("i", [token, token + 1]) for token in drawn.tokens]
        else:
            assert drawn.logprobs == [-token / 10 for token in drawn.tokens] and drawn.allowed is None


def test_an_update_is_between_begin_and_end_and_its_failure_is_read(fake, folder, tmp_path):
    with recorded(fake) as (url, asked):
        engine = engine_at(url, folder)
        asked.clear()
        engine.pause()
        assert engine.is_paused()
        engine.start()
        for bucket in (["a"], ["b"]):
            engine.update(tmp_path / "new", bucket)
        engine.finish("4")
        assert engine.version() == "4" and engine.reset_prefix_cache()
        probe = engine.generate([1, 2, 3], count=2, seed=1, temperature=1.0)
        assert (probe.tokens, probe.version, probe.cached, engine.is_paused()) == ((3, 4), "4", 0, True)
        engine.resume()
        commands = [(path, payload) for path, payload in asked if path not in ("/model_info", "/generate")]
        assert [path.lstrip("/") for path, _ in commands] == [
            *("pause_generation", "begin_weight_update", "update_weights_from_disk", "end_weight_update"),
            *("update_weight_version", "continue_generation", "pause_generation", "continue_generation"),
        ]
        assert [payload["mode"] for path, payload in commands if path == "/pause_generation"] == ["retract", "in_place"]
        fake.fails = "/update_weights_from_disk"
        engine.pause()
        engine.start()
        with pytest.raises(ValueError, match=r"update_weights_from_disk replied with status 400 .*no such folder"):
            engine.update(tmp_path / "newer", ["a"])
        fake.status = 200
        with pytest.raises(RuntimeError, match="SGLang's update_weights_from_disk failed: no such folder"):
            engine.update(tmp_path / "newer", ["a"])
        engine.close()


def test_rows_are_aborted_and_a_server_that_is_gone_is_waited_for(fake, folder):
    with recorded(fake) as (url, _):
        engine = engine_at(url, folder, seconds=0.6)
        fake.waits.clear()
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[7])
        decoder.add("row", [1, 2], seed=1, limit=4)
        (drawn,) = decoder.withdraw()
        assert (drawn.key, drawn.tokens, drawn.reason) == ("row", [2], "abort")
    decoder.add("lost", [1, 2], seed=1, limit=4)
    with pytest.raises((TimeoutError, ServerDied), match=r"did not reply for 0.6 s"):
        finish(decoder)
    engine.close()


def test_connections_to_one_server_name_no_request_alike(fake, folder):
    """Each numbers its requests from 0, and a server takes a second request of a running one's name for its own."""
    with recorded(fake) as (url, asked):
        for _ in range(2):
            engine = engine_at(url, folder)
            decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[7])
            for key in range(3):
                decoder.add(key, [1, 2], seed=key, limit=4)
            finish(decoder)
            engine.generate([1, 2, 3], count=2, seed=1, temperature=1.0)
            engine.close()
    names = [payload["rid"] for path, payload in asked if path == "/generate"]
    assert len(names) == len(set(names)) == 8


def until(condition):
    while not condition():
        time.sleep(0.01)


def test_a_row_that_is_withdrawn_takes_no_other_with_it(fake, folder):
    """Row 1 ended rows 10 and 11, as if they had reached their limits."""
    with recorded(fake) as (url, asked):
        engine = engine_at(url, folder, at_once=16)
        fake.waits.clear()
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[12])
        for key in range(12):
            decoder.add(key, [1, 2], seed=key, limit=4)
        until(lambda: len(fake.waiting) == 12)
        (drawn,) = decoder.withdraw([1])
        assert (drawn.key, drawn.tokens, drawn.reason) == (1, [2], "abort")
        fake.waits.set()
        rest = finish(decoder)
        assert {key: (row.tokens, row.reason) for key, row in rest.items()} == {
            key: ([2, 3, 4, 5], "length") for key in range(12) if key != 1
        }
        assert len([path for path, _ in asked if path == "/generate"]) == 12
        engine.close()


def test_rows_that_somebody_else_aborts_go_on(fake, folder):
    """They were rows of their limits, with the reward of an end; without a token there is nothing to go on from."""
    with recorded(fake) as (url, _):
        engine = engine_at(url, folder)
        fake.waits.clear()
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[12])
        decoder.add("row", [1, 2], seed=1, limit=4)
        until(lambda: fake.waiting)
        fake.aborted.update(fake.waiting)
        fake.waits.set()
        assert (finish(decoder)["row"].tokens, fake.waiting) == ([2, 3, 4, 5], [])
        engine.close()


@pytest.mark.parametrize("way", ["update", "replace"])
def test_rows_are_out_of_the_server_where_its_weights_change_and_begin_anew(fake, folder, tmp_path, way):
    """SGLang's scheduler ends where it is to flush its cache while requests wait."""
    with recorded(fake) as (url, asked):
        engine = engine_at(url, folder)
        fake.waits.clear()
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[12])
        for key in range(3):
            decoder.add(key, [1, 2], seed=key, limit=4)
        until(lambda: len(fake.waiting) == 3)
        if way == "update":
            engine.pause()
            engine.start()
            engine.update(tmp_path, ["a"])
            engine.finish("1")
        else:
            engine.replace(folder, "1")
        assert fake.waiting == [] and "the scheduler ended" not in fake.weights
        fake.waits.set()
        assert len(engine.generate([1, 2, 3], count=2, seed=1, temperature=1.0).tokens) == 2
        engine.resume()
        found = finish(decoder)
        engine.close()
    assert {key: (row.tokens, row.reason, row.versions) for key, row in found.items()} == {
        key: ([2, 3, 4, 5], "length", [1] * 4) for key in range(3)
    }
    assert len([path for path, _ in asked if path == "/generate"]) == 2 * 3 + 1


@pytest.mark.parametrize("way", ["replace", "close", "another update"])
def test_rows_beside_a_probe_without_proof_leave_a_server_that_is_paused(fake, folder, way):
    """A server that is paused in place ends no row: it was waited for until its time was over."""
    with recorded(fake) as (url, _):
        engine = engine_at(url, folder)
        engine.pause()
        decoder = ServedDecoder(engine, SamplingParams(max_new_tokens=9), stop=[12])
        decoder.add("row", [1, 2], seed=1, limit=4)
        fake.waits.clear()
        engine.server.resume()  # for a probe, beside which the row begins
        until(lambda: fake.waiting)
        engine.server.pause(clear=False)
        if way == "replace":
            engine.replace(folder, "1")
        elif way == "another update":
            engine.pause()
        else:
            engine.close()
        assert fake.waiting == []
        if way != "close":
            fake.waits.set()
            engine.resume()
            assert finish(decoder)["row"].tokens == [2, 3, 4, 5]
            engine.close()


def test_a_probe_that_fails_leaves_the_server_paused(fake, folder):
    with recorded(fake) as (url, _):
        engine = engine_at(url, folder)
        engine.pause()
        fake.fails = "/generate"
        with pytest.raises(ValueError, match="generate"):
            engine.generate([1, 2, 3], count=2, seed=1, temperature=1.0)
        assert engine.is_paused()
        engine.close()


def test_the_vocabulary_is_the_text_s_where_a_file_describes_several_models(fake, tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 13}, "vision_config": {"vocab_size": 5}}')
    with recorded(fake) as (url, _):
        engine = engine_at(url, tmp_path)
        assert engine.limits().vocabulary == 13
        engine.close()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"output_ids": [2, 4]}, "log-probabilities of other tokens than were drawn"),
        ({"meta_info": {}}, "a reply without 'output_token_logprobs'"),
        (
            {"meta_info": {"weight_versions": [{"version": "1", "start": 0, "end": 1}]}},
            "no weights version for all",
        ),
        ({"meta_info": {"finish_reason": {"type": "stop"}}}, "ended by 'stop' after 2 tokens, the last"),
        ({"meta_info": {"output_token_sampling_mask": [[1]]}}, "1 masks and 2 values for 2 tokens"),
    ],
)
def test_replies_that_do_not_fit_are_refused(fake, change, said):
    ask = Ask("1", (1, 1), SamplingParams(max_new_tokens=2, top_k=3), 7, 0, 2, frozenset([9]))
    fake.version = "3"
    reply = fake.drawn(request_of(ask))
    made = completion_of(reply, ask, "request 1")
    assert made.tokens == [2, 3] and made.versions == [3, 3]
    meta = change.get("meta_info", reply["meta_info"])
    changed = reply | change | {"meta_info": {} if meta == {} else reply["meta_info"] | meta}
    with pytest.raises(MalformedReply, match=said):
        completion_of(changed, ask, "request 1")
