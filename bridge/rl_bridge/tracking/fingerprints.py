"""Short hashes of what a run depends on besides its options: rows of data, and the source of a reward."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def of_rows(*groups: Iterable[Mapping[str, Any]]) -> str:
    """Of rows of data in their order. Names with a leading underscore say where a row came from and do not count.

    >>> of_rows([{"prompt": "1+1=", "_where": "a.jsonl, row 1"}]) == of_rows([{"prompt": "1+1="}])
    True
    """
    digest = hashlib.sha256()
    for rows in groups:
        for row in rows:
            counted = {key: value for key, value in row.items() if not str(key).startswith("_")}
            digest.update(json.dumps(counted, sort_keys=True, default=repr).encode() + b"\n")
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def of_function(function: Callable[..., Any]) -> str:
    """Of a function's name and the file that it stands in. One of this library is known by its name alone."""
    # An object that is called has the source of its class.
    named: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    if named.__module__.split(".")[0] in ("rl_bridge", "rl_fn", "builtins"):
        return name
    file = inspect.getsourcefile(named)
    content = Path(file).read_bytes() if file is not None and Path(file).is_file() else b""
    return f"{named.__qualname__}:{hashlib.sha256(content).hexdigest()[:16]}"
