"""Environment variables, and what a user may not read or write."""

import ctypes
import os
from pathlib import Path

from tests.bridge.bad_inputs.case import POLICY, SFT, Case, Damage, changed

# Variables, the command, what has to be said; None: nothing, for the run works.
VARIABLES = [
    ({"LANG": "nonsense"}, SFT, None),
    ({"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, SFT, None),
    ({"TERM": "dumb", "COLUMNS": "1"}, SFT, None),
    ({"COLUMNS": "many"}, SFT, None),
    ({"HOME": "/gone"}, SFT, None),
    ({"HF_HOME": "/gone/here"}, SFT, None),
    ({"HF_HUB_OFFLINE": "1"}, changed(SFT, "--model nobody/nothing"), ("nobody/nothing",)),
    ({"HF_TOKEN": "nonsense"}, SFT, None),
    ({"OMP_NUM_THREADS": "many"}, SFT, None),
    ({"CUDA_VISIBLE_DEVICES": "7"}, SFT, None),
    ({"RANK": "nonsense"}, SFT, ("RANK", "nonsense")),
    ({"WORLD_SIZE": "nonsense", "RANK": "0"}, SFT, ("WORLD_SIZE", "nonsense")),
    ({"LOCAL_RANK": "nonsense", "RANK": "0", "WORLD_SIZE": "1"}, SFT, ("LOCAL_RANK",)),
    ({"OPENAI_API_KEY": "a\nb"}, changed(POLICY, "--reward judge:judge.toml"), ("judge.toml", "no such judge file")),
    ({"HTTP_PROXY": "nonsense"}, SFT, None),
    ({"TOKENIZERS_PARALLELISM": "nonsense"}, SFT, None),
    ({"SOURCE_DATE_EPOCH": "nonsense"}, SFT, None),
]


def mode(place: str, bits: int) -> Damage:
    """Another mode of a file or folder, and no more right than an ordinary user has."""

    def damage(folder: Path) -> None:
        (folder / place).chmod(bits)
        if os.geteuid() == 0:
            be_bound_by_modes()
            os.environ["HOME"] = str(folder)

    return damage


def be_bound_by_modes() -> None:
    """Give up what lets root read and write every file; another user could not read this checkout wherever it lies."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_3, this_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then those of the capabilities from 32 on
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for kind in (0, 1):
        sets[kind] &= ~CHOWN_OVERRIDE_SEARCH_OWNER
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


CHOWN_OVERRIDE_SEARCH_OWNER = 0b1111
OUT = changed(SFT, "--output .")
# Name, command, damage, what has to be said.
MODES = [
    ("rows that may not be read", SFT, mode("sums.jsonl", 0), ("sums.jsonl", "may not read")),
    ("held-out rows that may not be read", changed(SFT, "--held-out -", "--eval-data pairs.jsonl"), mode("pairs.jsonl", 0), ("pairs.jsonl", "may not read")),
    ("weights that may not be read", SFT, mode("tinyq/model.safetensors", 0), ("tinyq/model.safetensors",)),
    ("a config that may not be read", SFT, mode("tinyq/config.json", 0), ("tinyq/config.json",)),
    ("a tokenizer that may not be read", SFT, mode("tinyq/tokenizer.json", 0), ("tinyq", "tokenizer.json|tokenizer")),
    ("a model's folder that may not be entered", SFT, mode("tinyq", 0), ("tinyq",)),
    ("a reward that may not be read", POLICY, mode("judged.py", 0), ("judged.py", "may not read")),
    ("a folder that may not be written to", OUT, mode(".", 0o555), ("--output",)),
    ("a run that may not be read", "report done/first", mode("done/first/metrics.jsonl", 0), ("metrics.jsonl", "may not read")),
    ("a run's folder that may not be written to", "report done/first", mode("done/first", 0o555), ("done/first", "--output")),
    ("an export into a folder that may not be written to", "export done/first --to tensorboard --output .", mode(".", 0o555), ("--output",)),
    ("a template that may not be read", changed(SFT, "--chat-template judged.py"), mode("judged.py", 0), ("judged.py", "may not read")),
    ("right: an ordinary user", SFT, mode("sums.jsonl", 0o444), None),
]  # fmt: skip


def cases() -> list[Case]:
    found = []
    for variables, command, says in VARIABLES:
        name = " ".join(f"{n}={v!r}" for n, v in variables.items())
        told = f"{name}, {command.split()[1]} {command.split()[3]}"
        found.append(
            Case(
                kind="environment variables",
                name=told,
                command=command,
                says=says or (),
                works=says is None,
                environment=variables,
            )
        )
    return found + [
        Case(kind="permissions", name=name, command=command, says=says or (), works=says is None, damage=damage)
        for name, command, damage, says in MODES
    ]
