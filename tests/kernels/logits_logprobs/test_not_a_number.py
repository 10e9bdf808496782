"""NaN in a row that counts is not taken for an excluded entry: it is in the row's results and gradient, on every
backend, and in no other row's.
"""

import pytest
import torch

from tests.kernels.operations import logits_logprobs
from tests.kernels.registry import backends


@pytest.mark.parametrize("backend", backends("logits_logprobs"))
@pytest.mark.parametrize("option", [{}, {"softcap": 3.0}, {"allowed_tokens": torch.tensor([[0, 5, 4]] * 4)}])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # how the interpreter takes a maximum
def test_not_a_number_stays_in_its_row(backend, option):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    logits[1, 4], logits[3, 0] = float("nan"), float("nan")
    logits[0, 2] = -float("inf")
    mask = torch.tensor([True, True, True, False])
    leaf = logits.clone().requires_grad_()
    out = logits_logprobs(leaf, torch.tensor([0, 5, 4, 0]), mask=mask, backend=backend, **option)
    for x in out:
        assert x.isnan().tolist() == [False, True, False, False]
    out.logprobs[:3].sum().backward()
    assert leaf.grad is not None and leaf.grad.isnan().any(-1).tolist() == [False, True, False, False]
