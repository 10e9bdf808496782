"""Named tensors that are read a part at a time: from safetensors files, or from tensors in hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
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

    def file_of(self, name: str) -> Path | None:
        """The file that the tensor, or the first of those that it is made from, is in. None: it is in no file."""
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

    def file_of(self, name: str) -> None:
        """In none."""


class SafetensorsFolder:
    """The safetensors files of a folder: ``model.safetensors``, or several with an index."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """``files``: of each tensor's name."""
        self._open: dict[Path, Any] = {path: _opened(path) for path in set(files.values())}
        self._files = files
        self.shapes = {name: tuple(self._slice(name).get_shape()) for name in files}
        self.dtypes: dict[str, str] = {name: self._slice(name).get_dtype() for name in files}
        self.bytes_read = 0

    @classmethod
    def of_folder(cls, folder: Path) -> "SafetensorsFolder":
        """Raises ValueError where the folder has no safetensors, or an index names what no file holds."""
        if (folder / INDEX).is_file():
            files = {name: folder / file for name, file in _weight_map(folder / INDEX).items()}
        elif (folder / ONE_FILE).is_file():
            return cls.of_file(folder / ONE_FILE)
        else:
            raise ValueError(f"{folder} has neither {ONE_FILE} nor {INDEX}")
        for path in set(files.values()):
            if not path.is_file():
                raise ValueError(f"{folder / INDEX} names {path.name}, which is not there")
            with _opened(path) as opened:
                lost = sorted({name for name, file in files.items() if file == path} - set(opened.keys()))
            if lost:
                raise ValueError(f"{path} lacks {len(lost)} tensors of its index, the first: {lost[0]!r}")
        return cls(files)

    @classmethod
    def of_file(cls, path: Path) -> "SafetensorsFolder":
        """One file, whatever its name."""
        with _opened(path) as opened:
            return cls(dict.fromkeys(opened.keys(), path))

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read these bytes alone; ``bytes_read`` counts them."""
        part = self._slice(name)[index] if index else self._open[self._files[name]].get_tensor(name)
        self.bytes_read += part.nbytes
        return part

    def file_of(self, name: str) -> Path:
        """One of those that are open."""
        return self._files[name]

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file beside the index: a name that leads elsewhere is refused."""
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} has no weight_map that can be read: {type(error).__name__}: {error}") from error
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ValueError(f"{index}: weight_map must have a file's name for each tensor")
    for file in named.values():
        if not file or file in (".", "..") or Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is no file's name in its own folder")
    return named
