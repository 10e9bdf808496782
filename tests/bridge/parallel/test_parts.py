"""Which parts of a user's module are made parallel, and which modules are refused."""

import pytest
import torch
from torch import nn

from rl_bridge.parallel import parallelize


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Linear(2, 2)})])
        self.activation = nn.ReLU()


@pytest.fixture
def made(monkeypatch):
    found = []
    monkeypatch.setattr(parallelize, "parallelize", lambda module, mesh, config: found.append(module))
    return found


def test_every_sub_module_that_has_parameters_is_one_piece(made):
    module = Module()
    parallelize.parallelize_parts(module, None)
    assert made == [module.line, module.layers[0], module.layers[1]["inner"]]


def test_a_language_model_is_one_piece(made, new_model):
    model = new_model()
    parallelize.parallelize_parts(model, None)
    assert made == [model]


def test_a_parameter_of_the_module_itself_is_refused(made):
    module = Module()
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"parameter 'scale' of Module belongs to no sub-module: .*a parallelize\(\)"):
        parallelize.parallelize_parts(module, None)
    assert not made


def test_a_parameter_of_two_sub_modules_is_refused(made):
    module = Module()
    module.layers[0].weight = module.line.weight
    with pytest.raises(ValueError, match=r"parameter '.*weight' of Module belongs to 2 sub-modules"):
        parallelize.parallelize_parts(module, None)
    assert not made
