"""A served engine is killed, paused, updated and replaced: every request gets one completion, of proved weights."""

import itertools
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_bridge.common.guard import LOOK
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.ahead.pumps import Row
from rl_bridge.rollout.rollout_worker import EngineDied
from rl_bridge.rollout.served.process import ServerDied, ServerProcess
from rl_bridge.rollout.served.protocol import Ask, MalformedReply
from rl_bridge.rollout.served.served_engine import ABORTED, ServedDecoder
from rl_bridge.rollout.served.served_rollout import _Served
from rl_bridge.rollout.served.sglang import SGLangOptions
from rl_bridge.rollout.served.vllm_server import ServedOptions, completion_of
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_bridge.rollout.vllm.weight_probe import Tolerance
from rl_bridge.rollout.vllm.weight_updates import UpdatedEngine
from tests.bridge.rollout.served.running import SAMPLING, added, finish, opened, weights
from tests.support.processes import gone


def served(folder):
    """Lines of the fake: a completion that it worked out."""
    return (folder / "served").read_text().splitlines() if (folder / "served").exists() else []


def test_rows_get_their_tokens_whatever_else_runs(engine_of, tmp_path):
    engine = engine_of(weights(tmp_path / "w"))
    found = finish(added(engine))
    assert set(found) == set(range(20)) and {drawn.reason for drawn in found.values()} == {"stop", "length"}
    for drawn in found.values():
        assert (drawn.tokens[-1] == 0) == (drawn.reason == "stop") and 0 not in drawn.tokens[:-1]
        assert drawn.logprobs == [-0.5 - token / 100 for token in drawn.tokens]
        assert drawn.versions == [0] * len(drawn.tokens) and drawn.allowed is None
    cut = finish(added(engine, 2, sampling=SamplingParams(max_new_tokens=12, top_p=0.9)))
    assert all([ids.tolist() for ids in drawn.allowed] == [[0, 2, 4]] * len(drawn.tokens) for drawn in cut.values())
    one = added(engine, 7)
    assert {key: drawn.tokens for key, drawn in finish(one).items()} == {key: found[key].tokens for key in range(7)}
    with pytest.raises(ValueError, match=r"64 tokens leaves no room .*: the engine holds 64 \(max_model_len, or"):
        one.add("long", [1] * 64, seed=0, limit=1)
    one.add("bounded", [1] * 60, seed=0, limit=50)
    assert len(finish(one)["bounded"].tokens) <= 4


def test_a_greedy_row_is_asked_for_as_one_beside_sampled_ones(engine_of, tmp_path):
    engine, sampling = engine_of(weights(tmp_path / "w")), SamplingParams(max_new_tokens=12, top_p=0.9)
    decoder = ServedDecoder(engine, sampling, stop=())
    for key in range(4):
        decoder.add(key, [1, 2], seed=key, limit=5, greedy=key == 2)
    for key, drawn in finish(decoder).items():
        assert (set(drawn.logprobs) == {0.0}) == (drawn.allowed is None) == (key == 2)


def test_a_row_s_random_numbers_go_on_however_it_is_asked_for(engine_of, tmp_path, monkeypatch):
    """Of several pieces, of rounds, and taken up again with the tokens that it has (found by real vLLM alone)."""
    engine = engine_of(weights(tmp_path / "w"))
    wanted = finish(added(engine))
    monkeypatch.setattr("rl_bridge.rollout.served.served_engine.PIECE", 3)
    assert finish(added(engine, prepare=ServedDecoder.count_tokens)) == wanted
    decoder, found = added(engine, prepare=ServedDecoder.draw_in_rounds), []
    while decoder.running:
        found += decoder.round(4)
    assert {drawn.key: drawn for drawn in found} == wanted
    again = ServedDecoder(engine, SAMPLING, stop=(0,))
    long = [key for key, drawn in wanted.items() if len(drawn.tokens) > 5]
    for key in long:
        again.add(key, [1] * (1 + key % 5) + wanted[key].tokens[:5], seed=key, drawn=5, limit=7)
    assert {key: drawn.tokens for key, drawn in finish(again).items()} == {key: wanted[key].tokens[5:] for key in long}


@pytest.mark.long
@pytest.mark.parametrize("who", ["server", "guard"])
def test_a_server_that_dies_is_started_again_and_no_row_is_lost_or_done_twice(engine_of, tmp_path, who, caplog):
    folder = weights(tmp_path / "w", delay=0.02)
    wanted = finish(added(engine_of(folder)))
    engine = engine_of(folder)
    decoder = added(engine)
    before = {drawn.key: drawn for _ in range(5) for drawn in decoder.step()}
    process = engine.server.process
    os.kill(process.pid if who == "server" else process._guard.pid, signal.SIGKILL)
    start = time.monotonic()
    assert before | finish(decoder) == wanted and time.monotonic() - start < 20
    assert engine.restarts == 1 and gone(process.pid)
    assert "ended by SIGKILL; the end of " in caplog.text and "starting again with weights version 0" in caplog.text
    assert engine.server.process.pid != process.pid


SHARES = """
import os, sys, time
from multiprocessing import shared_memory
if os.fork():
    time.sleep(60)
memory = shared_memory.SharedMemory(create=True, size=1000)
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(memory.name)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux's shared memory")
def test_shared_memory_of_a_killed_server_s_processes_does_not_outlive_it(tmp_path):
    """vLLM's processes left theirs each time: Python's own tracker of shared memory is killed with them."""
    name = tmp_path / "name"
    process = ServerProcess([sys.executable, "-c", SHARES, str(name)], tmp_path / "log")
    process.wait_until(name.exists, 20)
    segment = Path("/dev/shm") / name.read_text()
    assert segment.exists()
    time.sleep(LOOK + 1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.dead.wait(20) and not segment.exists()


def test_a_server_that_dies_again_and_again_is_given_up(engine_of, tmp_path):
    engine = engine_of(weights(tmp_path / "w", act="die"))
    with pytest.raises(ServerDied, match=r"died 3 times without a completion in between: .*exit status 7; the end of"):
        finish(added(engine, limit=10, stop=()))
    assert engine.restarts == 2


@pytest.mark.long
def test_deaths_with_completions_between_them_do_not_add_up(engine_of, tmp_path):
    engine = engine_of(weights(tmp_path / "w", delay=0.02), restarts=1)
    wanted = finish(added(engine))
    for deaths in (1, 2):
        decoder = added(engine)
        os.kill(engine.server.process.pid, signal.SIGKILL)
        assert finish(decoder) == wanted and engine.restarts == deaths


class Worker(_Served):
    """The worker of a fake server."""

    def __init__(self, engine, folder):
        save_file({"weight": torch.ones(1)}, folder / "model.safetensors")
        self.engine, self._stop, self._tokenizer = engine, frozenset([0]), None
        self.updated = UpdatedEngine(engine, folder, tolerance=Tolerance.of("fp32"))


def test_a_server_that_is_given_up_is_a_dead_engine_to_an_asynchronous_run(engine_of, tmp_path):
    """The worker starts another one with the weights that it has, and takes the rows that are given to it then."""
    folder = weights(tmp_path / "w", act="die")
    worker = Worker(engine_of(folder, restarts=1), folder)
    rows = [Row((0, 0, key), (1,) * (1 + key), (), drawn=0, said=0, seed=key, limit=10) for key in range(3)]
    with pytest.raises(EngineDied, match="ServerDied: died 2 times without a completion in between"):
        worker.advance(rows, SAMPLING, 200)
    (folder / "act").write_text("")
    worker.restart()
    assert worker.weights_version() == 0 and not worker.engine._running and not worker.engine.is_paused()
    ended = worker.advance(rows, SAMPLING, 200)
    assert {row.key for row in ended} == {row.key for row in rows}


@pytest.mark.parametrize(
    "act, error, said",
    [
        (
            "exit",
            ServerDied,
            r"server \(process \d+\) ended with exit status 1; .*\nthe fake begins\nno such weights",
        ),
        (
            "hang",
            TimeoutError,
            r"vLLM's server did not reply within 0.5 s of its start; the end of ",
        ),
        ("sick", TimeoutError, r"did not reply within 0.5 s"),
        ("no plugin", RuntimeError, r"worker 0 of the engine of vLLM works without rl_bridge's plugin: .*VLLM_PLUGINS"),
        ("heads of 16", ValueError, r"heads have size 16, and vLLM's attention on a CPU takes 32, 64: "),
    ],
)
def test_a_server_that_does_not_start_is_named_with_its_log(tmp_path, act, error, said):
    start = time.monotonic()
    with pytest.raises(error, match=said):
        opened(weights(tmp_path / "w", act=act), ServedOptions(start_seconds=0.5 if act in ("hang", "sick") else 30))
    assert time.monotonic() - start < 120, "it waits for nothing"


def test_an_error_of_a_request_is_the_request_s(engine_of, tmp_path):
    engine = engine_of(weights(tmp_path / "w", act="error"))
    with pytest.raises(RuntimeError, match=r"/inference/v1/generate \(request 0\) in 1 try; .*status 500 .*is broken"):
        finish(added(engine, 1))
    assert engine.restarts == 0 and not engine.server.process.dead.is_set()


@pytest.mark.long
def test_what_is_drawn_from_unproved_weights_is_kept_until_the_proof(engine_of, tmp_path):
    old, new = weights(tmp_path / "old", delay=0.05), weights(tmp_path / "new", offset=5)
    engine = engine_of(old)
    decoder = added(engine, 8, stop=())
    time.sleep(0.1)
    engine.pause()
    assert engine.is_paused() and decoder.step() == []
    engine.start()
    engine.update(new, ["offset"])
    engine.finish("3")
    assert engine.reset_prefix_cache() and engine.version() == "3"
    probe = engine.generate([1, 2], count=4, seed=2, temperature=1.0)
    assert (probe.tokens, probe.version, probe.cached) == ((9, 12, 2, 5), "3", 0) and engine.is_paused()
    engine.server.resume()  # others draw while the proof is awaited
    time.sleep(1.0)
    assert decoder.step() == [] and decoder.running == 8
    engine.resume()
    found = finish(decoder)
    assert {tuple(sorted(set(drawn.versions))) for drawn in found.values()} >= {(0, 3)}
    os.kill(engine.server.process.pid, signal.SIGKILL)
    again = finish(added(engine, 8, stop=()))
    assert {version for drawn in again.values() for version in drawn.versions} == {3}, "it has the proved weights"
    shift = [0 if version == 3 else 5 for version in found[2].versions]
    assert again[2].tokens == [(token + more) % 13 for token, more in zip(found[2].tokens, shift, strict=True)]


@pytest.mark.long
def test_an_update_waits_for_no_row_of_the_server(engine_of, tmp_path):
    """As many rows as there are at once have a seat each, and none of them ends before the update."""
    folder = weights(tmp_path / "w", act="hold")
    engine = engine_of(folder)
    decoder = added(engine, 8)
    for _ in range(2):
        assert len(engine.generate([1, 2], count=2, seed=1, temperature=1.0).tokens) == 2
        assert not served(folder)[2:] and not decoder.step()
        engine.pause()
    engine.resume()
    (folder / "go").touch()
    assert len(finish(decoder)) == 8


def test_an_engine_that_is_replaced_forgets_what_was_not_proved(engine_of, tmp_path):
    old, new = weights(tmp_path / "old", delay=0.05), weights(tmp_path / "new", offset=5)
    engine = engine_of(old)
    decoder = added(engine, 8, stop=())
    first = engine.server.process.pid
    engine.pause()
    engine.start()
    engine.update(new, ["offset"])
    engine.finish("3")
    engine.server.resume()
    time.sleep(0.8)
    engine.replace(old, "2")
    assert engine.is_paused() and engine.version() == "2" and gone(first) and decoder.step() == []
    engine.resume()
    found = finish(decoder)
    assert {version for drawn in found.values() for version in drawn.versions} == {2}
    assert engine.restarts == 0, "the death of the server before is no death of this one"
    fresh = finish(added(engine_of(old), 8, stop=()))
    assert {key: drawn.tokens for key, drawn in found.items()} == {key: drawn.tokens for key, drawn in fresh.items()}


def updates(engine, folder):
    engine.start()
    engine.update(folder, ["offset"])
    engine.finish("3")


WAYS = {
    "updated": updates,
    "replaced": lambda engine, folder: engine.replace(folder, "3"),
    "replaced, with an adapter": lambda engine, folder: engine.replace(folder, "3", folder),
    "given an adapter": lambda engine, folder: engine.adopt(folder, "3"),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_unproved_weights_draw_is_given_out(engine_of, tmp_path, way):
    """SURV-7: however a server came to them."""
    old, new = weights(tmp_path / "old"), weights(tmp_path / "new", offset=5)
    engine = engine_of(old)
    engine.pause()
    decoder = added(engine, 8, stop=())
    WAYS[way](engine, new)
    engine.server.resume()  # for the draws of the proof: all requests go on
    folder = new if way.startswith("replaced") else old
    deadline = time.monotonic() + 60
    while len(served(folder)) < 8:
        assert time.monotonic() < deadline and decoder.step() == []
    assert [decoder.step() for _ in range(3)] == [[]] * 3 and decoder.running == 8
    engine.resume()
    found = finish(decoder)
    assert set(found) == set(range(8)) and {v for drawn in found.values() for v in drawn.versions} == {3}


@pytest.mark.long
def test_rows_that_are_withdrawn_come_back_with_what_they_have(engine_of, tmp_path):
    folder = weights(tmp_path / "w", delay=0.03)
    engine = engine_of(folder)
    decoder = added(engine, 20)
    time.sleep(0.15)
    out = decoder.withdraw([0, 1, 2, 19])
    assert {drawn.key for drawn in out} == {0, 1, 2, 19} and decoder.running == 16
    (waited,) = [drawn for drawn in out if drawn.key == 19]
    assert waited.tokens == [] and waited.reason == "abort", "it was not in the engine yet"
    assert any(0 < len(drawn.tokens) < 12 and drawn.reason == "abort" for drawn in out)
    rest = finish(decoder)
    assert set(rest) == set(range(20)) - {0, 1, 2, 19}
    forgotten = added(engine, 3)
    del forgotten
    last = finish(added(engine, 2))
    assert len(last) == 2 and not engine._running and not engine._done


def test_a_row_that_was_not_sent_is_withdrawn_while_the_engine_draws_nothing(engine_of, tmp_path):
    """The rows before it have all of the places, and a paused engine gives none of them up."""
    folder = weights(tmp_path / "w")
    engine = engine_of(folder)
    engine.pause()
    names = [engine.submit([1], SAMPLING, seed=key, drawn=0, limit=12, stop=frozenset()) for key in range(9)]
    assert engine.withdraw(names[8:], seconds=1.0) == {names[8]: ABORTED}
    engine.resume()
    found = {}
    while len(found) < 8:
        more = engine.take(names, 30.0)
        assert more, f"{len(found)} rows of 8 ended"
        found |= more
    assert set(found) == set(names[:8]) and len(served(folder)) == 8


def test_a_command_that_is_not_there(tmp_path):
    made = ServerProcess([str(tmp_path / "absent")], tmp_path / "log", name="the engine")
    with pytest.raises(ServerDied, match=r"the engine \(process -1\) ended with exit status 127; (.|\n)*No such file"):
        made.wait_until(lambda: False, 30)


@pytest.mark.parametrize("ends", [(), (1,), (1, 2), (0, 2), (2,), (2, 3), (3,)], ids=str)
def test_a_reply_without_a_version_for_each_token_and_no_more_is_refused(ends):
    """``ends``: of spans that begin where the one before ended, the first at 0."""
    pairs = list(itertools.pairwise((0, *ends)))
    spans = [{"version": 3 + n, "start": start, "end": end} for n, (start, end) in enumerate(pairs)]
    rows = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
    choice = {"token_ids": [5, 6], "logprobs": {"content": rows}, "finish_reason": "length", "weight_versions": spans}
    ask = Ask("1", (1,), SamplingParams(max_new_tokens=2), 7, 0, 2, frozenset([9]))
    if max(ends, default=0) == 2:
        wanted = {(2,): [3, 3], (1, 2): [3, 4], (0, 2): [4, 4]}
        assert completion_of({"choices": [choice]}, ask, "request 1").versions == wanted[ends]
    else:
        with pytest.raises(MalformedReply, match="no weights version for all of 2 tokens"):
            completion_of({"choices": [choice]}, ask, "request 1")


REFUSED = [{"start_seconds": 0}, {"request_seconds": float("nan")}, {"control_seconds": -1.0}]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("server", ["vLLM", "SGLang"])
def test_limits_that_limit_nothing_are_refused(server, change):
    kind = ServedOptions if server == "vLLM" else partial(SGLangOptions, url="http://host:1", max_model_len=8)
    assert getattr(kind(), next(iter(change))) > 0
    with pytest.raises(ValueError, match=r"seconds must be > 0, got .*" + re.escape(str(next(iter(change.values()))))):
        kind(**change)


@pytest.mark.parametrize("change", [{"url": "host:30000"}, {"max_model_len": 0}, {"page_size": 0}], ids=str)
def test_a_server_without_an_address_or_room_is_refused(change):
    with pytest.raises(ValueError, match=r"http.*got url="):
        SGLangOptions(**{"url": "https://host", "max_model_len": 8, **change})


def test_a_negative_number_of_restarts_is_refused():
    with pytest.raises(ValueError, match="restarts must be ≥ 0, got -1"):
        ServedOptions(restarts=-1)


def test_the_command_line_s_server_needs_a_device_of_its_own(monkeypatch):
    options = RolloutOptions(backend="vllm_server", vllm=VLLMOptions(max_model_len=64))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend vllm_server needs vLLM in this environment"):
        options.factory(None, None, sleep=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match="a server of vLLM keeps its device"):
        options.factory(None, None, sleep=True)
    assert options.factory(None, None, sleep=False).args == (None, None, VLLMOptions(max_model_len=64))
