"""The whole command with rollouts ahead of training: options, records, and a run that is killed and taken up again."""

import json
import random
import shutil
import signal

import pytest

from rl_bridge.checkpoints.restoring import read_driver
from rl_bridge.modules.trainable import CausalLMModule
from rl_tools.cli import main
from tests.bridge.pipelines.killed import ended, lines, start
from tests.support.results import assert_same, metrics, result

pytestmark = pytest.mark.long

TOOL = """
class Counts:
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        said = sum(len(message["content"]) for message in messages)
        return self.Step(messages=[{"role": "tool", "content": f"{said}"}], reward=said % 7 / 7)

    from rl_bridge.environments import Step
"""
REWARD = "def even_digits(completion, row):\n    return sum(c in '02468' for c in completion) + 0.1 * len(completion)\n"
PARTIAL = {"--asynchronous.max-staleness": 2, "--asynchronous.tokens-beside": 4, "--asynchronous.round-tokens": 2}


@pytest.fixture
def words(tmp_path, arguments):
    (tmp_path / "reward.py").write_text(REWARD)
    options = {"--reward": f"{tmp_path / 'reward.py'}:even_digits", "--sft.steps": 1, "--policy.steps": 5}
    options |= {
        "--policy.updates-per-step": 1,
        "--policy.sampling.max-new-tokens": 12,
        "--policy.evaluate-every": 5,
        "--held-out": 8,
    }
    return lambda name, *more, **others: arguments(name, *more, **options | others)


class Killed(BaseException):
    """Nothing of the run's own code handles it."""


@pytest.mark.parametrize("recipe", ["dapo", pytest.param("remax", marks=pytest.mark.slow)])
def test_killed_with_rollouts_on_their_way_it_ends_as_if_it_had_not_been(
    tmp_path, words, run_to_end, monkeypatch, recipe
):
    """A baseline's greedy completion among them."""

    def command_of(name):
        # A sub-command stands behind all options.
        words_of = words(name, "--asynchronous.partial", **PARTIAL)
        return words_of if recipe == "dapo" else [*words_of, f"objective:{recipe}"]

    whole = result(run_to_end(command_of("whole")))
    records = [record for record in whole["metrics"] if record["stage"] == "policy"]
    assert [record["staleness_max"] for record in records] == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert all(record["versions_per_completion"] > 1 for record in records[3:])

    update = CausalLMModule.optimizer_step

    def dying(self):
        if self.weights_version() == 1 + 3:
            raise Killed
        return update(self)

    command = command_of("killed")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CausalLMModule, "optimizer_step", dying)
        main(command)
    newest = max((tmp_path / "killed" / "checkpoints").iterdir())
    ledger = read_driver(newest)["state"]["state"]["rollouts"]["ledger"]
    states = [sample["state"] for group in ledger["groups"] for sample in group["samples"]]
    assert states.count("waiting") > 2 and "running" not in states  # the kill interrupted completions
    greedy = [[sample["greedy"] for sample in group["samples"]] for group in ledger["groups"]]
    assert all(sum(of_group) == of_group[-1] == (recipe == "remax") for of_group in greedy)
    resumed = ["--resume"] if recipe == "dapo" else [command.pop(), "--resume"][::-1]
    assert_same(result(run_to_end([*command, *resumed])), whole)


@pytest.mark.slow
def test_conversations_that_are_killed_between_two_turns_go_on(tmp_path, words, run_to_end, monkeypatch):
    (tmp_path / "tool.py").write_text(TOOL)
    talks = {"--environment": f"{tmp_path / 'tool.py'}:Counts", "--max-turns": 3, "--reward": "environment"} | PARTIAL
    whole = result(run_to_end(words("whole", "--asynchronous.partial", **talks)))
    records = [record for record in whole["metrics"] if record["stage"] == "policy"]
    assert all(record["turns"] > 1 for record in records)
    assert any(record["versions_per_completion"] > 1 for record in records)

    update = CausalLMModule.optimizer_step

    def dying(self):
        if self.weights_version() == 1 + 3:
            raise Killed
        return update(self)

    command = words("killed", "--asynchronous.partial", **talks)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CausalLMModule, "optimizer_step", dying)
        main(command)
    newest = max((tmp_path / "killed" / "checkpoints").iterdir())
    ledger = read_driver(newest)["state"]["state"]["rollouts"]["ledger"]
    assert any(sample["turns"] and sample["state"] == "waiting" for g in ledger["groups"] for sample in g["samples"])
    assert_same(result(run_to_end([*command, "--resume"])), whole)


def assert_each_prompt_once(folder):
    """Of 5 steps of 4 prompts with 4 completions each: prompts go in one by one, and every one that did was trained."""
    ledger = read_driver(max((folder / "checkpoints").iterdir()))["state"]["state"]["rollouts"]["ledger"]
    assert (ledger["opened"], ledger["finished"], ledger["groups"]) == (20, {"trained": 80}, [])
    assert [record["step"] for record in metrics(folder) if record["stage"] == "policy"] == list(range(5))


def test_a_free_run_loses_nothing(words, run_to_end):
    options = {"--asynchronous.max-staleness": 2, "--asynchronous.window": 3}
    folder = run_to_end(words("free", "--asynchronous.no-deterministic", **options))
    records = [record for record in metrics(folder) if record["stage"] == "policy"]
    assert all(record["staleness_max"] <= 2 for record in records)
    assert_each_prompt_once(folder)


def test_options_that_do_not_go_together(words, capsys):
    for more, message in [
        (["--asynchronous.partial"], "without max_staleness nothing runs ahead"),
        (["--asynchronous.max-staleness", "1", "--asynchronous.partial"], "(--asynchronous.tokens-beside N)"),
        (["--asynchronous.max-staleness", "1", "--asynchronous.partial"], "(--asynchronous.no-deterministic)"),
        (["--asynchronous.max-staleness", "1", "--asynchronous.window", "2"], "needs deterministic=False"),
        (["--asynchronous.max-staleness", "1", "--offload", "phases"], "offload=phases"),
    ]:
        with pytest.raises(SystemExit):
            main(words("refused", *more))
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["deterministic", "free"])
def test_twenty_random_kills(tmp_path, words, mode):
    """A deterministic run ends as one that was never killed; a free one has trained on every prompt once."""
    extra = ["--asynchronous.partial"] + (["--asynchronous.no-deterministic"] if mode == "free" else [])
    options = dict(PARTIAL)
    if mode == "free":
        del options["--asynchronous.tokens-beside"]
    code, _, err = ended(start(words("whole", *extra, **options)))
    assert code == 0, err[-2000:]
    times = [json.loads(line)["time"] for line in lines(tmp_path / "whole")]
    a_step, generator, killed = (times[-1] - times[0]) / len(times), random.Random(0), 0
    folder = tmp_path / "killed"
    resume: list[str] = []
    reached = set()
    while killed < 20 or code != 0:
        moment = (generator.randrange(1, 4), generator.uniform(0.0, a_step)) if killed < 20 else (-1, 0.0)
        process = start(words("killed", *extra, *resume, **options), *moment, folder / "metrics.jsonl")
        code, _, err = ended(process)
        assert code in (0, -signal.SIGKILL), err[-2000:]
        killed += code != 0
        reached.add(len(lines(folder)))
        resume = ["--resume"] if folder.exists() else []
        if code == 0:
            if mode == "deterministic":
                assert_same(result(folder), result(tmp_path / "whole"))
            assert_each_prompt_once(folder)
            if killed < 20:
                shutil.rmtree(folder)
                resume = []
    assert len(reached) > 3
