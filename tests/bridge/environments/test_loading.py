import asyncio
import concurrent.futures
import pickle
import socket
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl_bridge.data.trajectory import RowRequest, SamplingParams
from rl_bridge.environments import Interact, Step, load_environment
from rl_bridge.environments.environment import Session
from rl_bridge.environments.factories import FileFactory, OpenEnv, OpenEnvSession, fingerprint_of, json_action
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.environment_turns import Talking, Talks
from rl_bridge.rollout.conversations import Limits

FILE = """
from dataclasses import dataclass
from rl_bridge.environments import Step
from word_of_the_neighbour import WORD

@dataclass
class Game:
    word: str = WORD
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, messages):
        import later_neighbour
        return Step(messages=[{"role": "tool", "content": self.word + later_neighbour.WORD}])

def make():
    return Game("made")

def interact(messages):
    return [] if len(messages) > 2 else [{"role": "tool", "content": "4"}]

async def slowly(messages, limit=3):
    return interact(messages)

class NoStep:
    def reset(self, row): ...

class Wants(Game):
    def __init__(self, size): ...

def two(messages, answer): ...

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "game.py").write_text(FILE)
    (tmp_path / "word_of_the_neighbour.py").write_text("WORD = 'next'")
    (tmp_path / "later_neighbour.py").write_text("WORD = ' door'")
    return tmp_path


def test_a_class_is_made_anew_each_time_and_may_import_its_neighbours(folder):
    factory = load_environment(f"{folder}/game.py:Game")
    first, second = factory(), factory()
    assert first is not second and first.reset({"prompt": "q"}) == [{"role": "user", "content": "q"}]
    assert first.step([]).messages == [{"role": "tool", "content": "next door"}]


def test_neighbours_of_one_name_are_those_of_each_file(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "game2.py").write_text(FILE)
    (other / "word_of_the_neighbour.py").write_text("WORD = 'another'")
    words = [load_environment(f"{file}:Game")().word for file in (folder / "game.py", other / "game2.py")]
    assert words == ["next", "another"]


def test_a_factory_travels_as_the_place_of_its_file(folder):
    factory = load_environment(f"{folder}/game.py:make")
    assert len(pickle.dumps(factory)) < 400
    there = pickle.loads(pickle.dumps(factory))
    assert there == factory and there().word == factory().word == "made"


@pytest.mark.parametrize("name", ["interact", "slowly"])
def test_a_function_of_the_messages_is_rl2_s(folder, name):
    environment = load_environment(f"{folder}/game.py:{name}")()
    assert isinstance(environment, Interact)
    assert environment.reset({"prompt": "2+2="}) == ({"role": "user", "content": "2+2="},)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert environment.reset({"prompt": chat}) == tuple(chat)


def test_a_function_that_returns_no_environment_is_named(folder):
    (folder / "one.py").write_text("def make():\n    return 1\n")
    with pytest.raises(ValueError, match=r"one\.py: make\(\) returns an environment, with .* reset and step; got 1$"):
        load_environment(f"{folder}/one.py:make")()


def test_an_empty_list_says_nothing_more():
    assert Interact(lambda messages: []).step([{"role": "user", "content": "q"}]) == Step(messages=[])


@pytest.mark.parametrize(
    "source, said",
    [
        ("game.py", "an environment is named FILE.py:Name or http://HOST:PORT, got 'game.py'"),
        ("game.py:NoStep", "class NoStep has no method step"),
        ("game.py:Wants", "Wants is made without arguments, and asks for size"),
        ("game.py:two", "takes the messages, or nothing and returns an environment; two asks for messages, answer"),
        ("game.py:number", "has no class or function 'number'"),
        ("game.py:Missing", "has no class or function 'Missing'"),
        ("broken.py:Game", "broken.py cannot be loaded: ModuleNotFoundError: No module named 'no_such_neighbour'"),
        ("exits.py:Game", "exits.py cannot be loaded: SystemExit: 0"),
    ],
)
def test_what_is_no_environment_is_refused(folder, monkeypatch, source, said):
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("import no_such_neighbour")
    (folder / "exits.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(ValueError, match=said):
        load_environment(source)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such environment file: .*game.py"):
        load_environment(f"{tmp_path}/game.py:Game")


@pytest.fixture
def new_worker(new_model, tokenizer):
    return InProcessRollout(StateSource(new_model().requires_grad_(False)), tokenizer)


GAME = """
import beside_only_here

class Game:
    def reset(self, row): ...
    def step(self, messages): ...
"""
OTHERS = {
    "no file": (None, FileNotFoundError, "no such environment file on {host}: {file}; "),
    "another file": (
        "reset = step = 0",
        ValueError,
        "the environment file on {host}, or a module beside it, is another",
    ),
    "another neighbour": (
        GAME,
        ValueError,
        "the environment file on {host}, or a module beside it, is another than the",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_file_that_another_machine_has_otherwise_is_named_with_the_machine(case, tmp_path, new_worker):
    """The driver loads the file at once; a worker loads the file when its first conversation begins."""
    text, kind, words = OTHERS[case]
    file, beside = tmp_path / "only_here.py", tmp_path / "beside_only_here.py"
    file.write_text(GAME)
    beside.write_text("X = 1\n")
    arrived = pickle.dumps(load_environment(f"{file}:Game"))
    file.unlink()
    beside.write_text("X = 22\n")
    if text is not None:
        file.write_text(text)
    factory = pickle.loads(arrived)
    talking = Talking(
        environment=factory,
        limits=Limits(max_turns=1, turn_tokens=1),
        template=TurnTemplate(character_tokenizer("1+=")),
    )
    uses = {
        "a conversation": lambda: Session(factory).reset({}),
        "conversations": lambda: new_worker.converse(
            [RowRequest({}, (0,))], SamplingParams(max_new_tokens=1), factory, 1
        ),
        "conversations that run ahead": lambda: Talks(talking, lambda group, place: None),
    }
    for use in uses.values():
        with pytest.raises(kind) as failure:
            use()
        assert str(failure.value).startswith(words.format(host=socket.gethostname(), file=file))


def test_a_file_that_extends_the_path_is_the_same_file_each_time(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_of_a_game.py").write_text("X = 1\n")
    text = f"import sys\nsys.path.insert(0, {str(tmp_path / 'lib')!r})\nimport helper_of_a_game\n"
    (tmp_path / "path_game.py").write_text(text + GAME.replace("import beside_only_here", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        first, second = (load_environment(f"{tmp_path / 'path_game.py'}:Game").file for _ in range(2))
    assert first == second != ""


def test_threads_that_unpickle_a_factory_execute_its_file_once(tmp_path):
    """A worker's first conversations begin in threads, each with the factory that arrived."""
    file, count, threads = tmp_path / "counted.py", tmp_path / "count", 8
    file.write_text("class Game:\n    def reset(self, row): ...\n    def step(self, messages): ...\n")
    # The file takes its time, as imports do: all threads come while the first executes it.
    file.write_text(
        f"import time\nwith open({str(count)!r}, 'a') as lines:\n    lines.write('executed\\n')\ntime.sleep(0.05)\n"
        + file.read_text()
    )
    arrived = pickle.dumps(FileFactory(str(file), "Game", "the content of another run"))
    together = threading.Barrier(threads, timeout=60)

    def begin(_):
        together.wait()
        return type(pickle.loads(arrived)())

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        assert len(set(pool.map(begin, range(threads)))) == 1
    assert count.read_text().split() == ["executed"]
    assert pickle.loads(pickle.dumps(pickle.loads(arrived))) is pickle.loads(arrived)


class Client:
    """OpenEnv's, as far as a step needs it."""

    async def step(self, action):
        return SimpleNamespace(observation={"text": f"got {action}"}, reward=1.0, done=True)


def test_an_action_that_cannot_be_made_of_the_policy_s_words_is_the_policy_s_fault():
    session = OpenEnvSession(OpenEnv(url="ws://nowhere", action=json_action))
    session._client = Client()

    def step(text):
        return asyncio.run(session.step([{"role": "assistant", "content": text}]))

    assert step('{"guess": 7}') == Step(
        messages=[{"role": "user", "content": "got {'guess': 7}"}], reward=1.0, done=True
    )
    for text in ("guess 7", "[7]"):
        answer = step(text)
        assert answer.reward == 0.0 and not answer.done
        assert answer.messages[0]["content"].startswith("no action: ")


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path):
    """A server and a file may be elsewhere when a run is taken up."""
    here, there = OpenEnv(url="ws://a:1"), OpenEnv(url="http://b:2", timeout=5.0)
    assert fingerprint_of(here) == fingerprint_of(there) != fingerprint_of(replace(here, action=json_action))
    games = {fingerprint_of(OpenEnv(url=f"http://gw:1{path}")) for path in ("", "/chess", "/go", "/go?level=2")}
    assert len(games) == 4 and fingerprint_of(OpenEnv(url="https://b/go?token=1")) == fingerprint_of(
        OpenEnv(url="https://b/go?token=2")
    )
    marks = []
    for folder, reply in (("x", 1), ("y", 1), ("x", 2)):
        file = tmp_path / folder / "game.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"class Game:\n    def reset(self, row):\n        return {reply}\n    def step(self, m): ...\n")
        marks.append(fingerprint_of(load_environment(f"{file}:Game")))
    assert marks[0] == marks[1] != marks[2]
