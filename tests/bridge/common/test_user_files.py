"""The working directory and torch's default dtype are the program's: functions of the user's only borrow them."""

import contextlib
import importlib.machinery
import inspect
import os
import pickle
import posix
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rl_bridge.common import event_loop
from rl_bridge.common.user_files import load_file, the_users_code
from rl_bridge.common.user_marks import mark_of


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


class Function:
    """A function of the user's at work in a thread of its own, which does what it is told."""

    def __init__(self):
        self._pool, self._guard = ThreadPoolExecutor(1), the_users_code()
        self.do(self._guard.__enter__)

    def do(self, function, *arguments):
        return self._pool.submit(function, *arguments).result(60)

    def end(self):
        self.do(self._guard.__exit__, None, None, None)
        self._pool.shutdown()


class Place:
    """The working directory: the program's own at first, and two others."""

    threads = ("main",)
    """Threads in which the program sets it."""
    by_c = staticmethod(posix.chdir)

    def __init__(self, folders):
        self.values = list(map(str, folders))

    def now(self):
        return os.getcwd()

    def set(self, value):
        os.chdir(value)


class Dtype:
    """Torch's default dtype."""

    threads = ("main", "another")
    by_c = staticmethod(torch._C._set_default_dtype)

    def __init__(self, folders):
        self.values = [torch.float32, torch.bfloat16, torch.float16]

    def now(self):
        return torch.get_default_dtype()

    def set(self, value):
        torch.set_default_dtype(value)


@pytest.fixture(params=[Place, Dtype], ids=["place", "dtype"])
def setting(request, folders):
    """One of what a process has once for all of its threads; each test leaves it as it was."""
    in_code(str)  # from here on torch's setters are watched
    one = request.param(folders)
    yield one
    assert one.now() == one.values[0]


def by_the_program(setting, thread, value):
    in_a_thread(setting.set, value) if thread == "another" else setting.set(value)


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("begins", ["before", "meanwhile"])
@pytest.mark.parametrize("ends", ["meanwhile", "afterwards"])
def test_what_the_program_sets_for_a_while_is_the_program_s(setting, thread, begins, ends):
    """A library sets the dtype while it builds a model, and back."""
    own, second, _ = setting.values
    thread = thread if thread in setting.threads else "main"
    function = Function() if begins == "before" else None
    by_the_program(setting, thread, second)
    function = function or Function()
    if ends == "meanwhile":
        function.end()
        assert setting.now() == second
    by_the_program(setting, thread, own)
    if ends == "afterwards":
        function.end()
    assert setting.now() == own


def harmless():
    in_code(str)


def another_thread_s():
    in_a_thread(harmless)


def another_that_sets_it_back_and_forth():
    for _ in range(3):
        Function().end()


def of_an_async_function():
    async def nothing():
        return None

    with the_users_code():
        event_loop.run(nothing(), "environment")


ENDS = [another_thread_s, another_that_sets_it_back_and_forth, of_an_async_function]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_function_keeps_what_it_has_set_until_it_ends(setting, end):
    own, second, third = setting.values
    function, beside = Function(), Function()
    for value in (second, third):
        function.do(setting.set, value)
        in_a_thread(end)
        assert setting.now() == value
        function.do(harmless)  # inside of itself
        assert setting.now() == value
        function.do(in_code, setting.set, value)
        assert setting.now() == value
    function.end()
    assert setting.now() == own  # at once, with another at work
    beside.end()


def test_a_coroutine_keeps_what_it_has_set_until_its_function_ends(setting):
    own, second, _ = setting.values
    function, beside = Function(), Function()

    async def sets():
        setting.set(second)
        in_code(str)  # in the coroutine's own thread

    function.do(lambda: event_loop.run(sets(), "reward"))
    another_thread_s()
    assert setting.now() == second
    function.end()
    assert setting.now() == own
    beside.end()


def test_of_two_functions_the_last_to_set_it_keeps_it(setting):
    own, second, third = setting.values
    first, last = Function(), Function()
    first.do(setting.set, second)
    last.do(setting.set, third)
    first.end()
    assert setting.now() == third
    last.end()
    assert setting.now() == own


def test_what_c_code_has_set_is_put_right_when_the_last_function_ends(setting):
    first, last = Function(), Function()
    first.do(setting.by_c, setting.values[1])
    first.end()
    last.end()
    assert setting.now() == setting.values[0]


def test_torch_s_setters_are_those_of_torch_to_others():
    in_code(str)
    assert pickle.loads(pickle.dumps(torch.set_default_dtype)) is torch.set_default_dtype
    assert torch.set_default_dtype.__doc__.strip().startswith("Sets the default floating point dtype")
    with pytest.raises(TypeError):
        torch.set_default_dtype(torch.int64)
    assert torch.get_default_dtype() == torch.float32
    before = torch.set_default_dtype
    in_code(str)
    assert torch.set_default_dtype is before  # watched once


LATER = """
import sys
from rl_bridge.common.user_files import the_users_code
with the_users_code():
    pass
assert "torch" not in sys.modules
import torch
with the_users_code():
    torch.set_default_dtype(torch.bfloat16)
print(torch.get_default_dtype())
"""


@pytest.mark.long
def test_torch_is_not_imported_and_may_come_later():
    words = [sys.executable, "-c", LATER]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout == "torch.float32\n"


@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_folder_that_vanishes_changes_no_result_and_no_error(folders, capsys, moves, fails):
    first, second, _ = folders

    def function():
        shutil.rmtree(first)
        if moves:
            os.chdir(second)
        if fails:
            raise KeyError("its own")
        return "its own"

    beside = Function()
    with pytest.raises(KeyError, match="its own") if fails else contextlib.nullcontext():
        assert in_code(function) == "its own"
    in_code(os.chdir, second)
    in_code(os.chdir, second)
    beside.end()
    text = "".join(capsys.readouterr())
    assert text.count(f"the program cannot go back to its folder {first}") == 1 and text.count("\n") == 1


ENDS_ITSELF = """
import multiprocessing, os, sys, threading
from rl_bridge.common.user_files import the_users_code

def ends():
    try:
        with the_users_code():
            os._exit(7)
    except SystemExit:
        os._exit(8)

def moves(second):
    end = threading.Event()
    def waits():
        with the_users_code():
            end.wait()
    thread = threading.Thread(target=waits)
    thread.start()
    os.chdir(second)
    end.set()
    thread.join()
    os._exit(8 if os.getcwd() == second else 7)

by, second = sys.argv[1:]
child = multiprocessing.get_context("fork").Process(target=ends if by != "a moving program" else moves,
                                                    args=() if by != "a moving program" else (second,))
if by == "a function":
    with the_users_code():
        child.start()
elif by == "a function's thread":
    with the_users_code():
        thread = threading.Thread(target=child.start)
        thread.start()
        thread.join()
else:
    child.start()
child.join(60)
print(child.exitcode)
"""
FORKED = {"a program": "8", "a moving program": "8", "a function": "7", "a function's thread": "8"}


@pytest.mark.parametrize("by", FORKED)
def test_a_child_of_the_program_is_guarded_and_one_of_a_function_ends_as_it_wants_to(folders, by):
    words = [sys.executable, "-c", ENDS_ITSELF, by, str(folders[1])]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.strip() == FORKED[by]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["reward", "environment", "model", "loss"])
def test_an_edit_within_a_second_is_read_and_nothing_is_written_beside_the_file(tmp_path, kind, monkeypatch):
    """Python's own copy of an edit of the same size was that of the text before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for number in range(10):
        file.write_text(f"def score(): return {number}\n")
        assert load_file(file, kind).score() == number
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_is_known_by_its_whole_path_wherever_the_program_goes(folders, monkeypatch):
    """By a shorter one, its mark and the lines of its errors would be those of a file of the same name elsewhere."""
    (folders[0] / "mine.py").write_text("def score(): return 1\n")
    (folders[1] / "mine.py").write_text("def score(): return 2\n")
    score = load_file(Path("mine.py"), "reward").score
    mark = mark_of(score)
    assert score.__code__.co_filename == str(folders[0] / "mine.py")
    for folder in folders[1:]:
        monkeypatch.chdir(folder)
        assert inspect.getsource(score) == "def score(): return 1\n" and mark_of(score) == mark
    assert mark_of(load_file(Path("../b/mine.py"), "reward").score) != mark


def test_a_file_that_may_not_be_read_is_named_so_by_a_relative_path_too(folders, monkeypatch):
    file = folders[0] / "locked.py"
    file.write_text("")
    error = PermissionError(13, "Permission denied", str(file))
    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "get_data", lambda *_: (_ for _ in ()).throw(error))
    for path in (file, Path("locked.py")):
        with pytest.raises(PermissionError):
            load_file(path, "reward")


def test_a_file_that_fails_is_tried_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\nif 'RL_FN_TEST' not in os.environ: raise KeyError('not yet')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            load_file(file, "reward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_FN_TEST", "1")
        assert load_file(file, "reward")
