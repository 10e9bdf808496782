"""The cases of rl_fn's registry in several sizes."""

import importlib
import sys

import jax
import numpy as np
import torch

from tests.bridge.functional.both import to_torch, weights
from tests.rl_fn.registry import CASES

FOLDER = "tests.rl_fn.cases"
# Rows, tokens, group, vocabulary. Tokens: one block of the recurrence, three, two levels of blocks, less than a block.
# All differ from the sizes that cases fix: equal sizes are another pattern of broadcasting, and another program.
SIZES = [(14, 8, 9, 13), (7, 19, 10, 31), (9, 67, 7, 20), (11, 7, 6, 12)]


def registry(rows, tokens, group, vocabulary):
    """The cases of rl_fn's registry with other sizes: the same modules once more, on another `base`."""
    known = {name: module for name, module in sys.modules.items() if name.startswith(f"{FOLDER}.")}
    for name in known:
        del sys.modules[name]
    try:
        base = importlib.import_module(f"{FOLDER}.base")
        base.B, base.T, base.G, base.V = rows, tokens, group, vocabulary
        for name in sorted(known):
            importlib.import_module(name)
        return base.CASES
    finally:
        for name in [name for name in sys.modules if name.startswith(f"{FOLDER}.")]:
            del sys.modules[name]
        sys.modules.update(known)


REGISTRIES = [registry(*sizes) for sizes in SIZES]
# Drawing from a random key has no rule; what takes no array is not traced.
NAMES = [
    name
    for name, case in CASES.items()
    if not case.random and any(isinstance(x, np.ndarray) for x in jax.tree.leaves(case.make(0)))
]


def arguments(name, cases):
    """The case's tensors in these sizes, in a flat list, and the function of them: what is static is the first's."""
    leaves, tree = jax.tree.flatten(REGISTRIES[0][name].make(0))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    drawn = jax.tree.leaves(cases[name].make(0))

    def filled(function, tensors):
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return function(*args, **kwargs)

    return [to_torch(drawn[place]) for place in places], filled


def value_and_gradient(function, filled, tensors):
    tensors = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    leaves = [x for x in jax.tree.leaves(filled(function, tensors)) if isinstance(x, torch.Tensor)]
    floats = [x for x in leaves if x.requires_grad]
    total = sum((torch.from_numpy(weights(x)) * x.float()).sum() for x in floats)
    active = [x for x in tensors if x.requires_grad]
    return leaves, torch.autograd.grad(total, active, allow_unused=True) if floats else ()
