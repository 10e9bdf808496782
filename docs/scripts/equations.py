"""An equation of a docstring, written in Unicode, as HTML: subscripts, superscripts, italic variables."""

import html
import re

TOKEN = re.compile(
    r"(?P<name>[A-Za-z]+(?:_[A-Za-z]+)+)|_\{(?P<low>[^}]*)\}|_(?P<lower>\w+)"
    r"|\^\{(?P<high>[^}]*)\}|\^\((?P<higher>[^)]*)\)|\^(?P<highest>\w)"
    r"|(?P<word>[^\W\d_]+)|(?P<other>.)",
    flags=re.DOTALL,
)
# Greek letters, and Latin ones that stand alone or are the product sA, are variables; Σ and Π are not.
VARIABLE = re.compile(r"[Α-ΟΡΤ-Ωα-ωℓ]|(?<![A-Za-z])(?:[A-Za-z]|sA)(?![A-Za-z])")


def _token(match: re.Match[str], names: frozenset[str]) -> str:
    group, text = match.lastgroup or "other", match.group()
    if group == "name":
        head, _, tail = text.partition("_")
        # A keyword of the function is a name; everything else with an underscore has a subscript.
        return f"<code>{text}</code>" if text in names else markup(head, names) + f"<sub>{html.escape(tail)}</sub>"
    inside = markup(match.group(group), names) if group not in ("word", "other") else ""
    if group in ("low", "lower"):
        return f"<sub>{inside}</sub>"
    if group in ("high", "higher", "highest"):
        return f"<sup>{inside}</sup>"
    return VARIABLE.sub(r"<i>\g<0></i>", text) if group == "word" else html.escape(text)


def markup(text: str, names: frozenset[str] = frozenset()) -> str:
    """One line of an equation as HTML; `names` are the function's keywords."""
    return TOKEN.sub(lambda match: _token(match, names), text)


def equation(paragraph: str, names: frozenset[str] = frozenset()) -> str:
    """A block of HTML with one line for each part of the equation; two spaces behind a comma or semicolon end one."""
    # A line of the docstring that ends in a semicolon ends a part too; any other goes on in the next line.
    parts = re.split(r"[;,]\s{2,}|;\n", paragraph)
    lines = "".join(f"<span>{markup(' '.join(part.split()), names)}</span>" for part in parts if part.strip())
    return f'<div class="equation" role="math">{lines}</div>'
