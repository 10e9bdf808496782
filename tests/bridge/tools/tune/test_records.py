"""The record of a run that goes on, read for its goals."""

import json

from rl_tools.tune.goals import parse_goal
from rl_tools.tune.journal import Key
from rl_tools.tune.scheduler import Plan
from rl_tools.tune.study import RunRecords

KEY = Key(0, 1)


def test_a_record_that_grows_is_read_as_far_as_it_is_whole(tmp_path):
    folder = tmp_path / KEY.name
    plan = Plan((parse_goal("reward", maximize=True),))
    records = RunRecords(tmp_path, plan)
    assert records.curve(KEY) == {} and records.steps(KEY) == 0 and not records.finished(KEY)
    folder.mkdir()
    lines = [json.dumps({"stage": "policy", "step": step, "reward": 0.5 + step}) + "\n" for step in range(3)]
    file = folder / "metrics.jsonl"
    file.write_text(lines[0] + lines[1][:9])
    assert records.curve(KEY) == {0: -0.5}, "losses, which are minimised"
    file.write_text("".join(lines[:2]))
    assert records.curve(KEY) == {0: -0.5, 1: -1.5} and records.steps(KEY) == 2
    file.write_text("".join(lines))
    (folder / "summary.json").write_text('{"seconds": 1.0}')
    with file.open("a") as stream:
        stream.write('{"stage": "policy", "step": 3, "kl": 0.1}\n')
    assert records.steps(KEY) == 4 and len(records.curve(KEY)) == 3, "not each step is measured"
    assert records.finished(KEY) and records.values(KEY) == {"reward": 2.5}
