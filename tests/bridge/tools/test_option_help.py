"""The short page of a trainer's options, and the words that a shell completes."""

import contextlib
import functools
import re
import subprocess
import typing
from pathlib import Path

import pytest

from rl_tools import option_help
from rl_tools.cli import COMMANDS, main
from rl_tools.trainer_options import TRAINERS, load, options_of


def completed(words: list[str]) -> list[str]:
    return option_help.next_words(words, COMMANDS)


def config_of_defaults(trainer: str):
    default = load(TRAINERS[trainer].default)
    return default if isinstance(default, type) else default(())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_short_page_has_at_most_40_options_with_default_and_text(trainer: str, capsys):
    assert main(["train", trainer, "--help"]) == 0
    page = capsys.readouterr().out
    options = options_of(config_of_defaults(trainer))
    heads = [line.split()[0] for line in page.splitlines() if line.startswith("  ") and line[2] != " "]
    names = [head.removeprefix("--").partition(":")[0] for head in heads]
    assert 10 < len(names) <= option_help.MOST and len(set(names)) == len(names)
    assert set(names) <= options.kinds.keys() | options.recipes.keys()
    lines = page.splitlines()
    assert all(lines[lines.index(line) + 1].startswith("      ") for line in lines if line.startswith("  --"))
    assert f"rl-fn train {trainer} --help-all" in page and "--optimizer.learning-rate NUMBER (" in page


def test_every_name_of_the_pages_is_an_option_of_some_trainer():
    every = [options_of(config_of_defaults(trainer)) for trainer in TRAINERS]
    known = {name for options in every for name in (*options.kinds, *options.recipes)}
    assert {name for names in option_help.USES.values() for name in names} <= known


def test_the_long_page_has_all_options(capsys):
    assert main(["train", "policy", "--help-all"]) == 0
    page = capsys.readouterr().out
    assert all(f"--{name}" in page for name in options_of(config_of_defaults("policy")).kinds if len(name) < 20)


@pytest.mark.parametrize("shell", option_help.SHELLS)
def test_a_shell_completes_commands_options_and_recipes(shell: str, capsys):
    assert main(["completion", shell]) == 0
    assert "complete -o default -F _rl_fn rl-fn" in capsys.readouterr().out
    assert completed([]) == sorted([*COMMANDS, "--help", "--version"])
    assert completed(["tr"]) == ["train"]
    assert completed(["train", "pre"]) == ["preference"]
    assert completed(["train", "policy", "--optimizer.le"]) == ["--optimizer.learning-rate"]
    assert completed(["train", "policy", "objective:gs"]) == ["objective:gspo", "objective:gspo-token"]
    assert completed(["train", "sft", "objective:"]) == []


BEHIND = {
    "a command's own words": ("check", ["openrlhf", "trl", "tunix", "verl"]),
    "a sub-command's option": ("quantize verify --e", ["--engine"]),
    "values of such an option": ("quantize verify --engine ", ["in_process", "none", "vllm"]),
    "values that a page of boxes lists": ("export runs/x --to ", ["mlflow", "tensorboard", "trackio", "wandb"]),
    "a file": ("export runs/x --output ", []),
    "several words": ("report runs/x runs/y --w", ["--watch"]),
    "values of a study's option": ("tune policy --pruner ", ["asha", "none", "paired"]),
    "what a study searches": ("tune policy --space.optimizer.le", ["--space.optimizer.learning-rate"]),
    "a domain": ("tune policy --space.optimizer.learning-rate ", []),
    "a plan's own option": ("plan policy --fi", ["--fits"]),
    "a value behind a sign": ("train policy --dtype = fl", ["float32"]),
    "nothing behind the sign yet": ("train policy --dtype =", ["bfloat16", "float32"]),
    "an option behind a switch": ("train policy --resume --optimizer.le", ["--optimizer.learning-rate"]),
    "a shell": ("completion ", ["bash", "zsh"]),
    "what is no command": ("trian ", []),
    "a file that is not there": ("train missing.toml --dty", []),
}


@pytest.mark.parametrize("line", BEHIND)
def test_what_may_stand_behind(line: str):
    words, expected = BEHIND[line]
    words = words.split(" ") if " " in words else [words, ""]
    assert [word for word in completed(words) if word != "--help"] == expected


@pytest.mark.parametrize("command", [command for command, function in COMMANDS.items() if function])
def test_every_option_of_a_command_s_page_is_completed(command: str, capsys):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    page = capsys.readouterr().out
    options = {
        option
        for pair in re.findall(r"(?m)^\W*(?:-\w, )?(--[a-z][a-z-]*)(?:, (--[a-z][a-z-]*))?", page)
        for option in pair
        if option
    }
    assert options or command == "check"
    assert options <= {*completed([command, "--"]), *completed([command, "x", "--"])}


DOCS = Path(__file__).parents[3] / "docs"
NAMED = sorted(
    {
        pair
        for page in DOCS.glob("*.md")
        for pair in re.findall(r"`--([a-z0-9.-]+)`\s\(([0-9.]+)\)", page.read_text("utf-8"))
    }
)


@pytest.mark.parametrize(("name", "number"), NAMED)
def test_a_number_that_a_page_has_behind_an_option_is_its_default(name: str, number: str):
    """With every trainer that has the option."""
    path, found = [part.replace("-", "_") for part in name.split(".")], []
    for trainer in TRAINERS:
        config = config_of_defaults(trainer)
        if name in options_of(config).kinds:
            found.append(functools.reduce(getattr, path, config))
    assert found and set(found) == {float(number)}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_values_of_every_option_that_has_a_few(trainer: str):
    kinds = options_of(config_of_defaults(trainer)).kinds
    few = {name: kind for name, kind in kinds.items() if typing.get_origin(kind) is typing.Literal}
    assert len(few) > 3
    for name, kind in few.items():
        assert completed(["train", trainer, f"--{name}", ""]) == sorted(map(str, typing.get_args(kind)))
    if trainer == "policy":  # an option of a recipe, which may be None
        words = ["train", trainer, "objective:dapo", "--objective.dynamic-sampling", ""]
        assert completed(words) == ["False", "True"]


@pytest.mark.parametrize("command", ["train", "plan", "tune"])
def test_a_run_file_names_the_trainer_whose_options_are_completed(command: str, tmp_path):
    (tmp_path / "a.toml").write_text('trainer = "preference"\n')
    (tmp_path / "b.toml").write_text("steps = 3\n")
    files = [str(tmp_path / "a.toml"), str(tmp_path / "b.toml")]
    assert completed([command, *files, "loss:dpo-n"]) == ["loss:dpo-norm"]
    assert completed([command, *files, "--steps", "3", "--optimizer.le"]) == ["--optimizer.learning-rate"]
    assert "--optimizer.learning-rate" not in completed([command, files[1], "--o"])


def test_loops_are_completed_by_their_names():
    assert {"grpo", "ppo", "sft"} <= set(completed(["new", ""])) and completed(["new", "gr"]) == ["grpo"]


def test_bash_asks_for_the_words_that_it_completes(tmp_path, capsys):
    """In a real bash: the function's answer for a line with a part of a word at its end."""
    main(["completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    command = (
        f'source {script}; rl-fn() {{ echo "$@" >&3; echo objective:gspo; echo objective:grpo; }}; exec 3>&1; '
        'COMP_WORDS=(rl-fn train policy objective:gs); COMP_CWORD=3; _rl_fn; echo "${COMPREPLY[@]}"'
    )
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout == "completion -- train policy objective:gs\nobjective:gspo\n"


def test_another_shell_is_refused_with_the_way_on(capsys):
    assert main(["completion", "fish"]) == 1
    assert 'one of bash, zsh: eval "$(rl-fn completion bash)"' in capsys.readouterr().err
