"""Memory beyond inputs and results does not grow with the number of rows."""

import importlib

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from tests.kernels.cases import ids, normal
from tests.kernels.live_bytes import LiveBytes
from tests.kernels.operations import placed
from tests.kernels.registry import backends

V, H, K, WORKSPACE = 300, 12, 3, 8 << 10


class Nothing:
    """A kernel that does nothing. The interpreter makes tensors of its own; what a kernel does changes no size."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def peak(count, *, allowed, backend="torch"):
    run = importlib.import_module(f"rl_kernels.topk_logprobs.{backend}")
    hidden, weight = normal(count, H, scale=0.3).float(), normal(V, H, scale=0.3, seed=1).float()
    inv_temperature, allowed_tokens = torch.ones(count), torch.arange(8).repeat(count, 1) if allowed else None
    hidden, weight, inv_temperature, allowed_tokens = placed((hidden, weight, inv_temperature, allowed_tokens))
    tokens = placed(torch.empty(count, 0, dtype=torch.long))
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as found:
        for name in ("search_kernel", "keep_kernel") if backend == "triton" else ():
            patch.setattr(run, name, Nothing())
        rows = Rows(tokens, inv_temperature, None, allowed_tokens, None)
        run.forward(Problem(hidden, weight, None, rows, 0), K, WORKSPACE)
    return found.peak


@pytest.mark.long
@pytest.mark.parametrize("backend", [b for b in backends("topk_logprobs") if b != "reference"])
@pytest.mark.parametrize("allowed", [False, True])
def test_flat_in_the_number_of_rows(allowed, backend):
    small, large = (peak(count, allowed=allowed, backend=backend) for count in (200, 400))
    # Results: k values of 4 bytes and ids of 8, a state of three numbers.
    a_row = 12 * K + 4 * 3
    assert large - small <= (400 - 200) * a_row < (400 - 200) * 4 * V / 10
    assert large <= WORKSPACE + 400 * a_row


def test_from_logits_in_chunks(monkeypatch):
    run = importlib.import_module("rl_kernels.topk_logprobs.torch")
    monkeypatch.setattr(run, "_CHUNK", 4 * V)
    logits, found = placed(ids(60, V, high=20).float()), []
    for count in (20, 60):
        with LiveBytes() as live:
            found.append(run.ids(logits[:count], None, None, K))
        found.append(live.peak)
    assert found[3] - found[1] <= 40 * 8 * K
    assert torch.equal(found[2][:20], found[0])
    assert torch.equal(found[2], logits.sort(dim=-1, descending=True, stable=True).indices[:, :K])
