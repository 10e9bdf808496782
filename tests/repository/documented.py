"""Run every command that the documents name, in a fresh clone of HEAD with fresh environments: `make documented`.

--without GROUP leaves out a group, --list prints the table, --only WORD runs the commands that contain the word, and
--of FILE those that the file names (README.md, docs/tools.md …).
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.repository.commands import COMMANDS
from tests.repository.documents import ROOT, Command, commands_in, documents

LIMIT = 1800  # seconds for one command: the installation of the other libraries is the longest


def environment(clone: Path, scratch: Path) -> dict[str, str]:
    """A newcomer's: nothing of the caller's Python; commands without a path come from the clone's .venv.

    pip compiles nothing in advance, half of its work: Python compiles a module when it is first imported.
    """
    strange = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in strange}
    mine = str(ROOT / ".venv" / "bin")
    path = [part for part in kept["PATH"].split(os.pathsep) if part != mine]
    kept["PATH"] = os.pathsep.join([str(clone / ".venv" / "bin"), *path])
    kept["PIP_NO_COMPILE"] = "0"  # pip's option of this name is on when its variable is false
    return kept | {"CLONE": str(clone), "SCRATCH": str(scratch), "MPLBACKEND": "agg"}


def begin_environment(clone: Path, scratch: Path) -> None:
    """Give the clone a .venv with all packages of the environment that ``pip install`` has filled, as links to files.

    ``make install`` adds the rest: into an empty folder the gate's stage of this name installs everything.
    """
    filled, made = scratch / "pip", clone / ".venv"
    if made.exists() or not filled.exists():
        return
    shutil.copytree(filled, made, symlinks=True, copy_function=os.link)
    scripts = [path for path in (made / "bin").iterdir() if path.is_file() and not path.is_symlink()]
    for file in (made / "pyvenv.cfg", *scripts):
        text, mode = file.read_bytes(), file.stat().st_mode
        if os.fsencode(filled) in text:
            file.unlink()  # a link is written anew, or the other environment would change
            file.write_bytes(text.replace(os.fsencode(filled), os.fsencode(made)))
            file.chmod(mode)


def of_processors() -> float:
    """Seconds of the processors that commands have taken so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(command: Command, clone: Path, scratch: Path) -> tuple[bool, float, float, str]:
    """Whether it ended well, its seconds, those of the processors, and the end of what it printed."""
    start, before = time.monotonic(), of_processors()
    done = subprocess.run(
        ["bash", "-c", command.shell],
        cwd=clone,
        env=environment(clone, scratch),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT,
        check=False,
    )
    return done.returncode == 0, time.monotonic() - start, of_processors() - before, done.stdout[-3000:]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a command fails."""
    pages = {str(path.relative_to(ROOT)): path for path in documents()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", nargs="*", default=[], choices=sorted({c.group for c in COMMANDS}))
    parser.add_argument("--only", default="")
    parser.add_argument("--of", choices=sorted(pages))
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    chosen = [c for c in COMMANDS if c.group not in options.without and options.only in c.text]
    if options.of:
        named = commands_in(pages[options.of].read_text("utf-8"))
        chosen = [c for c in chosen if c.text in named]
    if options.list:
        for c in chosen:
            print(c.text if c.run is None else f"{c.text}\n    runs: {c.run}\n    because: {c.why}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory(prefix="rl-fn-documented-") as folder:
        clone, scratch = Path(folder) / "clone", Path(folder) / "scratch"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        scratch.mkdir()
        for command in chosen:
            if command.shell.startswith(("make ", ".venv/")):
                begin_environment(clone, scratch)
            ended_well, seconds, busy, text = run(command, clone, scratch)
            word = "ok    " if ended_well else "FAILED"
            print(f"{word} {seconds:6.1f} s, {busy:6.1f} s of processors  {command.shell}", flush=True)
            if not ended_well:
                print(text, flush=True)
                failed.append(command.text)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} documented commands ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
