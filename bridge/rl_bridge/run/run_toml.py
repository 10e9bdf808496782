"""run.toml: the options of a run as a file, written from its config and read back as names with values."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

from rl_bridge.common.scrubbing import scrubbed_text

RUN_FILE = "run.toml"
NONE = "None"
"""TOML has no null. An option without a value is left out where that is its default, else this text stands for it."""
ATTEMPT = ("resume", "resume_anyway", "dry_run")
"""Options of one attempt at a run, and not of the run."""


def toml_of(config: Any, trainer: str) -> str:
    """The text of the run file of a config: every option that has a value, by its name on the command line.

    A part of the config is a table. One that is one of several recipes has the recipe's name as ``name``.

    >>> from rl_bridge.modules.trainable import OptimizerConfig
    >>> print(toml_of(OptimizerConfig(learning_rate=1e-5), "sft").splitlines()[2])
    learning-rate = 1e-05
    """
    import tomlkit  # of the extra ``bridge``: what reads run files does without

    document = tomlkit.document()
    document.add(tomlkit.comment("The options of a run, all of them: rl-fn train FILE is this run again."))
    document.add("trainer", tomlkit.item(trainer))
    _fill(document, config)
    return tomlkit.dumps(document)


def _fill(table: Any, config: Any) -> None:
    """Put the options of ``config`` into a table. The recipe's name is first; tables are last, for they end a table."""
    import tomlkit

    options = sorted(filterfalse(is_fixed, dataclasses.fields(config)), key=lambda option: option.init)
    values = {option.name: getattr(config, option.name) for option in options}
    for option in options:
        value = values[option.name]
        is_default_none = value is None and option.default is None
        if not (dataclasses.is_dataclass(value) or is_default_none or option.name in ATTEMPT):
            of_recipe = not option.init
            name, text = ("name", dashed(str(value))) if of_recipe else (dashed(option.name), _plain(value))
            table.add(name, tomlkit.item(text))
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            part = tomlkit.table()
            _fill(part, value)
            if part:
                table.add(dashed(name), part)


def is_fixed(option: dataclasses.Field) -> bool:
    """Whether a field of a config is no option: neither the command line nor a run file has it.

    >>> from rl_bridge.data.trajectory import SamplingParams
    >>> [option.name for option in dataclasses.fields(SamplingParams) if is_fixed(option)]
    ['seed']
    """
    from tyro.conf import Fixed  # of the extra ``bridge``

    return Fixed in getattr(option.type, "__metadata__", ())


def dashed(name: str) -> str:
    """A name as the command line has it."""
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
    """The value in a type that TOML has, without secrets."""
    if value is None:
        return NONE
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return scrubbed_text(str(value))


@dataclass(frozen=True)
class Setting:
    """The value that a run file has for an option."""

    value: Any
    file: Path
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Part of the options → the name that this file gives it, as objective → gspo."""


def read_run_files(files: Sequence[Path]) -> dict[str, Setting]:
    """Option by its name on the command line → its value; a later file lies over an earlier one.

    Raises:
        ValueError: a file that cannot be read as TOML, or an option that it has twice.
    """
    settings: dict[str, Setting] = {}
    for file in files:
        try:
            content = tomllib.loads(file.read_text("utf-8-sig"))
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:  # of the syntax or of the encoding
            raise ValueError(f"{file} is no TOML: {error}") from error
        flat, options = list(_flat(content, "")), {}
        names = {name.removesuffix(".name"): value for name, value in flat}
        for name, value in flat:
            if name in options:
                raise ValueError(f"{file} has {name} twice")
            options[name] = Setting(value, file, names)
        settings |= options
    return settings


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = f"{prefix}{dashed(key)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
