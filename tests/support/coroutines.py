"""Coroutines that nobody awaits."""

import gc
import warnings


def never_awaited(act):
    """Warnings of coroutines that nobody awaits, while ``act`` runs and what it leaves is collected."""
    gc.freeze()  # The collection need not look at all that was imported.
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
            gc.collect()
    finally:
        gc.unfreeze()
    return [str(one.message) for one in caught if "never awaited" in str(one.message)]
