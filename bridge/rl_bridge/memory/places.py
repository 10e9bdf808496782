"""Where an allocation came from: the component of the run that it belongs to, and the line of the step."""

import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "weights", "gradients", "optimizer", "activations"
HEAD, CACHE, TRANSFER, CHECKPOINT, OTHER = "head", "kv_cache", "transfer", "checkpoint", "other"
OFFLOADED, SERVER, REWARD = "offloaded", "server", "reward"
COMPONENTS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, CACHE, TRANSFER, CHECKPOINT, OTHER)
COMPONENTS += (SERVER, REWARD, OFFLOADED)
"""Of a run's memory. ``head``: logits and what else the head computes with; ``transfer``: buffers of a sync;
``server``: weights, keys and values of a server's process beside the worker, ``reward``: weights of reward models in
the driver's process, which a plan knows and no meter;
``offloaded``: what waits in host memory, which sums and peaks of a device leave out."""

# The innermost frame that one of these knows decides; a pair also names the function.
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
    ("rl_bridge/trainers/modules/trainable.py", "optimizer_step", OTHER),
    ("rl_bridge/rollout/", "", ACTIVATIONS),
    ("rl_bridge/parallel/offloading.py", "to_host", OFFLOADED),
    ("rl_bridge/parallel/", "", ACTIVATIONS),
    ("rl_bridge/trainers/modules/", "", ACTIVATIONS),
    ("/modeling_", "", ACTIVATIONS),
)
_OWN = ("rl_bridge/memory/", "torch/_")
_LINES = ("/rl_bridge/", "/rl_kernels/", "/modeling_")


class Place(NamedTuple):
    """``line`` is ``file:line function``; in a backward pass the operation that is differentiated follows."""

    component: str
    line: str


class _Known(NamedTuple):
    component: str | None
    own: bool
    line: str | None


_known: dict[CodeType, _Known] = {}


def _about(code: CodeType) -> _Known:
    """What the file and the name of a function say; looked up once a function."""
    found = _known.get(code)
    if found is None:
        file, name = code.co_filename.replace("\\", "/"), code.co_name
        own = any(part in file for part in _OWN)
        component = next((c for part, of, c in _OF_CODE if part in file and of in ("", name)), None)
        short = next((file[file.rindex(part) + 1 :] for part in _LINES if part in file), None)
        found = _known[code] = _Known(None if own else component, own, None if own else short)
    return found


def place_of(frame: FrameType | None = None) -> Place:
    """The place of what is being allocated, by the stack of the calling thread."""
    frame = sys._getframe(1) if frame is None else frame
    component = line = None
    while frame is not None and (component is None or line is None):
        about = _about(frame.f_code)
        if about.component is not None and component is None:
            component = about.component
        if about.line is not None and line is None:
            line = f"{about.line}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None:
        line = f"{line or 'backward'} ({node.name()})"
        component = component or ACTIVATIONS
    return Place(component or OTHER, line or "outside of rl_bridge")
