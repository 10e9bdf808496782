"""The receiving end: what a worker expects, and the proof that it arrived."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from rl_bridge.weights.manifest import (
    Claim,
    Manifest,
    Part,
    checksum,
    inside,
    is_peft,
    local,
    module_tensors,
    overlap,
    part_of,
    volume,
)
from rl_bridge.weights.source import in_charge_of


class Arrival(NamedTuple):
    """A tensor on its way in: ``tensor`` holds ``part`` of the whole, ``claims`` are checksums by its senders."""

    name: str
    tensor: torch.Tensor
    part: Part
    claims: Sequence[Claim]


class WeightReceiver(Protocol):
    """The end that takes weights over: ``begin``, any number of ``receive``, ``finish``; a sync sets ``version`` then.

    ``version`` is None from ``begin`` on: a worker with version None refuses to be used.
    """

    @property
    def version(self) -> int | None: ...

    @version.setter
    def version(self, version: int | None) -> None: ...

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """Names, and tensors of the shape, dtype and placement that are expected here."""
        ...

    def adapter_config(self) -> dict[str, Any]:
        """The configuration of the adapter that is expected; a receiver without adapters raises ValueError."""
        ...

    def expect_adapter(self, sent: Manifest) -> None:
        """Prepare for the adapter that a source announces, so that ``outline`` and ``adapter_config`` describe it."""
        ...

    def begin(self, manifest: Manifest) -> None:
        """From now on the old weights are not to be used."""
        ...

    def receive(self, arrivals: Sequence[Arrival]) -> None:
        """Take over this process's part of each tensor; no arriving tensor may be kept beyond the call."""
        ...

    def finish(self) -> None:
        """All tensors were received; raises if one is missing."""
        ...


@runtime_checkable
class ReceivesWeights(Protocol):
    """A module that says itself how it takes weights over."""

    def weight_receiver(self) -> WeightReceiver:
        """The same object on each call."""
        ...


class ModuleReceiver:
    """Copies into the parameters and persistent buffers of a module: whole, or each process its shards."""

    def __init__(self, module: torch.nn.Module, *, version: int | None = 0) -> None:
        """``version``: of the weights that the module has now; None if it has none that may be used.

        A peft model takes over adapters, into its active one.
        """
        self.latest = 0
        """The highest version so far."""
        self.version = version
        self._module = module
        self._targets: dict[str, torch.Tensor] = {}
        self._seen: set[str] = set()
        self._lent: set[str] = set()

    @property
    def version(self) -> int | None:
        """The version of the weights; None: there are none that may be used."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version = version
        self.latest = max(self.latest, version or 0)

    def usable_version(self) -> int:
        """The version of the weights in use. Raises as ``usable``."""
        return usable(self.version)

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """The module's own tensors, or its adapter's.

        Raises:
            ValueError: merged weights for a peft model, where they would count twice, or an adapter for another one.
        """
        if is_peft(self._module):
            if not adapter:
                raise ValueError("a peft model takes over an adapter: sync_weights(..., adapter=True)")
            from rl_bridge.weights.adapters import adapter_tensors

            return adapter_tensors(self._module)
        if adapter:
            self.adapter_config()
        return module_tensors(self._module)

    def adapter_config(self) -> dict[str, Any]:
        """The part of the active adapter's configuration that its effect depends on."""
        if is_peft(self._module):
            from rl_bridge.weights.adapters import adapter_config

            return adapter_config(self._module)
        raise ValueError(f"adapter=True needs a peft model, got {type(self._module).__name__}")

    def expect_adapter(self, sent: Manifest) -> None:
        """Nothing to prepare: the module's own adapter is expected, whatever comes."""

    def begin(self, manifest: Manifest) -> None:
        """Nothing may use the module until all has come."""
        self.version = None
        adapter, self._seen = manifest.adapter is not None, set()
        self._targets = dict(self.outline(adapter=adapter))
        for name, target in self._targets.items():
            if target.device.type == "meta":
                raise ValueError(f"weight {name!r} has no room here: it is on the meta device")
        for name in self._lent & set(self._targets):
            # Its memory is another module's, which a copy would change.
            self._targets[name].data = self._targets[name].detach().clone()
        self._lent.clear()

    @torch.no_grad()
    def receive(self, arrivals: Sequence[Arrival]) -> None:
        """Copy this process's part of each tensor and prove it.

        Raises:
            ValueError: an unknown name, one that comes twice, bits that are not the sender's.
        """
        for name, tensor, part, claims in arrivals:
            target = self._expected(name)
            local_part, room = part_of(target), local(target)
            vouched = [(claim, overlap(claim.part, local_part)) for claim in claims]
            if sum(volume(shared) for _, shared in vouched) != volume(local_part):
                raise ValueError(
                    f"weight {name!r}: no sender vouches for {local_part}, only for {[c.part for c in claims]}"
                )
            # A claim about more than is held here is proved before the copy, all others where the weights will be used.
            for claim, shared in vouched:
                if shared != claim.part and volume(shared):
                    prove(name, inside(tensor, part, claim.part), claim)
            room.copy_(inside(tensor, part, local_part))
            for claim, shared in vouched:
                if shared == claim.part:
                    prove(name, inside(room, local_part, shared), claim)
            self._seen.add(name)

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Use the sender's memory instead of a copy: whatever changes there changes here."""
        target = self._expected(name)
        if isinstance(target, DTensor):
            raise ValueError(f"weight {name!r} is sharded: only plain tensors can be lent")
        target.data = tensor.detach()
        self._lent.add(name)
        self._seen.add(name)

    def finish(self) -> None:
        """All expected names came."""
        missing = [name for name in self._targets if name not in self._seen]
        if missing:
            count = f"{len(missing)} of {len(self._targets)} parameters"
            raise ValueError(f"no weights came for {count}, the first: {missing[0]!r}")
        self._targets = {}

    def _expected(self, name: str) -> torch.Tensor:
        if name not in self._targets or name in self._seen:
            raise ValueError(f"weight {name!r} came twice" if name in self._seen else f"unknown weight {name!r}")
        return self._targets[name]


def usable(version: int | None) -> int:
    """The version of weights that may be used.

    Raises:
        ValueError: there are none: they were freed, or a sync failed.
    """
    if version is None:
        raise ValueError(
            "the weights here are incomplete: they were freed, or an update failed; sync them first, or load a "
            "checkpoint"
        )
    return version


def prove(name: str, tensor: torch.Tensor, claim: Claim) -> None:
    """Raise unless the tensor's bits are those that its sender had."""
    if checksum(tensor) != claim.checksum:
        raise ValueError(f"weight {name!r} was damaged on the way: its checksum is not the sender's")


_receivers: WeakKeyDictionary[torch.nn.Module, ModuleReceiver] = WeakKeyDictionary()


def receiver_of(module: Any) -> WeightReceiver:
    """The receiver of an engine's module; one that nothing is in charge of gets one at its first sync, at version 0."""
    owner = in_charge_of(module)
    if isinstance(owner, ReceivesWeights):
        return owner.weight_receiver()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{type(module).__name__} takes no weights: it is no torch module and has no weight_receiver()")
    if module not in _receivers:
        _receivers[module] = ModuleReceiver(module)
    return _receivers[module]
