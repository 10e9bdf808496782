"""The folder of a run: locked, swept, its options and fingerprints compared with those of the checkpoint."""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_bridge.checkpoints import Checkpointer
from rl_bridge.common import files, step_folders
from rl_bridge.common.files import RunLock, replacing, require_own_files, sweep, write_json
from rl_bridge.common.scrubbing import is_shown_as, scrubbed
from rl_bridge.common.terminal import tell
from rl_bridge.run.best import Best
from rl_bridge.run.options import MAY_CHANGE
from rl_bridge.run.provenance import EVALUATION, HELD_OUT, UNDIVIDED, write_provenance
from rl_bridge.run.recorder import Recorder
from rl_bridge.run.run_toml import RUN_FILE, toml_of

_ABSENT = "no such option"
BEGUN = frozenset({files.NAME, "config.json", RUN_FILE, "metrics.jsonl", "provenance.jsonl", "checkpoints", "events"})
EVENTS = "events/events.out.tfevents."
"""All that is in the folder of a run which has taken no step."""
BEFORE = "once/before"
"""The cached result of the evaluation that a recipe begins with."""


def options_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every option of a config by its dotted name, as JSON has its value; without options that may change.

    >>> from rl_bridge.modules.trainable import OptimizerConfig
    >>> options_of(OptimizerConfig(learning_rate=0.1))["learning_rate"]
    0.1
    """
    options: dict[str, Any] = {}
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.metadata.get("resume") == MAY_CHANGE["resume"]:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            options |= options_of(value, f"{prefix}{option.name}.")
        else:
            options[prefix + option.name] = json.loads(json.dumps(value, default=str))
    return options


def differences(before: Mapping[str, Any], now: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> list[str]:
    """A phrase for each name whose values differ, in the order of ``now``.

    The settings of a loop's objects have the names that Python has for them. ``whole``: ``now`` with nothing hidden,
    for another environment may have hidden more or less of ``before``.

    >>> differences({"policy.steps": 8, "seed": 0}, {"policy.steps": 9, "seed": 0})
    ['--policy.steps was 8 and is 9']
    >>> differences({"state": {"policy": {"lr": 1}}}, {"state": {"policy": {"lr": 2}}})
    ['policy.lr was 1 and is 2']
    """
    # As text: NaN differs from itself, and 1 equals True.
    texts = {name: _text(new) for name, _, new in _pairs(before, now if whole is None else whole)}
    return [
        f"{name.removeprefix('state.') if name.startswith('state.') else '--' + name.replace('_', '-')} was "
        f"{_text(old)} and is {_text(new)}"
        for name, old, new in _pairs(before, now)
        if _text(old) != _text(new) and not is_shown_as(texts.get(name, ""), _text(old))
    ]


def _pairs(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, value before and value now, down to values that are no mappings on both sides."""
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _pairs(old, new, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", old, new


def _text(value: Any) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Opened:
    """A run's folder, locked by this process."""

    lock: RunLock
    recorder: Recorder
    path: Path | None
    """The checkpoint to go on from."""
    state: dict[str, Any] | None
    """The driver's state in that checkpoint."""
    identity: dict[str, Any]
    """Options and fingerprints of the run, which the next checkpoints have."""
    is_new: bool = False
    """Whether the folder was made for this run, and not there before."""

    def unmake(self, folder: Path) -> bool:
        """Remove the folder of a run that failed before it did anything; returns whether it is gone.

        One that was there before stays, and so does one with anything besides what a run begins with.
        """
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        others = [name for name in names if name not in BEGUN and not name.startswith(EVENTS)]
        if not self.is_new or others:
            return False
        for path in sorted((folder / name for name in names), reverse=True):  # what is in a folder before it
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        return True


def begin_or_resume(
    folder: Path,
    config: Any,
    checkpointer: Checkpointer,
    fingerprints: Mapping[str, str],
    *,
    resume: bool,
    anyway: bool,
) -> Opened:
    """Make the folder of a new run, or find the checkpoint of an old one. ``anyway`` resumes with other options too.

    Raises:
        ValueError: see ``Run``.
    """
    new = not (resume or anyway)
    is_new = new and not folder.exists()
    if new:
        folder.mkdir(parents=True, exist_ok=True)
        _require_empty(folder)
    elif not _is_run(folder):
        near = difflib.get_close_matches(folder.name, _runs_in(folder.parent), cutoff=0.5)
        hint = f"; did you mean --name {' or '.join(near)}?" if near else ""
        raise ValueError(f"{folder} has no checkpoint to resume from: there is no such run{hint}")
    else:
        _require_trainer(folder, getattr(config, "trainer", ""))
    require_own_files(folder)
    lock = RunLock(folder)
    try:
        if new:  # Another process may have had the lock a moment ago.
            _require_empty(folder)
        opened = _open(folder, config, checkpointer, fingerprints, lock, resume=resume or anyway, anyway=anyway)
        return replace(opened, is_new=is_new)
    except BaseException:
        lock.release()
        raise


def _open(
    folder: Path,
    config: Any,
    checkpointer: Checkpointer,
    fingerprints: Mapping[str, str],
    lock: RunLock,
    *,
    resume: bool,
    anyway: bool,
) -> Opened:
    path = checkpointer.latest() if resume else None
    state = None if path is None else checkpointer.read(path)
    options = options_of(config)
    identity = {"options": scrubbed(options), "fingerprints": dict(fingerprints)}
    changes = [] if state is None else _changes(state, identity, options)
    if changes and not anyway:
        anyway_on = "Run(…, resume_anyway=True)" if hasattr(config, "state") else "--resume-anyway"
        raise ValueError(
            f"{path} was made with other options: {'; '.join(changes)}. Give the old ones, or {anyway_on} to go on "
            "with the new ones"
        )
    if path is None and resume:
        tell(f"{folder} was stopped before its first checkpoint: it begins with the first step")
    # All refusals are above: the folder of a refused run stays as it is.
    sweep(folder)
    step_folders.sweep(folder / "checkpoints")
    recorder = Recorder(folder, None if state is None else state["record"], again=resume, repair=anyway)
    try:
        if path is None or changes:
            write_json(folder / "config.json", scrubbed(asdict(config)))
            if trainer := getattr(config, "trainer", ""):
                with replacing(folder / RUN_FILE) as file:
                    file.write_text(toml_of(config, trainer), "utf-8")
        if changes:
            tell(f"going on with other options: {'; '.join(changes)}")
            recorder.note({"step": recorder.logged, "changed": changes})
            for text in _forget_evaluations(state or {}, fingerprints):
                tell(text)
                recorder.note({"step": recorder.logged, "note": text})
        write_provenance(folder, recorder.attempt, fingerprints)
        tell(f"run folder: {folder}" if path is None else f"run folder: {folder}, going on from {path.name}")
    except BaseException:
        recorder.close()
        raise
    return Opened(lock, recorder, path, state, identity)


def _changes(state: Mapping[str, Any], identity: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    before, now = state["fingerprints"], identity["fingerprints"]
    others = [
        f"the {name} is another one ({before.get(name)} was its fingerprint, {now.get(name)} is)"
        for name in dict.fromkeys([*before, *now])
        # The first two are made of the other fingerprints and of options, each of which is named itself. Older
        # checkpoints lack the third; the data is compared.
        if name not in (HELD_OUT, EVALUATION, UNDIVIDED) and before.get(name) != now.get(name)
    ]
    return [*differences(state["options"], identity["options"], options), *others]


def _forget_evaluations(state: dict[str, Any], fingerprints: Mapping[str, str]) -> list[str]:
    """Drop from a checkpoint's ``state`` what another evaluation measured; returns lines that say so.

    The weights of the beginning are gone, so that nothing measures them anew. Without a fingerprint of the evaluation,
    as in a loop of one's own, nothing is dropped; a checkpoint of an earlier version may lack the one that a run has.
    """
    before, lines = state["fingerprints"], []
    if HELD_OUT in before and before[HELD_OUT] != fingerprints.get(HELD_OUT):
        lines.append(
            "the held-out rows are other ones: rows that the steps before trained on may be among them, which makes "
            "held-out numbers too good; --eval-data FILE names rows that were never trained on"
        )
    if before.get(EVALUATION) == fingerprints.get(EVALUATION):
        return lines
    otherwise = "measured otherwise" if EVALUATION in before else "measured by an earlier version, perhaps otherwise"
    cached, best = state.get("cached_results", {}), Best(state.get("best"))
    if cached.get(BEFORE) is not None:
        cached[BEFORE] = None
        lines.append(f"held-out numbers of before were {otherwise}: there is no gain over the run's beginning")
    if best.pinned():
        best.lose(f"the best step so far was {otherwise}")
        state["best"] = best.state()
        lines.append(f"the best step so far was {otherwise}: the best of the steps that follow takes its place")
    return lines


def _require_empty(folder: Path) -> None:
    if {path.name for path in folder.iterdir()} - {files.NAME}:
        raise ValueError(f"{folder} exists: go on with --resume, or give this run another --name")


def _require_trainer(folder: Path, trainer: str) -> None:
    """Refuse a run that another trainer made: every option would be named as another one."""
    file = folder / RUN_FILE
    try:
        before = tomllib.loads(file.read_text("utf-8")).get("trainer") if trainer and file.is_file() else None
    except ValueError:  # the checkpoint has the run's options; nothing is read from a file that was edited
        before = None
    if before not in (None, trainer):
        raise ValueError(
            f"{folder} is a run of the trainer {before}, and this is {trainer}: give rl-fn train {before} … --resume, "
            "or another --name"
        )


def _runs_in(folder: Path) -> list[str]:
    """Names of the runs in a folder."""
    return sorted(path.name for path in folder.iterdir() if _is_run(path)) if folder.is_dir() else []


def _is_run(folder: Path) -> bool:
    """Whether a run was begun here. An empty folder is that of a run that was killed right after it was made."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or not names.isdisjoint({"config.json", "checkpoints", files.NAME})
