"""Pages of the reference, one a family of rl_fn: every public name with its equation, arguments, paper and example.

All text comes from the docstrings; the pages are made when the site is built and are not committed.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import rl_fn
from docs.scripts.equations import equation
from rl_fn import components, dialects, recipes

ROOT = Path(__file__).parents[2]
SECTIONS = ("Args:", "Returns:", "Raises:", "Reference:")
TITLES = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Raises", "Reference:": "Reference"}
ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
# What these do is told in words; the second paragraph of every other function is its equation.
PROCEDURES = frozenset(
    {"balance", "linear_logprobs", "pack", "position_ids", "segment_ids", "zigzag_gather", "zigzag_split"}
)
Entry = tuple[str, str, Any]  # where a user finds it, its name, the object


def entries() -> dict[str, list[Entry]]:
    """Public objects by page, in the order in which the pages stand in the menu."""
    pages: dict[str, list[Entry]] = {}
    for name in rl_fn.__all__:
        x = getattr(rl_fn, name)
        if not isinstance(x, ModuleType):
            pages.setdefault(x.__module__.split(".")[1], []).append((f"rl_fn.{name}", name, x))
    for page, module in {"recipes": recipes, "components": components, "dialects": dialects}.items():
        public = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
        pages[page] = [(f"rl_fn.{page}.{name}", name, getattr(module, name)) for name in public]
    return dict(sorted(pages.items()))


def anchors() -> dict[str, str]:
    """Where each public name is described, from a page of the reference; flat functions go before recipes."""
    found: dict[str, str] = {}
    for page, members in entries().items():
        for path, name, _ in members:
            found[path] = f"{page}.md#{name}"
            if path == f"rl_fn.{name}":
                found[name] = f"{page}.md#{name}"
    for name in components.__all__:
        found.setdefault(name, f"components.md#{name}")
    return found


def _escaped(text: str, links: dict[str, str]) -> str:
    """Docstring prose as Markdown: nothing is emphasis, code stays code, public names and papers are links."""
    pieces = re.split(r"(`[^`]+`)", text)
    for i, piece in enumerate(pieces):
        if piece.startswith("`"):
            target = links.get(piece.strip("`").removesuffix("()"))
            pieces[i] = f"[{piece}]({target})" if target else piece
        else:
            # Markdown knows no backslash before these two.
            plain = re.sub(r"([*_>\[\]#\\])", r"\\\1", piece).replace("<", "&lt;").replace("|", "&#124;")
            plain = re.sub(r"([^\x00-\x7f])\\_(\w+)", r"\1<sub>\2</sub>", plain)
            pieces[i] = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", plain)
    return "".join(pieces)


def paragraphs(x: object) -> list[str]:
    """The docstring cut at its empty lines."""
    return [part for part in (inspect.getdoc(x) or "").split("\n\n") if part.strip()]


def _items(body: str) -> Iterator[tuple[str, str]]:
    """The entries of an Args or Raises section: a name, and its text over several lines."""
    for item in re.split(r"\n(?=\S)", textwrap.dedent(body).strip("\n")):
        name, _, text = " ".join(item.split()).partition(": ")
        yield name, text


def _part(title: str, body: str, links: dict[str, str]) -> list[str]:
    lines = [f"**{TITLES[title]}**", ""]
    if title in ("Args:", "Raises:"):
        lines += [f"- `{name}` – {_escaped(text, links)}" for name, text in _items(body)]
    else:
        lines.append(_escaped(" ".join(body.split()), links))
    return [*lines, ""]


def signature(path: str, x: Callable[..., Any]) -> str:
    """The call with its defaults, without annotations: shapes stand beside the arguments."""
    parameters = inspect.signature(x).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if not p.name.startswith("_")]
    words = [str(p) for p in plain]
    keyword = next((i for i, p in enumerate(plain) if p.kind is p.KEYWORD_ONLY), None)
    if keyword is not None and not any(p.kind is p.VAR_POSITIONAL for p in plain):
        words.insert(keyword, "*")
    return call(path, words)


def call(path: str, words: list[str]) -> str:
    """A call on one line, or with one argument a line where it is long."""
    one_line = f"{path}({', '.join(words)})"
    return one_line if len(one_line) <= 88 else f"{path}(\n" + "".join(f"    {word},\n" for word in words) + ")"


def section(name: str, parts: list[str], call: str, source: str, links: dict[str, str], terms: list[str] | None) -> str:
    """One public name as Markdown, from its docstring's paragraphs; with `terms`, the second is an equation in them."""
    lines = [f"## `{name}` {{ #{name} }}", "", _escaped(" ".join(parts[0].split()), links), ""]
    rest = parts[1:]
    if terms is not None:
        lines += [equation(rest.pop(0), frozenset({*terms, *rl_fn.__all__})), ""]
    lines += ["```python", call, "```", ""]
    for part in rest:
        title = next((s for s in SECTIONS if part.startswith(s)), None)
        if title is not None:
            lines += _part(title, part.removeprefix(title), links)
        elif part.startswith(">>>"):
            lines += ["**Example**", "", "```pycon", part, "```", ""]
        else:
            lines += [_escaped(" ".join(part.split()), links), ""]
    return "\n".join([*lines, f'<p class="source">{source}</p>', ""])


def describe(path: str, name: str, x: Any, links: dict[str, str]) -> str:
    """One public name of rl_fn as Markdown."""
    has_equation = inspect.isroutine(x) and name not in PROCEDURES and not path.startswith("rl_fn.dialects")
    terms = [*inspect.signature(x).parameters] if has_equation else None
    source = Path(inspect.getsourcefile(inspect.unwrap(x)) or "").relative_to(ROOT).as_posix()
    return section(name, paragraphs(x), signature(path, x), source, links, terms)


def title(page: str) -> str:
    """A page's heading: the words of the folder's or file's name."""
    return page.replace("_", " ").capitalize()


def introduction(page: str) -> str:
    """The first paragraph of the folder's or file's own docstring."""
    modules = {"recipes": recipes, "components": components, "dialects": dialects}
    module = modules.get(page) or importlib.import_module(f"rl_fn.{page}")
    return " ".join((inspect.getdoc(module) or "").split("\n\n")[0].split())


def pages() -> dict[str, str]:
    """All pages by their file name."""
    links = anchors()
    made = {}
    for page, members in entries().items():
        head = [f"# {title(page)}", "", _escaped(introduction(page), links), ""]
        made[f"{page}.md"] = "\n".join(head + [describe(*member, links) for member in members])
    return made
