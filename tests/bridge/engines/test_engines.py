import copy

import pytest
import torch

import rl_fn
from rl_bridge.data.requests import SamplingParams
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import single_turn
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.rollout import InProcessRollout
from rl_bridge.trainers.module import OptimizerConfig
from rl_bridge.trainers.policy import PolicyModule
from rl_bridge.trainers.sft import SupervisedModule

SAMPLING = SamplingParams(max_new_tokens=6, n=2)
PROMPTS = ["1+1=", "12+34="]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=1)


class Doubler(torch.nn.Module):
    def double(self, x):
        return 2 * x


@pytest.fixture
def train(new_model):
    return TrainEngine(SupervisedModule(new_model(seed=1), OPTIMIZER, updates=10)).build()


@pytest.fixture
def inference(new_model, tokenizer):
    return InferenceEngine(InProcessRollout(new_model(), tokenizer)).build()


BATCH = collate([single_turn([2, 3], [4, 5, 1]), single_turn([6], [7, 1])], 0)


def update(engine):
    engine.train_step(NeedParallel(BATCH), 5.0)
    return engine.optimizer_step()


@pytest.mark.parametrize("worker", [Doubler(), Doubler, lambda: Doubler()], ids=["module", "class", "function"])
def test_calls_go_through_to_the_worker(worker):
    engine = TrainEngine(worker).build()
    assert torch.equal(engine.double(NeedParallel(torch.ones(2))), torch.full((2,), 2.0))


def test_a_factory_is_called_by_build_and_once():
    made = []
    engine = TrainEngine(lambda: made.append(1) or Doubler())
    assert not made
    engine.build()
    engine.double(1), engine.double(2)
    assert made == [1]


def test_a_method_that_the_worker_does_not_have():
    with pytest.raises(AttributeError, match="Doubler has no method 'halve'"):
        TrainEngine(Doubler()).build().halve(2)
    with pytest.raises(AttributeError, match="TrainEngine has no attribute '_private'"):
        TrainEngine(Doubler())._private  # noqa: B018


def test_a_call_before_build():
    with pytest.raises(ValueError, match=r"call build\(\) before double\(\)"):
        TrainEngine(Doubler()).double(2)


def test_a_second_build():
    with pytest.raises(ValueError, match="this engine is built already"):
        TrainEngine(Doubler()).build().build()


def test_placement():
    first = TrainEngine(Doubler()).build()
    assert TrainEngine(Doubler()).build(colocate_with=[first]).double(2) == 4
    with pytest.raises(ValueError, match="not_colocate_with cannot be met"):
        TrainEngine(Doubler()).build(not_colocate_with=[first])


def test_an_unknown_executor():
    with pytest.raises(NotImplementedError, match="executor 'ray' is not available; there is: local"):
        TrainEngine(Doubler(), executor="ray")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_cuda(train, inference):
    for engine in (train, inference):
        with pytest.raises(ValueError, match="no CUDA or ROCm device"):
            engine.cuda()


def test_what_an_engine_does_not_have_cannot_be_moved(train, inference):
    with pytest.raises(ValueError, match="TrainEngine has no 'kv_cache' to move; it has weights, optimizer"):
        train.cpu("kv_cache")
    with pytest.raises(ValueError, match="InferenceEngine has no 'optimizer' to move; it has weights, kv_cache"):
        inference.cpu("optimizer")


def test_moves_to_where_everything_is_change_nothing(train, inference):
    update(train)
    wanted = inference.generate(PROMPTS, SAMPLING)
    assert train.cpu().cpu("optimizer").device == inference.cpu().cpu("kv_cache").device == torch.device("cpu")
    assert inference.generate(PROMPTS, SAMPLING) == wanted
    update(train)


def test_synchronised_weights_bear_their_version(train, inference):
    before = inference.generate(PROMPTS, SAMPLING)
    update(train)
    assert train.sync_weights(inference) == inference.weights_version == 1
    after = inference.generate(PROMPTS, SAMPLING)
    assert [{*c.weights_versions} for c in before] == [{-1, 0}] * 4
    assert [{*c.weights_versions} for c in after] == [{-1, 1}] * 4
    assert [c.logprobs for c in before] != [c.logprobs for c in after]


@pytest.mark.parametrize("brought_back", ["by the sync", "to the CPU first"])
def test_freed_rollout_weights_come_back_with_a_sync(train, inference, brought_back):
    train.sync_weights(inference)
    wanted = inference.generate(PROMPTS, SAMPLING)
    assert inference.meta().device.type == "meta"
    assert inference.meta().device.type == "meta"
    with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
        inference.generate(PROMPTS, SAMPLING)
    if brought_back == "to the CPU first":
        inference.cpu()
        with pytest.raises(ValueError, match="the weights here are incomplete"):
            inference.generate(PROMPTS, SAMPLING)
    train.sync_weights(inference)
    assert inference.device.type == "cpu"
    assert inference.generate(PROMPTS, SAMPLING) == wanted


def test_freed_training_weights_come_back_with_a_checkpoint_and_train_on(new_model):
    engines = [TrainEngine(SupervisedModule(new_model(), OPTIMIZER, updates=10)).build() for _ in range(2)]
    for engine in engines:
        update(engine)
    freed, kept = engines
    state = copy.deepcopy(kept.training_state())
    assert freed.meta().device.type == "meta"
    for call in (lambda: update(freed), lambda: freed.token_logprobs(BATCH), lambda: list(freed.named_weights())):
        with pytest.raises(ValueError, match="these weights were freed"):
            call()
    freed.load_training_state(state)
    assert freed.device.type == "cpu"
    for _ in range(2):
        assert update(freed) == update(kept)
    for a, b in zip(freed.training_state()["model"].values(), kept.training_state()["model"].values(), strict=True):
        assert torch.equal(a, b)


def test_freed_training_weights_are_no_better_for_being_moved(train):
    train.meta().cpu()
    with pytest.raises(ValueError, match="these weights were freed"):
        update(train)


def test_freeing_keeps_tied_weights_tied(new_model):
    module = SupervisedModule(new_model(), OPTIMIZER, updates=10)
    names = [name for name, _ in module.model.named_parameters()]
    for device in ("meta", "cpu"):
        module.move("weights", torch.device(device))
        assert [name for name, _ in module.model.named_parameters()] == names
        assert {id(p) for p in module.model.parameters()} == {id(p) for p in module.optimizer.param_groups[0]["params"]}


def test_a_policy_module_takes_over_where_supervision_ended(new_model, inference):
    model = new_model(seed=1)
    supervised = TrainEngine(SupervisedModule(model, OPTIMIZER, updates=10)).build()
    update(supervised)
    supervised.sync_weights(inference)
    policy = TrainEngine(PolicyModule(model, OPTIMIZER, rl_fn.recipes.dapo(), updates=10, first_version=1)).build()
    assert policy.sync_weights(inference) == 1
