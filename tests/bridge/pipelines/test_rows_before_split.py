"""The fingerprint of all rows, which runs of several seeds share."""

import json
from dataclasses import replace

import pytest

from rl_bridge.data.census import Census
from rl_bridge.pipelines.training import load_rows, undivided
from rl_bridge.run.provenance import UNDIVIDED, of_rows, read_provenance
from rl_train.compared import load_comparisons
from rl_train.policy_configs import quickstart
from rl_train.preference import PreferencePipeline
from tests.support.counting_run import DATA, go

# A prompt that is there twice: what is left out depends on which prompts are held out.
ROWS = [{"prompt": f"{n // 2}+1=", "answer": str(n), "chosen": str(n), "rejected": "no"} for n in range(12)]


def written(file, rows=ROWS):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def marks_of(kind, **options):
    """What is recorded of the rows before their split, and the fingerprint of the parts."""
    census = Census()
    if kind == "policy":
        parts = load_rows(replace(quickstart(), **options), census=census)
    else:
        read = load_comparisons(PreferencePipeline(**options), census)
        parts = tuple([{**vars(row), "where": ""} for row in part] for part in read)
    return undivided(census)[UNDIVIDED], of_rows(*parts)


@pytest.mark.parametrize("kind", ["policy", "preference"])
def test_seeds_share_the_rows_before_their_split_and_an_edit_shows(kind, tmp_path):
    data = written(tmp_path / "rows.jsonl")
    marks = [marks_of(kind, data=data, held_out=3, seed=seed) for seed in range(3)]
    whole, parts = zip(*marks, strict=True)
    assert len(set(whole)) == 1 and len(set(parts)) == 3
    edited = written(tmp_path / "edited.jsonl", [*ROWS[:5], {**ROWS[5], "answer": "6", "chosen": "6"}, *ROWS[6:]])
    assert marks_of(kind, data=edited, held_out=3)[0] != whole[0]
    apart = [marks_of(kind, data=data, eval_data=other)[0] for other in (data, edited)]
    assert len({*apart, whole[0]}) == 3


def test_a_checkpoint_without_that_fingerprint_is_resumed_and_another_data_is_refused(tmp_path):
    """It was not recorded before, and the data of one seed is compared anyway."""
    go(tmp_path / "run", until=4)
    now = {**DATA, UNDIVIDED: "89ab"}
    with pytest.raises(ValueError, match="the data is another one"):
        go(tmp_path / "run", resume=True, fingerprints={**now, "data": "4567"})
    assert go(tmp_path / "run", resume=True, fingerprints=now) == [(4, 5), (5, 6)]
    assert read_provenance(tmp_path / "run")[-1]["fingerprints"] == now
