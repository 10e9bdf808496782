"""Each file of the user's imports the modules that lie beside it, whatever another file's neighbours are called."""

import sys

import pytest

from rl_bridge.common.user_files import load_file

# How a neighbour lies beside a file, and how the file imports its number.
PLACES = {
    "module": ("helpers_of_two.py", "from helpers_of_two import NUMBER"),
    "package": ("helpers_of_two/__init__.py", "from helpers_of_two import NUMBER"),
    "module of a package": ("helpers_of_two/inner.py", "from helpers_of_two.inner import NUMBER"),
    "module of a namespace": ("helpers_of_two/inner.py", "import helpers_of_two.inner as i; NUMBER = i.NUMBER"),
    "module of an inner package": ("helpers_of_two/a/inner.py", "from helpers_of_two.a.inner import NUMBER"),
}


@pytest.fixture(autouse=True)
def forgotten():
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path[:] = path


def own_file(folder, place, number):
    """A file and its neighbour with a number of its own."""
    where, line = PLACES[place]
    neighbour = folder / where
    neighbour.parent.mkdir(parents=True)
    neighbour.write_text(f"NUMBER = {number}\n")
    if place in ("module of a package", "module of an inner package"):
        for package in [each for each in neighbour.parents if each.is_relative_to(folder) and each != folder]:
            (package / "__init__.py").touch()
    (folder / "own.py").write_text(f"{line}\n")
    return folder / "own.py"


@pytest.mark.parametrize("place", PLACES)
def test_a_file_s_neighbour_is_its_own_and_not_another_file_s(place, tmp_path):
    """A package's inner module was that of the file before: a reward computed with the other project's code."""
    files = [own_file(tmp_path / f"project{number}", place, number) for number in range(3)]
    for number in (0, 1, 2, 0):
        assert number == load_file(files[number], "reward").NUMBER


def test_a_neighbour_is_not_the_module_of_a_folder_that_another_file_has_put_on_the_path(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "src").mkdir(parents=True)
    second.mkdir()
    (first / "src" / "helpers_of_two.py").write_text("NUMBER = 1\n")
    (second / "helpers_of_two.py").write_text("NUMBER = 2\n")
    line = "from helpers_of_two import NUMBER\n"
    (first / "own.py").write_text(f"import sys\nsys.path.insert(0, {str(first / 'src')!r})\n{line}")
    (second / "own.py").write_text(line)
    assert [load_file(folder / "own.py", "reward").NUMBER for folder in (first, second)] == [1, 2]


# What lies beside a file that has nothing to do with the file: its name, and what is made there.
ODD = {
    "a link to itself": lambda place: (place / "loop").symlink_to("loop"),
    "a module that has every name": lambda place: (place / "helpers_of_two.py").write_text(
        "S = {}\n\ndef __getattr__(name):\n    return S[name]\n\nNUMBER = 1\n"
    ),
    "a module that has nothing of any name": lambda place: (place / "helpers_of_two.py").write_text(
        "NUMBER = 1\n__path__ = None\n\ndef __getattr__(name):\n    return None\n"
    ),
    "a program": lambda place: (place / "__main__.py").write_text("raise SystemExit\n"),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_lies_beside_a_file_is_no_matter_of_the_file(odd, tmp_path):
    program = sys.modules["__main__"]
    for number in range(2):
        folder = tmp_path / f"project{number}"
        folder.mkdir()
        ODD[odd](folder)
        uses = "import helpers_of_two\n" if "module" in odd else ""
        (folder / "own.py").write_text(f"{uses}NUMBER = {number}\n")
        assert number == load_file(folder / "own.py", "reward").NUMBER
    assert sys.modules["__main__"] is program


def test_a_folder_of_rows_is_no_package(tmp_path):
    """The program's own package of this name would be imported again, and its objects be of other classes."""
    program, rows = tmp_path / "program", tmp_path / "rows"
    (program / "helpers_of_two").mkdir(parents=True)
    (program / "helpers_of_two" / "inner.py").write_text("class Kind: ...\n")
    (program / "own.py").write_text("from helpers_of_two.inner import Kind\n")
    (rows / "helpers_of_two").mkdir(parents=True)
    (rows / "helpers_of_two" / "rows.jsonl").write_text("{}\n")
    (rows / "own.py").write_text("NUMBER = 1\n")
    kind = load_file(program / "own.py", "reward").Kind
    load_file(rows / "own.py", "reward")
    assert sys.modules["helpers_of_two.inner"].Kind is kind


def test_what_lies_in_no_file_s_folder_stays_imported(tmp_path):
    """A folder may be called as a package of Python's, which everybody has imported."""
    import email.message

    for number in range(2):
        folder = tmp_path / f"project{number}"
        (folder / "email").mkdir(parents=True)
        (folder / "own.py").write_text("NUMBER = 1\n")
        load_file(folder / "own.py", "reward")
    assert sys.modules["email.message"] is email.message
