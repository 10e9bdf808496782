"""Activations that wait in host memory for the backward pass: torch's hooks of saved tensors, layer by layer.

A storage goes to the host once, however many operations and views of a layer save it. On a GPU the copies run beside
the computation, on streams of their own through pinned memory: out while the next layers compute, back while the layer
behind computes its gradients. On a CPU device and host are one memory, and the same copies are made one after another.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

LEAST = 1024
"""Bytes: a smaller storage stays, as its copy would cost more than its place."""
AHEAD = 2
"""Layers that compute while the copies of one may still be on their way."""


class ActivationOffload:
    """State that the layers of one model share: each forward pass of a layer is a visit, in the order of the passes."""

    def __init__(self) -> None:
        self._copies_by_storage: dict[int, _Entry] = {}
        self._newest: weakref.ref[_Visit] | None = None
        self._current: weakref.ref[_Visit] | None = None
        self._streams: dict[torch.device, _Streams] = {}

    def run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The layer's forward pass, whose saved activations go to the host."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        visit = _Visit(self, Weights(layer), None if self._newest is None else self._newest())
        self._newest = weakref.ref(visit)
        self._copies_by_storage = {
            key: entry for key, entry in self._copies_by_storage.items() if entry.storage() is not None
        }
        with torch.autograd.graph.saved_tensors_hooks(visit.pack, visit.unpack):
            return forward(*args, **kwargs)

    def copy_of(self, tensor: Tensor) -> "_Copy":
        """The copy of the tensor's storage: the one that there is, unless the numbers have changed since."""
        storage = tensor.untyped_storage()
        entry = self._copies_by_storage.get(storage._cdata)
        if entry is not None and entry.storage() is storage and entry.version == tensor._version:
            copy = entry.copy()
            if copy is not None and copy.host.dtype == tensor.dtype:
                return copy
        with torch.no_grad():
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            copy = _Copy(flat, self._streams_of(tensor.device))
        self._copies_by_storage[storage._cdata] = _Entry(weakref.ref(storage), tensor._version, weakref.ref(copy))
        return copy

    def enter(self, visit: "_Visit") -> None:
        """The backward pass has come to this visit: its activations come back, those of the visit before it go."""
        before = None if self._current is None else self._current()
        if before is visit:
            return
        self._current = weakref.ref(visit)
        needed = set(visit.copies)
        following = visit.earlier()
        if following is not None and self._streams:
            needed |= set(following.copies)
        if before is not None:
            for copy in set(before.copies) - needed:
                copy.release()
        if self._streams:
            for near_visit in (visit, following):
                for copy in () if near_visit is None else near_visit.copies:
                    copy.start()

    def _streams_of(self, device: torch.device) -> "_Streams | None":
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]


class _Streams(NamedTuple):
    out: torch.cuda.Stream
    back: torch.cuda.Stream


class _Entry(NamedTuple):
    """``storage`` is the storage's own object, which ends with the storage: a later one at its address is another."""

    storage: "weakref.ref[Any]"
    version: int
    copy: "weakref.ref[_Copy]"


class _Saved(NamedTuple):
    """A tensor that an operation saved, as a view of the copy of its storage."""

    copy: "_Copy"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Visit:
    """One forward pass of one layer. It lives as long as the graph holds any of what the pass saved."""

    def __init__(self, offload: ActivationOffload, weights: "Weights", earlier: "_Visit | None") -> None:
        self.copies: weakref.WeakSet[_Copy] = weakref.WeakSet()
        self._offload, self._weights = offload, weights
        self._earlier = None if earlier is None else weakref.ref(earlier)
        visit: _Visit | None = self
        for _ in range(AHEAD):
            visit = None if visit is None else visit.earlier()
        for copy in () if visit is None else visit.copies:
            copy.leave()

    def earlier(self) -> "_Visit | None":
        """The pass before, whose backward pass comes next."""
        return None if self._earlier is None else self._earlier()

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        """The value for autograd in the tensor's place. Weights, integers and small tensors stay where they are."""
        if not _can_move(tensor) or self._weights.have(tensor):
            return tensor
        copy = self._offload.copy_of(tensor)
        self.copies.add(copy)
        return _Saved(copy, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: "Tensor | _Saved") -> Tensor:
        """The tensor, on its device again."""
        if isinstance(saved, Tensor):
            return saved
        self._offload.enter(self)
        with torch.no_grad():
            return saved.copy.use().as_strided(saved.size, saved.stride, saved.offset)


class _Copy:
    """The numbers of a storage: in host memory, and on their device as long as a layer there needs them."""

    def __init__(self, flat: Tensor, streams: _Streams | None) -> None:
        self._home, self._streams = flat.device, streams
        self._copied: torch.cuda.Event | None = None
        self._ready: torch.cuda.Event | None = None
        self._device: Tensor | None = None
        if streams is None:
            self.host = to_host(flat)
            return
        # Until its copy is complete the source is held here: freed earlier, its memory would be written to again.
        self._device = flat
        self.host = to_host(flat, streams.out)
        self._copied = _event(streams.out)

    def leave(self) -> None:
        """The layers after this one may take the device's memory."""
        if self._streams is not None and self._device is not None and self._ready is None:
            self._wait(self._copied)
            self._device = None

    def start(self) -> None:
        """Begin to bring the numbers back, if they are not there."""
        if self._device is not None:
            return
        if self._streams is None:
            self._device = to_device(self.host, self._home)
            return
        back = self._streams.back
        if self._copied is not None:
            back.wait_event(self._copied)
        self._device = to_device(self.host, self._home, back)
        self._ready = _event(back)

    def use(self) -> Tensor:
        """The numbers on the device, flat."""
        self.start()
        self._wait(self._ready)
        assert self._device is not None
        return self._device

    def release(self) -> None:
        """Give the device's memory back, once what is on its way there has come."""
        if self._device is not None:
            self._wait(self._copied if self._ready is None else self._ready)
        self._device = self._ready = None

    def _wait(self, event: "torch.cuda.Event | None") -> None:
        """Let all that is computed from now on come after the event."""
        if event is not None:
            torch.cuda.current_stream(self._home).wait_event(event)

    def __del__(self) -> None:
        """The same, where a graph is dropped without its backward pass."""
        if self._device is not None:
            self.release()


def to_host(flat: Tensor, stream: "torch.cuda.Stream | None" = None) -> Tensor:
    """A copy in host memory: with a stream, pinned, and complete when the stream is."""
    if stream is None:
        return flat.to("cpu", copy=True)
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    with torch.cuda.stream(stream):
        host.copy_(flat, non_blocking=True)
    return host


def to_device(host: Tensor, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> Tensor:
    """A copy on the device, in memory of the stream that computes: with another stream, complete when that one is."""
    if stream is None:
        return host.to(device, copy=True)
    flat = torch.empty(host.shape, dtype=host.dtype, device=device)
    # The memory may still be read by operations that were queued before it was free.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        flat.copy_(host, non_blocking=True)
    return flat


class Weights:
    """A layer's parameters and buffers as they are now: FSDP has gathered them for the pass."""

    def __init__(self, layer: nn.Module) -> None:
        tensors = (*layer.parameters(), *layer.buffers())
        parts = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        self._storages = {p.untyped_storage()._cdata for p in parts if p.layout == torch.strided and not p.is_mkldnn}
        self._shapes = {tuple(sorted(part.shape)) for part in parts if part.dim() > 1}

    def have(self, tensor: Tensor) -> bool:
        """Whether the tensor is one of them, or autocast's copy of one: of its shape, in a precision of its own.

        An activation of the same shape stays on the device, too.
        """
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        kind = tensor.device.type
        low = torch.is_autocast_enabled(kind) and tensor.dtype == torch.get_autocast_dtype(kind)
        return low and tuple(sorted(tensor.shape)) in self._shapes


def _can_move(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter, FakeTensor) or tensor.layout != torch.strided:
        return False
    moved = tensor.is_floating_point() and not tensor.is_mkldnn
    return moved and tensor.untyped_storage().nbytes() >= LEAST


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    return cast(torch.cuda.Event, stream.record_event())
