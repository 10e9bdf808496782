"""Every number of OptimizerConfig reaches the optimiser it is for."""

import torch

from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.trainable import CausalLMModule
from tests.bridge.ready import ready


def test_the_config_is_the_optimisers(new_model):
    config = OptimizerConfig(
        learning_rate=1e-3, warmup=0, decay="constant", beta1=0.7, beta2=0.95, weight_decay=0.3, max_grad_norm=2.0
    )
    module = ready(CausalLMModule, new_model(), config, updates=4)
    assert isinstance(module.optimizer, torch.optim.AdamW)
    (group,) = module.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.7, 0.95), 0.3)
    first = next(module.model.parameters())
    for parameter in module.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    first.grad = torch.ones_like(first)
    size = float(first.numel()) ** 0.5
    assert abs(module.optimizer_step()["grad_norm"] - size) < 1e-2 * size
    # After one update the first moment is (1 − β₁) of the clipped gradient.
    moment = module.optimizer.state[first]["exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(first, 0.3 * 2.0 / size), rtol=1e-3, atol=0.0)


def test_moments_follow_a_parameter_that_another_takes_the_place_of(new_model):
    module = ready(CausalLMModule, new_model(), OptimizerConfig(learning_rate=1e-3), updates=4)
    for place, parameter in enumerate(module.model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + place)
    module.optimizer_step()
    before = [module.optimizer.state[parameter]["exp_avg"] for parameter in module.model.parameters()]
    for device in ("meta", "cpu"):
        module.move("weights", torch.device(device))
        state = module.optimizer.state
        assert len(state) == len(before)
        for parameter, moment in zip(module.model.parameters(), before, strict=True):
            assert state[parameter]["exp_avg"] is moment
