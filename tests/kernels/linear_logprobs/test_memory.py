"""Memory beyond inputs and results does not grow with the number of rows: live bytes are counted, tensor by tensor.

The torch backend's, whose loop backward is the Triton backend's too: Triton's interpreter copies every argument of a
kernel, so that counting under it would count the interpreter.
"""

import importlib

import pytest
import torch

from rl_kernels.row_state import finish
from tests.kernels.cases import ids, normal
from tests.kernels.live_bytes import LiveBytes

V, H, WORKSPACE = 300, 12, 8 << 10


def test_the_count_sees_what_is_alive_and_what_is_gone():
    with LiveBytes() as bytes_:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b, c
    assert (bytes_.peak, bytes_.live) == (8000, 0)


def peaks(count, *, options):
    """The most bytes alive in a forward and in a backward, beyond inputs and a row's O(1) numbers and dL/dhidden."""
    run = importlib.import_module("rl_kernels.linear_logprobs.torch")
    hidden, weight = normal(count, H, scale=0.3).float(), normal(V, H, scale=0.3, seed=1).float()
    tokens, inverse = ids(count, 1, high=V), torch.ones(count)
    support = torch.arange(8).repeat(count, 1) if "support" in options else None
    arguments = (hidden, weight, None, tokens, inverse, None, support, None, 0, WORKSPACE)
    with LiveBytes() as forward:
        state = run.forward(*arguments)
    outputs, cotangents = finish(state), (torch.ones(count, 1), torch.ones(count), torch.ones(count))
    with LiveBytes() as backward:
        results = run.backward(*arguments, outputs, cotangents)
    assert results[0].shape == hidden.shape
    return forward.peak, backward.peak


@pytest.mark.parametrize("options", ["", "support"])
def test_flat_in_the_number_of_rows(options):
    small, large = (peaks(count, options=options) for count in (48, 144))
    rows = 144 - 48
    # The state is four numbers a row; the backward's gradient H, and a handful of cotangents.
    assert large[0] - small[0] <= 4 * rows * 5
    assert large[1] - small[1] <= 4 * rows * (H + 10)
    # As much as one row of logits more would be V numbers.
    assert 4 * rows * (H + 10) < 4 * rows * V / 10
    assert large[0] <= WORKSPACE + 4 * 144 * 5
    assert large[1] <= WORKSPACE + 4 * 144 * (H + 10) + 4 * V * H
