"""Live bytes of tensors, allocation by allocation: by component, with the peak and the line that made it.

Every operation of the thread is seen. A storage counts from the operation that made it until nothing refers to it: what
autograd saves and what views share is counted once, as long as it lives. What a kernel allocates inside is not seen.
Activations that were offloaded are a component of their own, which the sum leaves out: it is the device's.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rl_bridge.memory.places import GRADIENTS, OFFLOADED, WEIGHTS, Place, place_of
from rl_bridge.memory.resizes import unwatch_resizes, watch_resizes


class Peak(NamedTuple):
    """The most bytes that lived at once, what they were, and the line that allocated the last of them."""

    bytes: int
    components: dict[str, int]
    line: str


class _Entry:
    __slots__ = ("bytes", "component", "line", "reference")

    def __init__(self, size: int, place: Place, reference: Any) -> None:
        self.bytes, self.component, self.line, self.reference = size, place.component, place.line, reference


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered. What was there before counts once it is shown to ``watch`` or ``track``.

    >>> with LiveBytes() as live:
    ...     x = torch.zeros(256)
    ...     del x
    ...     y = torch.zeros(16)
    >>> live.bytes, live.peak().bytes
    (64, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.components: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._peak = Peak(0, {}, "")
        self._hooks: list[Any] = []
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with the local parts and what it makes on the way
        inside = OPDEFS.get(func._schema.name)
        if inside is not None:
            # Of a custom operation written in Python every operation inside is seen, as its memory lives there.
            with self:
                out = inside._init_fn(*args, **(kwargs or {}))
        elif _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        else:
            out = self.run(func, args, kwargs or {})
        self._see(out, (args, kwargs or {}))
        return out

    def __enter__(self) -> Self:
        watch_resizes(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        unwatch_resizes(self)
        super().__exit__(*error)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage that had ``before`` bytes with its new size: FSDP2 frees gathered weights so."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            change, entry.bytes = storage.nbytes() - entry.bytes, storage.nbytes()
            self._change(entry.component, change, place_of().line)
        elif not before and storage.nbytes():
            self._add(storage._cdata, storage.nbytes(), storage, place_of())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation itself."""
        return func(*args, **kwargs)

    def track(self, tensor: torch.Tensor, component: str) -> None:
        """Count a tensor that is there already, or say what one that counts is."""
        for part in _parts(tensor):
            key, size, holder = _storage(part)
            entry = self._entries.get(key)
            if entry is None:
                self._add(key, size, holder, Place(component, ""))
            elif entry.component != component:
                self._change(entry.component, -entry.bytes)
                entry.component = component
                self._change(component, entry.bytes)

    def watch(self, module: torch.nn.Module, component: str = WEIGHTS) -> None:
        """Count a module's parameters and buffers, and know its gradients when they come."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta or _is_fake(tensor):
                self.track(tensor.detach(), component)
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient))

    def _gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.track(parameter.grad, GRADIENTS)

    def forget(self) -> None:
        """Take the hooks of ``watch`` off again."""
        while self._hooks:
            self._hooks.pop().remove()

    def by_line(self) -> Counter[str]:
        """Bytes that live now, by the line that allocated them."""
        found: Counter[str] = Counter()
        for entry in list(self._entries.values()):
            found[entry.line] += entry.bytes
        return found

    def peak(self) -> Peak:
        """Since the last ``reset``."""
        return self._peak

    def reset(self) -> None:
        """Begin a new peak with what lives now."""
        self._peak = Peak(self.bytes, dict(self.components), "")

    @contextmanager
    def phase(self, peaks: dict[str, Peak], name: str) -> Iterator[None]:
        """The peak of a part of the step, under its name; the highest where the part comes again."""
        self.reset()
        yield
        if name not in peaks or peaks[name].bytes < self._peak.bytes:
            peaks[name] = self._peak

    def _see(self, out: Any, given: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._count(out, given)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self._see(one, given)

    def _count(self, tensor: torch.Tensor, given: Any) -> None:
        for part in _parts(tensor):
            if part.is_meta and not _is_fake(part):
                continue
            key, size, holder = _storage(part)
            entry = self._entries.get(key)
            if entry is None:
                if size and not _is_given(key, given):
                    self._add(key, size, holder, place_of())
            elif entry.bytes != size:
                self._change(entry.component, size - entry.bytes)
                entry.bytes = size

    def _add(self, key: int, size: int, holder: Any, place: Place) -> None:
        # The storage's own object is kept by the storage, so that its end is the storage's.
        reference = weakref.ref(holder, lambda _: self._remove(key))
        self._entries[key] = _Entry(size, place, reference)
        self._change(place.component, size, place.line)

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._change(entry.component, -entry.bytes)

    def _change(self, component: str, size: int, line: str = "") -> None:
        self.components[component] = self.components.get(component, 0) + size
        if component == OFFLOADED:
            return
        self.bytes += size
        if self.bytes > self._peak.bytes:
            self._peak = Peak(self.bytes, dict(self.components), line)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether the operation is a sequence of others, which reaches a mode whole inside a custom operation."""
    if func.namespace != "aten" or func.has_kernel_for_dispatch_key(DispatchKey.CPU):
        return False  # such as silu_backward, which has a sequence for other devices, and a kernel of its own here
    return func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor of tensors consists of, such as the local shard of a DTensor."""
    if isinstance(tensor, DTensor):
        yield from _parts(tensor._local_tensor)
    elif isinstance(tensor, AsyncCollectiveTensor):  # what is on its way; the wrapper has no memory
        yield from _parts(tensor.elem)
    else:
        yield tensor


def _is_given(key: int, given: Any) -> bool:
    """Whether an operation was given the storage, and so did not make it: a view of what was there before."""
    tensors = [x for x in tree_iter(given) if isinstance(x, torch.Tensor)]
    return any(_storage(part)[0] == key for x in tensors for part in _parts(x))


def _is_fake(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "fake_mode", None) is not None


def _storage(tensor: torch.Tensor) -> tuple[int, int, Any]:
    """A number that is the storage's own while it lives, its bytes, and the object to hold a weak reference to."""
    if tensor.is_mkldnn:
        # oneDNN's own layout has no storage that torch knows; its size is about that of the numbers.
        return id(tensor), tensor.numel() * tensor.element_size(), tensor
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), storage
