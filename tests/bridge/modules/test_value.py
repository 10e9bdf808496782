"""The critic: its values, its gradient against plain torch, its files, its way to another worker."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import rl_fn
from rl_bridge.common.random_numbers import generators
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.model_source import PretrainedSource, PretrainedValueSource, StateSource, ValueSource
from rl_bridge.models.small import TinySource
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.modules.value import ValueModule, ValueScorer
from rl_bridge.parallel.config import ParallelConfig
from rl_fn import components
from tests.support.one_step import make
from tests.support.trajectories import random_batch

OBJECTIVE = rl_fn.recipes.ppo()
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=0)
BASE = TinySource(vocabulary=15, hidden=16, layers=2, heads=2, seed=3)
SOURCE = ValueSource(BASE, seed=7, pad_token=0)


def made(kind, source, *args, **options):
    return torch_worker(lambda: kind(source, *args, **options), None, torch.device("cpu"), generators())


def critic(objective=OBJECTIVE, source=SOURCE, **options):
    return made(ValueModule, source, OPTIMIZER, objective, updates=4, **options)


def data(rows=7):
    """Right-padded rows, a hole in a mask, a row in which nothing counts; tokens of which none is padding."""
    batch, g = random_batch(rows, seed=2), torch.Generator().manual_seed(1)
    columns = torch.arange(batch.tokens.shape[1])
    tokens = torch.where(columns < batch.lengths[:, None], batch.tokens.clamp(1, 14), 0)
    mask = batch.mask.clone()
    longest = int(batch.lengths.argmax())
    mask[longest, int(batch.lengths[longest]) - 2] = False
    mask[(longest + 1) % rows] = False
    returns, old = torch.randn((2, *mask.shape), generator=g)
    return batch._replace(tokens=tokens, mask=mask, returns=returns, old_values=0.3 * old)


def plainly(model, batch):
    """Each row alone and without padding: the head after every token, by transformers and torch alone."""
    values = torch.zeros(batch.tokens.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        hidden = model.model(batch.tokens[row : row + 1, :length], use_cache=False).last_hidden_state[0]
        values[row, 1:length] = (hidden @ model.score.weight[0])[:-1]
    return values


def gradients(module):
    return {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 10**6])
def test_a_value_is_of_the_state_before_its_token(packing, tokens):
    scoring = ScoringConfig(micro_batch_tokens=tokens, packing=packing)
    scorer, batch = made(ValueScorer, SOURCE, scoring), data()
    assert not any(p.requires_grad for p in scorer.model.parameters())
    with torch.no_grad():
        wanted = plainly(scorer.model, batch)
    got = scorer.values(batch)
    torch.testing.assert_close(got, wanted.masked_fill(~batch.mask, 0.0), rtol=1e-5, atol=1e-5)
    assert got[batch.mask].abs().min() > 0


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_plain_torch(packing, clip):
    objective = OBJECTIVE.replace(value=components.ValueLoss(clip))
    module = critic(objective, scoring=ScoringConfig(micro_batch_tokens=40, packing=packing))
    batch, denominator = data(), 11.0
    assert len(module.micro_batches(batch)) > 1
    metrics = module.train_step(batch, denominator)
    got = gradients(module)
    module.zero_grad()

    values = plainly(module.model, batch)
    errors = (values - batch.returns).square()
    if clip is not None:
        held = batch.old_values + (values - batch.old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (held - batch.returns).square())
    total = (errors * batch.mask).sum()
    (total / denominator).backward()
    wanted = gradients(module)
    assert got.keys() == wanted.keys() and max(float(w.abs().max()) for w in wanted.values()) > 0.1
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert float(metrics["value_loss"].total) == pytest.approx(float(total.detach()), rel=1e-5)
    assert float(metrics["value_loss"].denominator) == float(batch.mask.sum())


def test_a_critic_begins_at_zero_and_learns_the_returns():
    batch = data()._replace(returns=torch.ones(data().mask.shape), old_values=None)
    objective = OBJECTIVE.replace(value=components.ValueLoss())
    module = critic(objective, ValueSource(BASE))
    assert float(module.values(batch).abs().max()) == 0.0
    losses = []
    for _ in range(40):
        losses.append(float(module.train_step(batch, float(batch.mask.sum()))["value_loss"].total))
        module.optimizer_step()
    assert losses[-1] < 0.1 * losses[0] and module.weights_version() == 40


def test_transformers_loads_what_is_saved_and_scores_the_same(tmp_path):
    module, batch = critic(), data()
    module.save_pretrained(str(tmp_path))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    attention = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    with torch.no_grad():
        wanted = loaded(input_ids=batch.tokens, attention_mask=attention).logits[:, 0]
    for packing in (False, True):
        scorer = made(ValueScorer, PretrainedValueSource(str(tmp_path)), ScoringConfig(packing=packing))
        torch.testing.assert_close(scorer.scores(batch), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_trunk_is_that_of_any_source(tmp_path, family, tied):
    model = make(family, tied=tied)
    model.save_pretrained(tmp_path)
    wanted = {name: value for name, value in model.state_dict().items() if name.startswith("model.")}
    for source in (StateSource(model), PretrainedSource(str(tmp_path))):
        with torch.device("meta"):
            value = ValueSource(source).empty()
        ValueSource(source).load(value)
        state = value.state_dict()
        assert state.keys() == {*wanted, "score.weight"}
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
        assert not state["score.weight"].any() and not any(b.is_meta for b in value.buffers())


def test_other_models_are_refused(tmp_path):
    config = copy.deepcopy(SOURCE.empty().config)
    config.num_labels = 2
    two = AutoModelForSequenceClassification.from_config(config)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"has one label, that in .* has 2"):
        PretrainedValueSource(str(tmp_path / "two")).empty()
    with pytest.raises(ValueError, match="no model can be loaded from"):
        PretrainedValueSource(str(tmp_path)).empty()
    with pytest.raises(ValueError, match="has no critic's loss"):
        critic(rl_fn.recipes.grpo())
    with pytest.raises(ValueError, match=r"needs batch\.returns"):
        critic().train_step(data()._replace(returns=None), 1.0)


def test_a_saved_critic_goes_on_bit_for_bit():
    batch = data()

    def update(module):
        module.train_step(batch, 9.0)
        return module.optimizer_step()

    module = critic()
    update(module)
    state = copy.deepcopy(module.checkpoint_state())
    resumed = critic(source=ValueSource(BASE))
    resumed.load_checkpoint_state(state)
    assert [update(resumed) for _ in range(2)] == [update(module) for _ in range(2)]
    assert torch.equal(resumed.values(batch), module.values(batch))


def test_a_critic_travels_and_moves():
    batch = data()
    engine = TrainEngine(lambda: ValueModule(SOURCE, OPTIMIZER, OBJECTIVE, updates=4), name="critic").build()
    frozen = TrainEngine(lambda: ValueScorer(ValueSource(BASE)), name="frozen").build()
    engine.train_step(NeedParallel(batch), 9.0)
    engine.optimizer_step()
    wanted = engine.values(NeedParallel(batch))
    assert engine.sync_weights(frozen) == 1
    assert torch.equal(frozen.values(NeedParallel(batch)), wanted)
    frozen.meta()
    engine.sync_weights(frozen)
    assert torch.equal(frozen.scores(NeedParallel(batch)), engine.scores(NeedParallel(batch)))
    engine.release(), frozen.release()


def test_adapters_of_a_critic_are_trained_and_written_merged(tmp_path):
    pytest.importorskip("peft")
    from rl_bridge.models.lora import LoRASource

    batch = data()._replace(old_values=None)
    module = critic(OBJECTIVE.replace(value=components.ValueLoss()), LoRASource(ValueSource(BASE, pad_token=0), 4, 8.0))
    assert all(".lora_" in name for name, p in module.model.named_parameters() if p.requires_grad)
    for _ in range(3):
        module.train_step(batch, float(batch.mask.sum()))
        module.optimizer_step()
    values = module.values(batch)
    assert float(values.abs().max()) > 0
    module.save_pretrained(str(tmp_path))
    plain = made(ValueScorer, PretrainedValueSource(str(tmp_path)))
    torch.testing.assert_close(plain.values(batch), values, rtol=1e-5, atol=1e-6)


def test_values_are_float32_where_the_model_computes_in_bfloat16():
    batch = data()
    exact, low = (
        made(ValueScorer, SOURCE, ScoringConfig(dtype=dtype)).values(batch) for dtype in ("float32", "bfloat16")
    )
    assert low.dtype == torch.float32 and not torch.equal(low, exact)
    torch.testing.assert_close(low, exact, rtol=0.05, atol=0.05)
    gathered = made(ValueScorer, SOURCE, parallel=ParallelConfig(param_dtype=torch.bfloat16)).values(batch)
    assert gathered.dtype == torch.float32 and not torch.equal(gathered, exact)
    torch.testing.assert_close(gathered, exact, rtol=0.05, atol=0.05)
