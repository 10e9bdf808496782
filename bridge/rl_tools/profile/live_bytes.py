"""Live bytes of tensors, allocation by allocation: by component, with the peak and the line that made it.

Every operation of the thread is seen. A storage counts from the operation that made it until nothing refers to the
storage: a tensor that autograd saves and tensors that share a storage count once, as long as they live. Memory that a
kernel allocates inside is not seen. Activations that were offloaded are a component of their own, which the sum leaves
out: the sum is the device's.
"""

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
HEAD, CACHE, TRANSFER, CHECKPOINT, OTHER = "head", "kv_cache", "transfer", "checkpoint", "other"
OFFLOADED, SERVER, REWARD = "offloaded", "server", "reward"
COMPONENTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, CACHE, TRANSFER, CHECKPOINT, OTHER)
COMPONENTS += (SERVER, REWARD, OFFLOADED)
"""Components of a run's memory. ``head``: logits and other tensors of the head; ``transfer``: buffers of a sync;
``server``: weights, keys and values of a server's process beside the worker, ``reward``: weights of reward models in
the driver's process, which a plan knows and no meter;
``offloaded``: tensors that wait in host memory, which sums and peaks of a device leave out."""

# (Part of a file's path, name of a function or "" for all, component): the innermost frame with an entry decides.
_OF_CODE = (
    ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_reduce", GRADIENTS),
    ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "", WEIGHTS),
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "", WEIGHTS),
    ("rl_kernels/sampling", "", HEAD),
    ("rl_kernels/", "", HEAD),
    ("rl_bridge/rollout/row_cache.py", "", CACHE),
    ("rl_bridge/rollout/packed_step.py", "__init__", WEIGHTS),
    ("rl_bridge/weights/", "", TRANSFER),
    ("rl_bridge/checkpoints/", "", CHECKPOINT),
    ("torch/optim/", "_init_group", OPTIMIZER),
    ("rl_bridge/modules/trainable.py", "optimizer_step", OTHER),
    ("rl_bridge/rollout/", "", ACTIVATIONS),
    ("rl_bridge/parallel/offloading.py", "to_host", OFFLOADED),
    ("rl_bridge/parallel/", "", ACTIVATIONS),
    ("rl_bridge/modules/", "", ACTIVATIONS),
    ("/modeling_", "", ACTIVATIONS),
)
_OWN = ("rl_bridge/memory/", "rl_tools/", "torch/_")
_LINES = ("/rl_bridge/", "/rl_kernels/", "/modeling_")


class Place(NamedTuple):
    """Component and line of an allocation.

    ``line`` is ``file:line function``; in a backward pass the operation that is differentiated follows.
    """

    component: str
    line: str


class _Facts(NamedTuple):
    component: str | None
    own: bool
    line: str | None


_facts_by_code: dict[CodeType, _Facts] = {}


def _facts_of(code: CodeType) -> _Facts:
    """Component and path that the file and the name of a function tell; looked up once a function."""
    facts = _facts_by_code.get(code)
    if facts is None:
        file, name = code.co_filename.replace("\\", "/"), code.co_name
        own = any(part in file for part in _OWN)
        component = next((c for part, of, c in _OF_CODE if part in file and of in ("", name)), None)
        path = next((file[file.rindex(part) + 1 :] for part in _LINES if part in file), None)
        facts = _facts_by_code[code] = _Facts(None if own else component, own, None if own else path)
    return facts


def place_of(frame: FrameType | None = None) -> Place:
    """The place of the present allocation, by the stack of the calling thread."""
    frame = sys._getframe(1) if frame is None else frame
    component = line = None
    while frame is not None and (component is None or line is None):
        facts = _facts_of(frame.f_code)
        if facts.component is not None and component is None:
            component = facts.component
        if facts.line is not None and line is None:
            line = f"{facts.line}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None:
        line = f"{line or 'backward'} ({node.name()})"
        component = component or ACTIVATIONS
    return Place(component or OTHER, line or "outside of rl_bridge")


class Watcher(Protocol):
    """Gets the storages that ``UntypedStorage.resize_`` resizes in its thread, which no dispatch mode sees."""

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Take in a storage with its new size. ``before``: the bytes that the storage had."""
        ...


_lock = threading.Lock()
_watchers: dict[int, list[Watcher]] = {}
"""Thread → its watchers. A watcher may stand there more than once, as a dispatch mode may be entered again."""


def watch_resizes(watcher: Watcher) -> None:
    """Begin to call the watcher. torch's method is replaced while anyone watches, and at no other time."""
    with _lock:
        if not _watchers:
            torch.UntypedStorage.resize_ = _resize  # pyright: ignore[reportAttributeAccessIssue]
        _watchers.setdefault(threading.get_ident(), []).append(watcher)


def unwatch_resizes(watcher: Watcher) -> None:
    """Undo the last ``watch_resizes`` of this watcher in this thread."""
    with _lock:
        here = _watchers[threading.get_ident()]
        here.reverse()
        here.remove(watcher)
        here.reverse()
        if not here:
            del _watchers[threading.get_ident()]
        if not _watchers:
            del torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    before = storage.nbytes()
    resized = torch._C.StorageBase.resize_(storage, size)  # pyright: ignore[reportAttributeAccessIssue]
    for watcher in {id(watcher): watcher for watcher in _watchers.get(threading.get_ident(), ())}.values():
        watcher.resized(storage, before)
    return resized


class Peak(NamedTuple):
    """The most bytes that lived at once, their components, and the line that allocated the last of them."""

    bytes: int
    components: dict[str, int]
    line: str


class _Entry:
    __slots__ = ("bytes", "component", "line", "reference")

    def __init__(self, size: int, place: Place, reference: Any) -> None:
        self.bytes, self.component, self.line, self.reference = size, place.component, place.line, reference


class LiveBytes(TorchDispatchMode):
    """Counts while the mode is entered. Earlier tensors count once ``watch`` or ``track`` gets them.

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
        """Run the operation and count the storages that it made."""
        if DTensor in types:
            return NotImplemented  # DTensor's own dispatch calls this mode with local parts and intermediate tensors
        inside = OPDEFS.get(func._schema.name)
        if inside is not None:
            # A custom operation written in Python allocates in the operations inside, so that each of them is seen.
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
        """Count a storage that had ``before`` bytes with its new size: FSDP2 frees gathered weights by resizing."""
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            change, entry.bytes = storage.nbytes() - entry.bytes, storage.nbytes()
            self._change(entry.component, change, place_of().line)
        elif not before and storage.nbytes():
            self._add(storage._cdata, storage.nbytes(), storage, place_of())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation itself; a subclass may run another."""
        return func(*args, **kwargs)

    def track(self, tensor: torch.Tensor, component: str) -> None:
        """Count a tensor that is there already, or change the component of one that counts."""
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
        """Count a module's parameters and buffers, and its gradients from when they are there."""
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
        """Remove the hooks of ``watch``."""
        while self._hooks:
            self._hooks.pop().remove()

    def by_line(self) -> Counter[str]:
        """Bytes that live now, by the line that allocated them."""
        sizes: Counter[str] = Counter()
        for entry in list(self._entries.values()):
            sizes[entry.line] += entry.bytes
        return sizes

    def peak(self) -> Peak:
        """The peak since the last ``reset``."""
        return self._peak

    def reset(self) -> None:
        """Begin a new peak with the bytes that live now."""
        self._peak = Peak(self.bytes, dict(self.components), "")

    @contextmanager
    def phase(self, peaks: dict[str, Peak], name: str) -> Iterator[None]:
        """The peak of a part of the step, under its name; the highest where the part comes again."""
        self.reset()
        yield
        if name not in peaks or peaks[name].bytes < self._peak.bytes:
            peaks[name] = self._peak

    def _see(self, out: Any, inputs: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._count(out, inputs)
        elif isinstance(out, (tuple, list)):
            for part in out:
                self._see(part, inputs)

    def _count(self, tensor: torch.Tensor, inputs: Any) -> None:
        for part in _parts(tensor):
            if part.is_meta and not _is_fake(part):
                continue
            key, size, holder = _storage(part)
            entry = self._entries.get(key)
            if entry is None:
                if size and not _is_input(key, inputs):
                    self._add(key, size, holder, place_of())
            elif entry.bytes != size:
                self._change(entry.component, size - entry.bytes)
                entry.bytes = size

    def _add(self, key: int, size: int, holder: Any, place: Place) -> None:
        # A storage keeps its Python object, so that both end together.
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
        return False  # such as silu_backward, which is a sequence on other devices and has a kernel on a CPU
    return func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a tensor of tensors, such as the local shard of a DTensor."""
    if isinstance(tensor, DTensor):
        yield from _parts(tensor._local_tensor)
    elif isinstance(tensor, AsyncCollectiveTensor):  # a wrapper without memory, of a tensor that is on its way
        yield from _parts(tensor.elem)
    else:
        yield tensor


def _is_input(key: int, inputs: Any) -> bool:
    """Whether the storage is that of an operation's input, so that the operation returned a view and made none."""
    tensors = [x for x in tree_iter(inputs) if isinstance(x, torch.Tensor)]
    return any(_storage(part)[0] == key for x in tensors for part in _parts(x))


def _is_fake(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "fake_mode", None) is not None


def _storage(tensor: torch.Tensor) -> tuple[int, int, Any]:
    """(Key of the storage, unique while the storage lives; its bytes; the object to hold a weak reference to)."""
    if tensor.is_mkldnn:
        # oneDNN's own layout has no storage that torch knows. Its size is about that of the numbers.
        return id(tensor), tensor.numel() * tensor.element_size(), tensor
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), storage
