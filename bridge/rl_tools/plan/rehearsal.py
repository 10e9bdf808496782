"""A rehearsal: the trainer's own code in the first worker, with tensors that have sizes and no memory.

Floating-point tensors are torch's fake tensors, whose operations compute shapes alone. Integers and masks are real, as
the code reads them to decide what to do next. Bytes are counted as ``LiveBytes`` counts those of a real step.

The process group is torch's fake one, through which every collective ends at once. Sizes and memory of the first worker
are those of a real run; the numbers of what was gathered or summed are not.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_bridge.checkpoints.writing import state_of, take_apart
from rl_bridge.engines.dispatch import declared, row_count
from rl_bridge.engines.worker import call_worker, worker_of
from rl_bridge.executors import LocalExecutor
from rl_bridge.executors.executor import Arguments, Slot, Together
from rl_bridge.executors.host import Host
from rl_bridge.models.model_folder import config_of, made, require_causal, require_place
from rl_bridge.models.model_source import (
    ModelSource,
    PretrainedSource,
    PretrainedValueSource,
    device_of,
    require_one_label,
    scorer_of,
    with_head,
)
from rl_bridge.models.stored_tensors import fill_computed_buffers
from rl_bridge.parallel.fsdp import materialize
from rl_bridge.weights.manifest import local
from rl_tools.profile.live_bytes import CHECKPOINT, LiveBytes

# Operators on tensors that have sizes and no memory.

_ATEN: Any = torch.ops.aten
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default)
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Operations that hand on what a collective has gathered, in the same memory."""
_FACTORIES = frozenset(
    [f"{start}{kind}" for start in ("", "new_") for kind in ("empty", "empty_strided", "zeros", "ones", "full")]
    + [f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")]
    + ["rand", "randn", "scalar_tensor"]
)

_SHORT = 1 << 14


class Rehearsal(LiveBytes):
    """While it is entered, floating-point tensors that are made are fake.

    A number that the code reads from a fake tensor is 1, a truth is True, and no number is infinite or NaN: a
    gradient's norm is finite, a drawn token is token 1.

    >>> with Rehearsal() as rehearsal:
    ...     huge = torch.zeros(1 << 40)
    >>> rehearsal.bytes == 4 << 40
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation: for real where all numbers are, else on sizes alone."""
        tensors = _tensors(args, kwargs)
        if not any(isinstance(x, FakeTensor) for x in tensors):
            is_fake = not _is_meta(tensors, kwargs) and _makes_floats(func, args, tensors, kwargs)
            return self._fake(func, args, kwargs) if is_fake else func(*args, **kwargs)
        name = func._schema.name
        if func is _ATEN._local_scalar_dense.default:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        if func in (_ATEN.equal.default, _ATEN.allclose.default):
            return True
        if func is _ATEN.isnan.default or (func is _ATEN.eq.Scalar and abs(args[1]) == float("inf")):
            return torch.zeros(args[0].shape, dtype=torch.bool)
        if func is _ATEN.gt.Tensor and not args[0].dim():  # no error is above its tolerance
            return torch.zeros((), dtype=torch.bool)
        if func is _ATEN.nonzero.default:
            with self._fakes:
                return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _ATEN.split_with_sizes.default and sum(args[1]) <= args[0].shape[0]:
            # Sizes that are counted are numbers, of which each is 1 here, and a nonzero has found every place.
            args = (self._fake(_ATEN.slice.Tensor, (args[0], 0, 0, sum(args[1])), {}), *args[1:])
        if name in _WAITS:
            return self._fake(_ATEN.alias.default, args[:1], {})  # the shapes' own rule is a new array
        if func in _INDEXED:
            args = (args[0], _as_numbers(args[1], args[0]), *args[2:])
        if name == "mkldnn::_reorder_linear_weight":
            with self._fakes:
                return torch.empty_like(args[0])
        if name == "mkldnn::_linear_pointwise":
            x, weight = args[0], args[2 if func._overloadname == "binary" else 1]
            with self._fakes:
                return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
        return self._fake(func, args, kwargs)

    def _fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        def faked(x: torch.Tensor) -> torch.Tensor:
            return x if isinstance(x, FakeTensor) else self._fakes.from_tensor(x.detach(), static_shapes=True)

        args, kwargs = tree_map_only(torch.Tensor, faked, (args, kwargs))
        with self._fakes:
            return func(*args, **kwargs)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, torch.Tensor)]
    return tensors


def _is_meta(tensors: list[torch.Tensor], kwargs: Any) -> bool:
    """Whether the result is on the meta device, which has no memory to plan."""
    device = kwargs.get("device")
    if device is None:
        return any(x.is_meta for x in tensors)
    return torch.device(device).type == "meta"


def _makes_floats(func: Any, args: Any, tensors: list[torch.Tensor], kwargs: Any) -> bool:
    """Whether the operation makes a new floating-point array of a given size."""
    name = func._schema.name.removeprefix("aten::")
    if name not in _FACTORIES:
        return False
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return dtype.is_floating_point and not (name in ("full", "zeros", "ones") and _is_short(args[0]))


def _is_short(shape: Any) -> bool:
    """Whether an array is a list of options, of which the code reads the numbers: a temperature for each row."""
    return len(shape) == 1 and shape[0] <= _SHORT


def _as_numbers(indices: Any, whole: torch.Tensor) -> list[Any]:
    """Masks among the indices as the numbers of their places, of which a fake mask has all."""
    numbers: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            numbers.append(index)
            continue
        if isinstance(index, FakeTensor):
            index = torch.ones(tuple(index.shape), dtype=torch.bool)
        numbers.extend(index.nonzero().unbind(1))
    return numbers


# The first of several workers, alone in this process: its peers answer nothing, and what they would send is not there.


@contextmanager
def world_of(workers: int) -> Iterator[None]:
    """A process group of so many workers around this one, none for a single worker; it is gone at the end.

    Raises:
        ValueError: the process is in a group already.
    """
    before = dist.is_initialized()
    if before and workers > 1:
        raise ValueError(
            f"a plan of {workers} workers has a process group of its own, and this process is in one of "
            f"{dist.get_world_size()} already"
        )
    hook = sys.excepthook
    try:
        if workers > 1:
            from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("fake", store=store, rank=0, world_size=workers)
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch's own puts the rank in front of each line


def executor_of(workers: int) -> LocalExecutor:
    """Where the workers of a plan live; of several, within ``world_of``, the first one alone."""
    return LocalExecutor("cpu") if workers == 1 else FirstWorker(workers)


class FirstWorker(LocalExecutor):
    """An executor of several slots, of which the first alone does anything: its results are taken for those of all."""

    def __init__(self, workers: int) -> None:
        """Made within ``world_of(workers)``."""
        super().__init__("cpu")
        self.slots = tuple(Slot(slot) for slot in range(workers))
        self._host = _Host(0, "cpu")

    def call(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> dict[int, Any]:
        """Run the function in the first slot, and answer for all."""
        [result] = super().call(function, {0: arguments[0]}, what=what, timeout=timeout).values()
        if function is not call_worker:
            return dict.fromkeys(arguments, result)
        name, method, *_ = arguments[0]
        if declared(getattr(worker_of(self._host, name).module, method)) != "rows":
            return dict.fromkeys(arguments, result)
        return {slot: _with_rows(result, _rows(message)) for slot, message in arguments.items()}


class _Host(Host):
    """Its groups are fake, as the world is."""

    def group(self, slots: Sequence[int], backend: str | None = None, *, purpose: str = "") -> Any:
        return super().group(slots, "fake", purpose=purpose)


def _rows(message: tuple[Any, ...]) -> int:
    """The number of rows that a worker was called with."""
    _, _, args, kwargs, _ = message
    return row_count((*args, *kwargs.values())[0])


def _with_rows(result: Any, rows: int) -> Any:
    """A result for so many rows, of which the first one's stands for all."""
    if isinstance(result, torch.Tensor):
        return result[:1].expand(rows if len(result) else 0, *result.shape[1:])
    if hasattr(result, "_fields"):
        return type(result)(*(None if value is None else _with_rows(value, rows) for value in result))
    assert isinstance(result, tuple), f"rows of a {type(result).__name__}"
    return tuple(_with_rows(value, rows) for value in result)


# Models that have a structure and no numbers, for a rehearsal.


@dataclass(frozen=True)
class ConfigSource:
    """The structure that a config.json describes. It has no weights to load."""

    name: str
    """Folder with a config.json, the file itself, or a hub id."""

    def empty(self) -> PreTrainedModel:
        """The model that ``AutoModelForCausalLM`` makes, in float32.

        Raises:
            ValueError: there is no such configuration, or it is of no causal language model.
        """
        config = _config(self.name)
        require_causal(config, self.name)
        return made(
            self.name,
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval(),
        )

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Refused: a plan loads nothing."""
        raise ValueError(f"{self.name} is planned from its config.json: there are no weights to load")


@dataclass(frozen=True)
class ConfigValueSource(ConfigSource):
    """The same for a model of values or rewards."""

    def empty(self) -> PreTrainedModel:
        """The model that ``AutoModelForSequenceClassification`` makes, in float32.

        Raises:
            ValueError: there is no such configuration, or it is of a model with another head than one number.
        """
        config = _config(self.name)
        require_one_label(config, self.name)
        return with_head(made(self.name, lambda: scorer_of(config))).eval()


def _config(name: str) -> Any:
    path = Path(name)
    return config_of(name, path.parent if path.is_file() else str(require_place(name)))


@dataclass(frozen=True)
class WithoutNumbers:
    """The structure of ``source``, and weights of the right sizes, without values."""

    source: Any

    def empty(self) -> Any:
        """The model that the source makes."""
        return self.source.empty()

    def load(self, model: Any, device: torch.device | None = None) -> None:
        """Make room for the weights, and compute what is computed."""
        device = device_of(model) if device is None else device
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        fill_computed_buffers(base, device)


def without_numbers(source: ModelSource) -> ModelSource:
    """The source with sizes alone."""
    return WithoutNumbers(source)  # type: ignore[return-value]


def beside(name: str, *, rehearsed: bool, values: bool = False) -> ModelSource:
    """A model beside the trained one, of tokens or of ``values``: its structure for a rehearsal, else with weights."""
    if rehearsed:
        return without_numbers(ConfigValueSource(name) if values else ConfigSource(name))
    return PretrainedValueSource(name) if values else PretrainedSource(name)


# The host memory that a checkpoint's copies take.


def snapshot_tensors(live: LiveBytes, module: Any) -> list[torch.Tensor]:
    """Arrays as ``HostBuffers`` keeps them: one for each tensor of the module's state, tied ones as often as named."""
    _, tensors = take_apart(state_of("plan", module))
    copies = [torch.empty_like(local(tensor), device="cpu") for tensor in tensors.values()]
    for copy in copies:
        live.track(copy, CHECKPOINT)
    return copies
