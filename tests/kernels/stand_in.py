"""A device that this machine does not have: its tensors are the CPU's, wrapped, and no operation takes both kinds.

As on a GPU, copies go between the two devices and a CPU's tensor without axes counts as a number. A custom operation is
one operation: its backend runs on the CPU.
"""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# A device that every build of torch has, and whose tensors nothing can be computed with.
NAME = "meta"
_COPIES = ("aten::copy_", "aten::_to_copy")


class Elsewhere(Tensor):
    """A tensor on the stand-in device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor):
        where = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **where, device=NAME)  # pyright: ignore
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """While active the device is there: what is made on the device is a tensor of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """One operation, on one device."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    name = func._schema.name
    if there and name not in _COPIES:
        here = [tuple(x.shape) for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
        assert not here, f"{name} takes tensors of two devices: of the CPU's one has shape {here[0]}"
    asked = kwargs.get("device")
    on_device = torch.device(asked).type == NAME if asked is not None else bool(there)
    if name == "aten::copy_":
        on_device = isinstance(args[0], Elsewhere)
    if asked is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    given = {id(x.held): x for x in there}
    held_args, held_kwargs = pytree.tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    result = func(*held_args, **held_kwargs)
    if not on_device:
        return result

    def wrapped(x):
        if not isinstance(x, Tensor):
            return x
        return given[id(x)] if id(x) in given else Elsewhere(x)

    return pytree.tree_map(wrapped, result)
