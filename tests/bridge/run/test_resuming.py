"""A run is taken up again as it was begun, or it says what is different."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from functools import partial
from types import ModuleType

import pytest

from rl_bridge.common.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.common.user_marks import mark_of
from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.loop.data import load_rows
from rl_bridge.loop.groups import _fingerprint as fingerprint_of_loops
from rl_bridge.loop.groups import loaded_rewards
from rl_bridge.rewards import exact_match, load, load_reward
from rl_bridge.rewards.scoring_models import RemoteRewardModel, Server
from rl_bridge.run.folder import options_of
from rl_bridge.run.options import RunOptions
from rl_bridge.run.provenance import of_rows, write_provenance
from rl_bridge.run.run import Run
from tests.support.counting_run import DATA, Optimizer, Options, go
from tests.support.reward_batches import trajectories

TRAINERS = ("sft", "reward-model", "preference", "policy")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path):
    """A run that stopped after its fourth step."""
    go(tmp_path / "run", until=4)
    return tmp_path / "run"


CHANGES = {
    "seed": (Options(seed=1), DATA, "--seed was 0 and is 1"),
    "nested": (Options(optimizer=Optimizer(rate=0.25)), DATA, "--optimizer.rate was 0.5 and is 0.25"),
    "a tuple": (Options(optimizer=Optimizer(betas=(0.9, 0.5))), DATA, "--optimizer.betas was [0.9, 0.99] and is"),
    "a string": (Options(data="x"), DATA, '--data was null and is "x"'),
    "rows": (Options(), DATA | {"data": "9999"}, "the data is another one (0123 was its fingerprint, 9999 is)"),
    "reward": (Options(), DATA | {"reward": "9999"}, "the reward is another one"),
    "no reward": (Options(), {"data": "0123"}, "the reward is another one (abcd was its fingerprint, None is)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_named_with_both_values_and_nothing_is_touched(folder, change):
    options, fingerprints, message = CHANGES[change]
    before = content(folder)
    with pytest.raises(ValueError, match="was made with other options: ") as refused:
        go(folder, options, fingerprints=fingerprints, resume=True)
    assert message in str(refused.value) and "--resume-anyway" in str(refused.value)
    assert content(folder) == before


@pytest.mark.parametrize("change", ["nested", "rows", "no reward"])
def test_resume_anyway_goes_on_and_writes_down_what_changed(folder, change, capsys):
    options, fingerprints, message = CHANGES[change]
    assert go(folder, options, fingerprints=fingerprints, resume_anyway=True) == [(4, 5), (5, 6)]
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(dataclasses.asdict(options)))
    [change] = [line for line in lines(folder) if "changed" in line]
    assert message in change["changed"][0] and message in capsys.readouterr().out
    assert change["step"] == 4 and change["attempt"] == 2 and lines(folder).index(change) == 4
    # What was resumed anyway is from now on what the run is made with.
    assert go(folder, options, fingerprints=fingerprints, resume=True) == []


def test_options_that_may_change_do(folder, capsys):
    assert go(folder, Options(threads=4), resume=True) == [(4, 5), (5, 6)]
    assert "other options" not in capsys.readouterr().out
    assert not any("changed" in line for line in lines(folder))
    assert "threads" not in options_of(Options()) and "name" not in options_of(RunOptions())


SECRETS = {"HF_TOKEN": "s3cret-word", "WANDB_API_KEY": "0123456789ab", "DB_PASSWORD": "/no/such/path"}


@pytest.mark.parametrize("secrets", [(), ("HF_TOKEN",), ("WANDB_API_KEY", "DB_PASSWORD"), tuple(SECRETS)], ids=str)
@pytest.mark.parametrize("later", [(), ("HF_TOKEN",), tuple(SECRETS)], ids=str)
def test_another_environment_is_no_other_option(tmp_path, secrets, later, monkeypatch):
    """A checkpoint hides what the environment of its time had as secrets."""
    folder, options = tmp_path / "run", Options(data="s3cret-word/0123456789ab/no/such/path/rows.jsonl")
    for number, names in enumerate([secrets, later]):
        for name, value in SECRETS.items():
            monkeypatch.delenv(name, raising=False)
            if name in names:
                monkeypatch.setenv(name, value)
        go(folder, options, until=4 + number, resume=number > 0)
    with pytest.raises(ValueError, match=r"--data was .*rows\.jsonl\" and is .*row\.jsonl\""):
        go(folder, Options(data="s3cret-word/0123456789ab/no/such/path/row.jsonl"), resume=True)


def test_the_place_of_a_shell_is_no_password(tmp_path, monkeypatch):
    """``PWD`` was read as one: messages, records and advice had *** for the folder of the run."""
    socket = tmp_path / "agent"
    socket.touch()
    for name, value in {"PWD": tmp_path / "gone", "SSH_AUTH_SOCK": socket, "GOOGLE_CREDENTIALS": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ADMIN_PWD", "correct horse")
    assert scrubbed_text(f"{tmp_path}/gone, {socket} and correct horse", environment_secrets()) == (
        f"{tmp_path}/gone, {socket} and ***"
    )


def test_nan_equals_itself(tmp_path):
    options = Options(optimizer=Optimizer(rate=math.nan))
    go(tmp_path / "run", options, until=2)
    assert go(tmp_path / "run", options, resume=True)[0] == (2, 3)


def test_a_stream_of_other_rows_begins_anew_only_if_asked(folder, capsys):
    with pytest.raises(ValueError, match="made on 10 rows, this run has 11"):
        go(folder, rows=11, resume=True)
    assert go(folder, rows=11, resume_anyway=True) == [(4, 1), (5, 2)]
    assert "place begins anew: the checkpoint was made on 10 rows, this run has 11" in capsys.readouterr().out


def test_records_know_their_session(folder):
    go(folder, resume=True)
    records = lines(folder)
    assert [record["attempt"] for record in records] == [1] * 4 + [2] * 2
    assert {record["run"] for record in records} == {"run"}
    times = [record["time"] for record in records]
    assert times == sorted(times) and times[0] > 1.7e9


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_damaged_record_is_found_at_the_start_and_left_out_if_asked(folder, where, capsys):
    file = folder / "metrics.jsonl"
    damaged = file.read_bytes().splitlines()
    damaged[where] = damaged[where][:10] + b"\xff" + damaged[where][11:]
    file.write_bytes(b"\n".join(damaged) + b"\n")
    before = content(folder)
    with pytest.raises(ValueError, match=rf"metrics.jsonl is damaged in line {where + 1}; --resume-anyway goes on"):
        go(folder, resume=True)
    assert content(folder) == before
    assert go(folder, resume_anyway=True) == [(4, 5), (5, 6)]
    assert [line["step"] for line in lines(folder)] == [step for step in range(6) if step != where]
    assert "going on with 3 of 4 records, the file is now metrics.jsonl.damaged" in capsys.readouterr().out
    assert (folder / "metrics.jsonl.damaged").read_bytes().splitlines() == damaged
    assert (folder / "summary.json").exists()


def test_a_flipped_digit_of_a_record_is_found(folder):
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"reward": 2.0', '"reward": 3.0'))
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: it has another checksum than was written"):
        go(folder, resume=True)


def test_what_came_after_the_checkpoint_may_be_damaged(tmp_path):
    folder = tmp_path / "run"
    go(folder, until=3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"stage": "on\xff')
    assert go(folder, resume=True)[0] == (2, 3)
    assert [(line["step"], line["attempt"]) for line in lines(folder)] == [
        (0, 1),
        (1, 1),
        *((s, 2) for s in range(2, 6)),
    ]


@pytest.mark.parametrize("made", [(), (".lock",), (".lock", ".config.json.tmp"), (".lock", "config.json")])
def test_a_run_killed_before_anything_was_written_can_be_resumed(tmp_path, made):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in made:
        (folder / name).write_text("{}")
    assert len(go(folder, resume=True)) == 6
    assert json.loads((folder / "config.json").read_text())["seed"] == 0
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize("anyway", [False, True])
@pytest.mark.parametrize("before", [*TRAINERS, "one of later"])
def test_a_run_of_another_trainer_is_refused_with_that_trainer(tmp_path, before, anyway):
    """Every option of both was named as one that had changed."""
    folder = tmp_path / "run"
    go(folder, until=4)
    (folder / "run.toml").write_text(f'trainer = "{before}"\n')
    written = content(folder)
    for now in TRAINERS:
        options = dataclasses.make_dataclass("Now", [], bases=(Options,), namespace={"trainer": now}, frozen=True)()
        message = f"{folder} is a run of the trainer {before}, and this is {now}: give rl-fn train {before} … --resume"
        if before != now:
            with pytest.raises(ValueError) as refused:
                go(folder, options, resume=True, resume_anyway=anyway)
            assert str(refused.value) == f"{message}, or another --name"
            assert {path: text for path, text in content(folder).items() if path in written} == written
    go(folder, resume=True)


@pytest.mark.parametrize("slip", ["frist", "firs", "first-1", "First"])
def test_a_run_that_is_not_there_is_refused_with_the_name_nearest_to_it(tmp_path, slip):
    go(tmp_path / "first", until=2)
    (tmp_path / "firsts").mkdir()
    (tmp_path / "firsts" / "photo.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"there is no such run; did you mean --name first\?$"):
        go(tmp_path / slip, resume=True)
    with pytest.raises(ValueError, match=r"there is no such run$"):
        go(tmp_path / "other", resume=True)
    assert not (tmp_path / slip).exists()


def test_a_folder_of_somebody_else_is_no_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ValueError, match="there is no such run"):
        go(tmp_path / "photos", resume=True)
    assert [p.name for p in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_what_a_dead_process_left_is_swept_at_the_start(folder):
    for name in (".summary.json.tmp", ".model.old/weights", ".model.tmp/weights", "checkpoints/step-00000009.tmp/part"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old" if "old" in name else "half")
    with Run(folder, Options(), fingerprints=DATA, resume=True):
        left = {str(p.relative_to(folder)) for p in folder.rglob("*") if ".tmp" in p.name or ".old" in p.name}
        assert left == set()
        # Killed between two renames: the old model is there again.
        assert (folder / "model" / "weights").read_text() == "old"


def test_a_flipped_bit_of_any_file_makes_the_run_go_on_from_the_one_before(folder, capsys):
    newest = folder / "checkpoints" / "step-00000004"
    files = [p.relative_to(newest) for p in sorted(newest.rglob("*")) if p.is_file()]
    assert len(files) >= 3
    for number, file in enumerate(files):
        go(folder, until=4, resume=True)
        damaged = bytearray((newest / file).read_bytes())
        damaged[len(damaged) // 2] ^= 1 << (number % 8)
        (newest / file).write_bytes(damaged)
        assert go(folder, until=4, resume=True) == [(2, 3), (3, 4)]
        said = capsys.readouterr().out
        assert f"going on from {newest.with_name('step-00000002')}, because {newest / file}" in said


def test_fingerprints_are_of_what_is_there_not_of_where_it_lies(tmp_path):
    rows = arithmetic_rows(["+"])[:5]
    moved = [{**row, "_where": "elsewhere"} for row in rows]
    assert of_rows(rows) == of_rows(moved) != of_rows(rows[::-1])
    assert of_rows(rows) != of_rows([{**rows[0], "answer": "7"}, *rows[1:]])
    assert len({of_rows(rows), of_rows(rows, []), of_rows(rows[:2], rows[2:]), of_rows([])}) == 4
    sources = {}
    for name, body in (("a", "return 1.0"), ("b", "return 1.0"), ("c", "return 2.0")):
        (tmp_path / f"{name}.py").write_text(f"def f(c, r):\n    {body}\n\n\ndef g(c, r):\n    {body}\n")
        sources[name] = mark_of(load_reward(f"{tmp_path / name}.py:f"))
    assert sources["a"] == sources["b"] != sources["c"]
    assert mark_of(load_reward(f"{tmp_path}/a.py:g")) != sources["a"]
    assert mark_of(exact_match) == "rl_bridge.rewards.sources.exact_match"


def test_an_object_of_an_interactive_session_has_its_class_s_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "session", ModuleType("session"))  # without a file
    kind = type("Reward", (), {"__module__": "session", "__call__": lambda self, completion, row: 0.0})
    assert mark_of(kind()) == "Reward:"


def test_a_function_of_no_file_has_a_fingerprint():
    space = {}
    exec("def reward(completion, row): return 1.0", space)
    for function in (space["reward"], "abc".count, str.count, lambda completion, row: 0.0, max):
        assert mark_of(function) == mark_of(function) != mark_of(min)


def test_a_partial_is_its_function_and_what_it_adds():
    one, other, none = (partial(math.pow, 2.0, **extra) for extra in ({"by": 1}, {"by": 2}, {}))
    marks = [mark_of(f) for f in (one, other, none, partial(math.sqrt, 2.0), math.pow)]
    assert len(set(marks)) == 5 and mark_of(partial(math.pow, 2.0, by=1)) == marks[0]
    assert mark_of(partial(math.pow, object())) == mark_of(partial(math.pow, object()))  # no address
    script = (
        "from functools import partial; from math import pow; from rl_bridge.common.user_marks import mark_of; "
        "print(mark_of(partial(pow, tags={'alpha', 'beta', 'gamma'}, of=[pow])))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


def test_an_object_has_the_mark_of_its_fields_and_a_decorated_function_of_its_own_file(tmp_path):
    @dataclasses.dataclass
    class Length:
        scale: float

        def __call__(self, completion, row):
            return self.scale

    assert mark_of(Length(1.0)) == mark_of(Length(1.0)) != mark_of(Length(2.0))
    marks = set()
    for number in (1.0, 2.0):
        text = f"import torch\n\n@torch.no_grad()\ndef graded(completion, row):\n    return {number}\n"
        (tmp_path / "graded.py").write_text(text)
        marks.add(mark_of(load_reward(f"{tmp_path / 'graded.py'}:graded")))
    assert len(marks) == 2


def test_the_fingerprint_of_a_file_is_that_of_what_was_loaded(tmp_path, monkeypatch):
    """Wherever the program goes, and whatever becomes of the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completion, row):\n    return 1.0\n")
    first, second = load("mine.py:score"), load("mine.py:score")
    before = first.fingerprint
    (tmp_path / "mine.py").unlink()
    monkeypatch.chdir("/")
    assert second.fingerprint == first.fingerprint == before


@dataclasses.dataclass
class Counting:
    """A reward, and a reader of rows, that its own calls change."""

    scale: float = 1.0
    cache: dict = dataclasses.field(default_factory=dict)
    client: object = dataclasses.field(init=False)

    def __call__(self, completion, row):
        self.client = object()
        self.cache[completion] = self.cache.get(completion, 0.0) + self.scale
        return self.cache[completion]

    def read(self):
        self.cache["read"] = self.client = 1.0
        yield {"prompt": "1+1=", "answer": "2"}

    def batch(self, trajectories):
        return [self(t.completion, t.row) for t in trajectories]


def closing(scale):
    calls = []

    def counting(completion, row):
        calls.append(completion)
        return scale * len(calls)

    return counting


REWARDS = {
    "an object": Counting,
    "a method": lambda scale: Counting(scale).__call__,
    "of a batch": lambda scale: Counting(scale).batch,
    "a partial": lambda scale: partial(Counting.__call__, Counting(scale)),
    "a closure": closing,
}


@pytest.mark.parametrize("how", ["alone", "in a list", "by loops"])
@pytest.mark.parametrize("kind", REWARDS)
def test_calls_do_not_change_the_mark_of_a_reward(kind, how):
    protocol = "batch" if kind == "of a batch" else "completion"

    def marks(scale):
        """Before, between and after two calls; loops ask only after the first."""
        reward = REWARDS[kind](scale)
        loaded = load([reward] if how == "in a list" else reward, protocol=protocol)
        marks = [loaded.fingerprint]
        if how == "by loops":
            loaded = loaded_rewards(reward)
            marks = []
        for _ in range(2):
            loaded.score(trajectories("a", "b"))
            marks.append(fingerprint_of_loops(loaded) if how == "by loops" else loaded.fingerprint)
        return set(marks)

    first, again, other = marks(1.0), marks(1.0), marks(2.0)
    assert len(first) == 1 and first == again != other


def test_reading_does_not_change_the_mark_of_a_reader():
    reader, other = Counting(), Counting(2.0)
    first, again, changed = (load_rows(one.read).fingerprints() for one in (reader, Counting(), other))
    assert first == again and first["data"] == changed["data"]
    assert first["data reader"].startswith("Counting.read:") and first["data reader"] != changed["data reader"]
    assert load_rows(reader.read).fingerprints() != first  # as it is by now


@pytest.mark.parametrize("path", ["", "/score", "/score?key=1", "/v1/judge"])
def test_a_server_in_hand_has_the_mark_of_its_address(path):
    marks = {
        load(one).fingerprint
        for host in ("http://a:1", "http://b.example:2")
        for one in (f"{host}{path}", RemoteRewardModel(server=Server(url=f"{host}{path}", retries=2), batch=4))
    }
    assert len(marks) == 1 and load("http://a:1/other").fingerprint not in marks


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://gw/models/small/score", "http://gw/models/large/score"),
        ("http://gw/score?model=a", "http://gw/score?model=b"),
        ("http://gw/score", "http://gw/score?model=b"),
        ("http://gw/a/score", "http://gw/score"),
    ],
)
def test_another_path_or_query_of_a_server_is_another_reward(one, other):
    for made in (str, lambda url: RemoteRewardModel(server=Server(url=url))):
        assert load(made(one)).fingerprint != load(made(other)).fingerprint
        assert load(made(one)).fingerprint == load(made(one.replace("gw", "elsewhere:8000"))).fingerprint


def test_a_renewed_key_is_no_other_reward():
    keys = {load(f"http://{user}gw/score?model=a&api_key={key}").fingerprint for user, key in (("", 1), ("me:x@", 2))}
    assert len(keys) == 1 and load("http://gw/score?model=b&api_key=1").fingerprint not in keys


def test_no_value_of_a_partial_stands_in_the_record(tmp_path):
    reader = partial(Counting.read, Counting())
    rows = load_rows(partial(rows_of, "correct horse battery", table=list(range(3000))))
    write_provenance(tmp_path, 1, rows.fingerprints() | load_rows(reader).fingerprints())
    text = (tmp_path / "provenance.jsonl").read_text()
    assert "horse" not in text and len(rows.fingerprints()["data reader"]) <= 200


def rows_of(password, table):
    yield {"prompt": "1+1=", "answer": str(table[2]), "length": len(password)}
