"""Slices at a place that is known while tracing."""

import pytest
import torch

from rl_bridge.functional.gather import Indexing, slice_at

COLUMNS = Indexing(window=(0, 1), collapsed=(), indexed=(1,), batch=(), mode="fill")


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_slice_in_range_is_a_view(start):
    x = torch.arange(8.0).reshape(2, 4)
    columns = slice_at(x, start, 1, COLUMNS, (2, 2), float("nan"))
    torch.testing.assert_close(columns, x[:, start : start + 2])
    assert columns.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("start", [-1, 3])
def test_a_slice_out_of_range_is_filled(start):
    columns = slice_at(torch.arange(8.0).reshape(2, 4), start, 1, COLUMNS, (2, 2), -5.0)
    torch.testing.assert_close(columns, torch.full((2, 2), -5.0))
