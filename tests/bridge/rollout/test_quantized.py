"""A rollout in this process whose linear layers compute in int8."""

from functools import partial

import numpy as np
import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.model_source import StateSource
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.inprocess import Int8Linear
from rl_bridge.weights.source import Cast, Quantize
from tests.support.trajectories import generate

PROMPTS = ["1+1=", "7", "12+34=", "98-76+54="]
SAMPLING = SamplingParams(max_new_tokens=12, n=2, seed=4)


@pytest.fixture
def rollout(new_model, tokenizer):
    return InProcessRollout(StateSource(new_model(seed=2)), tokenizer, precision="int8")


def tensors(rollout):
    return dict(rollout.weight_receiver().outline(adapter=False))


def test_only_the_head_and_the_embeddings_are_no_int8(rollout, new_model):
    made = tensors(rollout)
    matrices = {name for name, tensor in made.items() if tensor.dim() == 2 and not name.endswith("_scale")}
    assert {name for name in matrices if made[name].dtype != torch.int8} == {"model.embed_tokens.weight"}  # tied
    assert sum(isinstance(module, Int8Linear) for module in rollout._model.modules()) == 14


def test_logprobs_are_those_of_the_int8_model(rollout):
    """A full forward of the same layers; the integer products depend on no order, so that rows cannot differ much."""
    for completion in generate(rollout, PROMPTS, SAMPLING):
        with torch.no_grad():
            logits = rollout._model(input_ids=torch.tensor([completion.tokens]), use_cache=False).logits[0]
        start = len(completion.prompt_tokens)
        wanted = logits[start - 1 : -1].log_softmax(-1).gather(1, torch.tensor(completion.tokens[start:])[:, None])
        np.testing.assert_allclose(completion.sampled_logprobs, wanted[:, 0], atol=1e-5)


def test_a_layer_is_near_the_one_it_replaces(new_model):
    """|y − Wx| ≤ Σ (|W| δx + |x| δw + δw δx), with half a step of each as δ."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    model = torch.nn.Sequential(linear)
    made = Int8Linear(linear)
    for (_, tensor), target in zip(
        Quantize("int8", frozenset(["0.weight"]), torch.float32)("0.weight", linear.weight.detach()),
        (made.weight, made.weight_scale),
        strict=True,
    ):
        target.copy_(tensor)
    x = torch.randn(5, 64)
    with torch.no_grad():
        error = (made(x) - model(x)).abs()
    dx, dw = (t.abs().amax(-1, keepdim=True) / 255 for t in (x, linear.weight.detach()))
    bound = dx * linear.weight.abs().sum(1) + x.abs().sum(1, keepdim=True) * dw.T + 64 * dx * dw.T
    assert bool((error <= bound).all())
    assert float(error.max()) > 0


@pytest.mark.long
def test_updates_equal_a_fresh_int8_rollout_bit_for_bit(new_model, tokenizer):
    executor = LocalExecutor("cpu")
    source = StateSource(new_model(seed=2))
    policy = TrainEngine(partial(TokenScorer, source), executor=executor, name="policy").build()
    engine = InferenceEngine(
        partial(InProcessRollout, source, tokenizer, precision="int8"), executor=executor, name="rollout"
    ).build()
    before = engine.generate(PROMPTS, SAMPLING)
    for seed in (3, 4, 5):
        changed = new_model(seed=seed)
        policy.run(load, "policy", changed.state_dict())
        addresses = engine.run(addresses_of, "rollout")
        policy.sync_weights(engine)
        assert engine.run(addresses_of, "rollout") == addresses
        fresh = InProcessRollout(StateSource(changed), tokenizer, precision="int8")
        got, wanted = engine.generate(PROMPTS, SAMPLING), generate(fresh, PROMPTS, SAMPLING)
        assert [(t.tokens, t.logprobs) for t in got] == [(t.tokens, t.logprobs) for t in wanted]
    assert [t.tokens for t in got] != [t.tokens for t in before]
    # A sync that forgets to quantise is refused before anything is overwritten.
    with pytest.raises(ValueError, match="nothing was overwritten"):
        policy.sync_weights(engine, through=Cast(torch.float32))
    engine.meta()
    engine.cpu()
    policy.sync_weights(engine)
    assert [t.logprobs for t in engine.generate(PROMPTS, SAMPLING)] == [t.logprobs for t in wanted]


def test_the_option_of_a_run(new_model, tokenizer):
    options = RolloutOptions(precision="int8")
    assert not options.exact and RolloutOptions().exact
    rollout = options.factory(StateSource(new_model()), tokenizer, sleep=False)()
    assert rollout.weights_map().precision == "int8"
    assert RolloutOptions().factory(StateSource(new_model()), tokenizer, sleep=False)().weights_map() is None
    with pytest.raises(ValueError, match=r"has --rollout\.vllm\.precision, got precision int8"):
        RolloutOptions(backend="vllm", precision="int8")


def load(host, engine, state):
    host.workers[engine].module.exported().load_state_dict(state)


def addresses_of(host, engine):
    return {n: t.data_ptr() for n, t in host.workers[engine].module.weight_receiver().outline(adapter=False)}
