"""The working directory is the program's: no function of the user's moves it, and the program itself does."""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
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


def in_a_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function, *arguments).result(60)


def in_a_folder_that_goes():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


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
        in_code(in_a_thread, os.chdir, third)  # in a thread of the function's own
        assert os.getcwd() == str(second)
        in_code(in_a_folder_that_goes)
        assert os.getcwd() == str(second)
        end.set()
    assert os.getcwd() == str(second) != str(first)


def test_the_functions_are_those_of_python_to_others(tmp_path):
    assert pickle.loads(pickle.dumps(os.chdir)) is os.chdir and os.chdir in os.supports_fd
    before = os.getcwd()
    with contextlib.chdir(tmp_path):
        assert os.getcwd() == str(tmp_path)
    assert os.getcwd() == before


FORKS = """
import os, sys, threading
from rl_bridge.common import user_files

second, third = sys.argv[1:]

def moves():
    with user_files.the_users_code():
        os.chdir(third)

with user_files.the_users_code(), user_files._at_work.lock:
    child = os.fork()
    if not child:
        os.chdir(second)
        thread = threading.Thread(target=moves)
        thread.start()
        thread.join(60)
        os._exit(0 if os.getcwd() == second else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_a_guard_of_its_own(folders):
    """Also while functions of the parent are at work, and one of its threads has the lock."""
    words = [sys.executable, "-c", FORKS, *map(str, folders[1:])]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout == "0\n"
