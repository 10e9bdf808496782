"""LoRA on a class of one's own, by the way it uses a layer: trained = merged = exported, or refused by name."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, relu
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from rl_bridge.common.random_numbers import generators
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.own_model import own_source
from rl_bridge.modules import scoring
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.weights.manifest import local
from tests.support.one_step import host_of_rank, mesh_of
from tests.support.own_models import TOKENS, tokenizer
from tests.support.ranks import as_rank, found_by_ranks

WIDTH = 8
BATCH = collate([single_turn([2, 3, 4], [5, 6, 7, 8]), single_turn([10], [11, 2])], 0)
READ_PAST, TIED, PARAMETRIZED = r"read past their modules", r"has the weight of \[", r"computes its weight from others"


def layer():
    return nn.Linear(WIDTH, WIDTH)


def patched():
    module = layer()
    module.forward = types.MethodType(lambda self, x: relu(linear(x, self.weight, self.bias)), module)
    return module


def hooked():
    module = layer()
    module.register_forward_hook(lambda module, inputs, output: 3 * output)
    return module


def beside_whole_numbers():
    module = layer()
    module.multipliers = nn.Parameter(torch.tensor([0, 3], device="cpu"), requires_grad=False)
    module.chosen = nn.Parameter(torch.tensor([True, False], device="cpu"), requires_grad=False)
    return module


def read_by_a_function(model, x):
    return linear(x, model.m.weight)


def by_a_local(model, x):
    module = model.m
    return linear(x, module.weight)


def called_and_read(model, x):
    module = model.m
    return model.m(x) + linear(x, module.weight)


def tied_to_another(model, x):
    return model.m(x) + model.other(x)


class Net(nn.Module):
    """Each token is embedded, mixed by the layer ``m`` in one of the ways, and read by the head."""

    def __init__(self, make, use, tokens=None, zeros=False, alias=None):
        super().__init__()
        self.tokens, self.q, self.head = tokens or nn.Embedding(TOKENS, WIDTH), layer(), nn.Linear(WIDTH, TOKENS)
        self.m, self.use = make(), use
        if alias == "list":
            self.listed = [self.m]
        if alias == "module":
            self.other = self.m
        if alias == "weight":
            self.other = layer()
            self.other.weight = self.m.weight
        if zeros:
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids, position_ids, attention_mask=None):
        x = self.tokens(input_ids)
        return self.head(x + self.q(x) + self.use(self, x))


def net(make, use, max_norm=None, **options):
    return Net(make, use, nn.Embedding(TOKENS, WIDTH, max_norm=max_norm), **options)


def of(make, use, **options):
    return functools.partial(net, make, use, **options)


def called(model, x):
    return model.m(x)


def repeated():
    return nn.ModuleList([layer()] * 3)


WAYS = {
    "called": (of(layer, called), "m", None),
    "called twice": (of(layer, lambda model, x: model.m(relu(model.m(x)))), "m", None),
    "called by getattr": (of(layer, lambda model, x: getattr(model, "m")(x)), "m", None),  # noqa: B009
    "called in a list of modules": (
        of(lambda: nn.ModuleList([layer(), layer()]), lambda model, x: model.m[1](model.m[0](x))),
        "1",
        None,
    ),
    "called, before a head of zeros": (of(layer, called, zeros=True), "m", None),
    "an embedding": (of(layer, called), "tokens", None),
    "a Conv1D": (of(lambda: Conv1D(WIDTH, WIDTH), called), "m", None),
    "a convolution": (
        of(lambda: nn.Conv1d(WIDTH, WIDTH, 1), lambda model, x: model.m(x.transpose(1, 2)).transpose(1, 2)),
        "m",
        None,
    ),
    "beside parameters of whole numbers": (of(beside_whole_numbers, called), "m", None),
    "never used": (of(layer, lambda model, x: x), "m", None),
    "dropped out in training": (
        of(layer, lambda model, x: nn.functional.dropout(model.m(x), 0.5, model.training)),
        "m",
        None,
    ),
    "read by a local name": (of(layer, by_a_local), "m", READ_PAST),
    "read by a local name, before a head of zeros": (of(layer, by_a_local, zeros=True), "m", READ_PAST),
    "read by a function": (of(layer, read_by_a_function), "m", READ_PAST),
    "read in a list of modules": (
        of(lambda: nn.ModuleList([layer()]), lambda model, x: linear(x, model.m[0].weight)),
        "0",
        READ_PAST,
    ),
    "read by getattr": (of(layer, lambda model, x: x @ getattr(model, "m").weight), "m", READ_PAST),  # noqa: B009
    "called and read": (of(layer, called_and_read), "m", READ_PAST),
    "in a plain list": (of(layer, lambda model, x: model.listed[0](x), alias="list"), "m", READ_PAST),
    "a forward of its own": (of(patched, called), "m", READ_PAST),
    "a hook": (of(hooked, called), "m", READ_PAST),
    "an embedding with max_norm": (of(layer, called, max_norm=1.0), "tokens", "is an embedding with max_norm"),
    "one layer in three places": (of(repeated, lambda model, x: model.m[2](model.m[0](x))), "0", TIED),
    "the second name of a layer": (of(layer, tied_to_another, alias="module"), "other", TIED),
    "a tied weight": (of(layer, tied_to_another, alias="weight"), "m", TIED),
    "parametrized": (of(lambda: weight_norm(layer()), called), "m", PARAMETRIZED),
    "the parametrization": (
        of(lambda: weight_norm(layer()), called),
        "parametrizations.weight.original1",
        PARAMETRIZED,
    ),
}
"""Way → the class, the target beside "q", and the refusal; None: it is trained."""


def built(factory, targets, parallel=None, mesh=None):
    source = own_source(factory, tokenizer(), seed=1)
    source = LoRASource(source, 2, 4.0, targets) if targets else source
    return torch_worker(lambda: TokenScorer(source, parallel=parallel), mesh, torch.device("cpu"), generators())


def exported_scores(factory, module, folder):
    module.save_pretrained(str(folder))
    source = own_source(factory, tokenizer(), weights=folder)
    plain = torch_worker(lambda: TokenScorer(source), None, torch.device("cpu"), generators())
    return plain.token_logprobs(BATCH)


@pytest.mark.parametrize("way", WAYS)
def test_trained_is_exported_or_refused_by_name(tmp_path, way):
    factory, target, refusal = WAYS[way]
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal) as raised:
            built(factory, ["q", target])
        assert target.partition(".")[0] in str(raised.value) and "'q'" not in str(raised.value)
    else:
        module, generator = built(factory, ["q", target]), torch.Generator().manual_seed(2)
        start = module.token_logprobs(BATCH)
        torch.testing.assert_close(start, built(factory, None).token_logprobs(BATCH), rtol=0, atol=0)
        factors = [parameter for name, parameter in module.model.named_parameters() if ".lora_" in name]
        assert len(factors) == 4
        with torch.no_grad():
            for factor in factors:
                local(factor).copy_(0.3 * torch.randn(factor.shape, generator=generator))
        trained = module.token_logprobs(BATCH)
        assert float((trained - start).abs().max()) > 1e-2 or "zeros" in way
        torch.testing.assert_close(exported_scores(factory, module, tmp_path), trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", [way for way, (_, _, refusal) in WAYS.items() if refusal in (None, READ_PAST)])
def test_in_bfloat16_too(way):
    factory, target, refusal = WAYS[way]
    parallel = ParallelConfig(param_dtype=torch.bfloat16)
    if refusal is None:
        assert built(factory, ["q", target], parallel) is not None
    else:
        with pytest.raises(ValueError, match=refusal):
            built(factory, ["q", target], parallel)


def test_the_comparison_leaves_everything_as_it_was(monkeypatch):
    factory, target, _ = WAYS["called, before a head of zeros"]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    compared = built(factory, ["q", target, "tokens"])
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(scoring, "require_effect", lambda *args, **options: None)
    values = built(factory, ["q", target, "tokens"]).model.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in compared.model.state_dict().items())
    assert not compared.model.training and all(p.grad is None for p in compared.model.parameters())


ON_RANKS = (
    "called, before a head of zeros",
    "beside parameters of whole numbers",
    "a Conv1D",
    "a hook",
    "a tied weight",
)


def answers(mesh):
    """Of each way: the scores of the module, or why there is none."""
    answered = {}
    for way in ON_RANKS:
        factory, target, _ = WAYS[way]
        try:
            answered[way] = built(factory, ["q", target], mesh=mesh).token_logprobs(BATCH).numpy()
        except ValueError as error:
            answered[way] = str(error)
    return answered


def rank(number, address, queue):
    as_rank(lambda: answers(mesh_of(host_of_rank(), (1, 2, 1, 1))), 2, number, address, queue)


@pytest.mark.long
def test_two_shards_answer_as_one_process(tmp_path):
    alone = answers(None)
    for _, answered in found_by_ranks(rank, 2, tmp_path):
        for way, answer in alone.items():
            if isinstance(answer, str):
                assert answered[way] == answer, way
            else:
                assert not isinstance(answered[way], str), (way, answered[way])
                assert abs(answered[way] - answer).max() < 1e-6, way
