"""What slots ask a cluster for, and whether it has that."""

from collections.abc import Mapping, Sequence

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


def check_feasible(wanted: Sequence[Resources], nodes: Mapping[str, Resources]) -> None:
    """Refuse what a cluster that does not grow will never have. ``nodes``: all resources, used or not.

    Raises:
        ValueError: no node has what a slot needs, or all nodes together have not enough.
    """
    if trouble := lacking(wanted, nodes):
        raise ValueError(trouble)


def lacking(wanted: Sequence[Resources], nodes: Mapping[str, Resources]) -> str:
    """What the nodes that there are will never have room for; empty if there is nothing."""
    there = "; ".join(f"node {node}: {_described(resources)}" for node, resources in nodes.items())
    for number, bundle in enumerate(wanted):
        if not any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes.values()):
            return f"slot {number} needs {_described(bundle)}, and no node has that; there is {there}"
    for name in {name for bundle in wanted for name in bundle}:
        needed = sum(bundle.get(name, 0) for bundle in wanted)
        if needed > sum(node.get(name, 0) for node in nodes.values()):
            return f"{len(wanted)} slots need {name}: {needed:g} in all; there is {there}"
    return ""


def _described(resources: Resources) -> str:
    """Resources without those that Ray makes up for itself."""
    own = ("node:", "memory", "object_store_memory")
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items() if not name.startswith(own)) or "none"
