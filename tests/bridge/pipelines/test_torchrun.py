"""The same command under torchrun: two ranks share the work and end with the numbers of one process."""

import pytest

from tests.bridge.pipelines.conftest import words_of
from tests.bridge.pipelines.processes import REWARD, SHORT, assert_same_run, in_a_process

pytestmark = pytest.mark.long


@pytest.fixture
def words(tmp_path, model_folder):
    (tmp_path / "reward.py").write_text(REWARD)

    def of(name, *more):
        options = {**SHORT, "--reward": f"{tmp_path / 'reward.py'}:even_digits"}
        return words_of(tmp_path, model_folder, name, "objective:grpo", *more, **options)[2:]

    return of


def test_two_ranks_of_torchrun_end_as_one_process_does(tmp_path, words, run_to_end):
    one = run_to_end(["train", "policy", *words("one")])
    printed = in_a_process(words("two"), ranks=2)
    assert "held-out reward" in printed.splitlines()[-1] and printed.count("before reinforcement learning") == 1
    assert_same_run(tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"sequence": 2}, {"replicate": 2, "shard": 1}], ids=str)
def test_other_meshes_do_too(tmp_path, words, run_to_end, mesh):
    one = run_to_end(["train", "policy", *words("one")])
    options = [str(word) for axis, size in mesh.items() for word in (f"--mesh.{axis}", size)]
    in_a_process(words("two", "--packing", *options), ranks=2)
    assert_same_run(tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_does_too(tmp_path, words, run_to_end):
    one = run_to_end(["train", "policy", *words("one")])
    in_a_process(words("two", "--executor", "ray", "--workers", "2"))
    assert_same_run(tmp_path / "two", one)


def test_a_mesh_that_does_not_fit_is_refused(words, capsys):
    from rl_tools.cli import main

    assert main(["train", "policy", *words("never"), "--mesh.tensor", "2"]) == 1
    assert "is of 2 workers, and there are 1" in capsys.readouterr().err
