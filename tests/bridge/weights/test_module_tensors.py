import torch

from rl_bridge.weights import replace_parameters


def test_a_frozen_parameter_stays_frozen_on_another_device(new_model):
    model = new_model()
    frozen = next(model.parameters()).requires_grad_(False)
    replaced = replace_parameters(model, torch.device("meta"))
    assert not replaced[frozen].requires_grad
    assert all(new.requires_grad for old, new in replaced.items() if old is not frozen)
