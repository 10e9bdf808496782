"""How a run takes its folder: locked, swept, compared with what it was begun with."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_bridge import step_folders
from rl_bridge.atomic import sweep, write_json
from rl_bridge.checkpoints import Checkpointer
from rl_bridge.tracking import lock
from rl_bridge.tracking.comparison import differences, options_of
from rl_bridge.tracking.lock import RunLock, require_own_files
from rl_bridge.tracking.provenance import write_provenance
from rl_bridge.tracking.recorder import Recorder
from rl_bridge.tracking.scrubbing import scrubbed
from rl_bridge.tracking.signals import tell


@dataclass(frozen=True)
class Opened:
    """A folder that this process has."""

    lock: RunLock
    recorder: Recorder
    path: Path | None
    """The checkpoint to go on from."""
    state: dict[str, Any] | None
    """The driver's state in it."""
    identity: dict[str, Any]
    """What the next checkpoints say about the run: its options and fingerprints."""


def begin_or_resume(
    folder: Path,
    config: Any,
    checkpointer: Checkpointer,
    fingerprints: Mapping[str, str],
    *,
    resume: bool,
    anyway: bool,
) -> Opened:
    """Make the folder of a new run, or find out where an old one goes on. ``anyway`` resumes with other options too.

    Raises:
        ValueError: see ``Run``.
    """
    new = not (resume or anyway)
    if new:
        folder.mkdir(parents=True, exist_ok=True)
        _require_empty(folder)
    elif not _is_run(folder):
        raise ValueError(f"{folder} has no checkpoint to resume from: there is no such run")
    require_own_files(folder)
    held = RunLock(folder)
    try:
        if new:  # another process may have had the lock a moment ago
            _require_empty(folder)
        return _open(folder, config, checkpointer, fingerprints, held, resume=resume or anyway, anyway=anyway)
    except BaseException:
        held.release()
        raise


def _open(
    folder: Path,
    config: Any,
    checkpointer: Checkpointer,
    fingerprints: Mapping[str, str],
    held: RunLock,
    *,
    resume: bool,
    anyway: bool,
) -> Opened:
    path = checkpointer.latest() if resume else None
    state = None if path is None else checkpointer.read(path)
    identity = {"options": scrubbed(options_of(config)), "fingerprints": dict(fingerprints)}
    changes = [] if state is None else _changes(state, identity)
    if changes and not anyway:
        raise ValueError(
            f"{path} was made with other options: {'; '.join(changes)}. Give the old ones, or --resume-anyway to go on "
            "with the new ones"
        )
    if path is None and resume:
        tell(f"{folder} was stopped before its first checkpoint: it begins with the first step")
    # Only now is anything in the folder changed.
    sweep(folder)
    step_folders.sweep(folder / "checkpoints")
    recorder = Recorder(folder, None if state is None else state["record"], again=resume, repair=anyway)
    try:
        if path is None or changes:
            write_json(folder / "config.json", scrubbed(asdict(config)))
        if changes:
            tell(f"going on with other options: {'; '.join(changes)}")
            recorder.note({"step": recorder.logged, "changed": changes})
        write_provenance(folder, recorder.attempt, fingerprints)
        tell(f"run folder: {folder}" if path is None else f"run folder: {folder}, going on from {path.name}")
    except BaseException:
        recorder.close()
        raise
    return Opened(held, recorder, path, state, identity)


def _changes(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    before, now = state["fingerprints"], identity["fingerprints"]
    others = [
        f"the {name} is another one ({before.get(name)} was its fingerprint, {now.get(name)} is)"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    return [*differences(state["options"], identity["options"]), *others]


def _require_empty(folder: Path) -> None:
    if {path.name for path in folder.iterdir()} - {lock.NAME}:
        raise ValueError(f"{folder} exists: go on with --resume, or give this run another --name")


def _is_run(folder: Path) -> bool:
    """Whether a run was begun here, were it killed the moment after its folder was made."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or not names.isdisjoint({"config.json", "checkpoints", lock.NAME})
