"""A worker's part of a checkpoint: the snapshot in host memory, and its files, written beside the training."""

import json
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from rl_bridge.common import step_folders
from rl_bridge.common.files import sync_file
from rl_bridge.weights.manifest import checksum, local
from rl_bridge.weights.source import in_charge_of

# A nested state taken apart: its tensors by name, and everything else as JSON. Nothing is pickled.


def take_apart(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(What JSON holds, name → tensor). Dictionaries, lists, tuples, tensors, numbers, strings, None may be nested.

    >>> structure, tensors = take_apart({"step": 3, "weights": {"a": torch.ones(2)}})
    >>> tensors
    {'weights/a': tensor([1., 1.])}
    >>> put_together(structure, tensors)
    {'step': 3, 'weights': {'a': tensor([1., 1.])}}

    Raises:
        TypeError: something else is in it; the message says where.
        ValueError: two tensors have the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _structure(state, "", tensors), tensors


def put_together(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``take_apart`` took apart."""
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content}
    values = [put_together(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)


def _structure(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(f"two tensors of the state have the name {path!r}")
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"a checkpoint's keys are strings or integers, got {odd[0]!r} at {path or 'the top'}")
        return {"dict": [[key, _structure(item, _below(path, key), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_structure(item, _below(path, place), tensors) for place, item in enumerate(value)]}
    # Subclasses (an enum of strings, a NumPy scalar) would come back as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, None and their dictionaries, lists and tuples, "
        f"got {type(value).__name__} at {path or 'the top'}"
    )


def _below(path: str, key: str | int) -> str:
    name = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{name}" if path else name


# The snapshot: copies in host memory, each piece with a checksum of what was read.


@dataclass
class Piece:
    """The part of one tensor that this worker holds."""

    values: torch.Tensor
    """In host memory, in a buffer that is the snapshot's alone."""
    checksum: str
    """Checksum of the tensor itself, read where it lies, not of the copy."""
    parameter: bool
    """Whether the values are weights, which have to be finite."""


@dataclass
class Snapshot:
    """A worker's state. torch's distributed checkpoint planned its pieces; nothing in it changes any more."""

    structure: Any
    """Everything but the tensors, as JSON has it."""
    plan: SavePlan
    pieces: dict[MetadataIndex, Piece]


class HostBuffers:
    """Host memory that snapshots are copied to, kept from one to the next: pinned where the tensors are on CUDA."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, MetadataIndex], torch.Tensor] = {}

    def snapshot(self, name: str, module: Any) -> Snapshot:
        """Copy the state of the worker's ``module``. An earlier snapshot of ``name`` is overwritten.

        Raises:
            TypeError: the module has no ``checkpoint_state``, or there is something in it that no checkpoint holds.
            ValueError: a tensor is on the meta device, because its weights were freed.
        """
        structure, tensors = take_apart(state_of(name, module))
        if freed := [key for key, tensor in tensors.items() if tensor.device.type == "meta"]:
            raise ValueError(f"{name}: {freed[0]} has no values to save, its weights were freed")
        weights = _parameters(module)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors))
        plan = planner.create_local_plan()
        # A mesh that does not divide a tensor leaves workers without a row of it.
        plan = SavePlan([item for item in plan.items if _size(item) or tensors[item.index.fqn].numel() == 0])
        pieces: dict[MetadataIndex, Piece] = {}
        devices = set()
        for item in plan.items:
            values = local(tensors[item.index.fqn])
            devices.add(values.device)
            pieces[item.index] = Piece(
                self._copy(name, item.index, values), checksum_of(values), values.data_ptr() in weights
            )
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != name or key[1] in pieces}
        return Snapshot(structure, plan, pieces)

    def only(self, names: Collection[str]) -> None:
        """Let go of what other names have here, such as an earlier stage's model."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] in names}

    def _copy(self, name: str, index: MetadataIndex, values: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((name, index))
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            on_cuda = values.device.type == "cuda"
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
            self._buffers[name, index] = buffer
        return buffer.copy_(values, non_blocking=True)


def state_of(name: str, module: Any) -> Mapping[str, Any]:
    """The state that a worker's module saves; a plain torch module saves its weights and optimisers."""
    owner = in_charge_of(module)
    if hasattr(owner, "checkpoint_state"):
        return owner.checkpoint_state()
    raise TypeError(f"{name}: {type(module).__name__} has no checkpoint_state()")


def give_state(module: Any, state: dict[str, Any]) -> None:
    """Give a worker's module its state back."""
    in_charge_of(module).load_checkpoint_state(state)


def checksum_of(values: torch.Tensor) -> str:
    """A checksum of a tensor's bits, computed where the tensor lies: CRC-32 on a CPU, a 64-bit sum elsewhere."""
    if values.device.type == "cpu":
        return f"crc32:{zlib.crc32(_bytes(values)):08x}"
    return f"mix64:{checksum(values)}"


def has_checksum(values: torch.Tensor, expected: str) -> bool:
    """Whether values in host memory are those that ``expected`` was computed from, on whatever device."""
    kind, _, number = expected.partition(":")
    if kind == "mix64":
        return checksum(values) == int(number)
    return zlib.crc32(_bytes(values)) == int(number, 16)


def _bytes(values: torch.Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).numpy()


def _parameters(module: Any) -> set[int]:
    if not isinstance(module, torch.nn.Module):
        return set()
    return {local(parameter).data_ptr() for parameter in module.parameters() if parameter.is_floating_point()}


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel()


# What can go wrong with a checkpoint after it was asked for.


class CheckpointError(RuntimeError):
    """A checkpoint was not written. Those that were whole before are whole still."""


# Steps that the writers of a checkpoint take together. An error of one ends all of them, with its name.

T = TypeVar("T")
R = TypeVar("R")


def together(
    what: str,
    group: dist.ProcessGroup | None,
    share: Callable[[], T],
    combine: Callable[[list[T]], list[R]],
) -> R:
    """Every writer computes its ``share``; the first combines them, in order, into an answer for each.

    ``group`` is of the checkpoint's own and of gloo: on the training's group its messages would meet those of the
    backward pass. None is a single writer.

    Raises:
        CheckpointError: a share or the combination raised, here or elsewhere.
    """
    value, failure, cause = _attempt(share)
    size = 1 if group is None else group.size()
    shares: list[Any] = [(value, failure)]
    if group is not None:
        gathered = [None] * size if group.rank() == 0 else None
        dist.gather_object((value, failure), gathered, group=group, group_dst=0)
        shares = gathered or []
    answers: list[Any] = []
    if shares:  # this is the first
        failures = [f"writer {place}: {failure}" for place, (_, failure) in enumerate(shares) if failure is not None]
        if failures:
            answers = [(None, "; ".join(failures))] * size
        else:
            combined, failure, cause = _attempt(lambda: combine([value for value, _ in shares]))
            answers = [(None, failure)] * size if failure else [(one, None) for one in combined]
    answer: list[Any] = answers[:1]
    if group is not None:
        answer = [None]
        dist.scatter_object_list(answer, answers or None, group=group, group_src=0)
    result, failure = answer[0]
    if failure is not None:
        raise CheckpointError(f"{what}: {failure}") from cause
    return result


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None, BaseException | None]:
    try:
        return function(), None, None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}", error


# The requests and shares of the writers, and the writing itself.

DRIVER = "driver"
RANDOM = "random"
INDEX = "index.json"


@dataclass(frozen=True)
class Request:
    """The driver's request to its writers."""

    path: Path
    """Final path of the checkpoint."""
    keep: int
    pinned: tuple[int, ...]
    """Steps whose checkpoints stay besides the newest."""
    engines: Mapping[str, str]
    """Name in the checkpoint → name of the engine in its workers."""
    slots: tuple[int, ...]
    """The writers: every slot with a worker of these engines."""
    driver: tuple[Any, Mapping[str, torch.Tensor]] | None = None
    """The driver's state, taken apart, for the first writer alone."""


@dataclass
class Share:
    """The share of a checkpoint that one writer has to write."""

    request: Request
    ranks: dict[str, int]
    """Engine → rank of its worker here."""
    snapshots: dict[str, Snapshot]
    random: dict[str, Any]
    group: dist.ProcessGroup | None


@dataclass
class Written:
    """One writer's result: its files' records for the manifest, and the places of the tensors in the shards."""

    files: dict[str, dict[str, Any]]
    pieces: dict[str, list[dict[str, Any]]]


Proposal = dict[str, tuple[int, SavePlan, str]]
"""Engine → (rank, what this worker could write, its plain values as JSON)."""


def write(share: Share) -> None:
    """Write the checkpoint, together with the other writers: it gets its name when all of it is on the disk.

    Raises:
        CheckpointError: it was not written; nothing of it is left.
    """
    request, structures = share.request, {}

    def propose() -> Proposal:
        return {
            engine: (share.ranks[engine], snapshot.plan, json.dumps(snapshot.structure))
            for engine, snapshot in share.snapshots.items()
        }

    def plan(proposals: list[Proposal]) -> list[dict[str, SavePlan]]:
        step_folders.begin(request.path, [RANDOM, *([DRIVER] if request.driver else []), *request.engines])
        plans: list[dict[str, SavePlan]] = [{} for _ in proposals]
        for engine in request.engines:
            order = sorted(
                (proposal[engine][0], writer) for writer, proposal in enumerate(proposals) if engine in proposal
            )
            writers = [writer for _, writer in order]
            structures[engine] = _agreed(engine, [proposals[writer][engine][2] for writer in writers])
            planner = DefaultSavePlanner(flatten_state_dict=False)
            final, _ = planner.create_global_plan([proposals[writer][engine][1] for writer in writers])
            for writer, its_plan in zip(writers, final, strict=True):
                plans[writer][engine] = its_plan
        return plans

    def commit(results: list[Written]) -> list[None]:
        temporary = step_folders.temporary_path(request.path)
        records = {name: record for result in results for name, record in result.files.items()}
        for engine in request.engines:
            pieces = [piece for result in results for piece in result.pieces.get(engine, [])]
            content = {"structure": structures[engine], "tensors": _by_tensor(pieces)}
            records[f"{engine}/{INDEX}"] = step_folders.write_json(temporary / engine / INDEX, content)
        about = {"step": step_folders.step_of(request.path)}
        step_folders.commit(request.path, records, about, keep=request.keep, pinned=request.pinned)
        return [None for _ in results]

    what = f"the checkpoint {request.path.name} was not written"
    try:
        plans = together(what, share.group, propose, plan)
        together(what, share.group, lambda: _write_share(share, plans), commit)
    except Exception:
        if share.group is None or share.group.rank() == 0:
            shutil.rmtree(step_folders.temporary_path(request.path), ignore_errors=True)
        raise


def _write_share(share: Share, plans: dict[str, SavePlan]) -> Written:
    request, result = share.request, Written({}, {})
    temporary = step_folders.temporary_path(request.path)
    slot = request.slots[0 if share.group is None else share.group.rank()]
    name = f"{RANDOM}/slot-{slot:05d}.json"
    result.files[name] = step_folders.write_json(temporary / name, share.random)
    if request.driver is not None:
        structure, tensors = request.driver
        name = f"{DRIVER}/state.json"
        result.files[name] = step_folders.write_json(temporary / name, structure)
        if tensors:
            name = f"{DRIVER}/tensors.safetensors"
            result.files[name] = _write_tensors(temporary / name, tensors)
    for engine, plan in plans.items():
        name = f"{engine}/rank-{share.ranks[engine]:05d}.safetensors"
        pieces = {item.index: share.snapshots[engine].pieces[item.index] for item in plan.items}
        for index, piece in pieces.items():
            if piece.parameter and not bool(torch.isfinite(piece.values).all()):
                raise FloatingPointError(f"{engine}: values of {index.fqn} are not finite")
        if pieces:
            tensors = {piece_name(index): piece.values for index, piece in pieces.items()}
            result.files[name] = _write_tensors(temporary / name, tensors)
            _read_back(temporary / name, {piece_name(index): piece.checksum for index, piece in pieces.items()})
        result.pieces[engine] = [
            {
                "tensor": item.index.fqn,
                "dtype": str(pieces[item.index].values.dtype).removeprefix("torch."),
                "shape": list(_data(item).size),
                "offsets": list(_data(item).chunk.offsets),
                "sizes": list(_data(item).chunk.sizes),
                "file": name,
                "checksum": pieces[item.index].checksum,
            }
            for item in plan.items
        ]
    return result


def piece_name(index: MetadataIndex) -> str:
    """Name in its file of the piece of a tensor that begins at an offset."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    sync_file(file)
    return step_folders.record_of(file)


def _read_back(file: Path, checksums: Mapping[str, str]) -> None:
    """Raise OSError unless the file on the disk holds the tensors as they were at the moment of the snapshot."""
    with safe_open(file, "pt") as reader:
        for name, checksum in checksums.items():
            if not has_checksum(reader.get_tensor(name), checksum):
                raise OSError(f"{file} holds other values of {name} than the snapshot read")


def _agreed(engine: str, structures: list[str]) -> Any:
    """The plain values of an engine's state, which are the same in all of its workers."""
    for rank, structure in enumerate(structures):
        if structure != structures[0]:
            place = next(i for i, (a, b) in enumerate(zip(structures[0], structure, strict=False)) if a != b)
            around = slice(max(0, place - 60), place + 20)
            raise ValueError(
                f"{engine}: the state of rank {rank} differs from that of rank 0 in more than the values of its "
                f"tensors: …{structure[around]}… instead of …{structures[0][around]}…"
            )
    return json.loads(structures[0])


def _by_tensor(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for piece in pieces:
        place = {key: piece[key] for key in ("offsets", "sizes", "file", "checksum")}
        tensor = tensors.setdefault(piece["tensor"], {"dtype": piece["dtype"], "shape": piece["shape"], "pieces": []})
        tensor["pieces"].append(place)
    return tensors


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
