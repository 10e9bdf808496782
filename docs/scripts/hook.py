"""What mkdocs does beside rendering docs/: pages of the reference, pictures, equations, files of the repository.

Links that leave docs/ lead to copies in the site, so that the site needs nothing from outside. Run from the root of the
repository (`python -m mkdocs build`), where docs.scripts is found.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.scripts import reference, torch_reference
from docs.scripts.equations import equation
from docs.scripts.pictures import TITLES, pictures
from rl_fn import recipes

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FOLDER = "repository"


def outside(source: PurePosixPath, target: str) -> PurePosixPath | None:
    """A link's target from the root of the repository, or None where it stays inside docs/ or leaves the site."""
    if "://" in target or target.startswith("mailto:"):
        return None
    path = PurePosixPath(os.path.normpath(source.parent / target))
    return None if path.parts[0] == "docs" else path


def source_of(uri: str) -> PurePosixPath:
    """Where in the repository a page of the site comes from."""
    path = PurePosixPath(uri)
    return path.relative_to(FOLDER) if path.parts[0] == FOLDER else PurePosixPath("docs") / path


def linked(text: str, source: PurePosixPath) -> set[PurePosixPath]:
    """Pages and pictures of the repository, outside docs/, that a text links to."""
    targets = {outside(source, match[3]) for match in LINK.finditer(text)}
    return {path for path in targets if path and path.suffix in (".md", ".png", ".svg")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made by the code, and what docs/ links to elsewhere in the repository."""
    references = reference.pages() | torch_reference.pages()
    made: dict[str, str | bytes] = {f"reference/{name}": text for name, text in references.items()}
    made |= pictures()
    waiting = [(file.content_string, source_of(file.src_uri)) for file in files.documentation_pages()]
    while waiting:
        for path in linked(*waiting.pop()):
            uri = f"{FOLDER}/{path}"
            if uri not in made:
                made[uri] = (ROOT / path).read_bytes()
                if path.suffix == ".md":
                    made[uri] = (ROOT / path).read_text(encoding="utf-8")
                    waiting.append((str(made[uri]), path))
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def resolved(text: str, uri: str) -> str:
    """Links out of docs/ as links inside the site; a link to code becomes its path."""
    source = source_of(uri)

    def replace(match: re.Match[str]) -> str:
        path = outside(source, match[3])
        here = PurePosixPath(uri).parent
        if path is None:
            inside = PurePosixPath(os.path.normpath(source.parent / match[3]))
            if "://" in match[3] or not uri.startswith(FOLDER):
                return match[0]
            return f"{match[1]}[{match[2]}]({os.path.relpath(inside.relative_to('docs'), here)}{match[4] or ''})"
        if path.suffix not in (".md", ".png", ".svg"):
            return match[2] if match[2].strip("`") == str(path) else f"{match[2]} (`{path}`)"
        return f"{match[1]}[{match[2]}]({os.path.relpath(f'{FOLDER}/{path}', here)}{match[4] or ''})"

    return LINK.sub(replace, text)


def picture(name: str) -> str:
    """Loss and gradient of a recipe beside each other; below each other where the page is narrow."""
    images = [f"![{name}: {title}](PICTURES/{name}_{which}.svg){{ loading=lazy }}" for which, title in TITLES.items()]
    return f'<div class="pair" markdown>\n{" ".join(images)}\n</div>\n'


def overview() -> str:
    """All gradients at a glance, each a link to its section."""
    cells = [f"[![{n}: gradient](PICTURES/{n}_small.svg)<br>{n.replace('_', '_<wbr>')}](#{n})" for n in recipes.__all__]
    return '<div class="overview" markdown>\n' + "\n".join(cells) + "\n</div>\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve links, set equations, and put a recipe's picture under its heading."""
    uri = page.file.src_uri
    text = re.sub(r"```equation\n(.*?)\n```", lambda m: equation(m[1]), resolved(markdown, uri), flags=re.DOTALL)
    if uri in ("objectives.md", "reference/recipes.md"):
        for name in recipes.__all__:
            heading = re.search(rf"^## `?{name}`?( {{ #{name} }})?$", text, flags=re.MULTILINE)
            if heading is None:
                raise ValueError(f"{uri} has no section {name}")
            text = text[: heading.end()] + "\n\n" + picture(name) + text[heading.end() :]
        text = text.replace("<!-- overview -->", overview())
    return text.replace("PICTURES/", os.path.relpath("pictures", PurePosixPath(uri).parent) + "/")


def on_page_content(html: str, **_: Any) -> str:
    """Wide tables scroll inside the page."""
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Refuse a page that would load something from the network."""
    foreign = re.findall(r"<(?:script|img|link\s+rel=\"?stylesheet)[^>]*\s(?:src|href)=\"?(https?://[^\s\">]+)", output)
    if foreign:
        raise ValueError(f"{page.file.src_uri} loads {foreign} from the network")
    return output
