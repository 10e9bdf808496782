"""An environment and a tool answer alike wherever they are called: in threads, ahead of training, in own processes.

Every kind of function × every place gives the same conversations three times in a row, or the run ends at the first
call with the option that cures it; and with that option it gives the conversations.
"""

import socketserver
import threading
from dataclasses import replace

import pytest

from rl_bridge.environments import Step, load_environment
from rl_bridge.environments.environment import Session
from rl_bridge.environments.environment_calls import EnvironmentProcesses, ThreadedSteps
from rl_bridge.environments.functions import function_tools
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout.ahead.environment_turns import Talking, Talks
from rl_bridge.rollout.ahead.ledger import Group, Sample
from rl_bridge.rollout.conversations import Conversations, Limits, Opening
from tests.support.chat_templates import bytes_tokenizer
from tests.support.simulated_sampler import SimulatedSampler

TOKENIZER = character_tokenizer("0123456789+-=?")
LIMITS = Limits(max_turns=3, turn_tokens=20)
KINDS = """
import asyncio, dataclasses, pathlib, pickle, signal, threading
from helper_of_environments import length as of_helper
from rl_bridge.environments import Step

def limited(text):
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        return len(text)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

async def limited_later(text):
    return limited(text)

ONE = asyncio.Semaphore(1)

async def one_at_a_time(text):
    async with ONE:
        await asyncio.sleep(0)
        return len(text)

PORT = int((pathlib.Path(__file__).parent / "port").read_text())
KEPT = []

async def asked(text):
    async with ONE:
        if not KEPT:
            KEPT.extend(await asyncio.open_connection("127.0.0.1", PORT))
        KEPT[1].write(text.encode() + b"\\n")
        return int(await KEPT[0].readline())

LOCAL, AT_IMPORT, OF_RESET = threading.local(), threading.local(), threading.local()
AT_IMPORT.length = len

def of_this_thread(text):
    if not hasattr(LOCAL, "length"):
        LOCAL.length = len
    return LOCAL.length(text)

CACHE = {}

@dataclasses.dataclass
class Value:
    value: int

KINDS = {
    "plain": len,
    "alarm": limited,
    "alarm in a coroutine": limited_later,
    "semaphore": one_at_a_time,
    "kept connection": asked,
    "thread-local": of_this_thread,
    "thread-local of the import": lambda text: AT_IMPORT.length(text),
    "cache": lambda text: CACHE.setdefault(text, len(text)),
    "dataclass": lambda text: pickle.loads(pickle.dumps(Value(len(text)))).value,
    "neighbour": lambda text: of_helper(text),
    "neighbour at the call": lambda text: __import__("helper_of_environments").length(text),
    "asyncio.run": lambda text: asyncio.run(asyncio.sleep(0, len(text))),
}

class Lengths:
    def reset(self, row):
        self.length = KINDS[row["kind"]] if row["kind"] in KINDS else self.of_reset
        OF_RESET.length = len
        return [{"role": "user", "content": row["prompt"]}]

    def of_reset(self, text):
        return OF_RESET.length(text)

    def step(self, messages):
        length = self.length(messages[-1]["content"])
        if not asyncio.iscoroutine(length):
            return self.answer(length)
        async def later():
            return self.answer(await length)
        return later()

    def answer(self, length):
        return Step(messages=[{"role": "tool", "content": f"={length}"}], reward=float(length))
"""
NEED_A_PROCESS = ("alarm", "alarm in a coroutine", "thread-local of the import", "thread-local of reset")
OTHERS = (
    *("semaphore", "kept connection", "thread-local", "cache", "dataclass", "neighbour", "neighbour at the call"),
    "asyncio.run",
)
WAY_ON = "--environment-processes"


class Length(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(b"%d\n" % (len(line) - 1))


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "helper_of_environments.py").write_text("def length(text):\n    return len(text)\n")
    (folder / "lengths_of_environments.py").write_text(KINDS)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Length) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (folder / "port").write_text(str(server.server_address[1]))
        yield load_environment(f"{folder / 'lengths_of_environments.py'}:Lengths")
        server.shutdown()


def converse(make, kinds):
    """Two conversations with each kind, without the kind."""
    rows = [{"prompt": f"{i}+1=", "kind": kind} for kind in kinds for i in range(2)]
    openings = [(Opening(request_id=(i % 2,), seed=i % 2, row=row), make()) for i, row in enumerate(rows)]
    sampler = SimulatedSampler(range(2, 11), TOKENIZER.eos_token_id, stop=0.9)
    with ThreadedSteps(limit=60) as steps:
        trajectories = Conversations(sampler, steps, TurnTemplate(TOKENIZER), LIMITS).run(openings)
    return [replace(trajectory, row={}) for trajectory in trajectories]


def ahead(factory, kind):
    """The replies to an opening and to a turn, of two conversations that run ahead of training."""
    talking = Talking(environment=factory, limits=LIMITS, template=TurnTemplate(TOKENIZER))
    row = {"prompt": "1+1=", "kind": kind}
    talks = Talks(talking, lambda group, place: Opening(request_id=(group.number, place), seed=0, row=row))
    turns = []
    try:
        for number in range(2):
            group = Group(number, row, [Sample(0)], 0)
            sample = group.samples[0]
            for drawn in (0, 2):
                if drawn:
                    turns[-1].drawn = drawn
                    sample.tokens, sample.logprobs = [5, TOKENIZER.eos_token_id], [0.0, 0.0]
                    sample.spans = [(0, drawn)]
                talks.ask(group, 0)
                (reply,) = talks.replies()
                assert reply.reason is None and reply.turn is not None
                sample.turns.append(reply.turn)
                turns.append(reply.turn)
    finally:
        talks.close()
    return turns


@pytest.mark.parametrize("kind", OTHERS)
def test_conversations_are_the_same_in_threads_and_ahead_of_training(kind, lengths):
    expected = converse(lambda: Session(lengths), ["plain"])
    assert all(trajectory.turns > 1 for trajectory in expected)
    assert [converse(lambda: Session(lengths), [kind]) for _ in range(3)] == [expected] * 3
    assert ahead(lengths, kind) == ahead(lengths, "plain")


@pytest.mark.parametrize("kind", NEED_A_PROCESS)
def test_what_threads_cannot_call_ends_the_run_with_the_way_on(kind, lengths):
    """A conversation that fails is left out of a step; here all would be, or those alone that come to the call."""
    with pytest.raises(ValueError, match=WAY_ON):
        converse(lambda: Session(lengths), ["plain", kind])
    with pytest.raises(ValueError, match=WAY_ON):
        ahead(lengths, kind)


@pytest.mark.long
def test_conversations_of_every_kind_are_the_same_in_processes(lengths):
    kinds = (*OTHERS, *NEED_A_PROCESS)
    expected = converse(lambda: Session(lengths), ["plain"])
    processes = EnvironmentProcesses(lengths, limit=60)
    try:
        assert converse(processes.session, kinds) == expected * len(kinds)
    finally:
        processes.close()


def alarm(text: str) -> int:
    """
    Count characters.

    Args:
        text: The characters.
    """
    import signal

    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    return len(text)


async def alarm_later(text: str) -> int:
    """
    Count characters.

    Args:
        text: The characters.
    """
    return alarm(text)


@pytest.mark.parametrize("tool", [alarm, alarm_later])
def test_a_tool_that_a_thread_cannot_call_is_no_reply_that_the_policy_reads(tool):
    tools = function_tools([tool], bytes_tokenizer("chatml"), lambda text: [(tool.__name__, {"text": text})])
    turn = [{"role": "assistant", "content": "abc"}]

    def reply():
        session = Session(tools)
        session.reset({"prompt": "?"})
        return session.step(turn)

    with ThreadedSteps(limit=60) as steps:
        steps.start("tool", reply)
        (finished,) = steps.finished(wait=True)
    assert WAY_ON in str(finished.error)
    if tool is alarm:
        assert reply() == Step(messages=[{"role": "tool", "content": "3"}])
