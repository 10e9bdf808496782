"""What a sync to an engine of vLLM fills: a complete copy beside the engine, which goes on with its old weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_bridge.rollout.vllm.adapters import expected_adapter
from rl_bridge.rollout.vllm.copies import Copies, Copy
from rl_bridge.weights.manifest import Manifest, TensorSpec
from rl_bridge.weights.receiver import Arrival, ModuleReceiver

_MERGED = (
    "this engine of vLLM takes adapters merged into the weights: sync_weights(..., adapter=False), or "
    "VLLMOptions(adapter_rank=...)"
)


class VLLMReceiver(ModuleReceiver):
    """Takes a stream into a copy of the engine's checkpoint, with every tensor's checksum proved there.

    The engine is not touched: after a stream that fails it still has all of its old weights. ``version`` is that of
    the newest complete copy; an update carries it into the engine.
    """

    def __init__(self, checkpoint: Path, *, copies: Path | None = None, adapter_rank: int | None = None) -> None:
        """``checkpoint``: the folder that the engine started from. ``copies``: as ``Copies`` has ``root``.

        ``adapter_rank``: the engine takes LoRA adapters up to this rank, and no whole weights. None: no adapters.
        """
        super().__init__(torch.nn.Module(), version=0)
        self.copies = Copies(checkpoint, copies)
        self.version: int | None = 0
        self._arriving: Copy | None = None
        self._complete = False
        self.adapter_rank = adapter_rank
        self._adapter: Manifest | None = None

    def expect_adapter(self, sent: Manifest) -> None:
        """Work out from the checkpoint's header what an adapter of this configuration must have.

        Raises:
            ValueError: the engine takes no adapters, or none of this kind.
        """
        if self.adapter_rank is None:
            raise ValueError(_MERGED)
        self._adapter = expected_adapter(sent, self.copies.expected, self.adapter_rank)

    def expected(self, copy: Copy) -> dict[str, TensorSpec]:
        """What a copy of its kind must hold."""
        if not copy.adapter:
            return self.copies.expected
        assert self._adapter is not None, "expect_adapter came before the stream"
        return self._adapter.tensors

    def outline(self, *, adapter: bool) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint's header, or of the adapter that is expected; without values."""
        if adapter:
            self.adapter_config()
        elif self.adapter_rank is not None:
            raise ValueError("this engine of vLLM takes adapters (adapter_rank): sync_weights(..., adapter=True)")
        expected = self._adapter if adapter and self._adapter is not None else Manifest(self.copies.expected)
        for name, spec in expected.tensors.items():
            yield name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def adapter_config(self) -> dict[str, Any]:
        """That of ``expect_adapter``."""
        if self._adapter is None or self._adapter.adapter is None:
            raise ValueError(_MERGED)
        return self._adapter.adapter

    def begin(self, manifest: Manifest) -> None:
        """Make room."""
        self.version = None
        self._seen, self._complete = set(), False
        self._arriving = self.copies.begin(manifest)
        self._targets = dict(self._arriving.tensors)

    def receive(self, arrivals: Sequence[Arrival]) -> None:
        """Copy each tensor and prove it.

        Raises:
            ValueError: bits that are not the sender's, a name that is unknown or came twice, a value that is no number.
        """
        super().receive(arrivals)
        for arrival in arrivals:
            tensor = self._targets[arrival.name]
            # A sum is no number if one of its terms is none, and costs a quarter of looking at each.
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not torch.isfinite(tensor.sum()):
                wrong = int((~torch.isfinite(tensor)).sum())
                if wrong:
                    raise ValueError(f"weight {arrival.name!r} has {wrong} values that are no numbers, or infinite")

    def finish(self) -> None:
        """All expected names came."""
        super().finish()
        self._complete = True

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """An engine of vLLM has memory of its own."""
        raise TypeError("an engine of vLLM cannot share the memory of its source: sync_weights(..., share=False)")

    def arrived(self, version: int) -> Copy:
        """The complete copy of this version.

        Raises:
            ValueError: there is none: the sync failed, or was of another version.
        """
        if self._arriving is None or not self._complete or self.version != version:
            raise ValueError(f"no complete weights of version {version} are here, but version {self.version}")
        self._arriving.version = version
        return self._arriving
