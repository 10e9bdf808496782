"""The working directory is the program's: no function of the user's moves it, and the program itself does."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_bridge.common.user_files import the_users_code


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Three folders, in the first of which the program is."""
    for name in "abc":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    return [tmp_path / name for name in "abc"]


def in_code(function, *arguments):
    with the_users_code():
        return function(*arguments)


@pytest.mark.parametrize("how", ["chdir", "fchdir"])
@pytest.mark.parametrize("hangs", [False, True], ids=["alone", "beside one that hangs"])
def test_the_program_moves_whatever_functions_are_at_work(folders, hangs, how):
    first, second, third = folders
    end, begun = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        if hangs:
            pool.submit(in_code, lambda: begun.set() or end.wait(60))
            assert begun.wait(60)
        number = os.open(second, os.O_RDONLY)
        try:
            os.chdir(second) if how == "chdir" else os.fchdir(number)
        finally:
            os.close(number)
        in_code(str)
        assert os.getcwd() == str(second)
        in_code(os.chdir, third)  # in this thread, and in another one
        assert os.getcwd() == str(second)
        pool.submit(in_code, os.chdir, third).result(60)
        assert os.getcwd() == str(second)
        end.set()
    assert os.getcwd() == str(second) != str(first)
