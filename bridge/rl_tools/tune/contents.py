"""The contents of what the trials of a study read: files, folders, and rows and models of the hub, each by its hash."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_bridge.common.terminal import tell
from rl_bridge.common.user_marks import content_of
from rl_tools.tune.journal import CONTENTS

_WRITTEN = ("--trackers", "--tracker-output", "--tracker-project")
"""Options that may be called like a folder to which the trials write."""


def contents(fixed: Sequence[str], values: Sequence[str], configs: Sequence[Any]) -> dict[str, str]:
    """A hash, by name, of all that the words of trials name: else one study has trials of other rows.

    ``fixed``: the options of every trial with their values; ``values``: those among which trials differ; ``configs``:
    options of trials that have each of these values. A file of Python counts with the user's modules that it imports,
    a folder with all that are in it, but none that is called like a number or an algorithm. What is on the hub counts
    by its rows and its models' files, as those of a run do, and not by its revision: that of another README is another.

    Raises:
        FileNotFoundError, ValueError: rows or a model that no trial could read.
    """
    option, pieces = "", {}
    for word in (*values, *fixed):
        option = word.partition("=")[0] if word.startswith("--") else option
        may_be_folder = option not in _WRITTEN and not re.fullmatch(r"[\d.,e+-]+|[a-z]+:[a-z_0-9]+", word)
        # A path may have these characters itself.
        for piece in (word, word.partition("=")[2], *re.split("[=:@,]", word)):
            pieces[piece] = pieces.get(piece, False) or may_be_folder
    places = [
        Path(piece) for piece, folder in pieces.items() if os.path.isfile(piece) or (folder and os.path.isdir(piece))
    ]
    of_words = {f"{CONTENTS}{place}": _content(place) for place in places}
    return of_words | _of_configs(configs, of_words)


def differences_of(before: Mapping[str, str], reads: Callable[[], Mapping[str, str]]) -> list[str]:
    """The changes between ``before`` and the study's end, in words.

    The trials are not refused: they have their results, and only their user knows what the change means for these.
    """
    try:
        now = reads()
    except Exception as error:  # of a hub that is out of reach by now, of a library that is no longer there
        return [f"what the trials read cannot be compared with what it was at their beginning: {error}"]
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} changed while trials ran: they may have read either one" for name in changed]


def _of_configs(configs: Sequence[Any], of_words: Mapping[str, str]) -> dict[str, str]:
    """A hash by name of models, and of rows of the hub, whichever role they have in a trial.

    ``of_words``: the hashes of files and folders that words name. A word may look like another thing: ``model:judge``.
    """
    # Not at the top: the words of a study that cannot be are refused without PyTorch.
    from rl_bridge.data.rows import rows_of_hub
    from rl_bridge.models.model_source import PretrainedSource
    from rl_bridge.models.own_class import is_file_of_class
    from rl_bridge.rewards.sources import reward_models
    from rl_bridge.run.provenance import of_folder, of_rows

    hashes: dict[str, str] = {}
    for config in configs:
        models = [name for name in config.models().values() if name is not None and not is_file_of_class(name)]
        models += reward_models(getattr(config, "reward", ()))
        for name in models:
            key = f"{CONTENTS}{Path(name)}" if Path(name).exists() else f"{CONTENTS}the model {name}"
            if key not in {**of_words, **hashes}:
                hashes[key] = of_folder(PretrainedSource(name).folder(), tell)
        for source in (config.data, config.eval_data):
            key = f"{CONTENTS}the rows of {source}"
            if source is not None and key not in hashes and (rows := rows_of_hub(source)) is not None:
                tell(f"reading the rows of {source}: all trials are to have the same")
                hashes[key] = of_rows(rows)
    return hashes


def _content(place: Path) -> str:
    from rl_bridge.run.provenance import of_folder, of_weights

    if not place.is_dir():
        return content_of(place)[:16] if place.suffix == ".py" else of_weights(place)
    of_model = (place / "config.json").exists()
    folders = {folder.relative_to(place): folder for folder in (place, *place.rglob("*")) if folder.is_dir()}
    visible = sorted(name for name in folders if not any(part.startswith(".") for part in name.parts))
    lines = [f"{name} {of_folder(folders[name], tell, every=not of_model)}" for name in visible]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
