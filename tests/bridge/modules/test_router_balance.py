"""A mixture's load-balancing loss is transformers' own over one whole batch, however the batch is cut."""

from functools import partial

import pytest
import torch

import rl_fn
from rl_bridge.algorithms.comparison_training import accumulate
from rl_bridge.common.random_numbers import generators
from rl_bridge.data.comparisons import PairBatch
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.engines.dispatch import declared
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import character_tokenizer
from rl_bridge.modules.comparison import OVER_BATCH, ComparisonLoss, PreferenceModule
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.rollout import InProcessRollout
from tests.support.direct_engine import Direct
from tests.support.lora_families import tiny
from tests.support.one_step import host_of_rank, mesh_of, whole
from tests.support.ranks import as_rank, found_by_ranks
from tests.support.ready import ready

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "jetmoe", "jamba"]
COEFFICIENT = 0.5
CUTS = {
    "one": {"share_prefixes": False},
    "many": {"share_prefixes": False, "micro_batch_tokens": 13},
    "packed": {"share_prefixes": False, "packing": True, "micro_batch_tokens": 24},
    "shared": {"micro_batch_tokens": 24},
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup=0)


def batch():
    """Groups of rows that share 5 of their first tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 32, (6, 12), generator=generator)
    tokens[:3, :5], tokens[3:, :5] = tokens[0, :5].clone(), tokens[3, :5].clone()
    lengths = torch.tensor([12, 7, 9, 8, 12, 10])
    columns = torch.arange(12)
    mask = (columns >= 5) & (columns < lengths[:, None])
    return TokenBatch(tokens.masked_fill(columns >= lengths[:, None], 0), mask, lengths, torch.arange(6) // 3)


def mixture(family, coefficient=COEFFICIENT):
    name = "aux_loss_coef" if family == "jetmoe" else "router_aux_loss_coef"
    return tiny(family, output_router_logits=True, **{name: coefficient})


def module_of(kind, model, *args, cut="many", **options):
    return ready(kind, model, OPTIMIZER, *args, updates=4, scoring=ScoringConfig(**CUTS[cut]), **options)


def gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def expected(model, rows):
    """transformers' own numbers for the tokens that are read, padded: its balance loss, and log-probabilities."""
    ids = rows.tokens[:, :-1]
    read = torch.arange(ids.shape[1]) < rows.lengths[:, None] - 1
    output = model(ids, attention_mask=read.long(), output_router_logits=True, use_cache=False)
    logprobs = output.logits.log_softmax(-1).gather(-1, rows.tokens[:, 1:, None])[..., 0]
    return output.aux_loss, logprobs * rows.mask[:, 1:]


def close(found, wanted):
    largest = max(float(x.abs().max()) for x in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=2e-5 * largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def balance_gradients(model, rows):
    balance, _ = expected(model, rows)
    (COEFFICIENT * balance).backward()
    return float(balance.detach()), gradients(model)


@pytest.mark.parametrize(
    ("family", "cut"), [(f, "many") for f in FAMILIES] + [("mixtral", cut) for cut in CUTS if cut != "many"]
)
def test_supervised_fine_tuning_has_it(family, cut):
    model, rows = mixture(family), batch()
    balance, logprobs = expected(model, rows)
    loss = -logprobs.sum() / rows.mask.sum()
    (loss + COEFFICIENT * balance).backward()
    module = module_of(SupervisedModule, model, cut=cut)
    metrics = module.train_step(rows, float(rows.mask.sum()))
    assert mean(metrics["router_balance"]) == pytest.approx(float(balance.detach()), rel=1e-5)
    assert mean(metrics["nll"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    close(gradients(module.model), gradients(model))
    assert "router_balance" not in module.nll(rows)


def policy_rows():
    rows, generator = batch(), torch.Generator().manual_seed(1)
    old = (-3.0 + 0.1 * torch.randn(rows.mask.shape, generator=generator)) * rows.mask
    advantages = torch.tensor([1.0, -1, 0.5, 0.25, -0.5, 1])[:, None] * rows.mask
    return rows._replace(old_logprobs=old, advantages=advantages)


def pairs():
    rows = batch()
    present = torch.ones(3, 2, dtype=torch.bool)
    return PairBatch(rows, present, torch.ones(3, dtype=torch.bool), {}, torch.full((3, 2), -20.0))


def policy_step(module):
    rows = policy_rows()
    return module.train_step(rows, float(rows.mask.sum()))


def through(module):
    """As a loss that sorts the batch does it."""
    return module.backward_through(pairs(), torch.arange(6.0).view(3, 2) / 50, True)


DPO = ComparisonLoss(name="dpo", constants={})
STEPS = {
    "policy": (PolicyModule, (rl_fn.recipes.dapo(),), {}, policy_step),
    "policy, fused": (PolicyModule, (rl_fn.recipes.dapo(),), {"fused_loss": True}, policy_step),
    "policy, over the batch": (PolicyModule, (rl_fn.recipes.m2po(threshold=0.01),), {}, policy_step),
    "preference": (PreferenceModule, (DPO,), {}, lambda module: module.train_step(pairs(), 3.0)),
    "preference, sorted": (PreferenceModule, (DPO,), {}, through),
    "recomputed": (
        PolicyModule,
        (rl_fn.recipes.dapo(),),
        {"parallel": ParallelConfig(activations="full")},
        policy_step,
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("cut", ["many", "shared"])
def test_every_trainer_of_tokens_adds_it_to_its_own_loss(name, cut):
    kind, args, options, step = STEPS[name]
    balance, wanted = balance_gradients(mixture("mixtral"), batch())
    without, module = (module_of(kind, mixture("mixtral", c), *args, cut=cut, **options) for c in (0.0, COEFFICIENT))
    assert "router_balance" not in step(without)
    assert mean(step(module)["router_balance"]) == pytest.approx(balance, rel=1e-5)
    before, after = gradients(without.model), gradients(module.model)
    assert float(max(x.abs().max() for x in wanted.values())) > 1e-3
    close({key: after[key] - before[key] for key in after}, wanted)


@pytest.mark.parametrize("name", ["dpo", *OVER_BATCH])
def test_every_loss_of_comparisons_has_it_in_the_record(name):
    loss = ComparisonLoss(name=name, constants={})
    module = module_of(PreferenceModule, mixture("mixtral"), loss)
    balance, _ = expected(mixture("mixtral"), batch())
    metrics = accumulate(Direct(module), loss, pairs(), {})
    assert metrics["router_balance"] == pytest.approx(float(balance.detach()), rel=1e-5)
    assert {"loss", "accuracy"} <= metrics.keys()


def test_workers_add_it_up():
    assert {declared(PreferenceModule.train_step), declared(PreferenceModule.backward_through)} == {"sum"}


def test_two_steps_are_two_losses():
    """Nothing of a step is left for the next one."""
    model, rows = mixture("mixtral"), batch()
    module = module_of(SupervisedModule, model)
    first = [module.train_step(rows, 1.0)["router_balance"] for _ in range(2)]
    assert float(first[0].total) == float(first[1].total) and float(first[0].denominator) == 2 * (58 - 6)


def test_a_step_that_ends_early_leaves_no_term_for_the_next_one(monkeypatch):
    """A loss over the batch goes back before the first micro-batch has a term."""
    kind, args, options, step = STEPS["policy, over the batch"]
    alone, module = (module_of(kind, mixture("mixtral"), *args, **options) for _ in range(2))
    real, calls = torch.autograd.backward, []

    def backward(*args, **kwargs):
        real(*args, **kwargs)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.autograd, "backward", backward)
        step(module)
    assert module.balance.term() is None
    metrics = step(module), step(alone)
    assert metrics[0] == metrics[1]
    assert all(torch.equal(a, gradients(alone)[name]) for name, a in gradients(module).items())


def test_with_adapters():
    model, rows = mixture("mixtral"), batch()
    source = LoRASource(StateSource(model), 2, 4, seed=1)
    make = partial(SupervisedModule, source, OPTIMIZER, updates=4)
    module = torch_worker(make, None, torch.device("cpu"), generators())
    balance, _ = expected(model, rows)
    assert mean(module.train_step(rows, 1.0)["router_balance"]) == pytest.approx(float(balance.detach()), rel=1e-5)


def test_it_is_off_unless_the_configuration_asks():
    for model in (tiny("mixtral", router_aux_loss_coef=0.5), mixture("mixtral", 0.0), tiny("llama")):
        assert module_of(SupervisedModule, model).balance is None
    scorer = ready(TokenScorer, mixture("mixtral"))
    assert not scorer.model.base_model._forward_hooks


def test_another_loss_than_transformers_usual_one_is_refused(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    usual = modeling_mixtral.load_balancing_loss_func
    for other in (lambda *args: 2 * usual(*args), None):
        monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", other)
        with pytest.raises(NotImplementedError, match=r"MixtralForCausalLM has output_router_logits=True, and a lo"):
            module_of(SupervisedModule, mixture("mixtral"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_completions_are_sampled_without_it(family):
    """transformers computes the loss in each forward pass of such a configuration, and fails beside a cache."""
    tokenizer = character_tokenizer("0123456789+=")
    sampling, found = SamplingParams(max_new_tokens=4, temperature=0), []
    for asks in (True, False):
        model = tiny(family, output_router_logits=asks, vocab_size=len(tokenizer))
        engine = InferenceEngine(lambda m=model: InProcessRollout(StateSource(m), tokenizer), name="r").build()
        try:
            found.append([completion.tokens for completion in engine.generate(["1+1=", "12+"], sampling)])
        finally:
            engine.release()
    assert found[0] == found[1]


LAYOUTS = {"shard": (1, 2, 1, 1), "replicate": (2, 1, 1, 1)}


def of_rank(host):
    found = {}
    for name, sizes in LAYOUTS.items():
        module = sharded(mesh_of(host, sizes))
        # Three micro-batches here, one there: stand-ins count nothing.
        metrics = module.train_step(batch().rows([slice(0, 4), slice(4, 6)][host.slot]), 1.0)
        gradient = {key: whole(p.grad).numpy() for key, p in module.model.named_parameters() if p.grad is not None}
        found[name] = gradient, [float(x) for x in metrics["router_balance"]]
    for axis, sizes in (("sequence", (1, 1, 2, 1)), ("tensor", (1, 1, 1, 2))):
        try:
            sharded(mesh_of(host, sizes))
        except NotImplementedError as error:
            found[axis] = str(error)
    return found


def sharded(mesh):
    make = partial(
        SupervisedModule, StateSource(mixture("mixtral")), OPTIMIZER, updates=4, scoring=ScoringConfig(**CUTS["many"])
    )
    return torch_worker(make, mesh, torch.device("cpu"), generators())


def rank(number, address, queue):
    as_rank(lambda: of_rank(host_of_rank()), 2, number, address, queue)


@pytest.mark.long
def test_two_workers_have_the_loss_of_one(tmp_path):
    model, rows = mixture("mixtral"), batch()
    balance, logprobs = expected(model, rows)
    (COEFFICIENT * balance - logprobs.sum()).backward()
    ranks = [found for _, found in found_by_ranks(rank, 2, tmp_path)]
    for name in LAYOUTS:
        totals, denominators = zip(*(found[name][1] for found in ranks), strict=True)
        assert sum(totals) / sum(denominators) == pytest.approx(float(balance.detach()), rel=1e-5)
        for found in ranks:
            close({key: torch.from_numpy(value) for key, value in found[name][0].items()}, gradients(model))
    for found in ranks:
        assert found["sequence"].startswith("a load-balancing loss needs sequence=1, not 2")
        assert found["tensor"].startswith("a load-balancing loss needs tensor=1, not 2")
