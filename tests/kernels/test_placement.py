"""Every tensor that a test gives to an operation is on the device under test. A device that this machine does not have
stands in for a GPU: an operation that takes tensors of both is an error there, too.
"""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_kernels
from tests.kernels import operations, registry
from tests.kernels.cases import N, V, ids, masked, normal
from tests.kernels.launches import CALLS
from tests.kernels.operations import placed, returned
from tests.kernels.registry import each_backend, imitates_a_gpu
from tests.kernels.stand_in import NAME, Elsewhere, StandIn

HERE = Path(__file__).parent


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(registry, "DEVICE", NAME)
    with StandIn():
        yield


@imitates_a_gpu
@each_backend(*CALLS)
def test_an_operation_and_its_gradient_run_on_the_device(monkeypatch, elsewhere, operation, backend):
    """In the operation's own code neither is a tensor of the CPU made, as a mixture of the two would show."""
    devices, moved = set(), operations._Moved.apply

    def seen(x, device):
        devices.add(device)
        return moved(x, device)

    monkeypatch.setattr(operations._Moved, "apply", seen)
    CALLS[operation](backend)
    assert devices == {NAME}


@imitates_a_gpu
def test_options_and_gradients_cross(elsewhere):
    leaf = normal(N, V).float().requires_grad_()
    options: dict[str, Any] = {"temperature": torch.linspace(0.5, 2.0, N), "mask": masked()}
    options["allowed_tokens"] = torch.rand(N, V) < 0.9
    found = operations.logits_logprobs(leaf, ids(N), **options)
    wanted = rl_kernels.logits_logprobs(leaf, ids(N), **options)
    assert all(torch.equal(a, b) and not isinstance(a, Elsewhere) for a, b in zip(found, wanted, strict=True))
    for out in (found, wanted):
        assert not isinstance(torch.autograd.grad(out.entropy.sum(), leaf)[0], Elsewhere)


@imitates_a_gpu
def test_a_tensor_that_stayed_on_the_cpu_is_found(elsewhere):
    with pytest.raises(AssertionError, match=r"tensors of two devices: of the CPU's one has shape \(7, 1\)"):
        rl_kernels.logits_logprobs(placed(normal(N, V).float()), ids(N))


@imitates_a_gpu
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0),
        torch.zeros(0, 3),
        normal(4, 6).T,
        normal(4, 6)[1:, ::2],
        normal(1, 6).expand(5, 6),
        torch.as_strided(torch.arange(100.0), (3, 2), (40, 1), 5),
    ],
)
def test_a_copy_has_the_strides_and_the_offset(elsewhere, x):
    copy = placed(x)
    assert isinstance(copy, Elsewhere) and copy.held is not x and torch.equal(returned(copy), x)
    assert (copy.stride(), copy.storage_offset()) == (x.stride(), x.storage_offset())


def test_without_a_gpu_nothing_moves(monkeypatch):
    monkeypatch.setattr(registry, "DEVICE", "cpu")
    x = normal(3)
    assert placed([x])[0] is x is returned(x)


def calls_past_the_helper(source: str) -> list[str]:
    """Operations that are not the helper's; custom operations, backends and kernels in a file that places nothing."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports if node.module == "rl_kernels" for alias in node.names}
    found = sorted(names & set(rl_kernels.__all__))
    if {"at_device", "placed", "imitates_a_gpu"} & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        return found
    found += ["a backend's Problem" for node in imports if node.module == "rl_kernels.common.arguments"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            launch = isinstance(node.func, ast.Subscript) and isinstance(node.func.slice, ast.Tuple)
            custom = ast.unparse(node.func).startswith(("torch.ops.rl_kernels", "torch.library.opcheck"))
            found += [ast.unparse(node)] if launch or custom else []
    return found


# JAX has its own devices; the rest runs in no backend, or in an emulator of a GPU on the CPU.
OTHERS = {"in_jax", "arg_specs", "gluon_emulator", "operations.py", "test_placement.py"}
FILES = [file for file in sorted(HERE.rglob("*.py")) if not OTHERS & set(file.parts)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HERE)))
def test_no_test_calls_an_operation_past_the_helper(file):
    assert not calls_past_the_helper(file.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "from rl_kernels import backends, sample",
        "torch.library.opcheck(torch.ops.rl_kernels.sample, (x,))",
        "kernel[(1,)](x)",
        "from rl_kernels.common.arguments import Problem, Rows",
    ],
)
def test_the_check_finds(source):
    assert calls_past_the_helper(source)
