"""The house keeps its floors: rooms stand in one order, no file goes round in a circle, and a small file says why."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"rl_fn": ROOT, "rl_kernels": ROOT / "kernels"}
SOURCES |= dict.fromkeys(("rl_bridge", "rl_train", "rl_tools"), ROOT / "bridge")
FLOORS = (
    *("common", "memory", "functional", "data", "executors", "weights", "parallel", "integrations", "models"),
    *("environments", "engines", "checkpoints", "run", "modules", "rewards", "rollout", "algorithms"),
    *("pipelines", "loop"),
)
"""Rooms of the bridge, the lowest first: a room imports rooms before it, and none behind."""
LONGEST = 80
"""Lines of a function with its docstring, of the bridge and its tools."""
MOST_POSITIONAL = 6
"""Positional parameters of a function of the bridge and its tools, besides ``self``, ``cls`` and ``ctx``."""
DICTATED = {
    "rl_bridge.engines.worker:build_worker": "an executor sends each slot its arguments by position",
    "rl_bridge.integrations.trl:apply": "TRL calls its autograd function by position",
}
"""Function with more positional parameters → the reason."""
TWICE = {"placement"}
"""Names of two files: rl_bridge.pipelines builds what a room of the same word computes."""
SMALL = 60
"""Lines below which a file with one importer is asked why it is not a part of that importer."""


class Modules:
    """Modules of a package with what each imports of the package: inside of functions and for types, too."""

    def __init__(self, package: str, source: Path):
        self.files = {
            ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted((source / package).rglob("*.py"))
        }
        self.trees = {name: ast.parse(path.read_text("utf-8")) for name, path in self.files.items()}
        self.imports = {name: self.known(imported(tree)) - {name} for name, tree in self.trees.items()}

    def known(self, names: Iterable[str]) -> set[str]:
        """A name of a module is that module, a name of a class or a function is the module in which it lies."""
        longest = {name if name in self.files else name.rpartition(".")[0] for name in names}
        return longest & self.files.keys()

    def rooms(self) -> dict[str, set[str]]:
        """Folders and files of the package's own folder, with what each imports of the others."""
        graph = {room(name): set() for name in self.files if name.count(".")}
        for name, targets in self.imports.items():
            if name.count("."):
                graph[room(name)] |= {room(target) for target in targets if target.count(".")} - {room(name)}
        return graph


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(name: str) -> str:
    return name.split(".")[1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


MODULES = {package: Modules(package, source) for package, source in SOURCES.items()}


@pytest.mark.parametrize("package", MODULES)
def test_no_circle_of_files(package):
    assert circle(MODULES[package].imports) == []


@pytest.mark.parametrize("package", MODULES)
def test_no_circle_of_rooms(package):
    assert circle(MODULES[package].rooms()) == []


def test_the_rooms_of_the_bridge_stand_in_one_order():
    rooms = MODULES["rl_bridge"].rooms()
    assert sorted(rooms) == sorted(FLOORS)
    wrong = {name: others - set(FLOORS[: FLOORS.index(name)]) for name, others in rooms.items()}
    assert {name: others for name, others in wrong.items() if others} == {}


@pytest.mark.parametrize("package", MODULES)
def test_a_small_file_with_one_importer_says_why_it_stands_alone(package):
    modules = MODULES[package]
    importers = Counter(target for targets in modules.imports.values() for target in targets)
    small = {
        name
        for name, path in modules.files.items()
        if importers[name] == 1 and path.name != "__init__.py" and len(path.read_text("utf-8").splitlines()) < SMALL
    }
    assert {name for name in small if "stands alone" not in (ast.get_docstring(modules.trees[name]) or "")} == set()


def same_names(modules: Iterable[str]) -> set[str]:
    """Last words that two modules end with: an editor's tab and a traceback show no more."""
    words = Counter(name.rpartition(".")[2] for name in modules if name.count(".") > 1)
    return {word for word, count in words.items() if count > 1}


def test_no_two_files_of_the_bridge_have_one_name():
    files = [*MODULES["rl_bridge"].files, *MODULES["rl_train"].files, *MODULES["rl_tools"].files]
    assert same_names(name for name in files if MODULES[name.partition(".")[0]].files[name].stem != "__init__") == TWICE


def test_two_files_with_one_name_are_seen():
    assert same_names(["rl_bridge.weights.worker", "rl_bridge.engines.worker", "rl_bridge.worker"]) == {"worker"}


def functions(trees: dict[str, ast.Module]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """``module:function`` and the function, methods included: one name may come more than once."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node


def long_functions(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Functions of more than ``LONGEST`` lines."""
    return {
        name: lines for name, node in functions(trees) if (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST
    }


@pytest.mark.parametrize("package", ["rl_bridge", "rl_train", "rl_tools"])
def test_no_function_is_long(package):
    assert long_functions(MODULES[package].trees) == {}


def test_a_long_function_is_seen():
    longest = "class A:\n  def f(self):\n" + (LONGEST - 1) * "    x = 1\n"
    assert long_functions({"p": ast.parse(longest)}) == {}
    assert long_functions({"p": ast.parse(longest + "    y = 2\n")}) == {"p:f": LONGEST + 1}


def many_positional(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Functions with more than ``MOST_POSITIONAL`` parameters that a call can give by position."""
    many = {}
    for name, node in functions(trees):
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
        if count > MOST_POSITIONAL:
            many[name] = count
    return many


def test_no_function_has_many_positional_parameters():
    trees = {
        name: tree for package in ("rl_bridge", "rl_train", "rl_tools") for name, tree in MODULES[package].trees.items()
    }
    assert many_positional(trees).keys() == DICTATED.keys()


def test_a_function_with_many_positional_parameters_is_seen():
    names = [f"p{number}" for number in range(MOST_POSITIONAL)]
    source = "class A:\n  def f(self, {}): ...\n  def g(self, x, /, {}, *, y): ...\ndef g(): ...\n".format(
        *2 * [", ".join(names)]
    )
    assert many_positional({"p": ast.parse(source)}) == {"p:g": MOST_POSITIONAL + 1}


def test_a_circle_a_wrong_floor_and_a_lonely_file_are_seen(tmp_path):
    (tmp_path / "p" / "low").mkdir(parents=True)
    (tmp_path / "p" / "high.py").write_text("from p.low.a import f\nfrom p.low import b\n")
    (tmp_path / "p" / "low" / "a.py").write_text("def f():\n    import p.low.b\n")
    (tmp_path / "p" / "low" / "b.py").write_text("from p import high\n")
    modules = Modules("p", tmp_path)
    assert modules.imports == {"p.high": {"p.low.a", "p.low.b"}, "p.low.a": {"p.low.b"}, "p.low.b": {"p.high"}}
    assert {"p.high", "p.low.b"} <= set(circle(modules.imports))
    assert modules.rooms() == {"high": {"low"}, "low": {"high"}} and circle(modules.rooms()) != []
