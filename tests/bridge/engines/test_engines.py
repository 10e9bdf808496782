import copy
from functools import partial

import pytest
import torch

import rl_fn
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.engines import Engine, InferenceEngine, Mesh, NeedParallel, TrainEngine, returns
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.policy import PolicyModule
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.rollout import InProcessRollout
from tests.support.many_hosts import ManyHosts
from tests.support.ready import ready

SAMPLING = SamplingParams(max_new_tokens=6, n=2)
PROMPTS = ["1+1=", "12+34="]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=1)


class Doubler(torch.nn.Module):
    def double(self, x):
        return 2 * x


def supervised_engine(model):
    return TrainEngine(partial(SupervisedModule, StateSource(model), OPTIMIZER, updates=10)).build()


@pytest.fixture
def train(new_model):
    return supervised_engine(new_model(seed=1))


@pytest.fixture
def inference(new_model, tokenizer):
    return InferenceEngine(lambda: InProcessRollout(StateSource(new_model()), tokenizer)).build()


BATCH = collate([single_turn([2, 3], [4, 5, 1]), single_turn([6], [7, 1])], 0)


def update(engine):
    engine.train_step(NeedParallel(BATCH), 5.0)
    return engine.optimizer_step()


@pytest.mark.parametrize("factory", [Doubler, lambda: Doubler()], ids=["class", "function"])
def test_calls_go_through_to_the_worker(factory):
    engine = TrainEngine(factory).build()
    assert torch.equal(engine.double(NeedParallel(torch.ones(2))), torch.full((2,), 2.0))
    assert engine.submit("double", 4).result() == 8


@pytest.mark.parametrize("given", [Doubler(), 3, lambda size: Doubler()])
def test_an_engine_takes_a_factory(given):
    with pytest.raises(TypeError, match=r"TrainEngine takes a factory without arguments, .*write lambda: YourModule"):
        TrainEngine(given)


def test_a_factory_is_called_by_build():
    made = []
    engine = TrainEngine(lambda: made.append(1) or Doubler())
    assert not made
    engine.build()
    engine.double(1), engine.double(2)
    assert made == [1]


class Line(torch.nn.Module):
    """Parameters tied and not, a buffer, and values from the global random state."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(2), persistent=False)

    def values(self):
        return {name: value.clone() for name, value in [*self.named_parameters(), *self.named_buffers()]}

    def tied(self):
        return self.first.weight is self.second.weight


def test_a_module_has_the_values_that_its_factory_would_make_here():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    engine = TrainEngine(Line).build()
    assert torch.equal(torch.get_rng_state(), state)
    expected, found = Line().values(), engine.values()
    assert found.keys() == expected.keys() and engine.tied()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_no_torch_module_has_an_engine_of_its_own():
    with pytest.raises(TypeError, match=r"makes a torch.nn.Module, got dict"):
        TrainEngine(lambda: {}).build()
    assert Engine(lambda: "a b").build().split() == ["a", "b"]


def test_a_method_that_the_worker_does_not_have():
    engine = TrainEngine(Doubler, name="doubler").build()
    with pytest.raises(AttributeError, match="the worker of doubler has no method 'doubel'; there is double"):
        engine.doubel(2)
    with pytest.raises(AttributeError, match="TrainEngine has no attribute '_private'"):
        engine._private  # noqa: B018


def test_an_unknown_method_is_sent_to_nobody():
    many = ManyHosts(2)
    engine = Engine(Rows, executor=many).build(mesh=Mesh(shard=2))
    many.sent.clear()
    with pytest.raises(AttributeError):
        engine.nothing_like_that(1)
    assert not many.sent


def test_a_call_before_build():
    with pytest.raises(ValueError, match=r"call build\(\) of TrainEngine.* before double\(\): it was not built"):
        TrainEngine(Doubler).double(2)


def test_a_second_build():
    with pytest.raises(ValueError, match="this engine is built already"):
        TrainEngine(Doubler).build().build()


def test_a_build_that_fails_leaves_no_worker_behind():
    many = ManyHosts(2)

    def factory():
        raise OSError("no such model")

    engine = Engine(factory, executor=many)
    with pytest.raises(OSError, match="no such model"):
        engine.build(mesh=Mesh(shard=2))
    assert not any(host.workers for host in many.hosts) and not many.held
    with pytest.raises(ValueError, match="call build"):
        engine.call("anything")


def test_an_engine_is_built_again_after_its_executor_was():
    many = ManyHosts(2)
    engine = Engine(Rows, executor=many, name="policy").build(mesh=Mesh(shard=2))
    for host in many.hosts:
        host.workers.clear()
    many.held.clear()
    with pytest.raises(
        ValueError, match=r"slot 0 holds no worker of 'policy' \(any more\): build\(\) the engine again"
    ):
        engine.constant(1)
    assert engine.build(mesh=Mesh(shard=2)).constant(1) == 1


def test_engines_of_one_name():
    many = ManyHosts(1)
    names = [Engine(Rows, executor=many, name="policy").build().name for _ in range(3)]
    assert names == ["policy", "policy-2", "policy-3"] == many.held[0]


def test_release_makes_room():
    many = ManyHosts(1)
    engine = Engine(Rows, executor=many).build()
    assert many.held[0] == [engine.name] and engine.name in many.hosts[0].workers
    engine.release()
    assert many.held[0] == [] and not many.hosts[0].workers
    engine.build()


@pytest.mark.parametrize("ends", ["restart", "stop"])
def test_an_error_behind_the_end_of_all_workers_is_not_hidden_by_a_release(ends):
    executor = LocalExecutor("cpu")
    engine = Engine(Rows, executor=executor).build()
    other = Engine(Rows, executor=executor).build()
    getattr(executor, ends)()
    engine.release(), other.release()
    assert engine.slots == other.slots == []
    if ends == "restart":
        assert engine.build().constant(1) == 1


class Rows:
    def __init__(self):
        self.seen = 0

    @returns("rows")
    def twice(self, rows):
        self.seen = len(rows)
        return 2 * rows

    @returns("sum")
    def count(self, rows):
        return {"rows": len(rows)}

    @returns("local")
    def how_many(self):
        return self.seen

    @returns("same")
    def constant(self, value):
        return value

    def undeclared(self, rows):
        return len(rows)


@pytest.mark.parametrize(
    "layout", [Mesh(shard=3), Mesh(replicate=3), Mesh(shard=3, tensor=2), Mesh(shard=3, sequence=2)]
)
def test_an_engine_of_many_workers_is_called_like_one(layout):
    engine = Engine(Rows, executor=ManyHosts(layout.size)).build(mesh=layout)
    rows = torch.arange(8.0)
    assert torch.equal(engine.twice(NeedParallel(rows)), 2 * rows)
    assert engine.count(NeedParallel(rows)) == {"rows": 8}
    assert engine.constant(7) == 7
    assert engine.how_many() == sorted([2, 3, 3] * (layout.size // 3))
    with pytest.raises(ValueError, match="undeclared ran on 3 workers and does not say how their results join"):
        engine.undeclared(NeedParallel(rows))
    assert torch.equal(engine.twice(NeedParallel(rows[:1])), 2 * rows[:1])


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
    engines = [supervised_engine(new_model()) for _ in range(2)]
    for engine in engines:
        update(engine)
    freed, kept = engines
    state = copy.deepcopy(kept.checkpoint_state())
    assert freed.meta().device.type == "meta"
    for call in (lambda: update(freed), lambda: freed.token_logprobs(BATCH), freed.checkpoint_state):
        with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
            call()
    freed.load_checkpoint_state(state)
    assert freed.device.type == "cpu"
    for _ in range(2):
        assert update(freed) == update(kept)
    for a, b in zip(freed.checkpoint_state()["model"].values(), kept.checkpoint_state()["model"].values(), strict=True):
        assert torch.equal(a, b)


def test_freed_training_weights_are_no_better_for_being_moved(train):
    train.meta().cpu()
    with pytest.raises(ValueError, match="the weights here are incomplete: they were freed"):
        update(train)


def test_freeing_keeps_tied_weights_tied(new_model):
    module = ready(SupervisedModule, new_model(), OPTIMIZER, updates=10)
    names = [name for name, _ in module.model.named_parameters()]
    for device in ("meta", "cpu"):
        module.move("weights", torch.device(device))
        assert [name for name, _ in module.model.named_parameters()] == names
        assert {id(p) for p in module.model.parameters()} == {id(p) for p in module.optimizer.param_groups[0]["params"]}


def test_a_policy_module_takes_over_where_supervision_ended(new_model, inference):
    model = new_model(seed=1)
    supervised = supervised_engine(model)
    update(supervised)
    supervised.sync_weights(inference)
    policy = TrainEngine(partial(PolicyModule, StateSource(model), OPTIMIZER, rl_fn.recipes.dapo(), updates=10)).build()
    reference = TrainEngine(partial(TokenScorer, StateSource(model))).build()
    assert supervised.sync_weights(policy) == policy.sync_weights(reference) == policy.sync_weights(inference) == 1
    wanted = supervised.token_logprobs(BATCH)
    assert torch.equal(policy.token_logprobs(BATCH), wanted) and torch.equal(reference.token_logprobs(BATCH), wanted)
    assert policy.weights_version() == reference.weights_version() == 1
