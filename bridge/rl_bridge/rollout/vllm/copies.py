"""Complete copies of the weights in folders that every process of the node sees, and from which an engine can start."""

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from rl_bridge.models.stored_tensors import ONE_FILE, SafetensorsFolder
from rl_bridge.rollout.temporary import TemporaryFolder
from rl_bridge.weights.manifest import Manifest, TensorSpec

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
    found = {}
    for name, shape in stored.shapes.items():
        if stored.dtypes[name] not in _DTYPES:
            raise ValueError(f"{folder}: weight {name!r} is stored as {stored.dtypes[name]}, which torch lacks")
        found[name] = TensorSpec(shape, _DTYPES[stored.dtypes[name]])
    if config.get("tie_word_embeddings") and len(found) > 1:
        found.pop("lm_head.weight", None)
    return found


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
        """Of its weights, once it is complete."""
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

        None: in shared memory if both copies have room there, else where temporary files are. What processes that were
        killed left there is removed.
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
