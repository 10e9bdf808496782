"""The instrument: storages are counted once, as long as they live, wherever they hide."""

import gc
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rl_bridge.engines import Mesh
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.mesh import make_mesh
from rl_tools.plan.rehearsal import FirstWorker, world_of
from rl_tools.profile.live_bytes import ACTIVATIONS, GRADIENTS, WEIGHTS, LiveBytes
from tests.support.one_step import make, parallel, token_ids


def test_views_count_once_and_freed_storages_do_not_count():
    with LiveBytes() as live:
        x = torch.zeros(256)
        y = x[3:].view(11, 23)
        assert live.bytes == 1024
        del x
        assert live.bytes == 1024
        del y
        assert live.bytes == 0 and live.peak().bytes == 1024


def test_what_autograd_saves_counts_until_the_backward_pass():
    with LiveBytes() as live:
        x = torch.zeros(100, requires_grad=True)
        loss = x.exp().sin().sum()
        # No name refers to what exp made: exp and sin both save that array, which counts once.
        assert live.bytes == 400 + 400 + 4
        loss.backward()
        del loss
        assert live.bytes == 800 and x.grad is not None


def test_gradients_and_weights_have_their_names():
    layer = torch.nn.Linear(8, 4)
    with LiveBytes() as live:
        live.watch(layer)
        assert live.components[WEIGHTS] == (32 + 4) * 4
        layer(torch.ones(2, 8)).sum().backward()
        assert live.components[GRADIENTS] == (32 + 4) * 4
        layer.zero_grad(set_to_none=True)
        assert live.components[GRADIENTS] == 0
        live.forget()
    assert ACTIVATIONS not in live.components or live.components[ACTIVATIONS] == 0


def test_an_array_that_grows_in_place_counts_with_its_new_size():
    with LiveBytes() as live:
        x = torch.zeros(4)
        x.resize_(400)
        assert live.bytes == 1600


def test_a_view_of_what_was_there_before_makes_nothing():
    x = torch.zeros(100)
    with LiveBytes() as live:
        y = x[2:].t()
        assert live.bytes == 0
        live.track(x, WEIGHTS)
        z = y[3:]
        assert live.bytes == 400 and z.data_ptr() == x[5:].data_ptr()


def allocated(step) -> tuple[int, int]:
    """The peak and the end of a step by an independent instrument: torch's allocator tells its profiler of all."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def test_the_peak_agrees_with_torchs_own_profiler():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    x = torch.randn(8, 32, 64)

    def step() -> None:
        model(x).square().sum().backward()
        model.zero_grad(set_to_none=True)

    step()
    with LiveBytes() as live:
        step()
    most, _ = allocated(step)
    assert most > 200_000
    assert abs(live.peak().bytes / most - 1) < 0.05


def test_an_operation_with_a_kernel_of_its_own_is_not_taken_apart():
    """Torch has a sequence of operations for the gradient of SiLU, too, for devices without a kernel."""
    x = torch.randn(1000, requires_grad=True)

    def step() -> None:
        torch.nn.functional.silu(x).sum().backward()
        x.grad = None

    step()
    with LiveBytes() as live:
        step()
    assert live.peak().bytes == allocated(step)[0] == 4000 + 4 + 4


def test_a_storage_that_is_resized_without_an_operation_counts_with_its_size():
    known = torch.zeros(100)
    with LiveBytes() as live:
        live.track(known, WEIGHTS)
        made = torch.zeros(50)
        for tensor in (known, made):
            tensor.untyped_storage().resize_(0)
        assert live.bytes == 0
        made.untyped_storage().resize_(80)
        assert live.bytes == 80 and live.peak().bytes == 600
    made.untyped_storage().resize_(8)
    assert live.bytes == 80 and "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 1, 1, 2)], ids=["shard", "tensor"])
def test_what_fsdp2_gathers_and_frees_is_counted(sizes: tuple[int, ...]):
    """FSDP2 frees gathered weights, and makes room for them again, by ``UntypedStorage.resize_``."""
    ids = token_ids()
    with world_of(2):
        layout = Mesh(shard=sizes[1], tensor=sizes[3])
        model = parallel(make("Qwen2"), make_mesh(FirstWorker(2)._host, (0, 1), layout), ParallelConfig())

        def step() -> None:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
            model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None

        step()
        with LiveBytes() as live:
            step()
        assert (live.peak().bytes, live.bytes) == allocated(step)
