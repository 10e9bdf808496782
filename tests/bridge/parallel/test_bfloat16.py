"""Arithmetic in bfloat16, master weights in float32: on several processes and on one; other modules; agreement."""

import pytest
import torch
from torch import nn

from tests.support import one_step
from tests.support.ranks import as_rank, found_by_ranks

LAYOUTS = {"shard": ("Llama", (1, 2, 1, 1)), "tensor": ("Qwen3", (1, 1, 1, 2))}
# Of ‖difference‖ / ‖float32‖: a rounding is at most 2⁻⁹ = 0.002. One process has these errors too.
FORWARD, GRADIENT, UPDATED = 0.02, 0.1, 0.002


class Blocks(nn.Module):
    """No transformers model: a list of layers, a layer beside it, a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.scale * block(x).tanh()
        return x


def blocks():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Blocks(), torch.randn(4, 2, 3)


def gradients_of_blocks(number=None, mesh=None):
    from rl_bridge.parallel.parallelize import parallelize

    module, rows = blocks()
    parallelize(module, mesh)
    module(rows if number is None else rows[2 * number : 2 * number + 2]).square().sum().backward()
    return {name: one_step.whole(p.grad).numpy() for name, p in module.named_parameters()}


def bfloat16(host, family, sizes):
    from rl_bridge.parallel.config import ParallelConfig

    mesh = None if sizes is None else one_step.mesh_of(host, sizes)
    model = one_step.parallel(one_step.make(family), mesh, ParallelConfig(param_dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = one_step.token_ids()
    ids = ids if sizes is None else ids[one_step.rows_of(sizes, host.slot)]
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = {name: value.numpy() for name, value in one_step.one_step(model, ids, mesh).items()}
    assert set(seen) == {torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return found


def gathered_after_forward(host, reshard):
    """Whether a layer's weights, and the root's, are whole between the forward and the backward pass."""
    from torch.distributed.tensor import DTensor

    from rl_bridge.parallel.config import ParallelConfig
    from rl_bridge.parallel.fsdp import reshard as free

    mesh = one_step.mesh_of(host, (1, 2, 1, 1))
    model = one_step.parallel(one_step.make("Llama"), mesh, ParallelConfig(reshard_after_forward=reshard))
    watched = model.model.layers[0].mlp.up_proj, model.lm_head
    model(input_ids=one_step.token_ids(), use_cache=False)
    found = [not isinstance(module.weight, DTensor) for module in watched]
    free(model)
    assert all(isinstance(module.weight, DTensor) for module in watched)
    return found


def rank(number, address, queue):
    def work():
        from rl_bridge.parallel.mesh import agree_max

        host = one_step.host_of_rank()
        found = {name: bfloat16(host, *case) for name, case in LAYOUTS.items()}
        # A group of both and a mesh of one, beside each other.
        found["one"] = bfloat16(host, "Qwen3", None)
        found["blocks"] = gradients_of_blocks(number, one_step.mesh_of(host, (1, 2, 1, 1)))
        found["gathered"] = [gathered_after_forward(host, reshard) for reshard in (True, False)]
        group = host.group((0, 1))
        found["agreed"] = [agree_max(value, group) for value in (number, 2.5 - number)]
        return found

    as_rank(work, 2, number, address, queue)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(rank, 2, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", [*LAYOUTS, "one"])
def test_one_step_is_near_that_of_float32(ranks, name):
    family, sizes = LAYOUTS.get(name, ("Qwen3", (1, 1, 1, 1)))
    expected = one_step.in_one_process(family)
    for number, found in ranks:
        number = number if name in LAYOUTS else 0
        assert found[name].keys() == expected.keys()
        errors = one_step.relative_errors(found[name], expected, sizes, number)
        for kind, error in errors.items():
            bound = FORWARD if kind.startswith("rows of") else UPDATED if kind == "after" else GRADIENT
            assert error < bound, (kind, error)
        assert errors["rows of logits"] > 1e-3, "that was float32"


def test_another_module_is_sharded_by_its_lists(ranks):
    wanted = gradients_of_blocks()
    for _, found in ranks:
        assert found["blocks"].keys() == wanted.keys()
        for name, gradient in found["blocks"].items():
            torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(wanted[name]))


def test_layers_stay_gathered_for_the_backward_pass_only_without_resharding(ranks):
    for _, found in ranks:
        assert found["gathered"] == [[False, True], [True, True]]


def test_workers_agree_on_the_largest(ranks):
    for _, found in ranks:
        assert found["agreed"] == [1, 2.5]
        assert [type(value) for value in found["agreed"]] == [int, float]
