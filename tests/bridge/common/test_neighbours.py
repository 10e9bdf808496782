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


def test_what_lies_in_no_file_s_folder_stays_imported(tmp_path):
    """A folder may be called as a package of Python's, which everybody has imported."""
    import email.message

    for number in range(2):
        folder = tmp_path / f"project{number}"
        (folder / "email").mkdir(parents=True)
        (folder / "own.py").write_text("NUMBER = 1\n")
        load_file(folder / "own.py", "reward")
    assert sys.modules["email.message"] is email.message
