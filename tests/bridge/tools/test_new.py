"""A loop as a file of the user's own."""

import pytest

from rl_tools.cli import main
from rl_tools.new import about, loops
from tests.support import warm


@pytest.mark.parametrize("name", loops())
def test_a_new_loop_is_the_example_and_knows_its_options(name: str, tmp_path, capsys):
    file = tmp_path / "my_loop.py"
    assert main(["new", name, str(file)]) == 0
    assert file.read_text("utf-8") == loops()[name].read_text("utf-8") and len(about(file)) > 20
    assert len(file.read_text("utf-8").splitlines()) <= 100
    assert capsys.readouterr().out == f"{file}: {len(file.read_text().splitlines())} lines; python {file} --help\n"
    compile(file.read_text("utf-8"), str(file), "exec")


@pytest.mark.long
def test_a_new_loop_runs_from_any_folder(tmp_path):
    assert main(["new", "grpo", str(tmp_path / "my_loop.py")]) == 0
    answer = warm.run("my_loop.py", "--help", cwd=tmp_path)
    assert answer.returncode == 0 and "--max-new-tokens" in answer.stdout


def test_all_kinds_of_training_have_a_loop():
    assert {"grpo", "ppo", "sft", "preference", "reward_model", "conversations"} <= loops().keys()


def test_a_file_that_is_there_stays(tmp_path, capsys):
    file = tmp_path / "my_loop.py"
    file.write_text("mine")
    assert main(["new", "sft", str(file)]) == 1 and file.read_text() == "mine"
    assert "is there already, and stays as it is" in capsys.readouterr().err
    assert main(["new", "sft", str(tmp_path / "loop.txt")]) == 1
    assert "is no Python file" in capsys.readouterr().err
    assert main(["new", "sft", str(tmp_path / "nowhere" / "loop.py")]) == 1
    assert "No such file or directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my_loop.py"]
