"""Names of the trainers' own options, and the words of a trial."""

import re
from pathlib import Path

import pytest

from rl_bridge.run.options import RunOptions
from rl_tools import trainers
from rl_tools.cli import main
from rl_tools.trainer_options import TRAINERS, options_of
from rl_tools.tune.space import Interval, corners, read_space, words_of
from rl_tools.tune.tune_command import ELSEWHERE, parser, run
from rl_train.policy_configs import quickstart
from rl_train.preference import PreferencePipeline

POLICY = options_of(quickstart())


def test_a_recipe_has_options_of_its_own():
    words = {
        "objective.clip-high": "log:1e-4..1e-2",
        "objective:gspo.clip-low": "0.1..0.2",
        "policy.sampling.n+policy.prompts-per-step": "4+192,8+96",
        "objective": "gspo,dapo,ppo",
        "policy.steps": "1..8",
    }
    space = read_space(words, POLICY, ["--track-kl"])
    assert next(parameter.name for parameter in space) == "objective"
    named = {parameter.name: parameter for parameter in space}
    assert named["objective.clip-high"].when is None and named["objective:gspo.clip-low"].when == (
        "objective",
        ("gspo",),
    )
    assert named["policy.steps"].domain == Interval(1, 8, whole=True), "an integer by the option's type"
    for corner in corners(space):
        made = words_of(corner, POLICY, ["--track-kl"])
        config = trainers.parse(quickstart(), made, prog="x")
        assert config.objective.algorithm == corner["objective"] and config.policy.steps in (1, 8)
        assert config.policy.sampling.n * config.policy.prompts_per_step == 768
        assert config.objective.clip_high == corner["objective.clip-high"] and config.track_kl
        assert ("--objective.clip-low" in made) == (corner["objective"] == "gspo")


def test_an_option_of_some_recipes_applies_with_those():
    space = read_space({"objective": "gspo,dapo,reinforce", "objective.clip-high": "0.1..0.3"}, POLICY, [])
    assert [p.when for p in space] == [None, ("objective", ("gspo", "dapo"))]


def test_without_a_word_the_recipe_is_the_trainers_own():
    space = read_space({"objective.clip-high": "0.1..0.3"}, POLICY, [])
    made = words_of({"objective.clip-high": 0.25}, POLICY, ["--policy.steps", "3"])
    assert [p.when for p in space] == [None] and made[0] == "objective:dapo"
    assert trainers.parse(quickstart(), made, prog="x").objective.clip_high == 0.25
    losses = options_of(PreferencePipeline)
    space = read_space({"loss": "dpo,aot_unpaired"}, losses, [])
    config = trainers.parse(
        PreferencePipeline, words_of({"loss": space.parameters[0].domain.points(2)[1]}, losses, []), prog=""
    )
    assert config.loss.loss == "aot_unpaired"


REFUSED = {
    "a slip": (
        {"optimizer.learning-rat": "0..1"},
        [],
        "has no option --optimizer.learning-rat; did you mean optimizer.le",
    ),
    "an older name": ({"policy.responses-per-prompt": "4,8"}, [], "-per-prompt; did you mean policy.sampling.n?"),
    "a recipe's slip": ({"objective.clip-hihg": "0..1"}, [], "did you mean objective.clip-high"),
    "no recipe": ({"objective": "gspo,dappo"}, [], "there is no objective:dappo; did you mean "),
    "of another recipe": ({"objective.clip-high": "0..1"}, ["objective:reinforce"], "here objective is reinforce"),
    "not of this recipe": (
        {"objective:reinforce.clip-high": "0..1"},
        [],
        "objective:reinforce has no option --objective.cl",
    ),
    "the seed": ({"seed": "1,2"}, [], "--seed is the study's own"),
    "twice": ({"policy.steps": "1..8"}, ["--policy.steps", "3"], "--policy.steps is fixed and searched"),
    "recipe twice": ({"objective": "gspo,dapo"}, ["objective:gspo"], "--objective is fixed and searched"),
    "a domain": ({"policy.steps": "8..1"}, [], "--space.policy.steps: a range goes"),
    "pairs": ({"policy.steps+seed": "1+2,3+4"}, [], "--seed is the study's own"),
    "uneven": ({"policy.steps+held-out": "1+2,3"}, [], "give choices of 2 values"),
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_option_is_refused_with_the_nearest_name(wrong):
    words, fixed, message = wrong
    with pytest.raises(ValueError) as refused:
        read_space(words, POLICY, fixed)
    assert message in str(refused.value)


COMMANDS = {
    "an end that cannot be": (["--space.policy.steps", "0..3"], SystemExit, "2"),
    "a fixed option": (
        ["--space.policy.steps", "1..3", "--policy.stepz", "3"],
        ValueError,
        "did you mean policy.steps",
    ),
    "a fixed seed": (["--space.policy.steps", "1..3", "--seed", "3"], ValueError, "give --seeds"),
    "no domain": (["--space.policy.steps", "--trials", "3"], ValueError, "needs a domain"),
    "nothing": (["--trials", "3"], ValueError, "nothing to search"),
    "a constraint": (["--space.policy.steps", "1..3", "--constraint", "kl<0.1"], ValueError, "is no constraint"),
    "a reduction": (["--space.policy.steps", "1..3", "--maximize", "reward:median"], ValueError, "last, best, mean"),
    "one goal": (
        ["--space.policy.steps", "1..3", "--sampler", "cma-es", "--maximize", "reward", "--minimize", "kl"],
        ValueError,
        "the sampler cma-es takes one goal, got 2; of several goals learn random, grid, tpe, gp",
    ),
    "a sampler that is gone": (
        ["--space.policy.steps", "1..3", "--sampler", "skopt"],
        ValueError,
        "the sampler skopt of scikit-optimize is gone: give --sampler gp",
    ),
    "a function beside": (
        ["--space", "x:y", "--space.policy.steps", "1..3"],
        ValueError,
        "leave --space.policy.steps out",
    ),
    "no function": (["--space", "math:nothing"], ValueError, "math has no function nothing"),
}


@pytest.mark.parametrize("wrong", COMMANDS.values(), ids=list(COMMANDS))
def test_a_command_that_cannot_be_is_refused_before_a_folder_is_made(wrong, tmp_path, capsys):
    words, kind, message = wrong
    with pytest.raises(kind) as refused:
        run(["policy", *words, "--output", str(tmp_path / "runs")])
    assert message in str(refused.value) and not (tmp_path / "runs").exists()


FALSE_SETTINGS = {
    "--maximize=": "has the name of a metric",
    "--maximize=:best": "has the name of a metric",
    "--maximize kl --minimize kl": "the goal kl is there twice",
    "--minimize kl:best --minimize kl:best": "the goal kl:best is there twice",
    "--constraint kl<=nan": "constraint 'kl<=nan': the bound is a finite number, got nan",
    "--constraint kl>=inf": "the bound is a finite number, got inf",
    "--sampler tpe --trials 4 --startup-trials 4": "every trial is random, and the sampler tpe never learns",
    "--pruner asha --minimize tokens": "tokens is of a whole run: give another goal, or --pruner none",
    "--devices 0,,1 --parallel 3": "got '0,,1'",
    "--devices 0,1": "at most one device for each process (--parallel 1)",
    "--space.policy.steps+held-out 1+4,2+8": "--policy.steps is searched twice",
    "--space.seed 1..3": "--seed is the study's own",
}
NO_FOLDERS = ("", ".", "..", "a/b", "../a", ".hidden", " ", "a ", "a\u202eb", "a\\b", "a" * 201)
WITHOUT_EFFECT = {
    "--grid-points 4": "with --sampler random",
    "--sampler tpe --grid-points 4": "with --sampler tpe",
    "--startup-trials 3": "with --sampler random",
    "--sampler grid --startup-trials 3": "with --sampler grid",
    "--prune-after 9": "with --pruner none",
    "--prune-factor 9": "with --pruner none",
    "--prune-pairs 9": "with --pruner none",
    "--prune-margin 0.5": "with --pruner none",
    "--pruner paired --seeds 3 --prune-factor 9": "with --pruner paired",
    "--pruner asha --prune-pairs 9": "with --pruner asha",
    "--pruner asha --prune-margin 0.5": "with --pruner asha",
}
BESIDE_A_FUNCTION = ("--sampler tpe", "--sampler-seed 3", "--grid-points 4", "--startup-trials 3")


@pytest.mark.parametrize("words", FALSE_SETTINGS)
def test_a_setting_of_the_study_that_cannot_be_is_refused_before_a_folder_is_made(words, tmp_path):
    with pytest.raises(ValueError) as refused:
        run(["policy", "--space.policy.steps", "1..3", *words.split(), "--output", str(tmp_path / "runs")])
    assert FALSE_SETTINGS[words] in str(refused.value) and not (tmp_path / "runs").exists()


def study_named(name, output):
    run(["policy", "--space.policy.steps", "1..3", "--name", name, "--output", str(output)])


@pytest.mark.parametrize("name", NO_FOLDERS)
@pytest.mark.parametrize("function", [RunOptions, study_named])
def test_a_name_that_is_no_folder_in_the_output_is_refused(name, function, tmp_path):
    with pytest.raises(ValueError) as refused:
        function(name=name, output=tmp_path / "runs")
    assert str(refused.value).startswith(f"name is that of a folder in {tmp_path / 'runs'}, not a path and not hidden")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", WITHOUT_EFFECT)
def test_a_setting_of_the_study_that_nothing_reads_is_refused(words, tmp_path):
    option, value = words.split()[-2:]
    with pytest.raises(ValueError) as refused:
        run(["policy", "--space.policy.steps", "1..3", *words.split(), "--output", str(tmp_path / "runs")])
    assert str(refused.value) == f"{option} {value} has no effect {WITHOUT_EFFECT[words]}"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", BESIDE_A_FUNCTION)
def test_a_setting_of_a_sampler_is_refused_beside_a_function_that_proposes(words, tmp_path):
    with pytest.raises(ValueError) as refused:
        run(["policy", "--space", "math:floor", *words.split(), "--output", str(tmp_path / "runs")])
    assert str(refused.value) == f"{words} has no effect with --space math:floor, which proposes all trials"


def test_a_seed_that_the_trainer_refuses_is_refused_before_a_folder_is_made(tmp_path, capsys):
    """Each run would refuse the seed, and the study would be one of failed trials."""
    words = ["--space.policy.steps", "1..3", "--first-seed", "4294967295", "--seeds", "2"]
    with pytest.raises(SystemExit, match="2"):
        run(["policy", *words, "--output", str(tmp_path / "runs")])
    said = capsys.readouterr().err
    assert "seed" in said and "all options: rl-fn train policy --help-all" in said and not (tmp_path / "runs").exists()


TAKES_ZERO = ("--sampler-seed", "--first-seed", "--confirm", "--prune-margin", "--retries", "--grace")
WORDS = (None, Path)
"""Types of options that take any word."""
NUMBERS = [action.option_strings[0] for action in parser()._actions if action.type not in WORDS]


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_without_sense_is_refused_by_its_option(option, tmp_path, capsys):
    assert len(NUMBERS) == 15
    for value in ("nan", "inf", "-inf", "-1", "one", "1.0.0", "", *(() if option in TAKES_ZERO else ("0",))):
        with pytest.raises(SystemExit, match="2"):
            run(["policy", "--space.policy.steps", "1..3", option, value, "--output", str(tmp_path / "runs")])
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"rl-fn tune: error: argument {option}: expected a ") and said.endswith(f"got {value!r}")
    if option in TAKES_ZERO:
        assert vars(parser().parse_args([option, "0"]))[option[2:].replace("-", "_")] == 0
    assert not (tmp_path / "runs").exists()


def slips(option):
    """An option with a letter less, two letters in the other order, and an underscore."""
    name = option[2:]
    return {f"--{name[:-1]}", f"--{name[:2]}{name[3:2:-1]}{name[2]}{name[4:]}", f"{option}s", option.replace("-", "_")}


OWN = [action.option_strings[-1] for action in parser()._actions if len(action.option_strings[-1]) > 7]


@pytest.mark.parametrize("option", OWN)
def test_a_slip_in_an_option_of_the_study_is_refused_with_that_option(option):
    for slip in slips(option) - {f"{option.replace('-', '_')}", *OWN}:
        with pytest.raises(ValueError, match=r"neither rl-fn tune nor the trainer has") as refused:
            run(["sft", "--space.steps", "1..3", slip, "3"])
        assert re.search(rf"did you mean .*{option}\b", str(refused.value)), slip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_of_another_tuner_is_refused_with_the_one_that_it_is_here(name):
    here = f"--{ELSEWHERE[name]}"
    assert any(here in action.option_strings for action in parser()._actions)
    for word in (f"--{name}", f"--{name}=3", f"--{name.replace('-', '_')}"):
        with pytest.raises(ValueError) as refused:
            run(["sft", "--space.steps", "1..3", word, "3"])
        assert str(refused.value).endswith(f"has --{name}; did you mean {here}? (rl-fn tune --help)")


@pytest.mark.parametrize("trainer", [*TRAINERS, None])
@pytest.mark.parametrize("word", ["--help-all", "--help", "-h"])
def test_help_is_the_study_s_and_says_where_the_trainer_s_is(word, trainer, capsys):
    assert main(["tune", *([trainer] if trainer else []), word]) == 0
    said = capsys.readouterr().out
    assert "--space MODULE:FUNCTION" in said
    assert said.splitlines()[-1] == f"all options of the trainer: rl-fn train {trainer or 'TRAINER'} --help-all"


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
@pytest.mark.parametrize(
    "function", [lambda output: RunOptions(output=output), lambda output: study_named("x", output)]
)
def test_an_output_that_is_a_file_or_lies_under_one_is_refused(function, below, tmp_path):
    (tmp_path / "rows.jsonl").write_text("content")
    output = tmp_path / "rows.jsonl" / below
    with pytest.raises(ValueError) as refused:
        function(output)
    where = f"lies under the file {tmp_path / 'rows.jsonl'}" if below else "is a file"
    assert str(refused.value) == f"--output {output} {where}; give a folder"
    assert (tmp_path / "rows.jsonl").read_text() == "content"


@pytest.mark.parametrize(
    ("option", "domain", "end"),
    [
        ("optimizer.learning-rate", "-1e-3..1e-3", "-0.001"),
        ("optimizer.final", "0.5..2", "2.0"),
        ("held-out", "-4,4", "-4"),
    ],
)
def test_an_end_that_the_option_refuses_is_named(option, domain, end, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(["sft", f"--space.{option}", domain, "--output", str(tmp_path / "runs")])
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"so a trial with these ends of the domains cannot be: --space.{option}: {end}"
    assert not (tmp_path / "runs").exists()


RETURNS = {
    "an int": "3",
    "a list": "[1, 2]",
    "a text": "'steps'",
    "None": "None",
    "numbers as names": "{1: 2}",
    "a list as a value": "{'steps': [1, 2]}",
    "None as a value": "{'steps': None}",
    "a failure": "set(number)",
}


@pytest.mark.parametrize("kind", RETURNS)
def test_a_function_that_returns_no_proposal_is_refused_before_a_folder_is_made(kind, monkeypatch, tmp_path):
    monkeypatch.setattr("rl_tools.tune.study.run_study", lambda study, resume: pytest.fail("the study began"))
    (tmp_path / "mine.py").write_text(f"def f(number, told):\n    return {RETURNS[kind]}\n")
    place = f"{tmp_path / 'mine.py'}:f"
    with pytest.raises((ValueError, TypeError)) as refused:
        run(["sft", "--space", place, "--output", str(tmp_path / "runs")])
    said = str(refused.value)
    assert said.startswith(f"--space {place} ") and "returns a mapping of options to numbers or texts" in said
    assert ("failed for trial 0: TypeError" in said) == (kind == "a failure") and not (tmp_path / "runs").exists()


def test_a_function_with_a_state_is_not_called_twice_for_its_first_proposal(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "rest = [{'steps': 1}, {'steps': 2}]\ndef f(number, told):\n    return rest.pop(0)\n"
    )
    proposed = []

    def to_its_end(study, resume):
        sampler = study.sampler(None)
        proposed.extend(sampler.ask(number) for number in range(2))
        return [{"kind": "study", "space": "", "goals": []}]

    monkeypatch.setattr("rl_tools.tune.study.run_study", to_its_end)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    monkeypatch.setattr("rl_tools.tune.tune_command._succeeded", lambda events, confirm: True)
    assert run(["sft", "--space", f"{tmp_path / 'mine.py'}:f", "--output", str(tmp_path)]) == 0
    assert proposed == [{"steps": 1}, {"steps": 2}]


@pytest.mark.parametrize("words", [[], ["--space.steps", "1..3", "sft"]], ids=["nothing", "a trainer behind options"])
def test_a_command_without_a_trainer_in_front_is_no_success(words, capsys):
    assert main(["tune", *words]) == 2
    assert "give a trainer" in capsys.readouterr().err


@pytest.mark.parametrize(("statuses", "exit_status"), [(["failed", "complete"], 0), (["failed", "pruned"], 1)])
def test_a_study_without_a_complete_trial_exits_with_1(statuses, exit_status, monkeypatch, tmp_path):
    """TOOL-8: it was 0 with every trial failed."""
    events = [{"kind": "study", "space": [], "goals": [{"name": "reward", "maximize": True}]}]
    values = {"reward": {"mean": 0.5, "low": None, "high": None, "seeds": [0.5]}}
    for number, status in enumerate(statuses):
        told = {"status": status, "reason": "", "violations": [], "values": values if status == "complete" else {}}
        events += [{"kind": "asked", "trial": number, "assignment": {}}, {"kind": "told", "trial": number, **told}]
    monkeypatch.setattr("rl_tools.tune.study.run_study", lambda study, resume: events)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    assert run(["policy", "--space.policy.steps", "1..3", "--output", str(tmp_path)]) == exit_status


FILES = {
    "rows": ("rows.jsonl", ["--data", "rows.jsonl"]),
    "held-out rows": ("held_out.jsonl", ["--eval-data=held_out.jsonl"]),
    "rows that are searched": ("more.jsonl", ["--space.data", "rows.jsonl,more.jsonl"]),
    "reward": ("mine.py", ["--reward", "right=mine.py:score"]),
    "module of a reward": ("beside.py", ["--reward", "mine.py:score"]),
    "rows of a function": ("mine.py", ["--data", "mine.py:rows@test"]),
    "rows of a folder": ("rows/test.jsonl", ["--data", "rows@test"]),
    "rows deep in a folder": ("rows/main/train.jsonl", ["--data", "rows"]),
    "model": ("tiny/config.json", ["--model", "tiny"]),
    "models that are searched": ("tiny/config.json", ["--space.model", "other,tiny"]),
    "reward model": ("tiny/config.json", ["--reward", "learned=model:tiny"]),
}
"""A file that trials read, and the words that name it or its folder."""


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_a_study_goes_on_with_the_files_that_it_began_with(name, monkeypatch, tmp_path):
    """Trials before and after the change would be compared, though they learn from other rows or by other rewards."""
    file, words = FILES[name]
    monkeypatch.chdir(tmp_path)
    for folder in ("rows/main", "tiny", "other"):
        Path(folder).mkdir(parents=True)
    Path("tiny/config.json").write_text("{}")
    for own in ("rows.jsonl", "held_out.jsonl", "more.jsonl", "rows/test.jsonl", "rows/main/train.jsonl"):
        Path(own).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("beside.py").write_text("RIGHT = 1.0\n")
    Path("mine.py").write_text("from beside import RIGHT\n")
    monkeypatch.setattr("rl_tools.tune.study._to_its_end", lambda journal, study: None)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    study = ["policy", "--space.policy.steps", "1..3", *words]
    run(study)
    run([*study, "--resume"])
    Path(file).write_text(Path(file).read_text() + "\n")
    before = Path("mine.py") if name == "module of a reward" else Path(Path(file).parts[0])
    with pytest.raises(ValueError, match=f"is another study: the content of {before} was .* Give this one another"):
        run([*study, "--resume"])


WRITTEN = ["exported", "tensorboard", "more", "8", "gspo", "objective:gspo"]


@pytest.mark.long
@pytest.mark.parametrize("word", WRITTEN)
def test_a_folder_that_is_written_to_or_named_as_a_word_is_not_the_study_s_matter(word, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl_tools.tune.study._to_its_end", lambda journal, study: None)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    study = ["policy", "--space.policy.steps", "1..3", "--policy.prompts-per-step", "8", "--trackers", "tensorboard"]
    study += ["--tracker-output", "exported", "--tracker-project=more", "objective:gspo"]
    Path(word).mkdir()
    run(study)
    (Path(word) / "events").write_text("after")
    run([*study, "--resume"])
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.long
@pytest.mark.parametrize("word", ["mine", "7", "random", "none"])
def test_a_file_that_is_named_as_a_word_of_the_study_is_not_its_matter(word, monkeypatch, tmp_path):
    """The study's own name, counts, sampler and pruner: no trial reads a file of these names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl_tools.tune.study._to_its_end", lambda journal, study: None)
    monkeypatch.setattr("rl_tools.tune.study_report.write_report", lambda folder: [])
    study = ["policy", "--space.policy.steps", "1..3", "--name", "mine", "--trials=7", "--grace", "7"]
    study += ["--sampler", "random", "--pruner", "none"]
    Path(word).write_text("before")
    run(study)
    Path(word).write_text("after")
    run([*study, "--resume"])
    assert (tmp_path / "runs" / "mine" / "journal.jsonl").is_file()
