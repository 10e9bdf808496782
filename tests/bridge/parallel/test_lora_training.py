"""LoRA adapters trained over several processes: losses, gradients, norm and weights are those of one process."""

from functools import partial

import pytest
import torch

from rl_bridge.common.random_numbers import generators
from tests.support.one_step import assert_equal, host_of_rank, mesh_of, whole
from tests.support.ranks import as_rank, found_by_ranks

# replicate, shard, sequence, tensor; and what is set besides
LAYOUTS = {
    "shard": ((1, 2, 1, 1), {}),
    "replicate, packed": ((2, 1, 1, 1), {"packing": True}),
    "sequence": ((1, 1, 2, 1), {}),
    "mixture": ((1, 2, 1, 1), {"mixture": True}),
    "mixture, recomputed": ((1, 2, 1, 1), {"mixture": True, "activations": "full"}),
    "recomputed": ((1, 2, 1, 1), {"activations": "full"}),
}
TARGETS = ["q_proj", "lm_head", "embed_tokens", "experts.gate_up_proj", "experts.down_proj", "gate.weight"]
RESTORED = ("mixture", "recomputed")
ROWS = 4


def batch():
    from rl_bridge.data.token_batch import TokenBatch

    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 5, 7, 8])
    mask = (torch.arange(9) < lengths[:, None]) & (torch.arange(9) >= 2)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(ROWS, 9) * mask
    old = (-3.0 + 0.1 * torch.randn(ROWS, 9, generator=g)) * mask
    tokens = torch.randint(1, 20, (ROWS, 9), generator=g)
    return TokenBatch(tokens, mask, lengths, torch.arange(ROWS), old_logprobs=old, advantages=advantages)


def source_of_model(mixture):
    """A dense model with adapters of its linear layers, or a mixture with adapters of all kinds (MUSB-1, MUSB-2)."""
    from rl_bridge.models.lora import LoRASource
    from rl_bridge.models.model_source import StateSource
    from rl_bridge.models.small import TinySource
    from tests.support.lora_families import tiny

    if mixture:
        return LoRASource(StateSource(tiny("mixtral")), 4, 16.0, TARGETS, seed=5)
    base = TinySource(vocabulary=20, hidden=16, layers=2, heads=4, key_value_heads=2, seed=3)
    return LoRASource(base, 4, 16.0, seed=5)


def module_of(mesh, *, packing=False, activations="keep", mixture=False):
    """As an engine makes it."""
    import rl_fn
    from rl_bridge.engines.worker import torch_worker
    from rl_bridge.modules.policy import PolicyModule
    from rl_bridge.modules.scoring import ScoringConfig
    from rl_bridge.modules.trainable import OptimizerConfig
    from rl_bridge.parallel.config import ParallelConfig

    make = partial(
        PolicyModule,
        source_of_model(mixture),
        OptimizerConfig(learning_rate=1e-2, warmup=0, max_grad_norm=0.05),
        rl_fn.recipes.dapo(),
        updates=4,
        scoring=ScoringConfig(temperature=0.7, packing=packing),
        parallel=ParallelConfig(activations=activations),
    )
    return torch_worker(make, mesh, torch.device("cpu"), generators())


def training(mesh, rows, options):
    """Two updates: with B at zero the first one gives A no gradient. Everything whole; and the module."""
    from rl_bridge.weights.manifest import full
    from rl_bridge.weights.source import source_of

    module, mine = module_of(mesh, **options), batch().rows(rows)
    frozen = {name: whole(p) for name, p in module.model.named_parameters() if not p.requires_grad}
    found = {}
    for step in range(2):
        found[f"rows of logprobs {step}"] = module.token_logprobs(mine)
        metrics = module.train_step(mine, float(batch().mask.sum()))
        found |= {f"sum of {name} {step}": ratio.total for name, ratio in metrics.items()}
        graded = {name: whole(p.grad) for name, p in module.model.named_parameters() if p.grad is not None}
        assert graded.keys() == {name for name, _ in module.model.named_parameters() if "lora_" in name}
        found |= {f"grad {step} {name}": gradient for name, gradient in graded.items()}
        found[f"norm {step}"] = torch.tensor(module.optimizer_step()["grad_norm"])
        merged = source_of(module.model).stream(adapter=False)
        found |= {f"merged {step} {name}": full(tensor).clone() for name, tensor in merged}
    after = {name: whole(p) for name, p in module.model.named_parameters()}
    assert frozen and all(torch.equal(after[name], value) for name, value in frozen.items())
    return {name: value.detach().float() for name, value in found.items()}, module


def restored(module, mesh, options):
    """Whether a new module with the checkpoint of this one makes the same next update."""
    twin, state = module_of(mesh, **options), module.checkpoint_state()
    assert set(state["optimizer"]["state"]) == {name for name in state["model"] if "lora_" in name}
    twin.load_checkpoint_state(state)
    for one in (module, twin):
        one.train_step(batch(), float(batch().mask.sum()))
        one.optimizer_step()
    pairs = zip(module.model.parameters(), twin.model.parameters(), strict=True)
    return all(torch.equal(whole(a), whole(b)) for a, b in pairs) and twin.weights_version() == 3


def on_layouts(host):
    found = {}
    for name, (sizes, options) in LAYOUTS.items():
        mesh = mesh_of(host, sizes)
        rows = slice(0, ROWS) if sizes[2] > 1 else slice(host.slot * 2, host.slot * 2 + 2)
        values, module = training(mesh, torch.arange(ROWS)[rows], options)
        found[name] = {key: value.numpy() for key, value in values.items()}
        if name in RESTORED:
            found.setdefault("restored", []).append(restored(module, mesh, options))
    try:
        module_of(mesh_of(host, (1, 1, 1, 2)))
    except ValueError as error:
        found["tensor"] = str(error)
    return found


def rank(number, address, queue):
    as_rank(lambda: on_layouts(host_of_rank()), 2, number, address, queue)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return found_by_ranks(rank, 2, tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def alone():
    return {mixture: training(None, torch.arange(ROWS), {"mixture": mixture})[0] for mixture in (False, True)}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_are_those_of_one_process(ranks, alone, name):
    sizes, options = LAYOUTS[name]
    alone = alone[options.get("mixture", False)]
    cut = sizes[2] == 1
    joined = {}
    for key in alone:
        values = [torch.from_numpy(found[name][key]) for _, found in ranks]
        if cut and key.startswith("sum of"):
            values = [values[0] + values[1]] * 2
        if cut and key.startswith("rows of"):
            values = [torch.cat(values)] * 2
        assert torch.equal(*values)
        joined["all " * key.startswith("rows of") + key] = values[0].numpy()
    wanted = {"all " * key.startswith("rows of") + key: value for key, value in alone.items()}
    assert_equal([(0, {name: joined})], name, wanted, sizes)


def test_the_reference_moves(alone):
    for found, adapted in zip(alone.values(), (14, 10), strict=True):
        weights = [key.removeprefix("merged 0 ") for key in found if key.startswith("merged 0 ")]
        assert sum(not torch.equal(found[f"merged 0 {key}"], found[f"merged 1 {key}"]) for key in weights) == adapted
        assert all(float(found[f"norm {step}"]) > 0.05 for step in (0, 1))
        graded = {key: bool(value.any()) for key, value in found.items() if key.startswith("grad")}
        begins = ("lora_B", "lora_embedding_A")
        assert all(
            nonzero != key.startswith("grad 0") or any(b in key for b in begins) for key, nonzero in graded.items()
        )


@pytest.mark.long
def test_a_checkpoint_goes_on_where_it_was(ranks):
    assert [found["restored"] for _, found in ranks] == [[True, True]] * 2


@pytest.mark.long
def test_tensor_parallelism_is_refused(ranks):
    for _, found in ranks:
        assert found["tensor"] == "LoRA adapters have no tensor-parallel plan: train them with tensor=1, not 2"
