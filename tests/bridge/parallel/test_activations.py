"""What layers keep for the backward pass: gradients are the same to the bit, and the device keeps less."""

import functools
import gc
import weakref
from typing import get_args

import pytest
import torch
from torch import nn

from experiments.benchmarks.memory_grid import models
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import FreezingSource
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.checkpointing import Activations
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.offloading import ActivationOffload
from rl_bridge.parallel.parallelize import parallelize
from rl_bridge.pipelines.objective_options import objective_options
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import ACTIVATIONS, OFFLOADED, LiveBytes

LLAMA, QWEN2, QWEN3 = (models()[name] for name in ("llama", "qwen2", "qwen3"))
PADDED = ScoringConfig(share_prefixes=False, micro_batch_tokens=60)
CASES = {
    "llama, padded": (LLAMA, PADDED),
    "qwen2, packed": (QWEN2, ScoringConfig(share_prefixes=False, packing=True)),
    "qwen3, shared prefixes": (QWEN3, ScoringConfig(micro_batch_tokens=80)),
    "bfloat16": (QWEN2, ScoringConfig(dtype="bfloat16")),
    "frozen layers": (FreezingSource(LLAMA, ("*.layers.[0-1].*", "model.embed_tokens.*")), PADDED),  # type: ignore[arg-type]
    "LoRA": (LoRASource(QWEN3, 4, 8.0, "all-linear", seed=1), ScoringConfig()),  # type: ignore[arg-type]
}
SOON = ("qwen2, packed", "LoRA")
OTHERS = [name for name in get_args(Activations) if name != "keep"]
PLACES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def made(source, scoring, activations) -> PolicyModule:
    torch.manual_seed(0)
    options = {"scoring": scoring, "parallel": ParallelConfig(activations=activations)}
    with torch.device("meta"):
        module = PolicyModule(
            source, OptimizerConfig(learning_rate=1e-2), objective_options("dapo").build(), updates=9, **options
        )
    module.load_weights()
    module.on_weights_materialized()
    return module


@functools.cache
def step(case: str, activations: str, place: str = "cpu") -> dict[str, torch.Tensor]:
    """Metrics and gradients; with LoRA after an update, as B is 0 before."""
    source, scoring = CASES[case]
    module = made(source, scoring, activations).to(place)
    batch = Workload(prompts=2, responses=3, prompt_tokens=9, new_tokens=11).batch(200)
    batch = batch._replace(lengths=torch.tensor([20, 13, 20, 17, 20, 11]))
    batch = batch._replace(mask=batch.mask & (torch.arange(20) < batch.lengths[:, None]))
    if case == "LoRA":
        module.train_step(batch, 9.0)
        module.optimizer_step()
    metrics = module.train_step(batch, 9.0)
    found = {name: torch.as_tensor(ratio.total) for name, ratio in metrics.items()}
    return found | {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "case", [case if case in SOON else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
@pytest.mark.parametrize("activations", OTHERS)
def test_metrics_and_gradients_are_those_of_layers_that_keep_all(activations: str, case: str, place: str):
    kept, found = step(case, "keep", place), step(case, activations, place)
    assert kept.keys() == found.keys() and any(float(x.abs().max()) > 0 for x in kept.values())
    for name, value in kept.items():
        assert torch.equal(value, found[name]), name


@functools.cache
def saved(activations: str) -> tuple[int, int]:
    """Bytes that wait for the backward pass of three layers: on the device, and in host memory."""
    module = made(QWEN2, PADDED, activations)
    ids = torch.randint(200, (8, 40), generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        hidden = module.model.model(input_ids=ids, use_cache=False).last_hidden_state
        del ids
        assert hidden.requires_grad
        return live.components[ACTIVATIONS], live.components.get(OFFLOADED, 0)


def test_each_policy_keeps_less_on_the_device_than_the_one_before():
    sizes = {name: saved(name) for name in get_args(Activations)}
    device = {name: size for name, (size, _) in sizes.items()}
    assert device["keep"] > device["selective"] > device["full"] > device["offload_inputs"]
    assert device["keep"] > device["every_other"] > device["full"]
    # What the last norm and the embedding keep is no layer's; layers that run again keep the rotary angles here.
    assert device["offload"] <= device["offload_inputs"] < 1.05 * device["offload"] < 0.3 * device["keep"]
    host = {name: size for name, (_, size) in sizes.items() if size}
    assert set(host) == {"offload", "offload_inputs"} and host["offload"] > 3 * host["offload_inputs"]
    # What left the device is in host memory, once: a storage that several operations read has one copy.
    gone = device["keep"] - device["offload"]
    assert 0.95 * gone <= host["offload"] <= 1.1 * gone


class Block(nn.Module):
    """Saves one array for several operations, as a whole and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64 * 64).reshape(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (x @ self.weight).chunk(2, -1)
        return torch.cat([first.sin() * second, first * second.exp().tanh()], -1)


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_one_layers_activations_are_on_the_device_in_the_backward_pass_and_none_after():
    model, x = Blocks(8), torch.ones(32, 64)
    parallelize(model, None, ParallelConfig(activations="offload"))
    with LiveBytes() as live:
        live.watch(model)
        loss = model(x).sum()
        waiting, left = live.components[OFFLOADED], live.components.get(ACTIVATIONS, 0)
        live.reset()
        loss.backward(retain_graph=True)  # else autograd itself lets go of what it has read
        # Copies come back for one layer of eight at a time.
        assert live.peak().components.get(ACTIVATIONS, 0) - left < waiting / 2
        del loss
        assert live.components[OFFLOADED] == 0


def test_a_second_backward_pass_and_a_graph_that_is_dropped():
    model, x = Blocks(3), torch.ones(32, 64)
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    parallelize(model, None, ParallelConfig(activations="offload"))
    loss = model(x).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, first, second, strict=True))
    output = model(x)
    node = weakref.ref(output)
    del output
    gc.collect()
    assert node() is None


def test_an_array_that_changes_after_it_was_saved_has_a_copy_of_either_state():
    offload, x, weight = ActivationOffload(), torch.full((16, 64), 2.0), torch.ones(16, 64, requires_grad=True)

    def twice(state: torch.Tensor) -> torch.Tensor:
        early = weight * state
        state.mul_(3.0)
        return early + weight * state

    offload.run(nn.Identity(), twice, x).sum().backward()
    assert weight.grad is not None and weight.grad.unique().tolist() == [2.0 + 6.0]


def test_weights_and_integers_stay_where_they_are():
    layer, ids = nn.Embedding(300, 16), torch.arange(256)
    linear = nn.Linear(16, 64)
    both = nn.ModuleList([layer, linear])
    with LiveBytes() as live:
        out = ActivationOffload().run(both, lambda x: linear(layer(x)), ids)
        assert out.requires_grad and live.components[OFFLOADED] == 256 * 16 * 4


def test_copies_of_weights_that_autocast_makes_stay():
    layer = nn.Linear(64, 128)
    with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
        out = ActivationOffload().run(layer, layer.forward, torch.ones(16, 64))
        # The weight is 16 KiB in bfloat16, what the layer reads 2 KiB.
        assert out.requires_grad and live.components[OFFLOADED] == 16 * 64 * 2


def test_no_gradient_no_copy_and_unknown_policies():
    model = Blocks(1)
    parallelize(model, None, ParallelConfig(activations="offload"))
    with LiveBytes() as live, torch.no_grad():
        model(torch.ones(32, 64))
        assert OFFLOADED not in live.components
    with pytest.raises(ValueError, match="activations is one of keep, selective"):
        parallelize(model, None, ParallelConfig(activations="some"))  # type: ignore[arg-type]
