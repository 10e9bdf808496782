"""Complete copies of the weights in folders that every process of the node sees.

An engine can start from a copy; a sync fills one beside the engine, which goes on with its old weights.
"""

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_bridge.common.files import TemporaryFolder
from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import ModelSource, PretrainedSource
from rl_bridge.models.stored_tensors import ONE_FILE, SafetensorsFolder
from rl_bridge.rollout.vllm.lora_adapters import expected_adapter
from rl_bridge.weights.manifest import Manifest, TensorSpec
from rl_bridge.weights.receiver import Arrival, ModuleReceiver
from rl_bridge.weights.source import LAYOUTS, Cast, Precision, Through

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
ADAPTER_FILE = "adapter_model.safetensors"
_SHARED_MEMORY = Path("/dev/shm")


def header_of(folder: Path) -> dict[str, TensorSpec]:
    """Name, shape and dtype of every stored tensor; a head that is tied to the embeddings counts once.

    Raises:
        ValueError: there are no safetensors, or they are of a dtype that torch lacks.
    """
    stored = SafetensorsFolder.of_folder(folder)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    specs = {}
    for name, shape in stored.shapes.items():
        if stored.dtypes[name] not in _DTYPES:
            raise ValueError(f"{folder}: weight {name!r} is stored as {stored.dtypes[name]}, which torch lacks")
        specs[name] = TensorSpec(shape, _DTYPES[stored.dtypes[name]])
    if config.get("tie_word_embeddings") and len(specs) > 1:
        specs.pop("lm_head.weight", None)
    return specs


def mapped(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a copy, on the memory of its file: nothing is read before it is used.

    Raises:
        ValueError: the file is shorter or longer than its header says.
    """
    path = folder / ONE_FILE
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise ValueError(f"{path} is truncated: a header of {length} bytes in {size}")
        header = json.loads(file.read(length))
        rows = {name: row for name, row in header.items() if name != "__metadata__"}
        ends = 8 + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
        if ends != size:
            raise ValueError(f"{path} is truncated: it has {size} bytes and its header promises {ends}")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    tensors = {}
    for name, row in rows.items():
        spec = TensorSpec(tuple(row["shape"]), _DTYPES[row["dtype"]])
        tensors[name] = _view(memory, 8 + length + row["data_offsets"][0], spec)
    return tensors


class Copy:
    """One folder: the checkpoint's configuration, and ``model.safetensors`` that a stream fills; or an adapter's."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorSpec], *, adapter: bool = False) -> None:
        """Make the file in its full size, without values.

        Raises:
            ValueError: there is no room.
        """
        self.folder, self.specs, self.adapter = folder, dict(tensors), adapter
        self.version: int | None = None
        """The version of its weights, once it is complete."""
        header, starts, size = _layout(tensors)
        with (folder / (ADAPTER_FILE if adapter else ONE_FILE)).open("w+b") as file:
            try:
                # Writing to a mapped file without room behind it would kill the process.
                os.posix_fallocate(file.fileno(), 0, len(header) + size)
            except OSError as error:
                raise ValueError(
                    f"no room for a copy of the weights, {size:,} bytes, in {folder.parent}: {error}; "
                    "name another folder for copies"
                ) from error
            file.write(header)
            file.flush()
            memory = mmap.mmap(file.fileno(), len(header) + size)
        self.tensors = {name: _view(memory, len(header) + starts[name], spec) for name, spec in tensors.items()}


class Copies:
    """Two copies at most: the newest proved one, and the one that arrives or waits for its proof."""

    def __init__(self, checkpoint: Path, root: Path | None = None) -> None:
        """``checkpoint``: the folder that the engine started from. ``root``: where copies lie.

        None: in shared memory if both copies have room there, else where temporary files are. Copies that killed
        processes left there are removed.
        """
        self.checkpoint = checkpoint
        self.expected = header_of(checkpoint)
        self.proved: Copy | None = None
        parent = _parent(2 * sum(spec.nbytes for spec in self.expected.values())) if root is None else root
        parent.mkdir(parents=True, exist_ok=True)
        # A server may be another user's.
        folder = TemporaryFolder("weights", parent, private=False)
        self._root, self.close = folder.path, folder.close
        self._folder = folder
        self._made = 0

    def begin(self, manifest: Manifest) -> Copy:
        """An empty copy; one that was begun and never proved is removed."""
        self._keep_only(self.proved)
        folder = self._root / f"copy-{self._made}"
        self._made += 1
        folder.mkdir()
        if manifest.adapter is not None:
            (folder / "adapter_config.json").write_text(json.dumps(manifest.adapter))
            return Copy(folder, manifest.tensors, adapter=True)
        for file in self.checkpoint.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)
        return Copy(folder, manifest.tensors)

    def prove(self, copy: Copy) -> None:
        """This copy is the one to go back to; the one before is removed."""
        self.proved = copy
        self._keep_only(copy)

    def _keep_only(self, copy: Copy | None) -> None:
        for folder in self._root.glob("copy-*"):
            if copy is None or folder != copy.folder:
                shutil.rmtree(folder)


def _layout(tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """Header, where each tensor starts behind it, and the bytes of all. Large elements come first: all are aligned."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name] = end
        end += spec.nbytes
        rows[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(rows).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, starts, end


def _view(memory: mmap.mmap, start: int, spec: TensorSpec) -> torch.Tensor:
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, count=spec.shape_numel, offset=start).view(spec.shape)


def _parent(nbytes: int) -> Path:
    if _SHARED_MEMORY.is_dir():
        room = os.statvfs(_SHARED_MEMORY)
        if room.f_bavail * room.f_frsize > nbytes:
            return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


_NOT_UPDATED = {
    "gpt_oss": "sinks and experts are copied past the loaders that its reload waits for, and stay as they were",
    "cohere2": "a token of its sliding layers sees one token more there than in transformers",
    "lfm2": "it reads conv_dim of the configuration, which transformers 5.19 does not write",
}
"""Families that vLLM 0.32 draws, and whose weights it does not take twice or does not compute with as we do."""
_EXPERTS = "its loader does not take a mixture's experts in place, and a fresh engine for each update is none"


def require_updates(model: PreTrainedModel) -> None:
    """Refuse a model whose updates vLLM loses, or that is another model there: before an engine is opened for it.

    Raises:
        NotImplementedError: with the reason and the way on.
    """
    reason = _NOT_UPDATED.get(model.config.get_text_config().model_type)
    if reason is None and any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters()):
        reason = _EXPERTS
    if reason is not None:
        raise NotImplementedError(
            f"vLLM draws no rollouts of {type(model).__name__}: {reason}; such a model needs backend in_process"
        )


def checkpoint(source: ModelSource, precision: Precision, dtype: torch.dtype, into: Path) -> tuple[Path, Through]:
    """A folder with the source's weights in this precision, others as ``dtype``, and the map of its updates.

    The folder is the source's own, or ``into``. An update has the names, shapes and dtypes of the checkpoint that the
    engine started from. So a model that is stored otherwise, such as a mixture with one tensor in its files for each
    expert, is written into ``into``, which needs room.
    """
    if isinstance(source, PretrainedSource) and precision not in LAYOUTS:
        folder = source.folder()
        stored = SafetensorsFolder.of_folder(folder)
        with torch.device("meta"):
            names = source.empty().state_dict().keys()
        if set(stored.dtypes.values()) == {_NAMES[dtype]} and stored.shapes.keys() <= names:
            return folder, Cast(dtype)
    return into, write_checkpoint(source, into, precision, dtype=dtype)


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
        """The tensors that a copy of its kind must hold."""
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
        """The configuration that ``expect_adapter`` was told of."""
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
