"""Memory beyond inputs and results does not grow with the number of rows: live bytes are counted, tensor by tensor.

Triton's interpreter copies every argument of a kernel, so that counting under it would count the interpreter: the
Triton backend's kernels are left out, and what is around them is counted.
"""

import importlib

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.common.blocks import Cost, blocks, row_blocks
from rl_kernels.common.row_state import finalize_row_state
from rl_kernels.linear_logprobs.api import CPU_WORKSPACE, FORWARD_WORKSPACE, GPU_WORKSPACE
from rl_kernels.linear_logprobs.backward import Needed
from tests.kernels.cases import ids, normal
from tests.kernels.live_bytes import LiveBytes
from tests.kernels.operations import linear_logprobs, linear_topk_logprobs, placed
from tests.kernels.registry import DEVICE

V, H, WORKSPACE = 300, 12, 8 << 10


def test_the_count_sees_what_is_alive_and_what_is_gone():
    with LiveBytes() as bytes_:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b, c
    assert (bytes_.peak, bytes_.live) == (8000, 0)


def peaks(backend, count, *, options):
    """The most bytes alive in a forward and in a backward, beyond inputs and a row's O(1) numbers and dL/dhidden."""
    run = importlib.import_module(f"rl_kernels.linear_logprobs.{backend}")
    hidden, weight = normal(count, H, scale=0.3).float(), normal(V, H, scale=0.3, seed=1).float()
    tokens, inv_temperature = ids(count, 1, high=V), torch.ones(count)
    allowed_tokens = torch.arange(8).repeat(count, 1) if "allowed_tokens" in options else None
    rows = Rows(tokens, inv_temperature, None, allowed_tokens, None)
    arguments = placed((Problem(hidden, weight, None, rows, 0), WORKSPACE))
    with LiveBytes() as forward:
        state = run.forward(*arguments)
    outputs = finalize_row_state(state)
    cotangents = placed((torch.ones(count, 1), torch.ones(count), torch.ones(count)))
    with LiveBytes() as backward:
        results = run.backward(*arguments, outputs, cotangents, Needed())
    assert results[0].shape == hidden.shape
    return forward.peak, backward.peak


class NotLaunched:
    def __getitem__(self, grid):
        return lambda *arguments, **options: None


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("options", ["", "allowed_tokens"])
def test_flat_in_the_number_of_rows(monkeypatch, backend, options):
    for kernel in ("state_kernel", "dlogits_kernel"):
        monkeypatch.setattr(importlib.import_module("rl_kernels.linear_logprobs.triton"), kernel, NotLaunched())
    small, large = (peaks(backend, count, options=options) for count in (200, 400))
    rows = 400 - 200
    # So many rows that the blocks, which are of about one size, are as large as they may be. The state is four numbers
    # a row; the backward's gradient H, and a handful of cotangents.
    assert large[0] - small[0] <= 4 * rows * 5
    assert large[1] - small[1] <= 4 * rows * (H + 10)
    # As much as one row of logits more would be V numbers.
    assert 4 * rows * (H + 10) < 4 * rows * V / 10
    assert large[0] <= WORKSPACE + 4 * 400 * 5
    assert large[1] <= WORKSPACE + 4 * 400 * (H + 10) + 4 * V * H


@pytest.mark.parametrize(("vocabulary", "hidden_size"), [(128256, 4096), (152064, 3584), (300, 12), (1, 1), (0, 4)])
@pytest.mark.parametrize("cost", [Cost(6, 6, 0), Cost(4, 10, 4), Cost(20, 12, 8, 9216)])
def test_a_block_holds_what_fits(vocabulary, hidden_size, cost):
    def held(tokens, vocab):
        a_token = vocab * cost.logit + hidden_size * cost.token_unit + cost.token
        return tokens * a_token + hidden_size * vocab * cost.weight_unit

    for workspace in (64 << 20, 512 << 20):
        tokens, vocab = blocks(vocabulary, hidden_size, workspace, cost)
        assert held(tokens, vocab) <= workspace < held(tokens + 128, vocab)
        assert vocab <= max(1, vocabulary)
    # One token and one entry of the vocabulary are the least there is.
    assert blocks(vocabulary, hidden_size, 1, cost) == (1, 1)


def test_blocks_of_a_model_on_a_gpu_are_near_squares_of_whole_tiles():
    tokens, vocab = blocks(128256, 4096, GPU_WORKSPACE, Cost(6, 6, 0))
    assert tokens % 128 == 0 == vocab % 128 and 0.8 < tokens / vocab < 1.25
    # What is read and written again for each block, over the time of the matmuls (docs/kernels.md).
    assert 245 * (1 / tokens + 1 / vocab) < 0.07


def test_the_forward_takes_64_mib_at_most(monkeypatch):
    seen = {}
    for operation in ("linear_logprobs", "topk_logprobs"):
        module = importlib.import_module(f"rl_kernels.{operation}.torch")
        whole = module.forward

        def forward(*arguments, whole=whole, operation=operation):
            seen[operation] = arguments[-1]
            return whole(*arguments)

        monkeypatch.setattr(module, "forward", forward)
    hidden, weight = normal(3, H).float(), normal(V, H, seed=1).float()
    for asked, given in (
        (None, CPU_WORKSPACE if DEVICE == "cpu" else FORWARD_WORKSPACE),
        (1 << 30, 64 << 20),
        (5000, 5000),
    ):
        linear_logprobs(hidden, weight, ids(3, high=V), workspace=asked, backend="torch")
        linear_topk_logprobs(hidden, weight, 2, workspace=asked, backend="torch")
        assert seen == {"linear_logprobs": given, "topk_logprobs": given}
    assert FORWARD_WORKSPACE == 64 << 20 < GPU_WORKSPACE == 512 << 20


@pytest.mark.parametrize(
    ("count", "size", "wanted"),
    [
        (8192, 7680, [4096, 4096]),
        (8192, 3200, [2816, 2816, 2560]),
        (7, 4, [4, 3]),
        (12, 5, [4, 4, 4]),
        (5, 9, [5]),
        (0, 4, []),
    ],
)
def test_blocks_of_rows_are_of_about_one_size(count, size, wanted):
    """7680 and 512 tokens would read and write all of dL/dweight for the last 512."""
    assert [tokens.stop - tokens.start for tokens in row_blocks(count, None, size)] == wanted
    mask = torch.arange(2 * count) % 2 == 1
    found = [len(tokens) for tokens in row_blocks(2 * count, mask, size)]
    assert [n for n in found if n] == wanted
