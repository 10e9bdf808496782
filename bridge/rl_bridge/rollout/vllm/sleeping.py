"""Engines of vLLM that sleep, as far as their device can.

The file stands alone since it loads no vLLM: its refusals are checked where none is installed.
"""

from collections.abc import Sequence
from typing import Any

LEVELS = {
    0: "no request draws",
    1: "weights go to host memory, keys and values are freed",
    2: "weights, keys and values are freed",
}


def require_sleep(device: str, level: int) -> None:
    """Refuse a level that an engine on this kind of device does not have; vLLM logs a line, and does nothing.

    >>> require_sleep("cuda", 1)
    >>> require_sleep("cpu", 2)
    Traceback (most recent call last):
        ...
    ValueError: an engine of vLLM on a cpu has no sleep of level 2 (weights, keys and values are freed)

    Raises:
        ValueError: names the level and the device.
    """
    if level not in LEVELS:
        raise ValueError(f"vLLM sleeps at levels {', '.join(map(str, LEVELS))}, got {level}")
    if level and device == "cpu":
        raise ValueError(f"an engine of vLLM on a cpu has no sleep of level {level} ({LEVELS[level]})")


def sleep(engine: Any, level: int) -> None:
    """Let an ``LLMEngine`` sleep; running requests stay, and go on when it is awake.

    Raises:
        ValueError: a level that its device does not have.
    """
    require_sleep(engine.vllm_config.device_config.device_type, level)
    engine.sleep(level=level, mode="keep")


def wake(engine: Any, tags: Sequence[str] | None = None) -> None:
    """Bring back what sleeps: "weights", "kv_cache", "scheduling"; None is all."""
    engine.wake_up(None if tags is None else list(tags))
