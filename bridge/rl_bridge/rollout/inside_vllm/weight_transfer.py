"""The end of a weight update inside an engine of vLLM: it reads a complete copy from a folder, and counts."""

# pyright: reportMissingImports=false

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_bridge.rollout.inside_vllm.plugin import PROTOCOL
from rl_bridge.rollout.vllm.weight_copies import header_of, mapped
from rl_bridge.weights.manifest import Manifest, compare


@dataclass
class TransferInit(WeightTransferInitInfo):
    """A handshake: the engine and its client are of one version of this package."""

    protocol: int


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """Tensors of a complete copy in a folder, by name; those of one layer beside each other."""

    folder: str
    names: list[str] = field(default_factory=list)


class FolderTransfer(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Weights from a folder that this process sees, each name once, every layer whole.

    vLLM alone takes any weights: a layer that lacks a part keeps old values or gets uninitialised ones. Here the copy
    is compared with the checkpoint that the engine started from before any layer is touched. At the end, a layer that
    did not get all of its elements is an error.
    """

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The header is read now: the folder that an engine started from may be gone later.
        self._own = Manifest(header_of(Path(self.model_config.model)))
        self._broken: str | None = None
        self._forget()

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Raise ValueError unless the client speaks as this engine does."""
        if init_info.protocol != PROTOCOL:
            raise ValueError(f"the client speaks protocol {init_info.protocol}, this engine {PROTOCOL}")

    def start_weight_update(self) -> None:
        """Nothing is touched before the first tensors are known to fit."""
        if self._broken is not None:
            raise RuntimeError(f"an update failed half-way, and this engine must be replaced: {self._broken}")
        self._forget()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load these names.

        Raises:
            ValueError: the copy does not fit the engine's own checkpoint, or a name came before.
        """
        folder, names = Path(update_info.folder), update_info.names
        if self._folder is None:
            tensors = mapped(folder)
            ends = f"{folder} → an engine of {self.model_config.model}"
            compare(Manifest(header_of(folder)), self._own, ends)
            _require_new(names, set(tensors))
            self._folder, self._tensors, self._left = folder, tensors, set(tensors)
            with self._until_whole():
                initialize_layerwise_reload(self.model)
        with self._until_whole():
            if folder != self._folder:
                raise ValueError(f"an update is of one folder: it began with {self._folder}, then came {folder}")
            _require_new(names, self._left)
            self._left -= set(names)
            self.model.load_weights((name, self._tensors[name]) for name in names)

    def finish_weight_update(self) -> None:
        """Every name came, and every layer is whole.

        Raises:
            ValueError: a name is missing, or a layer lacks elements.
        """
        with self._until_whole():
            if self._folder is None or self._left:
                missing = min(self._left, default="all of them")
                raise ValueError(f"the update ended before {len(self._left)} weights came, the first: {missing!r}")
            if lacking := _lacking(self.model):
                raise ValueError(f"vLLM left layers incomplete: {'; '.join(lacking[:4])}")
            finalize_layerwise_reload(self.model, self.model_config)
        self._forget()

    def shutdown(self) -> None:
        """Let go of the copy."""
        self._forget()

    def _forget(self) -> None:
        self._folder: Path | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._left: set[str] = set()

    @contextmanager
    def _until_whole(self) -> Iterator[None]:
        """Layers are in pieces inside this context: after an error there the engine is unusable, and remembers it."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise


def _require_new(names: Sequence[str], left: set[str]) -> None:
    """Raise ValueError unless these names are among those that have not come yet, each once."""
    left = set(left)
    for name in names:
        if name not in left:
            raise ValueError(f"weight {name!r} came twice in this update, or is unknown")
        left.remove(name)


def _lacking(model: torch.nn.Module) -> Sequence[str]:
    """Layers that did not get every element of their own parameters.

    Neither the padding of a vocabulary counts, nor a layer that got nothing because its parameter is another's: a head
    that is tied to the embeddings.
    """
    waiting: list[tuple[str, dict[str, torch.nn.Parameter]]] = []
    filled: set[int] = set()
    for name, layer in model.named_modules():
        info, own = get_layerwise_info(layer), dict(layer.named_parameters(recurse=False))
        if not own:
            continue
        if not info.can_load():
            filled |= set(map(id, own.values()))
            continue
        before = dict(info.kernel_tensors[0]) if info.kernel_tensors is not None else own
        total = int(info.load_numel_total or 0) - _padding(layer, own)
        if info.load_numel < total:
            waiting.append((f"{name} ({type(layer).__name__}) got {info.load_numel} of {total} elements", before))
        else:
            filled |= set(map(id, before.values()))
    return [got for got, before in waiting if not all(id(parameter) in filled for parameter in before.values())]


def _padding(layer: torch.nn.Module, own: dict[str, torch.nn.Parameter]) -> int:
    """Elements of a vocabulary's rows that no checkpoint has."""
    shard: Any = getattr(layer, "shard_indices", None)
    if shard is None:
        return 0
    rows = shard.num_org_vocab_padding + shard.num_added_vocab_padding
    return sum(rows * parameter[0].numel() for parameter in own.values())
