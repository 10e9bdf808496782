"""The commands that a server gets, in their order, and what a decoder counts: an engine above a server in memory."""

import threading

import pytest

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.served.process import ServerDied
from rl_bridge.rollout.served.protocol import Completion
from rl_bridge.rollout.served.served_engine import ServedDecoder, ServedEngine
from rl_bridge.rollout.vllm.weight_probe import EngineLimits

SAMPLING = SamplingParams(max_new_tokens=9)


class Server:
    """A server that replies at once, unless its number is among those that die or that wait."""

    limits = EngineLimits(13, 64, 0)

    def __init__(self, opened, folder):
        self.opened, self.number, self.folder = opened, len(opened.servers), folder
        self.commands, self.asks, self.paused, self.stopped, self.current = [], [], False, False, None

    def draw(self, ask):
        assert self.number not in self.opened.waiting or self.opened.end.wait(30)
        self.asks.append(ask)
        self.commands.append("draw")
        if self.number in self.opened.dying:
            raise ServerDied("it died")
        tokens = [len(ask.tokens) + number for number in range(ask.limit)]
        versions = [int(self.current)] * ask.limit if self.opened.versions else None
        return Completion(tokens, [-1.0] * ask.limit, None, versions, "length")

    def stamp(self, version):
        if self.opened.fails == "stamp":
            raise RuntimeError("no stamp")
        self.commands.append(f"stamp {version}")
        self.current = version

    def pause(self, *, clear):
        self.commands.append("pause, clear" if clear else "pause")
        self.paused = True

    def resume(self):
        self.commands.append("resume")
        self.paused = False

    def is_paused(self):
        return self.paused

    def adopt(self, folder):
        self.commands.append(f"adopt {folder}")

    def version(self):
        return self.current

    def probe(self, prompt, *, count, seed, temperature):
        self.commands.append("probe")
        return prompt, count, seed, temperature

    def abort(self, names):
        self.commands.append(f"abort {len(names)}")

    def dead(self):
        return self.stopped

    def stop(self):
        self.commands.append("stop")
        self.stopped = True


class Opened:
    """Opens servers, and keeps them."""

    def __init__(self, *, dying=(), waiting=(), versions=True, fails=None):
        self.servers, self.dying, self.waiting = [], {*dying}, {*waiting}
        self.versions, self.fails, self.end = versions, fails, threading.Event()

    def __call__(self, folder):
        self.servers.append(Server(self, folder))
        return self.servers[-1]

    def let_die(self, count):
        """The server that is there and those in its place, so many in all."""
        first = len(self.servers) - 1
        self.dying |= {*range(first, first + count)}


def engine_of(opened, restarts=1):
    return ServedEngine(opened, "weights", at_once=4, restarts=restarts)


def finish(decoder):
    ended = []
    while decoder.running:
        ended += decoder.step()
    return {drawn.key: drawn for drawn in ended}


def begun(engine, **options):
    decoder = ServedDecoder(engine, SAMPLING, stop=(), **options)
    decoder.add("row", [1, 2], seed=7, limit=3)
    return decoder


def test_a_server_s_weights_are_stamped_before_it_draws_and_its_adapter_is_there_before_that():
    opened = Opened()
    engine = engine_of(opened)
    assert opened.servers[0].commands == ["stamp 0"]
    engine.replace("new", "3", "adapter")
    first, second = opened.servers
    assert first.commands[-1] == "stop" and second.folder == "new"
    assert second.commands == ["adopt adapter", "stamp 3", "pause, clear"], "it is paused until its weights are proved"
    assert engine.version() == "3" and engine.restarts == 0


def test_a_server_that_cannot_be_made_ready_is_stopped():
    opened = Opened(fails="stamp")
    with pytest.raises(RuntimeError, match="no stamp"):
        engine_of(opened)
    assert opened.servers[0].commands == ["stop"]


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_so_many_deaths_in_a_row_are_survived_as_was_said_and_a_completion_between_them_begins_the_count_anew(restarts):
    opened = Opened()
    engine = engine_of(opened, restarts)
    for rounds in (1, 2):
        opened.let_die(restarts)
        assert finish(begun(engine))["row"].tokens == [2, 3, 4]
        assert engine.restarts == rounds * restarts and len(opened.servers) == 1 + engine.restarts
    opened.let_die(restarts + 1)
    with pytest.raises(ServerDied, match=rf"died {restarts + 1} times without a completion in between: it died"):
        finish(begun(engine))
    assert engine.restarts == 3 * restarts


def test_a_server_in_the_place_of_another_has_the_deaths_of_its_own_alone():
    opened = Opened(dying=[0, 2], waiting=[1])
    engine = engine_of(opened, restarts=1)
    decoder = begun(engine)
    while not engine.restarts:
        assert decoder.step() == []
    engine.replace("new", "2")
    engine.resume()
    assert finish(decoder)["row"].versions == [2] * 3 and engine.restarts == 2 and len(opened.servers) == 4
    opened.end.set()


def test_a_restarted_server_has_what_was_proved_last_and_not_what_was_on_its_way():
    opened = Opened()
    engine = engine_of(opened)
    engine.adopt("adapter", "1")
    engine.resume()
    engine.adopt("unproved", "2")
    opened.let_die(1)
    finish(begun(engine))
    assert opened.servers[-1].commands[:3] == ["adopt adapter", "stamp 1", "draw"]
    assert opened.servers[-1].folder == "weights"


def test_a_row_that_ended_beside_an_update_without_proof_begins_again_with_the_next_one():
    opened = Opened()
    engine = engine_of(opened)
    server = opened.servers[0]
    engine.pause()
    server.stamp("1")
    decoder = begun(engine)
    for version in ("2", "3"):
        assert not any(decoder.step() for _ in range(50) if not engine._unproved) and engine._unproved
        server.stamp(version)
        engine.pause()
    engine.resume()
    wanted = [decoder.step() for _ in range(50) if decoder.running]
    assert [row.versions for rows in wanted for row in rows] == [[3] * 3] and len(set(server.asks)) == 1


def test_a_probe_is_drawn_by_an_engine_that_runs_and_leaves_it_as_it_was():
    opened = Opened()
    engine = engine_of(opened)
    commands = opened.servers[0].commands
    for paused in (False, True):
        commands.clear()
        if paused:
            engine.pause()
        assert engine.generate([1], count=2, seed=3, temperature=0.5) == ([1], 2, 3, 0.5)
        assert commands == (["pause, clear", "resume", "probe", "pause"] if paused else ["probe"])
        assert engine.is_paused() is paused


@pytest.mark.parametrize("dead", [False, True])
def test_a_decoder_that_is_gone_takes_its_requests_back_from_a_server_that_lives(dead):
    opened = Opened(waiting=[0])
    engine = engine_of(opened)
    decoder, server = begun(engine), opened.servers[0]
    server.stopped = dead
    del decoder
    assert server.commands == ["stamp 0", *([] if dead else ["abort 1"])] and not engine._running
    opened.end.set()


def test_a_decoder_counts_the_rows_that_wait_for_the_next_round():
    opened = Opened()
    decoder = ServedDecoder(engine_of(opened), SAMPLING, stop=())
    decoder.draw_in_rounds()
    for key in range(3):
        decoder.add(key, [1] * (1 + key), seed=key, limit=5)
    assert (decoder.running, decoder.unfinished_tokens) == (3, 0)
    assert decoder.round(2) == [] and (decoder.running, decoder.unfinished_tokens) == (3, 6)
    [out] = decoder.withdraw({1})
    assert (out.key, out.tokens, out.reason, out.versions) == (1, [2, 3], "abort", [0, 0])
    assert (decoder.running, decoder.unfinished_tokens) == (2, 4)
    ended = [*decoder.round(2), *decoder.round(2)]
    assert {drawn.key: (len(drawn.tokens), drawn.reason) for drawn in ended} == {0: (5, "length"), 2: (5, "length")}
    asks = [(ask.seed, ask.drawn, ask.limit, len(ask.tokens)) for ask in opened.servers[0].asks]
    assert sorted(asks) == sorted(
        [(key, 2 * part, (2, 2, 1)[part], 1 + key + 2 * part) for key in (0, 2) for part in range(3)] + [(1, 0, 2, 2)]
    )


@pytest.mark.parametrize(("longest", "room"), [(None, 64), (10, 10), (100, 64)])
def test_a_row_ends_where_the_engine_or_the_model_ends_whichever_is_first(longest, room):
    decoder = ServedDecoder(engine_of(Opened()), SAMPLING, stop=(), longest=longest)
    with pytest.raises(ValueError, match=f"{room} tokens leaves no room .* the engine holds {room} "):
        decoder.add("long", [1] * room, seed=0, limit=1)
    decoder.add("row", [1] * (room - 2), seed=0, limit=9)
    assert len(finish(decoder)["row"].tokens) == 2


@pytest.mark.parametrize("token", [-1, 13])
def test_a_token_that_the_model_lacks_is_refused(token):
    with pytest.raises(ValueError, match=f"{token} is no token of the model, which knows those from 0 to 12"):
        ServedDecoder(engine_of(Opened()), SAMPLING, stop=()).add("strange", [3, token], seed=0, limit=1)


@pytest.mark.parametrize("stamped", [True, False])
def test_a_row_has_the_versions_of_its_tokens_where_the_server_says_them(stamped):
    decoder = begun(engine_of(Opened(versions=stamped)))
    assert finish(decoder)["row"].versions == ([0] * 3 if stamped else None)
    if not stamped:
        decoder.draw_in_rounds()
        decoder.add("nothing", [1], seed=0, limit=3)
        assert decoder.withdraw()[0].versions == [], "no token is without a version"


def test_a_request_is_drawn_as_its_row_asks():
    opened = Opened()
    decoder = ServedDecoder(engine_of(opened), SamplingParams(max_new_tokens=9, top_p=0.5), stop=(4, 5))
    decoder.add("row", [1, 2, 3], seed=-7, drawn=2, limit=3, greedy=True)
    finish(decoder)
    [ask] = opened.servers[0].asks
    assert (ask.tokens, ask.seed, ask.drawn, ask.limit, ask.stop) == ((1, 2, 3), -7, 2, 3, frozenset([4, 5]))
    assert ask.sampling.temperature == 0
