"""A class of a file with a fault of its own is refused by the fault, before a run begins."""

import functools
import re

import pytest
import torch

from rl_bridge.common.random_numbers import generators
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.own_class import factory_of
from rl_bridge.models.own_model import own_source
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.parallel import probe as probing
from rl_bridge.rollout.inprocess import check_decoder
from tests.support.own_models import tokenizer

CLASS = """import torch
from torch import nn

class Own(nn.Module):
    max_positions = 64

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(14, 8)
        self.head = nn.Linear(8, 14)

    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.head(self.embed(input_ids))

made = Own()
"""
LOGITS = "self.head(self.embed(input_ids))"
HEAD = "self.head = nn.Linear(8, 14)"
MADE = "is a list that torch does not see"
NAN = "Own.forward gives logits that are NaN or infinite for a row"
NO_GRADIENT = r"Own.forward gives logits without a gradient.*torch.no_grad.*detach"
POSITIONS = "Own.max_positions is the most tokens of a row, a whole number from 1 on"
FAULTS = {
    "needs an argument": (("__init__(self)", "__init__(self, size)"), r"Own of .*own.py is made without .* needs size"),
    "needs two": (("__init__(self)", "__init__(self, *, a, b, c=1)"), r"Own of .*own.py is made without .* needs a, b"),
    "NaN": ((LOGITS, f"{LOGITS} * float('nan')"), NAN),
    "infinity": ((LOGITS, f"{LOGITS} / 0"), NAN),
    "one NaN": ((LOGITS, f"{LOGITS}.masked_fill(torch.arange(14) == 3, torch.nan)"), NAN),
    "detached": ((LOGITS, f"{LOGITS}.detach()"), NO_GRADIENT),
    "of data": ((LOGITS, f"{LOGITS}.data"), NO_GRADIENT),
    "no_grad": (("    def forward", "    @torch.no_grad()\n    def forward"), NO_GRADIENT),
    "inference_mode": (("    def forward", "    @torch.inference_mode()\n    def forward"), NO_GRADIENT),
    "layers in a list": ((HEAD, f"{HEAD}\n        self.layers = [nn.Linear(8, 8)]"), r"'layers'.*nn\.ModuleList"),
    "layers in a tuple": ((HEAD, f"{HEAD}\n        self.layers = (1, nn.Linear(8, 8))"), r"'layers'.*nn\.ModuleList"),
    "layers in a dict": ((HEAD, f"{HEAD}\n        self.layers = dict(a=nn.Linear(8, 8))"), r"'layers'.*nn\.ModuleDict"),
    "a list in a list": ((HEAD, f"{HEAD}\n        self.layers = [[nn.Linear(8, 8)]]"), r"'layers'.*nn\.ModuleList"),
    "parameters in a list": (
        (HEAD, f"{HEAD}\n        self.scales = [nn.Parameter(torch.ones(8))]"),
        r"'scales'.*nn\.ParameterList",
    ),
    "all layers in a list": (
        (
            f"self.embed = nn.Embedding(14, 8)\n        {HEAD}",
            "self.layers = [nn.Embedding(14, 8), nn.Linear(8, 14)]",
        ),
        r"'layers'.*nn\.ModuleList",
    ),
    "positions by a word": (("= 64", "= 'many'"), f"{POSITIONS}.*'many'"),
    "positions by a float": (("= 64", "= 64.0"), f"{POSITIONS}.*64.0"),
    "no position": (("= 64", "= 0"), f"{POSITIONS}.*got 0"),
    "a truth of positions": (("= 64", "= True"), f"{POSITIONS}.*True"),
}
BARE = "assert input_ids.shape[0] == 1"


def own(folder, *changes, name="Own"):
    text = CLASS
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "own.py").write_text(text.replace("made = Own()\n", "" if name == "Own" else "made = Own()\n"))
    return own_source(factory_of(f"{folder / 'own.py'}:{name}"), tokenizer())


@pytest.mark.parametrize("kind", FAULTS)
def test_a_class_of_a_file_is_refused_by_its_fault(kind, tmp_path):
    change, words = FAULTS[kind]
    with pytest.raises((TypeError, ValueError), match=re.compile(words, re.DOTALL)):
        own(tmp_path, change)


def test_a_module_in_place_of_its_class_is_named_with_the_class(tmp_path):
    with pytest.raises(TypeError, match=r"made of .*own.py is a module that is made: give its class, .*own.py:Own"):
        own(tmp_path, name="made")


FAILURES = ["assert False, 'no GPU'", "{}['size']", "self.size", "1 / 0", "open('absent')", "raise StopIteration", "x"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_class_that_fails_when_it_is_made_is_named_with_the_error(failure, tmp_path):
    """An assertion, as of ``.cuda()`` without CUDA, was a traceback through the library."""
    with pytest.raises(ValueError, match=r"^Own cannot be made: \w+(Error|Iteration)"):
        own(tmp_path, ("super().__init__()\n", f"super().__init__()\n        {failure}\n"))


@pytest.mark.parametrize(
    "change",
    [
        (HEAD, f"{HEAD}\n        self.layers = [self.head, self.embed]"),
        (HEAD, f"{HEAD}\n        self.sizes = [8, 14, nn.Linear]"),
        (LOGITS, f"{LOGITS}.masked_fill(torch.arange(14) == 13, -torch.inf)"),
        ("max_positions = 64", "max_positions = None"),
        ("max_positions = 64", "pass"),
        (HEAD, f"{HEAD}\n        self.requires_grad_(False)"),
    ],
)
def test_what_is_no_fault_is_taken(change, tmp_path):
    assert own(tmp_path, change).vocabulary == 14


def test_an_error_without_words_is_told_by_its_line(tmp_path, monkeypatch):
    line = f"own.py, line 13: {BARE}"
    source = own(tmp_path, (f"return {LOGITS}", f"{BARE}\n        return {LOGITS}"))
    monkeypatch.setattr(probing, "_cached", {})
    with pytest.raises(ValueError, match=re.escape(line)):
        torch_worker(functools.partial(TokenScorer, source, ScoringConfig()), None, torch.device("cpu"), generators())
    model = source.empty()
    source.load(model)
    with pytest.raises(NotImplementedError, match=re.escape(line)):
        check_decoder(model)


def test_a_class_that_reads_no_row_is_told_by_the_line_of_an_error_without_words(tmp_path):
    with pytest.raises(ValueError, match=re.escape("own.py, line 13: assert False")):
        own(tmp_path, (f"return {LOGITS}", f"assert False\n        return {LOGITS}"))


def test_numbers_that_are_nan_by_the_weights_alone_are_told_as_such(tmp_path):
    """A new model of the class has numbers: it is the file's weights that have none."""
    source = own(tmp_path, (f"return {LOGITS}", f"return {LOGITS}.sqrt() if self.head.bias.min() < -9 else {LOGITS}"))
    model = source.empty()
    source.load(model)
    with torch.no_grad():
        model.get_parameter("head.bias").fill_(-99)
    with pytest.raises(ValueError, match="Own: the model's own forward of a row"):
        probing.probe(model)
