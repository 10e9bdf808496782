"""Which tests concern which function: by the names a test speaks of and by who calls whom in the package."""

import ast
import re
from collections import defaultdict, deque
from pathlib import Path

WORD = re.compile(r"[A-Za-z_]\w*")
# Generated over the table of cases: only the case in the test's id says which function it is about.
GENERATED = tuple(f"test_{law}.py" for law in ("laws", "oracle", "gradients", "ties", "adversarial", "not_a_number"))


def identifiers(node: ast.AST) -> set[str]:
    """Names and attributes, without the variables of a function: `read` there is not a function of that name."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if isinstance(node, ast.FunctionDef):
        names -= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names -= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _definitions(body: list[ast.stmt]) -> dict[str, set[str]]:
    """The names that each top-level definition or assignment mentions."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] |= identifiers(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in identifiers(target):
                    found[name] |= identifiers(node.value)
    return found


class CallGraph:
    """Who mentions whom among the top-level definitions of the package's files; a shared name joins its bearers."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        mentions: dict[str, set[str]] = defaultdict(set)
        self.files = {file: _definitions(tree.body) for file, tree in trees.items()}
        for definitions in self.files.values():
            for name, names in definitions.items():
                mentions[name] |= names
        self.callers: dict[str, set[str]] = defaultdict(set)
        for name, names in mentions.items():
            for mentioned in names & set(mentions):
                self.callers[mentioned].add(name)

    def distances(self, name: str, file: str) -> dict[str, int]:
        """Everything that reaches the `name` of this file, and in how many calls."""
        found, queue = {name: 0}, deque([name])
        if name.startswith("_"):
            # Two files may have a private function of one name; its callers are in its own file.
            near = [caller for caller, names in self.files[file].items() if name in names and caller != name]
            found |= dict.fromkeys(near, 1)
            queue = deque(near)
        while queue:
            current = queue.popleft()
            for caller in self.callers[current] - set(found):
                found[caller] = found[current] + 1
                queue.append(caller)
        return found


class Selection:
    """The tests of a function, nearest first."""

    def __init__(self, nodeids: list[str], root: Path, trees: dict[str, ast.Module]) -> None:
        self.graph, self.root = CallGraph(trees), root
        self.files: dict[str, dict[str, set[str]]] = {}
        self.texts: dict[str, str] = {}
        self.names = {nodeid: self._names(nodeid) for nodeid in nodeids}

    def _names(self, nodeid: str) -> set[str]:
        path, test = nodeid.split("::", 1)
        if not Path(path).name.startswith("test_"):
            return {test.rsplit(".", 1)[-1]}  # a doctest
        own, _, parameters = test.partition("[")
        named = set(WORD.findall(parameters))
        if Path(path).name in GENERATED:
            return named
        if path not in self.files:
            self.texts[path] = (self.root / path).read_text(encoding="utf-8")
            self.files[path] = _definitions(ast.parse(self.texts[path]).body)
        definitions, seen = self.files[path], set()
        waiting = {own.split("::")[-1]}
        while waiting:
            name = waiting.pop()
            seen.add(name)
            waiting |= definitions.get(name, set()) - seen
        # What the test file defines itself is not the package's, whatever its name.
        return named | (seen - definitions.keys())

    def of(self, owner: str, file: str) -> dict[str, int]:
        """Tests and the number of calls between what they name and the owner, a function or a constant."""
        distances = self.graph.distances(owner.split(".")[0], file)
        found, module = {}, file.removesuffix(".py").replace("/", ".")
        for nodeid, names in self.names.items():
            if near := names & distances.keys():
                found[nodeid] = min(distances[name] for name in near)
                # A test file that imports the module itself is about its helpers, whatever else bears their names.
                if not found[nodeid] and f"rl_fn.{module} import" in self.texts.get(nodeid.split("::")[0], ""):
                    found[nodeid] = -1
        return found
