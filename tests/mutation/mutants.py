"""Every small change of a source file that its tests ought to notice, each with a stable name.

A mutant is found on the syntax tree and can be set and taken back there, so one parse serves them all. Docstrings,
annotations, the text of messages, methods that only describe (`explain`), `if TYPE_CHECKING` and `__all__` are not
mutated: no behaviour hangs on them.
"""

import ast
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

ARITHMETIC: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
# The boundary, and the opposite.
COMPARISON: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SWAPS = {
    "minimum": "maximum",
    "sum": "mean",
    "exp": "expm1",
    "log": "log1p",
    "max": "min",
    "any": "all",
    "argmax": "argmin",
    "floor": "ceil",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "prod": "sum",
    "cumsum": "cumprod",
    "isfinite": "isnan",
}
SWAPS |= {value: key for key, value in SWAPS.items() if value not in SWAPS and key != "cumsum"}
# Calls of one meaningful argument: the mutant is the argument itself.
DROPPED = ("stop_gradient", "abs", "sqrt", "square", "keep", "log_softmax", "softmax", "sort", "flip", "cumsum")
# They return the equation of a piece or a part of it, for people to read.
DESCRIBING = ("explain", "describe", "symbol", "_clipped")
LIBRARIES = ("jnp", "np", "jax", "lax", "nn", "scipy", "special", "math")

Change = Callable[[], Callable[[], None]]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """owner: the module-level function, `Class.method`, `Class` or "" around it. lines: of its innermost statement.

    text: the source line, and nth: which of its mutants of this kind, before and after it is, so that a mutant can be
    named by what it is and not by where.
    """

    file: str
    line: int
    column: int
    kind: str
    owner: str
    before: str
    after: str
    lines: tuple[int, ...] = dataclasses.field(compare=False)
    change: Change = dataclasses.field(compare=False, repr=False)
    default_of: ast.AST | None = dataclasses.field(default=None, compare=False, repr=False)
    text: str = dataclasses.field(default="", compare=False)
    nth: int = dataclasses.field(default=0, compare=False)

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.column}:{self.kind}:{self.after}"

    @property
    def runs(self) -> int:
        """The line that a test must run to meet the mutant: of a default, the first one of the function's body."""
        if not isinstance(self.default_of, ast.FunctionDef):
            return self.line
        documented = ast.get_docstring(self.default_of) is not None and len(self.default_of.body) > 1
        return self.default_of.body[documented].lineno

    @property
    def name(self) -> tuple[str, ...]:
        """Stays the same when lines are added elsewhere."""
        return self.file, self.owner, self.kind, self.text, self.before, self.after, str(self.nth)

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """The tree is mutated inside the block."""
        take_back = self.change()
        try:
            yield
        finally:
            take_back()


def _field(node: ast.AST, name: str, value: Any, index: int | None = None) -> Change:
    def change() -> Callable[[], None]:
        holder: Any = getattr(node, name) if index is not None else vars(node)
        key = name if index is None else index
        old = holder[key]
        holder[key] = value
        return lambda: holder.__setitem__(key, old)

    return change


class _Finder:
    def __init__(self, source: str, file: str) -> None:
        self.file, self.found = file, []
        self.owner, self.lines, self.default_of = "", (), None
        self.index, self.texts = False, source.splitlines()
        self.names: Counter[tuple[str, ...]] = Counter()

    def add(self, node: Any, kind: str, after: str, change: Change, before: str | None = None) -> None:
        text = ast.unparse(node) if before is None else before
        kind = "default" if self.default_of is not None else kind
        position = node.lineno, node.col_offset
        line = self.texts[node.lineno - 1].strip()
        mutant = Mutant(self.file, *position, kind, self.owner, text, after, self.lines, change, self.default_of, line)
        if mutant.id not in {m.id for m in self.found if m.line == mutant.line}:
            self.found.append(dataclasses.replace(mutant, nth=self.names[mutant.name]))
            self.names[mutant.name] += 1

    def replace(self, node: Any, kind: str, parent: ast.AST, name: str, i: int | None, new: ast.expr) -> None:
        ast.copy_location(new, node)
        ast.fix_missing_locations(new)
        self.add(node, kind, ast.unparse(new), _field(parent, name, new, i))

    def operator(self, node: Any, kind: str, name: str, operators: Any, index: int | None = None) -> None:
        """`node` has the operator in the attribute `name`."""
        old = getattr(node, name) if index is None else getattr(node, name)[index]
        for new in operators.get(type(old), ()):
            change = _field(node, name, new(), index)
            take_back = change()
            after = ast.unparse(node)
            take_back()
            self.add(node, kind, after, change)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not docstring:
                self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.definition(node)
            return
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.Pass):
            return
        # dataclasses.field(...) is read when the class is made, which nothing can make again.
        made = isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
        if made == "dataclasses.field":
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) and not self.owner:
            names = {target.id for target in ast.walk(node) if isinstance(target, ast.Name)}
            alias = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
            if alias or any(name.startswith("__") for name in names):
                return
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        first = blocks[0][0].lineno - 1 if blocks[0] else node.end_lineno
        self.lines = tuple(range(node.lineno, max(node.lineno, first or node.lineno) + 1))
        for name, value in ast.iter_fields(node):
            if name not in ("body", "orelse", "finalbody", "annotation", "handlers"):
                self.field(node, name, value)
        for block in blocks:
            self.body(block)

    def definition(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        if node.name in DESCRIBING:
            return
        outer, lines = self.owner, self.lines
        nested = bool(outer) and not outer[0].isupper()
        self.owner = outer if nested else f"{outer}.{node.name}".strip(".")
        if isinstance(node, ast.FunctionDef):
            self.lines = tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            for name, values in (("defaults", node.args.defaults), ("kw_defaults", node.args.kw_defaults)):
                for i, value in enumerate(values):
                    if value is not None:
                        self.default_of = None if nested else node
                        self.expression(value, node.args, name, i)
                        self.default_of = None
        self.body(node.body)
        self.owner, self.lines = outer, lines

    def field(self, parent: ast.AST, name: str, value: Any) -> None:
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.field_item(parent, name, i, item)
        else:
            self.field_item(parent, name, None, value)

    def field_item(self, parent: ast.AST, name: str, i: int | None, value: Any) -> None:
        if isinstance(value, ast.expr):
            self.expression(value, parent, name, i)
        elif isinstance(value, ast.comprehension | ast.keyword | ast.withitem | ast.match_case):
            for inner, item in ast.iter_fields(value):
                self.field(value, inner, item)

    def expression(self, node: ast.expr, parent: ast.AST, name: str, i: int | None) -> None:
        match node:
            case ast.JoinedStr():
                return
            case ast.BinOp():
                self.operator(
                    node,
                    "arithmetic" if not isinstance(node.op, ast.BitAnd | ast.BitOr) else "boolean",
                    "op",
                    ARITHMETIC,
                )
            case ast.Compare():
                for j in range(len(node.ops)):
                    self.operator(node, "comparison", "ops", COMPARISON, j)
            case ast.BoolOp():
                other = {ast.And: (ast.Or,), ast.Or: (ast.And,)}
                self.operator(node, "boolean", "op", other)
            case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
                kind = "minus" if isinstance(node.op, ast.USub) else "boolean"
                self.replace(node, kind, parent, name, i, node.operand)
            case ast.Constant():
                self.constant(node, parent, name, i)
            case ast.Call():
                self.call(node, parent, name, i)
            case ast.IfExp():
                swapped = ast.IfExp(node.test, node.orelse, node.body)
                self.replace(node, "branches", parent, name, i, swapped)
        for inner, value in ast.iter_fields(node):
            if isinstance(node, ast.Subscript) and inner == "slice":
                before, self.index = self.index, True
                self.field(node, inner, value)
                self.index = before
            else:
                self.field(node, inner, value)

    def constant(self, node: ast.Constant, parent: ast.AST, name: str, i: int | None) -> None:
        value = node.value
        news: list[Any] = []
        kind = "constant"
        if isinstance(value, bool):
            news, kind = [not value], "flag"
        elif isinstance(value, int):
            kind = "index" if self.index else "constant"
            news = [value + 1, value - 1] if value or self.index else [1]
            if value > 2 and not self.index:
                news = [value + 1]
        elif isinstance(value, float):
            news = [1.0] if value == 0 else [2.0, 0.0] if value == 1 else [value * 1.1]
        for new in news:
            self.add(node, kind, repr(new), _field(node, "value", new), before=repr(value))

    def call(self, node: ast.Call, parent: ast.AST, name: str, i: int | None) -> None:
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        library = isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[-1] in LIBRARIES
        ours = isinstance(function, ast.Name) and called in ("exp", "expm1", "sqrt", "keep")
        if called == "where" and len(node.args) == 3:
            swapped = ast.Call(node.func, [node.args[0], node.args[2], node.args[1]], node.keywords)
            self.replace(node, "branches", parent, name, i, swapped)
        if called in SWAPS and (library or ours):
            field = "attr" if isinstance(function, ast.Attribute) else "id"
            self.add(node, "swap", f"{called} → {SWAPS[called]}", _field(function, field, SWAPS[called]))
        if called in DROPPED and (library or ours) and node.args:
            self.replace(node, "dropped", parent, name, i, node.args[0])


def mutants(source: str, file: str) -> tuple[ast.Module, list[Mutant]]:
    """The tree of a source text and all its mutants."""
    tree = ast.parse(source)
    finder = _Finder(source, file)
    finder.body(tree.body)
    return tree, finder.found
