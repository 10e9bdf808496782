"""Which slots an engine's workers get, and what slots ask a cluster for: pure, and the same for every executor."""

from collections.abc import Mapping, Sequence

from rl_bridge.executors.executor import Slot

# The choice of slots.

Engines = Sequence[Sequence[int]]
"""Slots of each of several engines."""


def place(
    slots: Sequence[Slot],
    size: int,
    *,
    occupied: Mapping[int, Sequence[str]],
    colocate_with: Engines = (),
    not_colocate_with: Engines = (),
    nodes: Sequence[str] | None = None,
    resources: Mapping[str, float] | None = None,
) -> list[int]:
    """``size`` slots, in order of rank.

    ``occupied``: names of the engines that a slot holds already. ``colocate_with``: slots of engines to share with; of
    this engine and each of those, the smaller has all its slots in common with the other, and ranks meet as far as
    possible. ``not_colocate_with``: slots of engines to have no slot in common with. ``nodes``: addresses of the
    machines allowed. ``resources``: what a slot must have at least. Beyond the wishes the emptiest slots are taken, on
    as few machines as possible.

    Raises:
        ValueError: the wishes cannot be met; with the slots that there are, and who holds them.

    >>> four = [Slot(i) for i in range(4)]
    >>> place(four, 2, occupied={0: ["policy"], 1: ["policy"]})
    [2, 3]
    >>> place(four, 2, occupied={}, colocate_with=[[3, 1, 0]])
    [3, 1]
    >>> place(four, 3, occupied={}, not_colocate_with=[[0, 1]])
    Traceback (most recent call last):
        ...
    ValueError: 3 slots are needed (not_colocate_with slots [0, 1]) and 2 fit; there are slot 0 (cpu on ...
    """
    if size < 1:
        raise ValueError(f"an engine has at least one slot, got {size}")
    apart = {slot for engine in not_colocate_with for slot in engine}
    able = {
        slot.index
        for slot in slots
        if (nodes is None or slot.node in nodes)
        and all(slot.resources.get(name, 0) >= amount for name, amount in (resources or {}).items())
    }
    # Within every larger engine, and around every smaller one.
    fitting = able - apart
    for engine in colocate_with:
        if len(engine) > size:
            fitting &= set(engine)
    needed = list(dict.fromkeys(slot for engine in colocate_with if len(engine) <= size for slot in engine))
    if len(fitting) < size or len(needed) > size or not set(needed) <= fitting:
        count = len(fitting) if set(needed) <= fitting else len(fitting & set(needed))
        request = _request(colocate_with, apart, nodes, resources)
        raise ValueError(f"{size} slots are needed ({request}) and {count} fit; {describe(slots, occupied)}")
    shared = [slot for engine in colocate_with if len(engine) > size for slot in engine if slot in fitting]
    picks = needed + [slot for slot in dict.fromkeys(shared) if slot not in needed]
    if len(picks) < size:
        rest = [slot for slot in slots if slot.index in fitting - set(picks)]
        picks += _emptiest(rest, size - len(picks), occupied)
    return picks[:size]


def _emptiest(slots: Sequence[Slot], size: int, occupied: Mapping[int, Sequence[str]]) -> list[int]:
    """The slots with the fewest engines; of those one machine's if it has enough, else the emptiest machines' first."""

    def engines(slot: Slot) -> int:
        return len(occupied.get(slot.index, ()))

    by_node: dict[str, list[Slot]] = {}
    for slot in sorted(slots, key=lambda slot: (engines(slot), slot.index)):
        by_node.setdefault(slot.node, []).append(slot)
    least = sum(sorted(engines(slot) for slot in slots)[:size])
    whole = [
        node_slots
        for node_slots in by_node.values()
        if sum(map(engines, node_slots[:size])) == least and len(node_slots) >= size
    ]
    if whole:
        # The machine that has the least to spare, so that a larger engine still finds one.
        picks = min(whole, key=len)[:size]
    else:
        free = {node: sum(engines(slot) == 0 for slot in node_slots) for node, node_slots in by_node.items()}
        picks = sorted(slots, key=lambda slot: (engines(slot), -free[slot.node], slot.node, slot.index))[:size]
    return sorted(slot.index for slot in picks)


def _request(
    colocate_with: Engines, apart: set[int], nodes: Sequence[str] | None, resources: Mapping[str, float] | None
) -> str:
    wishes = [
        f"colocate_with slots {' and '.join(str(list(engine)) for engine in colocate_with)}" if colocate_with else "",
        f"not_colocate_with slots {sorted(apart)}" if apart else "",
        f"nodes {list(nodes)}" if nodes is not None else "",
        f"resources {dict(resources)}" if resources else "",
    ]
    return "; ".join(wish for wish in wishes if wish) or "no further wish"


def describe(slots: Sequence[Slot], occupied: Mapping[int, Sequence[str]]) -> str:
    """The slots there are, and who holds them."""
    return "there are " + ", ".join(
        f"slot {slot.index} ({slot.device} on {slot.node}: {', '.join(occupied.get(slot.index, ())) or 'free'})"
        for slot in slots
    )


# The resources that slots ask for, and whether a cluster has them.

Resources = Mapping[str, float]


def bundles(workers: int | None, slots: Sequence[Resources] | None, cluster: Resources) -> tuple[dict[str, float], ...]:
    """Resources of each slot.

    ``slots`` says so itself. Otherwise every slot has one GPU and one CPU, ``workers`` of them or one for each GPU of
    the cluster; in a cluster without GPUs ``workers`` (or one) slots have a CPU.

    >>> bundles(None, None, {"CPU": 16, "GPU": 2})
    ({'GPU': 1.0, 'CPU': 1.0}, {'GPU': 1.0, 'CPU': 1.0})
    >>> bundles(3, None, {"CPU": 16})
    ({'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 1.0})

    Raises:
        ValueError: no slot, or a number of workers that is not the number of slots.
    """
    if slots is not None:
        if not slots or not all(slots) or workers not in (None, len(slots)):
            raise ValueError(f"slots are resources of at least one worker each, got {slots!r} and workers={workers}")
        return tuple(dict(slot) for slot in slots)
    gpus = int(cluster.get("GPU", 0))
    count = workers if workers is not None else max(gpus, 1)
    if count < 1:
        raise ValueError(f"workers={workers}: there is at least one")
    return tuple({"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0} for _ in range(count))


def lacking(wanted: Sequence[Resources], nodes: Mapping[str, Resources]) -> str:
    """The resources that these nodes will never have room for, in words; empty if there are none.

    ``nodes``: all resources, used or not. Either no node has what a slot needs, or all together have not enough.
    """
    present = "; ".join(f"node {node}: {_described(resources)}" for node, resources in nodes.items())
    for number, bundle in enumerate(wanted):
        if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes.values()):
            return f"slot {number} needs {_described(bundle)}, and no node has that; there is {present}"
    for name in {name for bundle in wanted for name in bundle}:
        needed = sum(bundle.get(name, 0) for bundle in wanted)
        if needed > sum(node.get(name, 0) for node in nodes.values()):
            return f"{len(wanted)} slots need {name}: {needed:g} in all; there is {present}"
    return ""


def _described(resources: Resources) -> str:
    """Resources without those that Ray makes up for itself."""
    hidden = ("node:", "memory", "object_store_memory")
    return (
        ", ".join(f"{name}: {amount:g}" for name, amount in resources.items() if not name.startswith(hidden)) or "none"
    )
