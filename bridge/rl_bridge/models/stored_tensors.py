"""Named tensors that are read a part at a time: from safetensors files, or from tensors in hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensors(Protocol):
    """Where a model's weights come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor there is."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """That part of the tensor, on the CPU."""
        ...


class TensorsInHand:
    """A state dictionary whose tensors are whole."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """The tensors are not copied."""
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A view of that part."""
        return self.tensors[name].detach()[index]


class SafetensorsFolder:
    """The safetensors files of a folder: ``model.safetensors``, or several with an index."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """``files``: of each tensor's name."""
        self._open: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in set(files.values())}
        self._files = files
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in files}
        self.dtypes: dict[str, str] = {name: self._slice(name).get_dtype() for name in files}
        self.bytes_read = 0

    @classmethod
    def of_folder(cls, folder: Path) -> "SafetensorsFolder":
        """Raises ValueError where the folder has no safetensors, or an index names what no file holds."""
        if (folder / INDEX).is_file():
            named = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {name: folder / file for name, file in named.items()}
        elif (folder / ONE_FILE).is_file():
            with safe_open(folder / ONE_FILE, framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), folder / ONE_FILE)
        else:
            raise ValueError(f"{folder} has neither {ONE_FILE} nor {INDEX}")
        for path in set(files.values()):
            if not path.is_file():
                raise ValueError(f"{folder / INDEX} names {path.name}, which is not there")
            with safe_open(path, framework="pt") as opened:
                lost = sorted({name for name, file in files.items() if file == path} - set(opened.keys()))
            if lost:
                raise ValueError(f"{path} lacks {len(lost)} tensors of its index, the first: {lost[0]!r}")
        return cls(files)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read these bytes alone; ``bytes_read`` counts them."""
        part = self._slice(name)[index] if index else self._open[self._files[name]].get_tensor(name)
        self.bytes_read += part.nbytes
        return part

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)
