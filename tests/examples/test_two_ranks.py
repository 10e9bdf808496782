"""Every example runs with torchrun on two ranks as it does with python, and has the numbers of one process."""

import pytest

from tests.examples import scripts
from tests.support import warm

pytestmark = pytest.mark.long


@pytest.mark.parametrize("example", scripts.FLAGS)
def test_two_ranks_of_torchrun_have_the_numbers_of_one_process(example, model_folder, problems, pairs, tmp_path):
    for place, ranks in (("one", 0), ("two", 2)):
        command = scripts.words(example, tmp_path, place, model_folder, problems, pairs)
        done = warm.run(*command, count=ranks, timeout=240)
        assert done.returncode == 0, done.stderr
    scripts.assert_same_numbers(tmp_path, "two", example)


def test_no_example_is_left_out():
    assert sorted(scripts.FLAGS) == sorted(path.stem for path in (scripts.ROOT / "examples").glob("*.py"))
