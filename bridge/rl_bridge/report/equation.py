"""The equation that a run optimised, as parts that a page sets: text, variables, names, sub- and superscripts."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import rl_fn

Part = tuple[str, str]
"""(Kind, text); the kinds are text, var, code, sub, sup."""
_TOKEN = re.compile(
    r"(?P<number>\d[\d.]*(?:e[-+]?\d+)?)|(?P<code>[A-Za-z]+(?:_[A-Za-z]+)+(?=\b))|_\{(?P<low>[^}]*)\}|_(?P<lower>\w+)"
    r"|\^\{(?P<high>[^}]*)\}|\^\((?P<higher>[^)]*)\)|\^(?P<highest>\w)"
    r"|(?P<var>[Α-ΟΡΤ-Ωα-ωℓ]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))|(?P<text>[A-Za-z]+|.)",
    flags=re.DOTALL,
)
_KINDS = {"low": "sub", "lower": "sub", "high": "sup", "higher": "sup", "highest": "sup", "number": "text"}


def parts_of(line: str) -> list[Part]:
    """The parts of one line; what stands beside each other in one kind is one part.

    >>> parts_of("min(ρA, x^2) of old_logprobs")
    [('text', 'min('), ('var', 'ρ'), ('var', 'A'), ('text', ', '), ('var', 'x'), ('sup', '2'), ('text', ') of '),
     ('code', 'old_logprobs')]
    """
    found: list[Part] = []
    for match in _TOKEN.finditer(line):
        group = match.lastgroup or "text"
        text, kind = match.group(group), _KINDS.get(group, group)
        if kind == "code" and len(text.split("_")[0]) == 1:
            # ε_high: a variable with its subscript.
            head, _, tail = text.partition("_")
            found += [("var", head), ("sub", tail)]
        elif kind == "text" and found and found[-1][0] == "text":
            found[-1] = ("text", found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


def equation_of(config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Name, a sentence, the docstring's equation, the constants, and where the run has ended what was optimised.

    None for a run whose loss has no name in its config.
    """
    named = [(config.get("objective"), "algorithm", rl_fn.recipes), (config.get("loss"), "loss", rl_fn)]
    for options, key, module in named:
        name = options.get(key) if isinstance(options, Mapping) else None
        function = getattr(module, name, None) if isinstance(name, str) else None
        if isinstance(options, Mapping) and function is not None:
            paragraphs = (inspect.getdoc(function) or "").split("\n\n")
            published = paragraphs[1] if len(paragraphs) > 1 else ""
            optimised = str(summary.get("objective", "")).splitlines()
            return {
                "name": name,
                "about": " ".join(paragraphs[0].split()),
                "published": [parts_of(line) for line in lines_of(published)],
                "optimised": [parts_of(line.strip()) for line in optimised],
                "constants": {
                    option: str(value)
                    for option, value in options.items()
                    if option != key and value is not None and not isinstance(value, Mapping)
                }
                | {
                    f"{option}.{own}": str(value)
                    for option, values in options.items()
                    if isinstance(values, Mapping)
                    for own, value in values.items()
                    if value is not None
                },
            }
    return None


def lines_of(paragraph: str) -> list[str]:
    """The lines of an equation in a docstring: two spaces behind a comma or semicolon, or a semicolon at an end.

    >>> lines_of("token-mean of -A log π,  A = (r - mean)/(std +\\nε)")
    ['token-mean of -A log π', 'A = (r - mean)/(std + ε)']
    """
    return [" ".join(part.split()) for part in re.split(r"[;,]\s{2,}|;\n", paragraph) if part.strip()]
