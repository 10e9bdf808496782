"""A loss of one's own: the numbers of the same loss of rl_fn, or refused before it trains wrongly."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
import torch

import rl_fn
from rl_bridge import torch_loss
from rl_bridge.functional import from_jax
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.own_loss import GIVEN, READABLE, check_loss, load_loss, trial_batch
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_fn import Batch, components
from tests.support.policy_batch import make_batch
from tests.support.ready import ready

NAN = float("nan")
OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


@torch_loss(gradient_without_advantage=False)
def clipped(batch):
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)


@torch_loss(over_batch=True)
def centred(batch):
    advantages = batch.advantages - batch.advantages.sum() / batch.mask.sum()
    return -advantages * (batch.logprobs - batch.old_logprobs).exp()


def centred_in_jax(batch):
    advantages = batch.advantages - batch.advantages.sum() / jnp.sum(batch.mask, dtype=batch.advantages.dtype)
    return -advantages * jnp.exp(batch.logprobs - batch.old_logprobs)


GRPO = rl_fn.recipes.grpo().replace(loss=components.PPOClip(0.2), kl=components.KL("k3", 0.1))
WEIGHTED = GRPO.replace(correction=components.TIS(1.1), entropy=components.EntropyBonus(0.1))


def gradient_of(tokenizer, objective, *, micro_batch_tokens=10**6, **options):
    model = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=3)
    module = ready(PolicyModule, model, OPTIMIZER, objective, updates=1, **options)
    module.scoring = ScoringConfig(micro_batch_tokens=micro_batch_tokens)
    batch = make_batch()
    metrics = module.train_step(batch, float(objective.denominator(batch.mask.numpy())))
    gradient = torch.cat([p.grad.flatten() for p in module.model.parameters()])
    return gradient, {name: mean(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    "objective, loss",
    [(GRPO, clipped), (WEIGHTED, clipped), (WEIGHTED.replace(loss=centred_in_jax), centred)],
    ids=["grpo", "weighted", "over_batch"],
)
@pytest.mark.parametrize("micro_batch_tokens", [10**6, 12])
def test_a_loss_has_the_gradient_and_metrics_of_the_same_loss_in_jax(tokenizer, objective, loss, micro_batch_tokens):
    expected, metrics = gradient_of(tokenizer, objective, micro_batch_tokens=micro_batch_tokens)
    gradient, own = gradient_of(tokenizer, objective.replace(loss=loss), micro_batch_tokens=micro_batch_tokens)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert own.keys() == metrics.keys() - {"clip_fraction"}
    assert own == pytest.approx({name: metrics[name] for name in own}, rel=1e-5, abs=1e-7)


@torch_loss(reads=("advantages", "entropies"))
def curious(batch):
    return -batch.advantages * batch.logprobs - 0.5 * batch.entropies


def curious_in_jax(batch):
    return -batch.advantages * batch.logprobs - 0.5 * batch.entropies


def reinforce_in_jax(batch):
    return -batch.advantages * batch.logprobs


CURIOUS = components.Custom(curious_in_jax, ("entropies",), over_batch=False)


@pytest.mark.parametrize("entropy", [None, components.EntropyBonus(0.0)], ids=["no bonus", "bonus of 0"])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (curious, {}),
        (CURIOUS, {}),
        (CURIOUS, {"fused_loss": True}),
        (dataclasses.replace(CURIOUS, over_batch=True), {}),
    ],
    ids=["torch", "jax", "fused", "over batch"],
)
def test_entropies_that_a_loss_reads_have_a_gradient_whether_or_not_there_is_a_bonus(tokenizer, loss, options, entropy):
    alone = components.Custom(reinforce_in_jax, over_batch=False)
    base = rl_fn.recipes.dapo()
    expected, _ = gradient_of(tokenizer, base.replace(loss=alone, entropy=components.EntropyBonus(0.5)))
    without, _ = gradient_of(tokenizer, base.replace(loss=alone))
    gradient, _ = gradient_of(tokenizer, base.replace(loss=loss, entropy=entropy), **options)
    assert (expected - without).abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_masked_numbers_reach_no_loss_and_no_gradient():
    share = from_jax(GRPO.replace(loss=clipped, kl=None).share)
    mask = torch.tensor([[True, True, False]])

    def gradient(masked):
        logprobs = torch.tensor([[-1.0, -2.0, masked]], requires_grad=True)
        advantages = torch.tensor([[1.0, -1.0, masked]])
        loss, _ = share(Batch(logprobs, logprobs.detach() + 0.1, advantages, mask), torch.tensor(2.0))
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]

    for value in (NAN, float("inf"), -1e30):
        assert all(torch.equal(a, b) for a, b in zip(gradient(value), gradient(0.0), strict=True))


@torch_loss
def summed(batch):
    return (batch.logprobs * batch.advantages).sum(1)


@torch_loss
def an_integer(batch):
    return batch.mask.long()


@torch_loss
def a_number(batch):
    return 1.0


@torch_loss
def without_gradient(batch):
    return -batch.advantages * batch.logprobs.detach()


@torch_loss
def not_finite(batch):
    return batch.logprobs.log()


@torch_loss
def not_finite_at_the_start(batch):
    distance = ((batch.logprobs - batch.old_logprobs) ** 2 * batch.mask).sum(1, keepdim=True).sqrt()
    return -batch.logprobs * batch.advantages + 0.01 * distance


@torch_loss
def not_finite_without_advantage(batch):
    return -batch.logprobs * batch.advantages / batch.advantages.abs()


@torch_loss(reads=("advantages", "entropies"), gradient_without_advantage=False)
def declares_falsely(batch):
    """Its bonus for entropy would be left out of each group with equal rewards."""
    return -batch.logprobs * batch.advantages - 0.01 * batch.entropies


@torch_loss(over_batch=True, gradient_without_advantage=False)
def centred_falsely(batch):
    return -batch.logprobs * (batch.advantages - batch.advantages.sum() / batch.mask.sum())


@torch_loss
def discounted(batch):
    """By the place in the row, of which the prompt's tokens are the first."""
    return -(0.9 ** torch.arange(batch.mask.shape[1])) * batch.logprobs * batch.advantages


@torch_loss
def mean_of_a_padded_row(batch):
    return (batch.logprobs * batch.advantages).mean(1, keepdim=True).expand_as(batch.logprobs)


@torch_loss
def whitened(batch):
    kept = batch.advantages[batch.mask]
    return -(batch.advantages - kept.mean()) / kept.std() * batch.logprobs


@torch_loss
def reads_more(batch):
    return batch.logprobs - batch.ref_logprobs


@torch_loss
def random(batch):
    return -batch.advantages * batch.logprobs * torch.rand_like(batch.logprobs)


@torch_loss
def dropped(batch):
    return torch.nn.functional.dropout(-batch.advantages * batch.logprobs)


CALLS = []


@torch_loss
def counting(batch):
    CALLS.append(batch)
    return -batch.advantages * batch.logprobs * len(CALLS)


SCALE = torch.nn.Parameter(torch.ones(1))
SCORER = torch.nn.Linear(1, 1)


@torch_loss
def scaled(batch):
    return -SCALE * batch.advantages * batch.logprobs


@torch_loss
def scored(batch):
    return -SCORER(batch.advantages[..., None])[..., 0] * batch.logprobs


AGAIN = "gives other numbers for the same batch when it is called again: .*torch_loss.reads=.'noise',"


@pytest.mark.parametrize(
    "loss, words",
    [
        (random, f"random {AGAIN}"),
        (dropped, f"dropped {AGAIN}"),
        (counting, f"counting {AGAIN}"),
        (scaled, r"scaled has a gradient in tensors of its own, of shapes \[1\], which no optimiser"),
        (scored, r"scored has a gradient in tensors of its own, of shapes .*\[1, 1\].*, which no optimiser"),
        (summed, r"summed returns a number for each token, \[3, 6\], got \[3\]"),
        (an_integer, r"an_integer returns a tensor of floating-point numbers, got torch\.int64"),
        (a_number, "a_number returns a tensor of floating-point numbers, got float"),
        (without_gradient, "without_gradient has no gradient"),
        (not_finite, "not_finite is not finite on an ordinary batch"),
        (mean_of_a_padded_row, "mean_of_a_padded_row depends on how far its rows are padded"),
        (not_finite_at_the_start, "not_finite_at_the_start is not finite where π is π_old, as in the first update"),
        (not_finite_without_advantage, "not_finite_without_advantage is not finite where the advantage is 0"),
        (declares_falsely, r"declares_falsely declares gradient_without_advantage=False, and has a gradient where"),
        (centred_falsely, r"centred_falsely declares gradient_without_advantage=False, and has a gradient where"),
        (discounted, r"discounted depends on how many tokens a row has before its completion.*mask\.cumsum\(1\) - 1"),
        (whitened, r"in the loss whitened .* other completions.*over_batch=True"),
        (reads_more, r"gets logprobs, mask, old_logprobs, advantages, not 'ref_logprobs'"),
    ],
    ids=lambda value: getattr(value, "name", "refused"),
)
def test_a_loss_that_would_train_wrongly_is_refused_before_training(tokenizer, loss, words):
    model = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2)
    with pytest.raises((TypeError, ValueError, AttributeError), match=words):
        ready(PolicyModule, model, OPTIMIZER, rl_fn.recipes.grpo().replace(loss=loss), updates=1)


@pytest.mark.parametrize("field", [*GIVEN, *READABLE])
def test_a_mean_over_the_completions_that_have_something_is_refused_whatever_it_is(field):
    """Several completions of the trial have it: of one alone the mean would be its own."""
    reads = (field,) if field in READABLE else ()

    def averaged(batch):
        having = (getattr(batch, field) != 0).any(1)
        return -batch.logprobs * getattr(batch, field).detach() / having.sum().clamp(min=1)

    with pytest.raises(ValueError, match="depends on other completions"):
        check_loss(torch_loss(averaged, reads=reads))
    check_loss(torch_loss(averaged, reads=reads, over_batch=True))


def test_what_a_whole_batch_decides_passes_when_it_is_declared():
    check_loss(dataclasses.replace(whitened, over_batch=True))
    check_loss(torch_loss(lambda b: (b.logprobs * b.mask).sum(1, keepdim=True) / b.mask.sum(1)[:, None] * b.mask))


def test_fields_that_no_batch_has_are_refused_by_name():
    with pytest.raises(ValueError, match="names logits; a loss may read old_logprobs, advantages, rollout_logprobs"):
        torch_loss(reads=("logits",))(clipped.function)


@pytest.mark.parametrize("function", [3, "loss", [clipped]], ids=["a number", "a text", "a list"])
def test_what_is_no_function_is_no_loss(function):
    with pytest.raises(TypeError, match="torch_loss takes a function of a batch, got"):
        torch_loss(function)


@pytest.mark.parametrize("reads", ["advantages", (3,), ["advantages", None]], ids=["a text", "a number", "none in it"])
def test_fields_are_a_tuple_of_names(reads):
    with pytest.raises(TypeError, match=r"reads is a tuple of names, as \('advantages',\), got"):
        torch_loss(reads=reads)(clipped.function)


def test_parameters_that_are_detached_pass():
    check_loss(torch_loss(lambda b: -SCALE.detach() * b.advantages * b.logprobs))


def test_a_fused_head_takes_no_loss_in_pytorch(tokenizer):
    model = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2)
    with pytest.raises(ValueError, match="fused_loss takes losses in JAX, clipped is in PyTorch"):
        ready(PolicyModule, model, OPTIMIZER, GRPO.replace(loss=clipped), updates=1, fused_loss=True)


def test_jax_alone_says_what_it_cannot_run():
    ones = jnp.ones((1, 2))
    batch = Batch(ones, ones, ones, jnp.ones((1, 2), bool))
    objective = GRPO.replace(loss=clipped, kl=None)
    for run in (objective, jax.jit(objective), jax.grad(lambda b: objective(b)[0], allow_int=True)):
        with pytest.raises(TypeError, match="JAX alone cannot run or differentiate"):
            run(batch)


def test_the_explanation_knows_a_changed_source_and_pickles():
    assert clipped.explain().startswith("clipped, in PyTorch, of source ")
    assert clipped.explain() != dataclasses.replace(clipped, function=summed.function).explain()
    assert "ℓ = clipped, in PyTorch" in GRPO.replace(loss=clipped).explain()
    assert torch_loss(abs).explain() == "abs, in PyTorch"
    assert pickle.loads(pickle.dumps(dataclasses.replace(clipped, function=centred_in_jax))).function is centred_in_jax


def a_sum_in_jax(batch):
    return (batch.logprobs * batch.advantages).sum(1)


def a_padded_mean_in_jax(batch):
    return (batch.logprobs * batch.advantages).mean(1, keepdims=True) * jnp.ones_like(batch.logprobs)


def without_gradient_in_jax(batch):
    return batch.advantages


@pytest.mark.parametrize(
    "function, words",
    [
        (a_sum_in_jax, r"a_sum_in_jax returns a number for each token, \[3, 6\], got \[3\]"),
        (a_padded_mean_in_jax, "a_padded_mean_in_jax depends on how far"),
        (without_gradient_in_jax, "without_gradient_in_jax has no gradient"),
        (components.Custom(centred_in_jax, over_batch=False), "depends on other completions"),
    ],
    ids=["sum", "padded", "no gradient", "over batch"],
)
def test_a_loss_in_jax_is_tried_likewise(tokenizer, function, words):
    model = tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2)
    with pytest.raises(ValueError, match=words):
        ready(PolicyModule, model, OPTIMIZER, rl_fn.recipes.grpo().replace(loss=function), updates=1)


FILE = """
import torch
import jax.numpy as jnp
import rl_fn
from rl_bridge import torch_loss

def ratio(batch, exp):
    return exp(batch.logprobs - batch.old_logprobs) * batch.advantages

def in_jax(batch):
    return -ratio(batch, jnp.exp)

@torch_loss(gradient_without_advantage=False)
def in_torch(batch):
    return -ratio(batch, torch.exp)

declared = rl_fn.components.Custom(in_jax, over_batch=False, gradient_without_advantage=False)
number = 3
"""


def test_a_loss_of_a_file_is_that_of_its_function_and_pickles_by_its_path(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(FILE)
    batch = {name: torch.tensor([[-1.0, -2.0]]) for name in ("logprobs", "old_logprobs", "advantages")}
    batch = Batch(**batch | {"mask": torch.ones(1, 2, dtype=torch.bool)})
    for name in ("in_jax", "in_torch", "declared"):
        loss = load_loss(f"{file}:{name}")
        check_loss(loss)
        again = pickle.loads(pickle.dumps(loss))
        assert again == loss and hash(again) == hash(loss) and name in loss.explain()
        assert from_jax(again.__call__)(batch).tolist() == [[1.0, 2.0]]
    assert load_loss(f"{file}:declared").over_batch is False and load_loss(f"{file}:in_jax").over_batch is True
    assert load_loss(f"{file}:in_torch").gradient_without_advantage is False


FAILING = """
import jax.numpy as jnp
from rl_bridge import torch_loss

def in_jax(batch):
    return -batch.logprobs * batch.advantage

def by_hand(batch):
    raise KeyError("by hand")

@torch_loss
def in_torch(batch):
    return -batch.logprobs * batch.advantages[:, :2]
"""


@pytest.mark.parametrize("name", ["in_jax", "by_hand", "in_torch"])
def test_an_error_inside_a_loss_names_it(tmp_path, name):
    """By a note behind the error, whatever it is: the trial's first, and a later batch's where the trial passes."""
    (file := tmp_path / "losses.py").write_text(FAILING)
    loss = load_loss(f"{file}:{name}")
    for fails in (lambda: check_loss(loss), lambda: from_jax(loss.__call__)(Batch(**trial_of_three()))):
        with pytest.raises((AttributeError, KeyError, RuntimeError)) as error:
            fails()
        assert error.value.__notes__[:1] == [f"in the function {name} of an objective"]


def trial_of_three():
    tokens = trial_batch(3, 6)
    return {name: tokens[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")}


@pytest.mark.parametrize(
    "body", ["torch.exp(x)", "torch.where(x > 0, x, 0.0)", "torch.clamp(x, 0.0)", "x * torch.ones(3, 6)"]
)
def test_a_loss_in_pytorch_without_its_word_is_told_the_word(tmp_path, body):
    (tmp_path / "losses.py").write_text(
        f"import torch\n\ndef plain(batch):\n    x = batch.logprobs\n    return {body}\n"
    )
    with pytest.raises(TypeError, match=r"losses\.py: the loss .*plain.* calls PyTorch .* write @torch_loss"):
        check_loss(load_loss(f"{tmp_path}/losses.py:plain"))


@pytest.mark.parametrize(
    "source, words",
    [
        ("losses.py", "a loss is named FILE.py:name"),
        ("losses.py:nothing", "has no function 'nothing'"),
        ("losses.py:number", "has no function 'number'"),
        ("broken.py:loss", "broken.py cannot be loaded: ZeroDivisionError"),
        ("absent.py:loss", "no such loss file"),
    ],
)
def test_a_file_without_that_loss_is_refused_by_name(tmp_path, source, words):
    (tmp_path / "losses.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_loss(str(tmp_path / source))


SIGNATURES = {
    "of a reward": ("completion, row", "completion, row"),
    "of nothing": ("", "no arguments"),
    "with a name that must be given": ("batch, *, weight", "batch, weight"),
    "of names alone": ("**fields", "**fields"),
    "of a name alone": ("*, batch", "batch"),
    "of three": ("batch, a, b=2", "batch, a, b"),
}


@pytest.mark.parametrize("above", ["", "@torch_loss\n"], ids=["JAX", "PyTorch"])
@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_function_of_other_arguments_is_no_loss(kind, above, tmp_path):
    arguments, words = SIGNATURES[kind]
    head = "from rl_bridge.modules.own_loss import torch_loss\n"
    (tmp_path / "losses.py").write_text(f"{head}{above}def scored({arguments}):\n    return 1.0\n")
    with pytest.raises(TypeError) as refused:
        check_loss(load_loss(f"{tmp_path}/losses.py:scored"))
    text = str(refused.value)
    assert f"--objective.loss {tmp_path}/losses.py:scored takes {words}; a loss takes one argument" in text, text
    assert "def scored(batch)" in text and "JAX" not in text


@pytest.mark.parametrize("arguments", ["batch", "b, eps=0.2", "*fields", "batch, **options", "batch, /"])
def test_a_function_that_a_batch_alone_calls_is_a_loss(arguments, tmp_path):
    batch = "fields[0]" if arguments == "*fields" else arguments[:1] if arguments.startswith("b,") else "batch"
    body = f"def scored({arguments}):\n"
    (tmp_path / "losses.py").write_text(f"{body}    return -{batch}.logprobs * {batch}.advantages\n")
    check_loss(load_loss(f"{tmp_path}/losses.py:scored"))
