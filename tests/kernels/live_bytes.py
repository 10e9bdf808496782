"""Memory that torch operations hold, counted tensor by tensor."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.seen:
                    self.seen.add(key)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key, size):
        self.seen.discard(key)
        self.live -= size
