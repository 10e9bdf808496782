"""Functions in a forked process, whose threads and libraries this one does not get."""

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any


def in_a_child(function: Callable[[], Any]) -> Any:
    """What the function returns in a process of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)

        def tell() -> int:
            with os.fdopen(writing, "wb") as to:
                pickle.dump(function(), to)
            return 0

        leave(tell)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        content = told.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{function} failed in its process")
    return pickle.loads(content)


def leave(run: Callable[[], int]) -> None:
    """End a forked process with what ``run`` returns, and never come back."""
    status = 70
    try:
        status = run()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
