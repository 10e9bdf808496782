"""The first weights of a class of the user's own: the same in every worker and engine, as the class made them."""

import random
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from rl_bridge.common.random_numbers import drawing_from, generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import Mesh, TrainEngine
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.own_model import own_source
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.weights.manifest import local
from tests.support.many_hosts import ManyHosts
from tests.support.own_models import Bigram, tokenizer


def by_torch(shape):
    return torch.randn(shape)


def by_numpy(shape):
    return torch.tensor(np.random.randn(*shape), dtype=torch.float32, device="cpu")


def by_python(shape):
    return torch.tensor([random.gauss() for _ in range(shape.numel())], device="cpu").view(shape)


DRAWS = {"torch": by_torch, "NumPy": by_numpy, "Python": by_python}


def drawn(draw):
    class Drawn(Bigram):
        def __init__(self):
            super().__init__()
            self.table.weight = nn.Parameter(draw(self.table.weight.shape))

    return Drawn


def scorer(factory, seed=1, **options):
    source = own_source(factory, tokenizer(), seed=seed, **options)
    return torch_worker(lambda: TokenScorer(source, ScoringConfig()), None, torch.device("cpu"), generators())


@pytest.mark.parametrize("draw", DRAWS)
def test_a_new_model_is_the_same_for_every_engine_and_another_for_another_seed(draw):
    factory, states = drawn(DRAWS[draw]), generators()
    tables = []
    for seed in (1, 1, 2):
        tables.append(scorer(factory, seed).model.state_dict())
        np.random.rand(3), random.random(), torch.rand(2)  # what a program draws between two builds
    (first,), (second,), (other,) = (table.values() for table in tables)
    assert torch.equal(first, second) and not torch.equal(first, other)
    with drawing_from(states):
        before = (torch.rand(1), np.random.rand(), random.random())
        with drawing_from(states):
            scorer(factory)
            assert (torch.rand(1), np.random.rand(), random.random()) == before


@pytest.mark.parametrize("draw", DRAWS)
def test_copies_of_a_module_begin_alike_in_every_worker(draw):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(DRAWS[draw](torch.Size([3, 2])))

        def values(self):
            return self.weight.tolist()

    engines = [TrainEngine(Module, executor=ManyHosts(2)) for _ in range(2)]
    values = [engine.build(mesh=Mesh(replicate=1)).values() for engine in engines]
    assert values[0] == values[1]


def test_a_class_that_draws_by_a_generator_without_a_seed_is_refused():
    def unseeded(shape):
        return torch.tensor(np.random.default_rng().standard_normal(tuple(shape)), dtype=torch.float32, device="cpu")

    def seeded(shape):
        return torch.tensor(np.random.default_rng(3).standard_normal(tuple(shape)), dtype=torch.float32, device="cpu")

    scorer(drawn(seeded))
    with pytest.raises(ValueError, match=r"Drawn draws other values of 'table.weight' each time that it is made"):
        scorer(drawn(unseeded))


def holding(value):
    class Holding(Bigram):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(value().to("cpu"), requires_grad=value().is_floating_point())

        def forward(self, input_ids, position_ids, attention_mask=None):
            mixed = (self.extra.double() / 2**41).sum().float()
            return super().forward(input_ids, position_ids, attention_mask) * (1 + mixed)

    return Holding


NUMBERS = {
    "float64": lambda: torch.rand(3, dtype=torch.float64, device="cpu"),
    "bfloat16": lambda: torch.rand(3, device="cpu").bfloat16(),
    "int64": lambda: torch.tensor([2**40 + 1, 2**41 + 3], device="cpu"),
    "uint8": lambda: torch.tensor([3, 255], dtype=torch.uint8, device="cpu"),
    "bool": lambda: torch.tensor([True, False], device="cpu"),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_a_parameter_are_those_that_the_class_made(kind):
    """Floats are computed with in float32; whole numbers, as the multipliers of a hash, stay whole."""
    factory = holding(NUMBERS[kind])
    with drawing_from(1), torch.no_grad():
        plain = factory().eval()
        expected = plain(torch.tensor([[2, 3, 4]]), torch.arange(3)[None])[0].log_softmax(-1)
    module = scorer(factory)
    extra = next(value for name, value in module.model.named_parameters() if name.endswith("extra"))
    extra = extra.full_tensor() if isinstance(extra, DTensor) else extra
    assert torch.equal(extra, plain.extra.float() if plain.extra.is_floating_point() else plain.extra)
    batch = collate([single_turn([2], [3, 4])], 0)
    values = module.token_logprobs(batch)[0, 1:3]
    torch.testing.assert_close(values, expected[[0, 1], [3, 4]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", NUMBERS)
def test_an_export_is_read_back_with_the_same_numbers(tmp_path, kind):
    factory = holding(NUMBERS[kind])
    module = scorer(factory)
    module.save_pretrained(str(tmp_path))
    again = scorer(factory, weights=str(tmp_path))
    for (name, value), (_, other) in zip(module.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(local(value), local(other)), name


STORED = {
    "half a number": (torch.int64, torch.tensor([0.5, 3.0], device="cpu"), False),
    "whole floats": (torch.int64, torch.tensor([2.0, 3.0], device="cpu"), True),
    "a smaller type": (torch.int64, torch.tensor([2, 3], dtype=torch.int32, device="cpu"), True),
    "a larger number": (torch.int32, torch.tensor([2**40, 3], device="cpu"), False),
    "a mask in bytes": (torch.bool, torch.tensor([1, 0], dtype=torch.uint8, device="cpu"), True),
    "no mask": (torch.bool, torch.tensor([3, 0], device="cpu"), False),
}
"""Name → the model's type, what a file holds, and whether the model's type holds these numbers, too."""


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_whole_numbers_of_a_file_are_those_or_refused(tmp_path, name, kind):
    dtype, numbers, fits = STORED[name]

    class Counts(Bigram):
        def __init__(self):
            super().__init__()
            counts = torch.zeros(2, dtype=dtype, device="cpu")
            if kind == "buffer":
                self.register_buffer("counts", counts)
            else:
                self.counts = nn.Parameter(counts, requires_grad=False)

    scorer(Counts).save_pretrained(str(tmp_path))
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"counts": numbers}, file)
    if fits:
        model = scorer(Counts, weights=str(tmp_path)).model
        read = dict([*model.named_parameters(), *model.named_buffers()])
        assert (
            local(next(value for path, value in read.items() if path.endswith("counts"))).tolist() == numbers.tolist()
        )
    else:
        with pytest.raises(
            ValueError, match=f"'counts' is {dtype} in the model, and {numbers.dtype} with other numbers"
        ):
            scorer(Counts, weights=str(tmp_path))


def test_complex_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Holding has a parameter 'extra' of complex numbers.*view_as_real"):
        own_source(holding(lambda: torch.rand(3, dtype=torch.complex64, device="cpu")), tokenizer())


@pytest.mark.parametrize("kind", [nn.Linear, nn.RMSNorm, nn.LayerNorm])
def test_a_forward_that_the_user_set_on_a_layer_is_what_computes(kind):
    class Patched(Bigram):
        def __init__(self):
            super().__init__()
            self.layer = kind(14, 14) if kind is nn.Linear else kind(14)
            plain = self.layer.forward
            self.layer.forward = types.MethodType(lambda layer, x: 2 * plain(x), self.layer)

        def forward(self, input_ids, position_ids, attention_mask=None):
            return self.layer(super().forward(input_ids, position_ids, attention_mask))

    with drawing_from(1), torch.no_grad():
        expected = Patched().eval()(torch.tensor([[2, 3, 4]]), torch.arange(3)[None])[0].log_softmax(-1)
    values = scorer(Patched).token_logprobs(collate([single_turn([2], [3, 4])], 0))[0, 1:3]
    torch.testing.assert_close(values, expected[[0, 1], [3, 4]], rtol=1e-5, atol=1e-6)


def test_load_weights_that_would_copy_into_nothing_is_refused_with_the_way_on():
    stored = nn.Linear(3, 2).state_dict()

    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.back = nn.Linear(3, 2)

        def load_weights(self):
            self.back.load_state_dict(stored, **options)

        def values(self):
            return self.back.weight.tolist()

    options = {}
    with pytest.raises(ValueError, match=r"load_weights copies values into \w+, which is on the meta.*assign=True"):
        TrainEngine(Copies).build()
    options["assign"] = True
    assert TrainEngine(Copies).build().values() == stored["weight"].tolist()
