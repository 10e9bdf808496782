import json
import re
from dataclasses import replace

import pytest

from rl_bridge.engines.dispatch import returns
from rl_bridge.pipelines import rollout_options
from rl_bridge.pipelines.rollout_options import EnvironmentOptions
from rl_bridge.rewards import load
from rl_bridge.rewards.function import RewardError
from rl_bridge.rollout import InProcessRollout
from rl_bridge.run.options import RunOptions
from rl_bridge.run.provenance import write_provenance
from rl_tools.cli import main
from rl_train import policy as recipe
from tests.support.trajectories import trajectory

SMALL = {
    "--sft.steps": 0,
    "--policy.steps": 2,
    "--policy.sampling.max-new-tokens": 12,
    "--policy.evaluate-every": 2,
    "--held-out": 8,
    "--max-turns": 3,
}
ROWS = [{"prompt": "1+1="}]
GAME = """
from rl_bridge.environments import Step

class Game:
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, messages):
        said = messages[-1]["content"]
        return Step(messages=[{"role": "tool", "content": "+1="}], reward=float(len(said)), done="7" in said)

class Silent(Game):
    def step(self, messages):
        return Step(messages=[])

class Fails(Game):
    def reset(self, row):
        raise OSError("no server")
"""


@pytest.fixture
def game(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(GAME)
    return file


@pytest.mark.long
def test_the_policy_learns_from_an_environment_s_rewards(arguments, run_to_end, game):
    folder = run_to_end(arguments("game", **SMALL, **{"--environment": f"{game}:Game"}))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward" in step]
    assert len(steps) == 2 and all(step["reward"] > 0 for step in steps)
    samples = json.loads((folder / "samples.json").read_text())
    assert all("environment" in sample for how in samples["after"].values() for sample in how)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, said",
    [
        ("Silent", "reward environment on .*: the environment gave none; its steps say reward="),
        ("Fails", r"the environment was tried before the run, and fails in reset\(\) with .*: OSError: no server"),
        ("Missing", "game.py has no class or function 'Missing'"),
    ],
)
def test_an_environment_that_is_no_use_is_one_line(arguments, game, capsys, name, said):
    assert main(arguments("bad", **SMALL, **{"--environment": f"{game}:{name}"})) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize("warm", [0, 1])
def test_an_engine_that_is_too_short_is_refused_before_the_warm_start(arguments, game, capsys, monkeypatch, warm):
    """An engine of its own may hold fewer tokens than the model has positions."""
    monkeypatch.setattr(InProcessRollout, "ends", returns("same")(lambda worker: (frozenset(worker._stop), 20)))
    options = SMALL | {"--sft.steps": warm, "--max-trajectory-tokens": 21, "--environment": f"{game}:Game"}
    monkeypatch.setattr(recipe, "Policy", lambda *_, **__: pytest.fail("it comes too late"))
    assert main(arguments("short", **options)) == 1
    assert "conversations of 21 tokens (max_tokens, --max-trajectory-tokens) are longer" in capsys.readouterr().err


def test_the_reward_s_source_can_be_the_environment_among_others():
    rewards = load(["environment", "short=exact"], weights=[1.0, 0.5])
    assert rewards.names == ("environment", "short") and load("environment").names == ("environment",)
    scored = rewards.score([trajectory([5], [6], rewards={"environment": 3.0}, request_id=(1,), row={"answer": "x"})])
    assert scored[0].rewards == {"environment": 3.0, "short": 0.0}
    with pytest.raises(RewardError, match="reward environment on row 4: the environment gave none"):
        rewards.score([trajectory([5], [6], request_id=(1,), row={"answer": "x", "_where": "row 4"})])


def test_a_conversation_that_was_cut_before_its_reward_has_none(capsys):
    """An environment may give its reward at the end; one that fails or whose turns run out has not come so far."""

    def made(reason, **rewards):
        return trajectory([5], [6], rewards=rewards, request_id=(1,), row={"_where": "row 4"}, finish_reason=reason)

    environment = load("environment")
    found = environment.score([made("error"), made("turns"), made("stop", environment=2.0)])
    assert [t.rewards["environment"] for t in found] == [0.0, 0.0, 2.0]
    ended = [made("stop"), made("turns")]
    cut = [[made(first), made(second)] for first in ("error", "turns", "abort") for second in ("turns", "length")]
    # A resumed run has scored nothing yet: what is refused is the same, and 0 are the same.
    for of_run in (environment, load("environment")):
        for batch in cut:
            assert [t.rewards["environment"] for t in of_run.score(batch)] == [0.0, 0.0]
        with pytest.raises(RewardError, match="reward environment on row 4: the environment gave none"):
            of_run.score(ended)
    assert (
        capsys.readouterr().out.count("of 2 conversations the environment ended none, and gave no reward so far") == 1
    )


def write(file, text):
    """Gives a file in the run's folder another text."""
    return lambda game, folder: (folder / file).write_text(text)


RESUMED = {
    "unchanged": ({}, None, False),
    "another limit": ({"environment_timeout": 3.0}, None, False),
    "another file": ({}, lambda game, folder: game.write_text(GAME + "\n"), True),
    "another class": ({"environment": "Silent"}, None, True),
    "in processes": ({"environment_processes": 2}, None, True),
    "never begun": ({}, lambda game, folder: (folder / "provenance.jsonl").unlink(), True),
    "damaged provenance": ({}, write("provenance.jsonl", "{\n"), True),
    "provenance of nothing": ({}, write("provenance.jsonl", '{"fingerprints": 3}\n'), True),
    "damaged options": ({}, write("config.json", "{"), True),
    "no options": ({}, write("config.json", "[]"), True),
    "of an older version": ({}, write("config.json", "{}"), True),
    "with nothing else to compare": (
        {},
        lambda game, folder: write_provenance(
            folder, 3, EnvironmentOptions(environment=f"{game}:Game").environment_fingerprint()
        ),
        False,
    ),
    "without an environment before": ({}, write("provenance.jsonl", '{"fingerprints": {}}\n'), True),
}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_tries_its_environment_again_only_where_something_changed(
    game, tmp_path, monkeypatch, case, processes
):
    trials = []
    monkeypatch.setattr(rollout_options, "try_environment", lambda *_, **options: trials.append(options))
    changes, act, is_tried = RESUMED[case]
    began = EnvironmentOptions(environment=f"{game}:Game", environment_processes=processes)
    folder = tmp_path / "run"
    folder.mkdir()
    write_provenance(folder, 1, {"environment": "of another attempt"})
    write_provenance(folder, 2, {"data": "1"} | began.environment_fingerprint())
    (folder / "config.json").write_text(json.dumps({"environment_processes": processes}))
    if act is not None:
        act(game, folder)
    changes = changes | ({"environment": f"{game}:{changes['environment']}"} if "environment" in changes else {})
    now = replace(began, **changes)
    if case == "in processes" and processes:
        is_tried = False
    environment = object()
    assert now.tried(environment, ROWS, None, resumed=folder) is environment and len(trials) == is_tried
    assert now.tried(environment, ROWS, None) is environment and len(trials) == is_tried + 1
    assert now.tried(None, ROWS, None, resumed=folder) is None


@pytest.mark.parametrize("option", ["resume", "resume_anyway"])
def test_the_folder_of_a_run_that_is_resumed_is_known_before_the_run_opens(tmp_path, option):
    options = RunOptions(output=tmp_path, name="first")
    assert options.resumed is None and not (tmp_path / "first").exists()
    resumed = replace(options, **{option: True})
    assert resumed.resumed == resumed.folder() == tmp_path / "first"


def test_a_changed_environment_is_another_fingerprint(game):
    options = EnvironmentOptions(environment=f"{game}:Game")
    before = options.environment_fingerprint()
    assert (
        options.environment_fingerprint()
        == before
        != EnvironmentOptions(environment=f"{game}:Fails").environment_fingerprint()
    )
    game.write_text(GAME + "\n")
    assert options.environment_fingerprint() != before and EnvironmentOptions().environment_fingerprint() == {}


def test_a_server_may_move_and_is_tried_again_there(tmp_path, monkeypatch):
    """A gateway chooses the environment by path and query."""
    trials = []
    monkeypatch.setattr(rollout_options, "try_environment", lambda *_, **options: trials.append(options))
    at = {url: EnvironmentOptions(environment=url) for url in ("http://a:1/go", "ws://b:2/go", "http://a:1/chess")}
    here, there, other = (options.environment_fingerprint() for options in at.values())
    assert here == there != other
    write_provenance(tmp_path, 1, here)
    (tmp_path / "config.json").write_text(json.dumps({"environment_processes": 0, "environment": "http://a:1/go"}))
    for options in at.values():
        options.tried(object(), ROWS, None, resumed=tmp_path)
    assert len(trials) == 2


LEAST = {"max_turns": 1, "environment_timeout": 5e-324, "environment_processes": 0, "max_trajectory_tokens": 1}


@pytest.mark.parametrize(("name", "least"), LEAST.items(), ids=LEAST)
def test_limits_that_leave_no_turn_are_refused_and_the_least_ones_taken(game, name, least):
    options = EnvironmentOptions(environment=f"{game}:Game", **{name: least})
    assert getattr(options, name) == least
    for below in (least - 1, least - 100):
        with pytest.raises(ValueError, match=f"{name} (≥ {least}|> 0|must be at least {least})"):
            replace(options, **{name: below})
