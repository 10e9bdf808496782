"""Curves: extremes stay, bands are the intervals of tracking, groups are runs that differ in the seed."""

import json

import numpy as np
import pytest

from rl_bridge.common.statistics import over_seeds
from rl_bridge.run.recorder import draw_curves
from rl_tools.report.curves import comparison, curves, grouped
from rl_tools.report.run_files import buckets, read_run, thinned, thinned_clock
from tests.bridge.tools.report.runs import record, write_lines, write_run


def test_thinning_keeps_every_extreme():
    values = np.random.default_rng(0).normal(size=7321)
    values[[1234, 5000]] = 99.0, -99.0
    parts = buckets(len(values), 1000)
    few = thinned(values.tolist(), parts)
    assert len(few) == len(thinned_clock(range(7321), parts)) == 1000
    assert max(few) == 99.0 and min(few) == -99.0
    assert [place for part in parts for place in part] == list(range(7321))
    for part, pair in zip(parts, np.array(few).reshape(-1, 2), strict=True):
        assert sorted(pair) == [values[part.start : part.stop].min(), values[part.start : part.stop].max()]


def mean_around(values, place):
    """The mean of a twentieth of all values, around one of them."""
    half = len(values) // 40
    return np.mean(values[max(0, place - half) : place + half + 1])


@pytest.mark.parametrize("steps", [60, 1000, 5000])
def test_the_bold_line_is_the_running_mean_of_all_that_was_recorded(tmp_path, steps):
    """TOOL-1: of a metric that is mostly small and sometimes large, beyond 1000 steps too."""
    values = np.exp(np.random.default_rng(0).normal(size=steps)).round(6)
    folder = write_run(tmp_path / "a", steps=1)
    lines = [
        record(step, grad_norm=value, **({"rare": value} if step % 3 == 0 else {})) for step, value in enumerate(values)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    runs = [read_run(folder)]
    stage = curves(runs, grouped(runs))["policy"]
    line = next(panel for panel in stage["panels"] if panel["name"] == "grad_norm")["lines"][0]
    assert len(line["mean"]) == len(line["y"])
    wanted = [mean_around(values, int(step)) for step in stage["clocks"][0]["step"]]
    assert line["mean"] == pytest.approx(wanted, rel=1e-4)
    rare = next(panel for panel in stage["panels"] if panel["name"] == "rare")["lines"][0]
    assert ("mean" in rare) == (steps > 120)
    if steps > 120:
        assert np.mean(rare["mean"]) == pytest.approx(np.mean(values[::3]), rel=0.05)


def test_both_pictures_of_a_run_have_the_same_running_mean(tmp_path, monkeypatch):
    """TOOL-1: curves.png had the mean of what came before, which lies below a curve that rises."""
    folder = write_run(tmp_path / "a", steps=200)
    runs, drawn = [read_run(folder)], []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axis, x, y, **_: drawn.append((list(x), list(y))))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axis, **_: None)
    draw_curves(runs[0].records, tmp_path / "curves.png", title="a")
    line = next(p for p in curves(runs, grouped(runs))["policy"]["panels"] if p["name"] == "reward")["lines"][0]
    (seconds, raw), (smooth_seconds, smooth) = drawn[:2]
    assert (raw, smooth) == (pytest.approx(line["y"], rel=1e-5), pytest.approx(line["mean"], rel=1e-5))
    assert seconds == smooth_seconds == [record["seconds"] for record in runs[0].records]


def test_a_band_is_the_interval_of_tracking_and_a_run_alone_has_none(tmp_path):
    """TOOL-6: the page's bands and its comparison are those of rl-fn tune."""
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(4)]
    for count in (1, 2, 3, 4):
        runs = [read_run(folder) for folder in folders[:count]]
        stage = curves(runs, grouped(runs))["policy"]
        bands = next(panel for panel in stage["panels"] if panel["name"] == "reward")["bands"]
        assert list(bands) == list(stage["group_clocks"]) == ([0] if count > 1 else [])
        made = bands.get(0, {})
        assert ("low" in made, "high" in made) == (count > 2, count > 2)
        for step in range(0, 40, 13) if count > 2 else ():
            wanted = over_seeds([run.records[step]["reward"] for run in runs])
            assert {"mean": made["y"][step], "low": made["low"][step], "high": made["high"][step]} == pytest.approx(
                {end: wanted[end] for end in ("mean", "low", "high")}, abs=1e-5
            )


def test_the_panel_of_held_out_rows_has_the_level_before_training(tmp_path):
    """TOOL-18: the gain from there was off the chart."""
    folder = write_run(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text()) | {"accuracy_before": 0.125}
    (folder / "summary.json").write_text(json.dumps(summary))
    runs = [read_run(folder)]
    levels = {p["name"]: p["before"] for p in curves(runs, grouped(runs))["policy"]["panels"]}
    assert levels.pop("held_out") == {0: 0.125} and not any(levels.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one config, the second one step shorter, and two of another."""
    folder = tmp_path_factory.mktemp("runs")
    other = {"optimizer": {"learning_rate": 0.5}}
    made = [
        write_run(folder / "a0", seed=0),
        write_run(folder / "a1", seed=1, steps=39),
        write_run(folder / "b0", seed=0, shift=0.5, config=other),
        write_run(folder / "b1", seed=1, shift=0.5, config=other),
    ]
    return [read_run(path) for path in made]


def test_runs_that_differ_in_the_seed_are_a_group(runs):
    groups = grouped(runs)
    assert [group.runs for group in groups] == [[0, 1], [2, 3]]
    assert groups[0].label == "a0, a1: optimizer.learning_rate 0.0001"
    assert groups[1].label == "b0, b1: optimizer.learning_rate 0.5"


@pytest.mark.parametrize("name", ["rows before their split", "reward", "model", "environment"])
def test_runs_with_other_inputs_are_no_seeds_of_one_group(name, tmp_path):
    """A reward that was edited after the first seed was in one mean with the others, under a 95 % band."""
    folders = [write_run(tmp_path / f"a{seed}", seed=seed, fingerprints={name: "old"}) for seed in range(4)]
    assert [group.runs for group in grouped(list(map(read_run, folders)))] == [[0, 1, 2, 3]]
    # The last attempt counts: the run went on with --resume-anyway.
    for place in (1, 3):
        lines = [json.loads(line) for line in (folders[place] / "provenance.jsonl").read_text().splitlines()]
        again = {**lines[0], "attempt": 2, "fingerprints": {**lines[0]["fingerprints"], name: "new"}}
        write_lines(folders[place] / "provenance.jsonl", [*lines, again])
    groups = grouped(list(map(read_run, folders)))
    assert [group.runs for group in groups] == [[0, 2], [1, 3]]
    assert [group.label for group in groups] == [
        f"a0, a2: content of the {name} old",
        f"a1, a3: content of the {name} new",
    ]


@pytest.mark.parametrize("data", ["of the seed", "one"])
def test_data_is_compared_where_all_rows_before_a_split_are_not_recorded(data, tmp_path):
    """Runs of three files were three seeds, under a band: loops of one's own that hold nothing out, and older runs."""
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    for seed, folder in enumerate(folders):
        mark = seed if data == "of the seed" else data
        write_lines(folder / "provenance.jsonl", [{"attempt": 1, "fingerprints": {"data": f"of {mark}"}}])
    groups = [group.runs for group in grouped(list(map(read_run, folders)))]
    assert groups == ([[0], [1], [2]] if data == "of the seed" else [[0, 1, 2]])


def test_a_seed_counts_with_the_run_that_came_to_its_end(tmp_path):
    """The first one died at its third step, and cut the whole band there."""
    folders = [write_run(tmp_path / "a0", seed=0, steps=3, finished=False), write_run(tmp_path / "again", seed=0)]
    folders += [write_run(tmp_path / f"a{seed}", seed=seed, finished=False) for seed in (1,)]
    [group] = grouped(list(map(read_run, folders)))
    assert group.counted == [1, 2] and "a0 (seed 0)" in group.label


def test_a_run_that_recorded_no_inputs_joins_runs_of_one_kind_alone(tmp_path):
    folders = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    (folders[0] / "provenance.jsonl").unlink()
    lines = [{"attempt": 1, "fingerprints": {"reward": "w2"}}]
    write_lines(folders[2] / "provenance.jsonl", lines)
    assert [group.runs for group in grouped(list(map(read_run, folders)))] == [[0, 1], [2]]


@pytest.mark.parametrize("seeds", [(0, 0, 0), (0, 1, 0), (0, 0, 1, 1, 2), (3, 1, 2)], ids=str)
def test_a_seed_that_is_repeated_is_named_and_counts_once(seeds, tmp_path):
    """Three runs of one seed were three repetitions, with a band of no width."""
    made = [write_run(tmp_path / f"a{n}", seed=seed, shift=0.1 * n) for n, seed in enumerate(seeds)]
    other = {"optimizer": {"learning_rate": 0.5}}
    made += [write_run(tmp_path / f"b{seed}", seed=seed, config=other) for seed in range(3)]
    runs = list(map(read_run, made))
    first, second = groups = grouped(runs)
    counted = [n for n, seed in enumerate(seeds) if seed not in seeds[:n]]
    assert first.runs == list(range(len(seeds))) and first.counted == counted
    again = [n for n in first.runs if n not in counted]
    assert all(f"a{n} (seed {seeds[n]})" in first.label for n in again) and ("not counted" in first.label) is bool(
        again
    )
    stage = curves(runs, groups)["policy"]
    panel = next(panel for panel in stage["panels"] if panel["name"] == "reward")
    assert (0 in panel["bands"]) is (len(counted) > 1) and list(panel["lines"]) == list(range(len(runs)))
    assert ("low" in panel["bands"].get(0, {})) is (len(counted) > 2)
    row = next(row for row in comparison("policy", runs, groups)["rows"] if row["name"] == "reward")
    ends = [np.mean([r["reward"] for r in run.records[36:]]) for run in runs]
    assert row["groups"][0]["runs"] == len(counted)
    assert row["groups"][0]["mean"] == pytest.approx(np.mean([ends[n] for n in counted]), rel=1e-4)
    pairs = [ends[second.runs[seeds[n]]] - ends[n] for n in counted if seeds[n] < 3]
    if len(pairs) > 1:
        assert row["groups"][1]["difference"]["mean"] == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-6)


def test_an_option_that_a_config_does_not_know_makes_no_group(tmp_path):
    first = write_run(tmp_path / "a", steps=1, config={"samples_every": 5})
    second = write_run(tmp_path / "b", steps=1, config={"new_option": 5, "checkpoint_every": 3})
    third = write_run(tmp_path / "c", steps=1, config={"new_option": 6, "objective": {"algorithm": "grpo"}})
    groups = grouped([read_run(folder) for folder in (first, second, third)])
    assert [group.runs for group in groups] == [[0, 1], [2]]


def test_a_band_is_over_the_steps_that_all_runs_have(runs):
    stage = curves(runs, grouped(runs))["policy"]
    panel = next(panel for panel in stage["panels"] if panel["name"] == "reward")
    assert [len(panel["lines"][run]["y"]) for run in range(4)] == [40, 39, 40, 40]
    assert len(panel["bands"][0]["y"]) == 39 and len(panel["bands"][1]["y"]) == 40
    pair = [run.records[7]["reward"] for run in runs[:2]]
    assert panel["bands"][0]["y"][7] == pytest.approx(sum(pair) / 2, rel=1e-5)
    assert stage["group_clocks"][0]["tokens"][:2] == [100, 200]
    assert stage["clocks"][0]["version"][:2] == [1, 2] and stage["clocks"][0]["seconds"][:2] == [0.5, 1.0]
    held_out = next(panel for panel in stage["panels"] if panel["name"] == "held_out")
    assert held_out["lines"][0]["at"] == [9, 19, 29, 39] and len(held_out["lines"][0]["low"]) == 4
    assert not any(panel["name"].endswith(("_low", "_high")) for panel in stage["panels"])


def test_clocks_count_the_tokens_of_earlier_stages(tmp_path):
    folder = write_run(tmp_path / "a", steps=1)
    write_lines(folder / "metrics.jsonl", [record(0, "sft", nll=2.0), record(1, "sft", nll=1.0), record(0, reward=0.0)])
    runs = [read_run(folder)]
    found = curves(runs, grouped(runs))
    assert list(found) == ["sft", "policy"] and found["policy"]["clocks"][0]["tokens"] == [300]


def test_a_run_of_many_steps_is_thinned(tmp_path):
    runs = [read_run(write_run(tmp_path / "a", steps=5000))]
    stage = curves(runs, grouped(runs))["policy"]
    lines = {panel["name"]: panel["lines"][0] for panel in stage["panels"]}
    assert len(stage["clocks"][0]["step"]) == len(lines["reward"]["y"]) == 1000
    assert max(lines["reward"]["y"]) == pytest.approx(max(r["reward"] for r in runs[0].records), rel=1e-5)


def test_groups_are_compared_at_an_equal_step_and_paired_by_seed(runs):
    found = comparison("policy", runs, grouped(runs))
    assert found["step"] == 38
    row = next(row for row in found["rows"] if row["name"] == "reward")
    # The last tenth of 39 steps.
    ends = [np.mean([r["reward"] for r in run.records if 36 <= r["step"] <= 38]) for run in runs]
    assert row["groups"][0]["mean"] == pytest.approx(np.mean(ends[:2]), rel=1e-4)
    difference = row["groups"][1]["difference"]
    assert difference["seeds"] == 2
    assert difference["mean"] == pytest.approx(np.mean([ends[2] - ends[0], ends[3] - ends[1]]), rel=1e-4)
    assert (difference["low"], difference["high"]) == (None, None), "of two seeds"
    held_out = next(row for row in found["rows"] if row["name"] == "held_out")
    assert held_out["groups"][0]["mean"] == pytest.approx(
        np.mean([run.records[29]["held_out"] for run in runs[:2]]), rel=1e-4
    )
    assert comparison("policy", runs[:2], grouped(runs[:2])) is None
