"""Stored tensors as transformers gives them to a model: renamed, experts one by one made into one tensor, and so on.

This file alone needs names of transformers that are not of its public interface.
"""

import copy
import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rl_bridge.models.model_folder import FLOATS
from rl_bridge.models.stored_tensors import SafetensorsFolder

_NEEDED = {
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": (
        "Concatenate",
        "MergeModulelist",
        "WeightConverter",
        "WeightRenaming",
        "dot_natural_key",
        "rename_source_key",
        "revert_weight_conversion",
    ),
}


def _internals() -> Any:
    """transformers' own conversion. Raises ImportError that names what this version of transformers lacks."""
    members = {}
    for path, names in _NEEDED.items():
        try:
            module = importlib.import_module(path)
            members |= {name: getattr(module, name) for name in names}
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"transformers {transformers.__version__} converts stored weights in a way that is not known here "
                f"({error}): install a version that has {', '.join(names)} in {path}, such as 5.19"
            ) from error
    return SimpleNamespace(**members)


@dataclass
class _Conversion:
    """Tensors that are stored, and the operations that make one or several tensors of the model from them."""

    first: str
    """The first of the names in the model."""
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(stored name, the converter's pattern that matches the name), in transformers' order."""

    def __call__(self, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The model's tensors from some or all of the stored ones."""
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            if name in tensors:
                converter.add_tensor(self.first, name, pattern, tensors[name])
        results = converter.convert(self.first, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in results.items()}

    def by_pattern(self) -> list[list[str]]:
        """The stored names of each pattern."""
        groups: dict[str, list[str]] = {}
        for name, pattern in self.sources:
            groups.setdefault(pattern, []).append(name)
        return list(groups.values())


class ConvertedTensors:
    """The tensors of a folder under a model's names and in its shapes. What needs no conversion is read by the part."""

    def __init__(self, stored: SafetensorsFolder, model: PreTrainedModel) -> None:
        """``model``: without values, as ``AutoModel…`` makes it: neither sharded nor with adapters.

        Raises:
            ValueError: stored tensors that cannot be converted, or two for one tensor of the model, by name.
        """
        self._internals = _internals()
        self._stored, self._model = stored, model
        self._plain: dict[str, str] = {}
        self._conversions: dict[str, _Conversion] = {}
        self._neighbours: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for conversion in self._planned():
            self._outline(conversion)

    @property
    def converted(self) -> frozenset[str]:
        """The names of the tensors that are computed from other ones."""
        return frozenset(self._conversions)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """That part of the tensor, on the CPU. What is converted is read whole, or the part's own experts alone."""
        if name in self._plain:
            return self._stored.read(self._plain[name], index)
        if name in self._neighbours:
            return self._neighbours.pop(name)[index]
        conversion = self._conversions[name]
        if index and self._along_first(conversion):
            first, *others = index
            start, stop, _ = first.indices(self.shapes[name][0])
            # A part without rows reads one all the same: nothing at all cannot be stacked.
            rows = slice(start, stop) if start < stop else slice(1)
            needed = [stored for names in conversion.by_pattern() for stored in names[rows]]
            return self._converted(conversion, needed)[name][(slice(stop - start), *others)]
        tensors = self._converted(conversion, [stored for stored, _ in conversion.sources])
        tensor = tensors.pop(name)
        # A neighbour is read next, from the same sources.
        self._neighbours |= tensors
        return tensor[index]

    def file_of(self, name: str) -> Path:
        """The file of a stored tensor; of one that is made from several, the first one's."""
        stored = self._plain[name] if name in self._plain else self._conversions[name].sources[0][0]
        return self._stored.file_of(stored)

    def _converted(self, conversion: _Conversion, names: Iterable[str]) -> dict[str, Tensor]:
        return conversion({name: self._stored.read(name, ()) for name in names}, self._model)

    def _planned(self) -> list[_Conversion]:
        """Give each stored name its name in the model, as transformers' loader does; returns what is to be computed."""
        internals = self._internals
        mapping = internals.get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, internals.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, internals.WeightConverter)]
        of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix, names = self._model.base_model_prefix, self._model.state_dict()
        conversions: dict[str, _Conversion] = {}
        for stored in sorted(self._stored.shapes, key=internals.dot_natural_key):
            name, pattern = internals.rename_source_key(stored, renamings, converters, prefix, names)
            if name not in names and stored in names:
                name, pattern = internals.rename_source_key(stored, [], [], prefix, names)
            if pattern is not None and name in names:
                conversion = conversions.setdefault(name, _Conversion(name, of_pattern[pattern]))
                conversion.sources.append((stored, pattern))
            else:
                self._take(name, stored)
        return list(conversions.values())

    def _take(self, name: str, stored: str) -> None:
        if name in self._plain and name in self._model.state_dict():
            raise ValueError(
                f"{self._plain[name]!r} and {stored!r} are both stored, and both are {name!r} of "
                f"{type(self._model).__name__}"
            )
        self._plain[name] = stored
        self.shapes[name], self.dtypes[name] = self._stored.shapes[stored], self._stored.dtypes[stored]

    def _outline(self, conversion: _Conversion) -> None:
        """Shapes and types of what a conversion makes, from the headers alone."""
        kind = type(self._model).__name__
        for names in conversion.by_pattern():
            _require_all(names, conversion.first, kind)
        sources = [name for name, _ in conversion.sources]
        empty = {name: torch.empty(self._stored.shapes[name], device="meta") for name in sources}
        try:
            outlines = conversion(empty, self._model)
        except (ValueError, RuntimeError, KeyError, IndexError) as error:
            raise ValueError(
                f"{len(sources)} stored tensors (the first: {sources[:3]}) cannot be made into {conversion.first!r} of "
                f"{kind}: {error}"
            ) from error
        dtypes = [self._stored.dtypes[name] for name in sources]
        for name, tensor in outlines.items():
            if name in self._plain or name in self._conversions:
                raise ValueError(f"{name!r} of {kind} is stored, and made from {sources[:3]}, too")
            self._conversions[name] = conversion
            self.shapes[name] = tuple(tensor.shape)
            self.dtypes[name] = next((dtype for dtype in dtypes if dtype not in FLOATS), dtypes[0])

    def _along_first(self, conversion: _Conversion) -> bool:
        """Whether the i-th row of the one tensor that is made comes from the i-th source of each pattern alone."""
        stack, *others = conversion.converter.operations
        return (
            type(stack) is self._internals.MergeModulelist
            and stack.dim == 0
            and all(type(other) is self._internals.Concatenate and other.dim >= 1 for other in others)
        )


def written_tensors(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that transformers writes of a model's: under the names of the hub, experts one by one."""
    return _internals().revert_weight_conversion(model, dict(state))


def _require_all(names: list[str], target: str, kind: str) -> None:
    """Refuse a list of numbered tensors with a hole, which transformers would close.

    Raises:
        ValueError: with the numbers that are there.
    """
    columns = list(zip(*(map(int, re.findall(r"\d+", name)) for name in names), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(names) > 1 and varying != [tuple(range(len(names)))]:
        raise ValueError(
            f"{target!r} of {kind} is made from {len(names)} stored tensors, whose numbers are not 0 to "
            f"{len(names) - 1}: the first is {names[0]!r}, the last {names[-1]!r}"
        )
