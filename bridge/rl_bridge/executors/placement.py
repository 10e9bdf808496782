"""Which slots an engine's workers get: pure, and the same for every executor."""

from collections.abc import Mapping, Sequence

from rl_bridge.executors.base import Slot


def place(
    slots: Sequence[Slot],
    size: int,
    *,
    occupied: Mapping[int, Sequence[str]],
    colocate_with: Sequence[Sequence[int]] = (),
    not_colocate_with: Sequence[Sequence[int]] = (),
    nodes: Sequence[str] | None = None,
    resources: Mapping[str, float] | None = None,
) -> list[int]:
    """``size`` slots, in order of rank.

    ``occupied``: names of the engines that a slot holds already. ``colocate_with``: slots of engines to share with,
    from the first on. Without that wish the emptiest slots come first. ``not_colocate_with``: slots of engines to be
    apart from. ``nodes``: addresses of machines allowed. ``resources``: what a slot must have at least.

    Raises:
        ValueError: the wish cannot be met; with the slots that there are, and who holds them.
    """
    refused = {slot for engine in not_colocate_with for slot in engine}
    allowed = [
        slot
        for slot in slots
        if slot.index not in refused
        and (nodes is None or slot.node in nodes)
        and all(slot.resources.get(name, 0) >= amount for name, amount in (resources or {}).items())
    ]
    if colocate_with:
        shared = list(dict.fromkeys(slot for engine in colocate_with for slot in engine))
        found = [slot for slot in shared if slot in {candidate.index for candidate in allowed}]
    else:
        found = [slot.index for slot in sorted(allowed, key=lambda s: (len(occupied.get(s.index, ())), s.index))]
    if len(found) < size:
        wishes = [
            f"colocate_with slots {sorted({s for engine in colocate_with for s in engine})}" if colocate_with else "",
            f"not_colocate_with slots {sorted(refused)}" if refused else "",
            f"nodes {list(nodes)}" if nodes is not None else "",
            f"resources {dict(resources)}" if resources else "",
        ]
        asked = "; ".join(wish for wish in wishes if wish) or "no further wish"
        raise ValueError(f"{size} slots are needed ({asked}) and {len(found)} fit; {describe(slots, occupied)}")
    chosen = found[:size]
    return chosen if colocate_with else sorted(chosen)


def describe(slots: Sequence[Slot], occupied: Mapping[int, Sequence[str]]) -> str:
    """The slots there are, and who holds them."""
    return "there are " + ", ".join(
        f"slot {slot.index} ({slot.device} on {slot.node}: {', '.join(occupied.get(slot.index, ())) or 'free'})"
        for slot in slots
    )
