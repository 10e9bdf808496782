"""Named tensors that are read a part at a time, and filled into a model that may be sharded."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_bridge.parallel.fsdp import part_of
from rl_bridge.weights.manifest import local

# Named tensors that are read a part at a time: from safetensors files, or from tensors in hand.

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
        """Raises ValueError where the folder has no safetensors, or weights twice, or an index that names no file."""
        if not (folder / INDEX).is_file():
            if not (folder / ONE_FILE).is_file():
                raise ValueError(f"{folder} has neither {ONE_FILE} nor {INDEX}")
            return cls.of_file(folder / ONE_FILE)
        files = {name: folder / file for name, file in _weight_map(folder / INDEX).items()}
        others = sorted({path.name for path in files.values()} - {ONE_FILE})
        if others and (folder / ONE_FILE).is_file():
            raise ValueError(
                f"{folder} has weights twice: {ONE_FILE}, which transformers reads, and {INDEX} with {others[0]}"
                f"{'' if len(others) == 1 else f' and {len(others) - 1} more'}. Take those out that are not the model's"
            )
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


# Stored tensors into a model that may be sharded: each worker reads its part of each parameter.

# Rotary frequencies and numbers of positions were once stored with the weights.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")


@torch.no_grad()
def fill_parameters(model: nn.Module, stored: StoredTensors) -> None:
    """Fill every parameter and persistent buffer from the tensor of its name; tied names may stand for each other.

    Raises:
        ValueError: a parameter that nothing is stored for, a stored tensor that the model does not have, another shape,
            or two tied names stored with different values: nothing has then been read but tied tensors. Or weights of
            a file that are NaN or infinite, or stored numbers that a model's type of whole numbers does not hold.
    """
    names = require_fit(model, stored)
    for target, aliases in names.items():
        present = [name for name in aliases if name in stored.shapes]
        index = part_of(target)
        values = stored.read(present[0], index)
        for other in present[1:]:
            if not torch.equal(stored.read(other, index), values):
                raise ValueError(f"{present[0]!r} and {other!r} are one tensor in the model, but differ where stored")
        own = local(target)
        if not own.is_floating_point() and not torch.equal(values.to(own.dtype).to(values.dtype), values):
            raise ValueError(
                f"{present[0]!r} is {own.dtype} in the model, and {values.dtype} with other numbers where stored"
            )
        own.copy_(values)
        file = stored.file_of(present[0])
        if file is not None and isinstance(target, nn.Parameter):  # a buffer may hold −inf, as masks do
            require_finite(own, present[0], file)


def require_finite(values: Tensor, name: str, file: Path) -> None:
    """Refuse weights of a file with NaN or infinity, by their least and largest number, which are NaN with any.

    Raises:
        ValueError: with the tensor, the file and how many there are.
    """
    if not values.numel() or not values.is_floating_point():
        return
    least, largest = torch.aminmax(values.detach())
    if torch.isfinite(least) and torch.isfinite(largest):
        return
    bad = int((~torch.isfinite(values)).sum())
    raise ValueError(
        f"{file}: {name!r} has {bad} of {values.numel()} numbers that are NaN or infinite in {values.dtype}: a model "
        "with such weights computes nothing; take a copy that is whole"
    )


@torch.no_grad()
def fill_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers that are on the meta device, as rotary frequencies, the way transformers itself does.

    Everything else, which may be sharded, keeps its values; so does the global random state.

    Raises:
        ValueError: such a buffer that transformers does not compute.
    """
    computed = computed_buffers(model)
    if not computed:
        return
    results = []
    with _set_aside(model, {(id(module), name) for _, module, name, _ in computed}), torch.random.fork_rng(devices=[]):
        for background in (0, 1):  # what nobody computes shows by its background
            for _, module, name, buffer in computed:
                module._buffers[name] = torch.full_like(buffer, background, device=device)
            _initialize(model, model)
            results.append([getattr(module, name) for _, module, name, _ in computed])
    for (path, *_), first, second in zip(computed, *results, strict=True):
        if first.is_meta or not torch.equal(first, second):
            raise ValueError(f"{path} of {type(model).__name__} is not stored, and nothing computes it")


def computed_buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Buffers without values that no file of weights holds: (full name, module, name, buffer) of each."""
    return [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    """Have each module's model initialise the module, after its children, whose buffers it may compute.

    As ``PreTrainedModel.initialize_weights``, which takes a class that FSDP has renamed for code from elsewhere, and
    then skips what has no parameters of its own.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _initialize(child, owner)
    owner._init_weights(module)


@contextmanager
def _set_aside(model: nn.Module, but: set[tuple[int, str]]) -> Iterator[None]:
    """Stand-ins without values, which transformers takes for initialised, in place of all tensors of a model.

    ``but``: (id of a module, name) of buffers that stay.
    """
    tensors_aside = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and (id(module), name) not in but:
                    tensors_aside.append((tensors, name, tensor))
    try:
        for tensors, name, tensor in tensors_aside:
            empty: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            tensors[name] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
            tensors[name]._is_hf_initialized = True
        yield
    finally:
        for tensors, name, tensor in tensors_aside:
            tensors[name] = tensor


def _persistent(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def require_fit(model: nn.Module, stored: StoredTensors) -> dict[Tensor, list[str]]:
    """The names of each parameter and persistent buffer; raises ValueError where ``stored`` has not just these."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    persistent = _persistent(model)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in persistent:
            names.setdefault(buffer, []).append(name)
    missing = [aliases[0] for aliases in names.values() if not any(name in stored.shapes for name in aliases)]
    expected = {name for aliases in names.values() for name in aliases}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unknown = [
        name
        for name in sorted(set(stored.shapes) - expected)
        if not _COMPUTED.search(name) and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: "
            f"{len(missing)} are not stored (the first: {missing[:3]}), {len(unknown)} are not of the model "
            f"(the first: {unknown[:3]})"
        )
    for target, aliases in names.items():
        for name in aliases:
            if name in stored.shapes and stored.shapes[name] != tuple(target.shape):
                raise ValueError(
                    f"{name!r}: the model's shape is {tuple(target.shape)}, stored is {stored.shapes[name]}"
                    + _sizes(model)
                )
    return names


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def _sizes(model: nn.Module) -> str:
    """Sizes of the configuration, as an error's end: one of them is not that of the stored weights."""
    config = getattr(model, "config", None)
    sizes = [f"{name}={size}" for name in _SIZES if isinstance(size := getattr(config, name, None), int)]
    return f"; the model's config has {', '.join(sizes)}" if sizes else ""
