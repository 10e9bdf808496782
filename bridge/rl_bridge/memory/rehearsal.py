"""A rehearsal: the trainer's own code with arrays of numbers that have sizes and no memory.

Floating-point tensors are torch's fake tensors, whose operations compute shapes alone. Integers and masks are real, as
the code reads them to decide what to do next. Bytes are counted as ``LiveBytes`` counts those of a real step.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from rl_bridge.memory.live import LiveBytes

_ATEN: Any = torch.ops.aten
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default)
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""What a collective has gathered is handed on by them, in the same memory."""
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
            made = not _is_meta(tensors, kwargs) and _makes_floats(func, args, tensors, kwargs)
            return self._fake(func, args, kwargs) if made else func(*args, **kwargs)
        name = func._schema.name
        if func is _ATEN._local_scalar_dense.default:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        if func is _ATEN.equal.default:
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
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [x for x in value if isinstance(x, torch.Tensor)]
    return found


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
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        if isinstance(index, FakeTensor):
            index = torch.ones(tuple(index.shape), dtype=torch.bool)
        found.extend(index.nonzero().unbind(1))
    return found
