"""The site's pages are made of the code: no public name is without an entry, no recipe without a picture."""

import inspect
import re

import numpy as np
import pytest

import rl_fn
import rl_kernels
from docs.scripts import objectives, torch_reference
from docs.scripts.equations import equation
from docs.scripts.pictures import CLOSE, curves, thumbnail
from docs.scripts.reference import PROCEDURES, anchors, entries, pages, paragraphs
from rl_bridge import functional
from rl_fn import Objective, components, recipes

PAGES = pages()
FUNCTIONS = [
    (page, name, x)
    for page, members in entries().items()
    for _, name, x in members
    if page != "dialects" and not isinstance(x, type)
]


def test_the_page_of_objectives_is_what_the_recipes_say():
    assert objectives.PAGE.read_text(encoding="utf-8") == objectives.page(), "python -m docs.scripts.objectives"


def test_every_public_name_has_an_entry():
    names = {f"rl_fn.{name}" for name in rl_fn.__all__} - {f"rl_fn.{m}" for m in ("components", "dialects", "recipes")}
    names |= {f"rl_fn.recipes.{name}" for name in recipes.__all__}
    names |= {f"rl_fn.components.{name}" for name in components.__all__}
    found = anchors()
    assert names <= set(found)
    for name in names:
        page, _, anchor = found[name].partition("#")
        assert f"{{ #{anchor} }}" in PAGES[page], name


@pytest.mark.parametrize(("page", "name", "x"), FUNCTIONS, ids=[f"{page}-{name}" for page, name, _ in FUNCTIONS])
def test_an_entry_has_equation_arguments_source_and_example(page, name, x):
    text = PAGES[f"{page}.md"].split(f"{{ #{name} }}")[1].split("\n## ")[0]
    assert ('class="equation"' in text) == (name not in PROCEDURES)
    wanted = ["**Reference**", "```pycon", 'class="source"']
    wanted += ["**Arguments**"] if inspect.signature(x).parameters else []
    # What every recipe returns and raises is said once.
    wanted += ["**Returns**", "**Raises**"] if page != "recipes" else []
    assert [word for word in wanted if word not in text] == []
    shapes = set(re.findall(r"`\*\w+[^`]*`", " ".join(paragraphs(x))))
    assert all(shape in text for shape in shapes)


@pytest.mark.parametrize("page", PAGES)
def test_no_backslash_is_left_when_a_page_is_set(page):
    """TOOL-14: "A \\< 0" stood 41 times on 10 pages. Markdown takes a backslash away from its own marks alone."""
    prose = re.sub(r"```.*?```|`[^`]*`|<div.*?</div>", "", PAGES[page], flags=re.DOTALL)
    assert re.findall(r".{0,20}\\[^\\`*_{}\[\]()>#+.!-].{0,20}", prose) == []


def test_a_product_of_two_variables_is_two_variables():
    """TOOL-14: of "sA" only s and A alone were italic."""
    assert "<i>sA</i>" in equation("−min(sA, clip(s, 1)A)") and "<i>cl" not in equation("clip(sAx)")


def test_what_every_recipe_returns_and_raises_is_said_once():
    head = PAGES["recipes.md"].split("\n## ")[0]
    assert "Objectives" in head and "ValueError" in head
    assert all(inspect.signature(getattr(recipes, name)).return_annotation is Objective for name in recipes.__all__)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("ρ = π/π_old", "<i>ρ</i> = <i>π</i>/<i>π</i><sub>old</sub>"),
        ("e^{−d} < 1", "<i>e</i><sup>−<i>d</i></sup> &lt; 1"),
        ("start^(1−s)", "start<sup>1−<i>s</i></sup>"),
        ("Σ_{k<n} γᵏ", "Σ<sub><i>k</i>&lt;<i>n</i></sub> <i>γ</i>ᵏ"),
        ("clip_low ≥ 0", "<code>clip_low</code> ≥ 0"),
    ],
)
def test_equations_are_set(text, html):
    assert equation(text, frozenset({"clip_low"})).removesuffix("</span></div>").endswith(html)


def test_parts_of_an_equation_have_lines_of_their_own():
    assert equation("a = b;  c = d").count("<span>") == 2
    assert equation("a = b;\nc\n+ d").count("<span>") == 2


@pytest.mark.long
@pytest.mark.parametrize("name", recipes.__all__)
def test_the_picture_of_a_recipe_shows_its_gradient(name):
    """At ratio 1 every recipe follows the advantage: up for a good completion, down for a bad one."""
    objective = getattr(recipes, name)()
    for advantage in (1.0, -1.0):
        loss, gradient = curves(objective, advantage, (0.5, 1.0, 2.0))
        assert loss[1] == 0 and np.isfinite(loss).all() and np.isfinite(gradient).all()
        assert gradient[1] * advantage < 0
    assert set(recipes.__all__) >= set(CLOSE)


def test_a_picture_is_a_drawing_with_two_curves():
    svg = thumbnail("grpo").decode()
    assert svg.startswith("<?xml") and svg.count('id="line2d') >= 4


@pytest.mark.parametrize("package", [rl_kernels, functional], ids=["rl_kernels", "functional"])
def test_what_needs_torch_is_read_from_the_sources(package):
    page = torch_reference.pages()[f"{package.__name__.split('.')[-1]}.md"]
    assert re.findall(r"^## `(\w+)`", page, flags=re.MULTILINE) == package.__all__
    for name in package.__all__:
        for parameter in inspect.signature(getattr(package, name)).parameters:
            assert parameter in page.split(f"{{ #{name} }}")[1].split("\n## ")[0], (name, parameter)
