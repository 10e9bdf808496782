"""A comparison of the tensors in a worker of vLLM, element by element, with the weights that they were loaded from.

An engine fuses, cuts, packs and quantises the weights that it loads. Here each of its tensors is read back, in the
layout that it computes with, and compared with the part of the checkpoint that belongs there: q, k and v one under the
other, the rows or columns of this rank, codes of the engine's own quantiser. A layout that nobody can read (oneDNN's
blocks) is read through the layer itself: its product with the unit matrix is its weights, exactly, because each sum has
one term that is not 0.

Nothing of vLLM is imported: the kinds of its layers are read from their attributes.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.rollout.vllm.lora_adapters import of_module
from rl_bridge.rollout.vllm.weight_copies import ADAPTER_FILE

_CHUNK = 512
_HEAD = "lm_head.weight"
_PEFT = "base_model.model."
_DERIVED = ("azp_adj",)
"""Tensors that the engine derives from codes and scales, which are compared; symmetric activations do not use them."""


class Held(NamedTuple):
    """``compared``: elements of the engine's tensors that were read. ``different``: by tensor, the differences.

    ``unread``: by tensor, why it could not be compared; the samples alone speak for it.
    """

    compared: int
    different: dict[str, str]
    unread: dict[str, str]

    @classmethod
    def of_ranks(cls, workers: Sequence[Sequence[Any]]) -> "Held":
        """The comparison of an engine from those of its workers, each of which holds its own part.

        >>> Held.of_ranks([[3, {}, {"r": "why"}], [3, {"q": "wrong"}, {"r": "why"}]])
        Held(compared=6, different={'q on rank 1': 'wrong'}, unread={'r on rank 0': 'why', 'r on rank 1': 'why'})
        """

        def ranked(place: int) -> dict[str, str]:
            if len(workers) == 1:
                return dict(workers[0][place])
            return {
                f"{name} on rank {rank}": why for rank, row in enumerate(workers) for name, why in row[place].items()
            }

        return cls(sum(row[0] for row in workers), ranked(1), ranked(2))


class Piece(NamedTuple):
    """Rows and columns of a checkpoint's tensor; the pieces of a layer lie one under the other."""

    name: str
    rows: slice
    columns: slice = slice(None)

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the whole."""
        return tensor[self.rows, self.columns] if tensor.dim() > 1 else tensor[self.rows] if tensor.dim() else tensor


def held_by(worker: Any, folder: str, adapter: str | None = None) -> list[Any]:
    """For ``collective_rpc``: ``Held`` of this worker as JSON, against the checkpoint or the adapter in a folder."""
    runner = worker.model_runner
    model, dtype = runner.get_model(), runner.model_config.dtype
    result = (
        against_checkpoint(model, Path(folder), dtype) if adapter is None else against_adapter(model, Path(adapter))
    )
    return [result.compared, result.different, result.unread]


class _Sources:
    """A checkpoint's tensors as the engine loads them: through its own quantiser, if it has one."""

    def __init__(self, folder: Path, send: Callable[[str, Tensor], Any] | None) -> None:
        stored = SafetensorsFolder.of_folder(folder)
        derived = () if send is None else [name for name in send.names if f"{name}_scale" not in stored.shapes]  # type: ignore[attr-defined]
        self._stored, self._send, self._made = stored, send, frozenset(derived)
        self.names = [*stored.shapes, *(f"{name}_scale" for name in sorted(self._made))]
        self._last: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """The whole tensor; a weight and its scale are made together."""
        owner = name.removesuffix("_scale")
        if owner not in self._made:
            return self._stored.read(name, ())
        if name not in self._last:
            assert self._send is not None
            self._last = dict(self._send(owner, self._stored.read(owner, ())))
        return self._last[name]


def against_checkpoint(model: nn.Module, folder: Path, dtype: torch.dtype) -> Held:
    """Each parameter of an engine's model against a folder of weights; ``dtype``: of its activations."""
    sources = _Sources(folder, getattr(model, "rl_fn_send", None))
    places, unread = _places(model, sources.names)
    compared, different = 0, dict[str, str]()
    for (path, leaf), names in places.items():
        module = _module(model, path)
        assert module is not None
        wholes = {name: sources.read(name) for name in names}
        pieces = _pieces(module, leaf, {name: whole.shape for name, whole in wholes.items()})
        expected = [(piece.name, piece.of(wholes[piece.name])) for piece in pieces]
        try:
            readings = list(_readings(module, leaf, [part for _, part in expected], dtype))
        except RuntimeError as error:
            readings, why = [], f"{type(module).__name__}: {str(error).splitlines()[0]}"
        else:
            why = f"{type(module).__name__}: its layout is not known"
        if not readings:
            unread[f"{path}.{leaf}"] = why
        for how, got in readings:
            compared += got.numel()
            if wrong := list(_differing(got, expected)):
                different[f"{path}.{leaf}{how}"] = ", ".join(wrong)
    compared_names = {f"{path}.{leaf}" for path, leaf in places}
    for name, parameter in model.named_parameters():
        plain = name.replace(".base_layer.", ".")
        if parameter.numel() and plain not in compared_names and not name.endswith(_DERIVED):
            unread[plain] = "in no checkpoint"
    return Held(compared, different, unread)


def against_adapter(model: nn.Module, folder: Path) -> Held:
    """The factors of the one adapter of an engine's model against those in a folder, B times α/r or α/√r.

    α and r are those of peft for each module, whose name a pattern may match.
    """
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    root = 0.5 if config.get("use_rslora") else 1.0
    stored = SafetensorsFolder.of_file(folder / ADAPTER_FILE)
    left, compared, different = set(stored.shapes), 0, dict[str, str]()
    for path, module in model.named_modules():
        if not hasattr(module, "lora_a_stacked"):
            continue
        layer: Any = module
        parent, last = _split(path)
        names = [f"{_PEFT}{parent}{part}" for part in _packed(model).get(last, (last,))]
        inside, outside = layer.lora_a_stacked[0].shape[-1], [one.shape[-2] for one in layer.lora_b_stacked]
        size = getattr(layer.base_layer, "tp_size", 1)
        shapes = {name: torch.Size((rows * size, inside)) for name, rows in zip(names, outside, strict=True)}
        for name in names:
            a = f"{name}.lora_A.weight"
            if a in stored.shapes:
                shapes[name] = torch.Size((stored.shapes[f"{name}.lora_B.weight"][0], stored.shapes[a][1]))
        for piece, a, b in zip(
            _pieces(layer.base_layer, "weight", shapes), layer.lora_a_stacked, layer.lora_b_stacked, strict=True
        ):
            factors = f"{piece.name}.lora_A.weight", f"{piece.name}.lora_B.weight"
            expected = torch.zeros_like(a[0, 0]), torch.zeros_like(b[0, 0])
            if factors[0] in stored.shapes:
                down, up = (stored.read(name, ()).to(expected[0].dtype) for name in factors)
                expected[0][: len(down)] = down[:, piece.columns]
                adapted = piece.name.removeprefix(_PEFT)
                scaling = of_module(adapted, config, "lora_alpha") / of_module(adapted, config, "r") ** root
                expected[1][:, : up.shape[1]] = (up if scaling == 1 else up * scaling)[piece.rows]
                left -= set(factors)
            for name, got, whole in zip(factors, (a[0, 0], b[0, 0]), expected, strict=True):
                compared += got.numel()
                different |= {f"{path}, {name}": what for what in _differing(got, [(name, whole)])}
    return Held(compared, different, dict.fromkeys(sorted(left), "the engine has no such factor"))


def _places(model: nn.Module, names: Sequence[str]) -> tuple[dict[tuple[str, str], list[str]], dict[str, str]]:
    """Which of a checkpoint's tensors are in which of the engine's, in the order of its rows; and those in none."""
    places: dict[tuple[str, str], dict[int, str]] = {}
    unread: dict[str, str] = {}
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()  # without the names of parts, which ``_packed`` has in their order
    fused = {part: (owner, place) for owner, parts in _packed(model).items() for place, part in enumerate(parts)}
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    for name in names:
        engine_name = name if mapper is None else mapper._map_name(name)
        if engine_name is None or (tied and engine_name == _HEAD):
            continue
        path, _, leaf = engine_name.rpartition(".")
        parent, last = _split(path)
        place = 0
        if _module(model, path) is None and last in fused:
            owner, place = fused[last]
            path = parent + owner
        if not hasattr(_module(model, path), leaf):
            unread[name] = "the engine has no such tensor"
        else:
            places.setdefault((path, leaf), {})[place] = name
    shared = [parts for (path, _), parts in places.items() if _split(path)[1] == "embed_tokens"]
    if tied and len(shared) == 1 and hasattr(_module(model, "lm_head"), "weight"):
        places["lm_head", "weight"] = shared[0]
    return {at: [parts[place] for place in sorted(parts)] for at, parts in places.items()}, unread


def _pieces(module: Any, leaf: str, shapes: Mapping[str, torch.Size]) -> list[Piece]:
    """The pieces of these tensors that a layer holds: all, or this rank's part of tensor parallelism.

    One tensor for a fused layer is one that the checkpoint has fused already (Phi-3): it is cut like its parts.
    """
    names, rows = list(shapes), [shape[0] if shape else 1 for shape in shapes.values()]
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if (own := getattr(module, "shard_indices", None)) is not None:
        return [Piece(names[0], slice(own.org_vocab_start_index, own.org_vocab_end_index))]
    if hasattr(module, "num_kv_head_replicas"):
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        wide = (module.head_size, module.head_size, module.v_head_size)
        total = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
        full = [count * width for count, width in zip(total, wide, strict=True)]
        widths = [count * width for count, width in zip(heads, wide, strict=True)]
        ranks = (rank, rank // module.num_kv_head_replicas, rank // module.num_kv_head_replicas)
        return _stacked(names, full, widths, ranks)
    if hasattr(module, "gather_output"):
        full = list(module.output_sizes) if len(names) == 1 and hasattr(module, "output_sizes") else rows
        return _stacked(names, full, [width // size for width in full], [rank] * len(full))
    if hasattr(module, "input_is_parallel") and leaf == "weight":
        [shape] = shapes.values()
        width = shape[1] // size
        return [Piece(names[0], slice(None), slice(rank * width, rank * width + width))]
    return [Piece(name, slice(None)) for name in names]


def _stacked(names: list[str], full: Sequence[int], held: Sequence[int], ranks: Sequence[int]) -> list[Piece]:
    """``held`` rows of each part, those of its rank; parts of one tensor begin where the one before ends."""
    starts = [0, *accumulate(full)][:-1] if len(names) == 1 else [0] * len(full)
    owners = names * len(full) if len(names) == 1 else names
    begins = [start + rank * count for start, rank, count in zip(starts, ranks, held, strict=True)]
    return [Piece(name, slice(begin, begin + count)) for name, begin, count in zip(owners, begins, held, strict=True)]


def _readings(module: Any, leaf: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensor, ``[rows, …]``, once for each place where it lies: as a parameter, packed, or both."""
    rows, rest = sum(len(part) if part.dim() else 1 for part in parts), parts[0].shape[1:]
    whole = torch.Size((rows, *rest)) if parts[0].dim() else parts[0].shape
    stored = getattr(module, leaf)
    if stored is not None and stored.numel():
        if stored.shape == whole or (hasattr(module, "shard_indices") and stored.shape[1:] == rest):
            yield "", stored.detach()[:rows] if whole else stored.detach()
        elif stored.dim() == 2 and stored.T.shape == whole:
            yield "", stored.detach().T
        else:
            return
    handler = getattr(getattr(getattr(module, "scheme", None), "kernel", None), "dnnl_handler", None)
    if handler is not None and hasattr(handler, "rl_fn_scales"):
        scales = handler.rl_fn_scales.view(-1)
        if leaf == "weight_scale":
            yield " where oneDNN reads it", scales.view(whole)
        elif leaf == "weight":
            codes = _product(lambda unit: _scaled(handler, unit), whole[1], torch.int8) / scales[:, None]
            # A number that is no code becomes NaN, which differs from every code.
            near = (codes - codes.round()).abs() < 1e-3
            yield " (packed)", torch.where(near, codes.round(), torch.nan)
    elif leaf == "weight" and len(whole) == 2:
        linear = vars(module).get("cpu_linear", nn.functional.linear)
        if linear is not nn.functional.linear:
            weights = _product(lambda unit: linear(unit, module.weight, None), whole[1], dtype)
            yield " (packed)", weights[:rows]


def _product(linear: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    """A layer's weights ``[rows, columns]``: its product with the unit matrix, some columns at a time."""
    blocks = []
    for start in range(0, columns, _CHUNK):
        count = min(_CHUNK, columns - start)
        unit = torch.zeros(count, columns, dtype=dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1
        blocks.append(linear(unit).T)
    return torch.cat(blocks, 1)


def _scaled(handler: Any, unit: Tensor) -> Tensor:
    """oneDNN's int8 product with codes of 1: larger ones are cut off on CPUs that add pairs in 16 bits."""
    import vllm._custom_ops as operations

    out = torch.empty(len(unit), handler.n)
    operations.onednn_scaled_mm(handler, unit, out, torch.ones(len(unit), 1), None, None, None)
    return out


def _differing(got: Tensor, expected: Sequence[tuple[str, Tensor]]) -> Iterator[str]:
    """Differences, by the name of the sent tensor. 0 and −0 are equal, and so are numbers below the least normal."""
    begin = 0
    for name, part in expected:
        rows = len(part) if part.dim() else 1
        own = got[begin : begin + rows] if got.dim() else got
        begin += rows
        part = part.to(own.device, own.dtype)
        wrong = own != part
        if not wrong.any():
            continue
        if own.is_floating_point() and own.dtype.itemsize > 1:
            least = torch.finfo(own.dtype).tiny
            wrong &= ~((own.abs() < least) & (part.abs() < least))
        if count := int(wrong.sum()):
            most = float((own.float() - part.float()).abs().nan_to_num(torch.inf).max())
            yield f"{count:,} of {wrong.numel():,} elements of {name} are not what was sent, by {most:.2g} at most"


def _module(model: nn.Module, path: str) -> Any:
    """The layer at a path, inside what an adapter wraps it in; None where there is none."""
    try:
        module: Any = model.get_submodule(path)
    except AttributeError:
        return None
    return getattr(module, "base_layer", module)


def _packed(model: nn.Module) -> Mapping[str, Sequence[str]]:
    return getattr(model, "packed_modules_mapping", {})


def _split(path: str) -> tuple[str, str]:
    """
    >>> _split("model.layers.0.q_proj"), _split("lm_head")
    (('model.layers.0.', 'q_proj'), ('', 'lm_head'))
    """
    parent, dot, last = path.rpartition(".")
    return parent + dot, last
