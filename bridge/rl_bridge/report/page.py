"""The page: its template, style and scripts put into one file with the content, safe whatever a model wrote."""

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rl_bridge.atomic import replacing
from rl_bridge.report.content import content
from rl_bridge.report.reading import read_run
from rl_bridge.report.studies import is_study, study_of

SCRIPTS = ("dom.js", "scales.js", "plot.js", "curves.js", "tokens.js", "tables.js", "studies.js", "main.js")
"""In the order in which they define what the next ones use."""


def write_report(
    folders: Sequence[Path], output: Path, *, title: str | None = None, reload_seconds: float | None = None
) -> int:
    """Write the report of the runs and tuning studies in ``folders``; returns its bytes.

    A reader sees the old file or the new one.

    Raises:
        ValueError: a folder is no run's and no study's, or a file in it is damaged.
    """
    studies = [study_of(folder) for folder in folders if is_study(folder)]
    runs = [read_run(folder) for folder in folders if not is_study(folder)]
    text = page(content(runs, studies, title=title, reload_seconds=reload_seconds)).encode()
    with replacing(output) as temporary:
        temporary.write_bytes(text)
    return len(text)


def page(shown: dict[str, Any]) -> str:
    """The whole file. Its policy lets no other script run than its own, and nothing be loaded."""
    script = "\n".join(_source(name) for name in SCRIPTS)
    style = _source("style.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = _source("page.html")
    parts = {
        "{{policy}}": policy,
        "{{title}}": html.escape(printable(shown["title"])),
        "{{style}}": style,
        "{{content}}": encoded(shown),
        "{{script}}": script,
    }
    # One pass: what is put in is not looked at again.
    pieces, rest = [], filled
    for name, value in parts.items():
        before, found, rest = rest.partition(name)
        assert found, f"the template has no {name}, or in another order"
        pieces += [before, value]
    return "".join([*pieces, rest])


def encoded(value: Any) -> str:
    """JSON that can stand in a script element: ASCII alone, without a character that HTML reads.

    >>> print(encoded({"a": "</script>&\\u202e"}))
    {"a":"\\u003c/script\\u003e\\u0026\\u202e"}
    """
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def finite(value: Any) -> Any:
    """None in place of every number that JSON does not have.

    >>> finite({"a": [float("nan"), 1.5]})
    {'a': [None, 1.5]}
    """
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """The text without characters that turn or hide what stands around them.

    >>> printable("run\\u202e1\\x00")
    'run�1�'
    """
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _source(name: str) -> str:
    return (resources.files("rl_bridge.report") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
