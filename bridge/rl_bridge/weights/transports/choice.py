"""Which transport for which slots."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

Transport = Literal["same_slot", "shared_memory", "broadcast", "file"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


def choose_transport(
    source: Collection[int], target: Collection[int], nodes: Mapping[int, str], *, on_gpus: bool = False
) -> Transport:
    """The cheapest transport from the slots of one engine to those of another; ``nodes``: slot -> its machine.

    Beside each other in one process: no transport at all. On one machine without GPUs: memory that all map. Otherwise
    the process group, which between GPUs of one machine is faster than going through its memory.

    >>> choose_transport([0, 1], [0], {0: "a", 1: "a"})
    'same_slot'
    >>> choose_transport([0], [1], {0: "a", 1: "a"})
    'shared_memory'
    >>> choose_transport([0], [1], {0: "a", 1: "b"})
    'broadcast'
    """
    if set(target) <= set(source):
        return "same_slot"
    if len({nodes[slot] for slot in {*source, *target}}) == 1 and not on_gpus:
        return "shared_memory"
    return "broadcast"


def check_transport(
    name: str, source: Collection[int], target: Collection[int], nodes: Mapping[int, str], folder: object
) -> None:
    """Raise unless the transport can serve these slots: what was asked for is never replaced silently.

    Raises:
        ValueError: an unknown name, or what the transport lacks.
    """
    union = {*source, *target}
    if name not in TRANSPORTS:
        raise ValueError(f"transport {name!r} is unknown; there is: {', '.join(TRANSPORTS)}")
    if name == "same_slot" and not set(target) <= set(source):
        alone = sorted(set(target) - set(source))
        raise ValueError(f"transport 'same_slot': no worker of the source is in the target's slots {alone}")
    if name == "shared_memory" and len(machines := {nodes[slot] for slot in union}) > 1:
        raise ValueError(f"transport 'shared_memory': the slots are on {len(machines)} nodes: {sorted(machines)}")
    if name == "broadcast" and len(union) == 1:
        raise ValueError(f"transport 'broadcast': both ends are in slot {min(union)} alone; use 'same_slot'")
    if (name == "file") != (folder is not None):
        raise ValueError(f"transport {name!r} with folder={folder!r}: 'file' needs one, the others none")
