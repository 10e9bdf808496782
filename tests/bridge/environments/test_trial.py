"""An environment that is broken is refused before a run, and its trial changes nothing of the run.

One test starts the processes as a run does; those of the others are forked with everything imported.
"""

import os
import random
import re

import pytest

from rl_bridge.common.terminal import remarks
from rl_bridge.environments import load_environment
from rl_bridge.environments.trial import try_environment

FILE = """
import os, random, signal, time
from rl_bridge.environments import Step

COUNT = []

class Game:
    tools = [{"type": "function"}]
    def reset(self, row):
        COUNT.append(random.random())
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, messages):
        assert messages[-1] == {"role": "assistant", "content": ""}
        return Step(messages=[{"role": "tool", "content": "4"}], reward=1.0)
    def close(self):
        COUNT.clear()

class Later(Game):
    async def reset(self, row):
        return super().reset(row)
    async def step(self, messages):
        return super().step(messages)

class NotMade(Game):
    def __init__(self):
        raise OSError("no server")

class NoReset(Game):
    def reset(self, row):
        raise OSError("no server")

class LeavesReset(Game):
    def reset(self, row):
        raise SystemExit("no server")

class Nothing(Game):
    def reset(self, row):
        return []

class OfOneRow(Game):
    def reset(self, row):
        if row["prompt"] != "right":
            raise KeyError("board")
        return super().reset(row)

class Text(Game):
    def step(self, messages):
        return "4"

class Infinite(Game):
    def step(self, messages):
        return Step(reward=float("inf"))

class Raises(Game):
    def step(self, messages):
        return Step(reward=int(messages[-1]["content"]))

class RaisesLater(Game):
    async def step(self, messages):
        return Step(reward=int(messages[-1]["content"]))

class Keyword(Game):
    def step(self, messages):
        return Step(rewards=1.0)

class TwoArguments(Game):
    def step(self, messages, action):
        return Step(reward=1.0)

class NoArgument(Game):
    def step(self):
        return Step(reward=1.0)

class KeywordLater(Game):
    async def step(self, messages):
        return Step(rewards=1.0)

class NoName(Game):
    def step(self, messages):
        return Stepp(reward=1.0)

class NoneAdded(Game):
    def step(self, messages):
        return Step(reward=1.0 + {"": None}[messages[-1]["content"]])

class Slow(Game):
    def step(self, messages):
        time.sleep(1000)

class Closed(Game):
    def close(self):
        raise OSError("no server")

class SlowReset(Game):
    def reset(self, row):
        time.sleep(1000)

class EndsReset(Game):
    def reset(self, row):
        os._exit(3)

class Logged(Game):
    # Writes down what is called, and fails.
    def reset(self, row):
        self.note("reset")
        return super().reset(row)
    def step(self, messages):
        self.note("step")
        raise OSError("no server")
    def close(self):
        self.note("close")
    def note(self, what):
        with open(__file__ + ".log", "a") as log:
            log.write(what + " ")

class LoggedReset(Logged):
    def reset(self, row):
        self.note("reset")
        raise OSError("no server")

class LoggedText(Logged):
    def step(self, messages):
        self.note("step")
        return "4"

class Alarm(Game):
    def reset(self, row):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return super().reset(row)
"""
ROWS = [{"prompt": "1+1=", "_where": "a.jsonl, row 1"}, {"prompt": "right", "_where": "a.jsonl, row 2"}]
BEFORE = "the environment was tried before the run, and fails in "
REFUSED = {
    "NotMade": rf"{BEFORE}reset\(\) with a.jsonl, row 1: OSError: no server; so it does with 1 more",
    "NoReset": rf"{BEFORE}reset\(\) with a.jsonl, row 1: OSError: no server; so it does with 1 more",
    "LeavesReset": rf"{BEFORE}reset\(\) with a.jsonl, row 1: .*no server; so it does with 1 more",
    "Nothing": rf"{BEFORE}reset\(\) with a.jsonl, row 1: .*there is nothing to begin a conversation with",
    "Text": rf"{BEFORE}step\(\) with a.jsonl, row 1: TypeError: step\(\) returned '4', expected a Step",
    "Infinite": rf"{BEFORE}step\(\) with a.jsonl, row 1: ValueError: step\(\) gave the reward inf",
}
TRIED = "the environment was tried with a.jsonl, row 1 and an empty turn of the policy, and failed: "
REFUSED |= {
    name: rf"^{TRIED}{error}.*That is so whatever a turn says"
    for name, error in {
        "Keyword": r"TypeError: Step\.__init__\(\) got an unexpected keyword argument 'rewards'",
        "KeywordLater": r"TypeError: Step\.__init__\(\) got an unexpected keyword argument 'rewards'",
        "TwoArguments": r"TypeError: TwoArguments\.step\(\) missing 1 required positional argument: 'action'",
        "NoArgument": r"TypeError: NoArgument\.step\(\) takes 1 positional argument but 2 were given",
        "NoName": "NameError: name 'Stepp' is not defined",
    }.items()
}
NAMED = {
    "NoneAdded": "TypeError: unsupported operand type(s) for +: 'float' and 'NoneType'",
    "Raises": "ValueError: invalid literal for int() with base 10: ''",
    "RaisesLater": "ValueError: invalid literal for int() with base 10: ''",
    "Slow": "took longer than 3 s, and its process was ended",
    "Closed": "OSError: no server",
}


@pytest.fixture
def tried_as_in_a_run(tmp_path):
    """Tries an environment of the file; what it named before is forgotten."""
    file = tmp_path / "game.py"
    file.write_text(FILE)
    remarks()

    def tried(name, in_thread=True):
        # The others have a minute, so that nothing here depends on how busy the machine is.
        limit = 3 if name.startswith("Slow") else 60
        return try_environment(load_environment(f"{file}:{name}"), ROWS, limit=limit, in_thread=in_thread)

    return tried


@pytest.fixture
def tried(tried_as_in_a_run, warm_environments):
    return tried_as_in_a_run


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("name", ["Game", "Later", "OfOneRow"])
def test_an_environment_that_works_with_a_row_passes(tried, name, in_thread):
    row, first, tools = tried(name, in_thread)
    assert row == ROWS[name == "OfOneRow"]
    assert first.messages == [{"role": "user", "content": row["prompt"]}]
    assert tools == ({"type": "function"},)
    assert remarks() == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_environment_is_refused(tried, name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        tried(name, in_thread=name in ("NotMade", "Text"))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED)
def test_what_an_environment_raises_at_an_empty_turn_is_named(tried, name):
    tried(name)
    assert remarks() == [TRIED + NAMED[name]]


def test_an_environment_of_a_main_thread_is_refused_where_a_run_calls_it_in_others(tried):
    tried("Alarm", in_thread=False)
    with pytest.raises(ValueError, match=r"fails in reset\(\) .*--environment-processes N"):
        tried("Alarm")


@pytest.mark.long
def test_the_trial_changes_nothing_of_this_process(tried_as_in_a_run, tmp_path):
    tried = tried_as_in_a_run
    factory = load_environment(f"{tmp_path / 'game.py'}:Game")
    count = type(factory()).reset.__globals__["COUNT"]
    random.seed(3)
    state = random.getstate()
    tried("Game")
    assert count == [] and random.getstate() == state
    count.append(1.0)
    tried("Game")  # its close() empties the list of its own process
    assert count == [1.0]


@pytest.mark.parametrize("in_thread", [False, True])
def test_without_rows_there_is_nothing_to_try(in_thread):
    with pytest.raises(ValueError, match="an environment is tried with the first rows of the data, and there are none"):
        try_environment(lambda: None, [], limit=1, in_thread=in_thread)


UNKNOWN = {
    "SlowReset": "took longer than 3 s, and its process was ended",
    "EndsReset": r"the environment ended its process in reset\(\)",
}


@pytest.mark.long
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_process_of_the_trial_s_own_brings_about_is_named_where_a_run_calls_in_threads(tried, name):
    """A fork has no threads of the file's, and may need longer than a process that has begun; a run's processes too."""
    assert tried(name) is None
    (line,) = remarks()
    assert re.search(rf"tried with a.jsonl, row 1, and nothing is known of it: {UNKNOWN[name]}", line)
    with pytest.raises(ValueError, match=rf"{BEFORE}reset\(\) .*{UNKNOWN[name]}"):
        tried(name, in_thread=False)


def test_a_file_that_only_this_process_can_load_is_named_or_refused(tried, tmp_path):
    file = tmp_path / "game.py"
    file.write_text(FILE + f"\nif os.getpid() != {os.getpid()}:\n    raise OSError('Address already in use')\n")
    assert tried("Game") is None
    (line,) = remarks()
    assert "was not tried before the run: " in line and "Address already in use" in line
    with pytest.raises(ValueError, match=r"was tried before the run: .*Address already in use"):
        tried("Game", in_thread=False)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("Logged", "reset step close"), ("LoggedReset", "reset close reset close"), ("LoggedText", "reset step close")],
)
def test_a_conversation_that_began_is_closed_whatever_it_did(tried, tmp_path, name, calls):
    try:
        tried(name)
    except ValueError as error:
        assert name != "Logged", error
    assert (tmp_path / "game.py.log").read_text().split() == calls.split()
