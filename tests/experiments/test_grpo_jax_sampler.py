"""Sampling with the cache is the full forward pass, one token at a time; a learner trains on what can teach it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rl_fn
from experiments.flax_qwen2 import Completions, Qwen2, Qwen2Config, completion_logprobs, generate
from experiments.flax_qwen2.learner import Problems, Sampling, build_learner, data_mesh

pytestmark = pytest.mark.long

CONFIG = Qwen2Config(
    vocab_size=9,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    initializer_range=0.3,
)
PROMPTS = jnp.array([[3, 4, 5, 6], [0, 0, 7, 8], [0, 2, 2, 4]], jnp.int32)
MASK = PROMPTS != 0
sample = nnx.jit(generate, static_argnames=("max_new_tokens", "samples", "temperature"))
score = nnx.jit(completion_logprobs, static_argnames=("temperature",))


@pytest.fixture(scope="module")
def model() -> Qwen2:
    return nnx.jit(lambda: Qwen2(CONFIG, nnx.Rngs(0)))()


def full_logits(model: Qwen2, tokens, mask, samples: int):
    """Of every completion token, from one forward pass over the whole sequences, nothing shared or cached."""
    prompts, prompt_mask = (jnp.repeat(x, samples, axis=0) for x in (PROMPTS, MASK))
    sequences, valid = jnp.concatenate([prompts, tokens], axis=1), jnp.concatenate([prompt_mask, mask], axis=1)
    logits = nnx.jit(lambda model: model(sequences, valid))(model)
    return logits[:, PROMPTS.shape[1] - 1 : -1]


@pytest.fixture(scope="module")
def drawn(model) -> Completions:
    return sample(model, PROMPTS, MASK, jax.random.key(1), max_new_tokens=6, samples=16, temperature=0.7)


def test_logprobs_kept_at_sampling_equal_a_full_forwards(model, drawn):
    expected = rl_fn.logits_logprobs(full_logits(model, drawn.tokens, drawn.mask, 16), drawn.tokens, temperature=0.7)
    kept = np.asarray(drawn.mask)
    np.testing.assert_allclose(np.asarray(drawn.logprobs)[kept], np.asarray(expected.logprobs)[kept], atol=1e-4)
    assert not np.asarray(drawn.logprobs)[~kept].any() and not np.asarray(drawn.tokens)[~kept].any()

    logprobs, entropies = score(model, PROMPTS, MASK, drawn.tokens, drawn.mask, temperature=0.7)
    np.testing.assert_allclose(np.asarray(logprobs)[kept], np.asarray(expected.logprobs)[kept], atol=1e-4)
    np.testing.assert_allclose(np.asarray(entropies)[kept], np.asarray(expected.entropy)[kept], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_pallas_gives_the_same_values_and_gradients(shallow, drawn, tied):
    model = shallow
    if not tied:
        config = dataclasses.replace(CONFIG, num_hidden_layers=1, tie_word_embeddings=False)
        model = nnx.jit(lambda: Qwen2(config, nnx.Rngs(0)))()

    def loss(model, pallas):
        batch = (PROMPTS, MASK, drawn.tokens, drawn.mask)
        logprobs, entropies = completion_logprobs(model, *batch, temperature=0.7, pallas=pallas)
        return jnp.sum(jnp.where(drawn.mask, logprobs - 0.1 * entropies, 0.0))

    (a, mine), (b, theirs) = (
        nnx.jit(nnx.value_and_grad(lambda model, pallas=pallas: loss(model, pallas)))(model) for pallas in (True, False)
    )
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4)


def test_a_row_ends_with_its_first_end_of_sequence(drawn):
    lengths = set()
    for tokens, mask in zip(np.asarray(drawn.tokens), np.asarray(drawn.mask), strict=True):
        ends = np.flatnonzero(tokens == CONFIG.eos_token_id)
        length = ends[0] + 1 if len(ends) else 6
        assert mask.tolist() == [True] * length + [False] * (6 - length)
        lengths.add(int(length))
    assert lengths >= {1, 6}, "some rows should end at once and some not at all"
    groups = np.asarray(drawn.tokens).reshape(3, 16, 6)
    assert (groups[:, 1:] != groups[:, :1]).any(axis=(1, 2)).all(), "the samples of a prompt should differ"


def test_greedy_with_cache_equals_argmax_of_full_forwards(model):
    drawn = sample(model, PROMPTS, MASK, jax.random.key(0), max_new_tokens=6, temperature=0.0)
    choice = jnp.argmax(full_logits(model, drawn.tokens, drawn.mask, 1), axis=-1)
    kept = np.asarray(drawn.mask)
    np.testing.assert_array_equal(np.asarray(drawn.tokens)[kept], np.asarray(choice)[kept])
    assert kept.sum() > 6


def test_completions_that_are_not_a_multiple_of_the_prompts_are_refused(model):
    with pytest.raises(ValueError, match="multiple of the prompts"):
        completion_logprobs(model, PROMPTS, MASK, jnp.ones((4, 2), jnp.int32), jnp.ones((4, 2), bool))


@pytest.fixture(scope="module")
def shallow() -> Qwen2:
    """One layer, which compiles in half the time."""
    return nnx.jit(lambda: Qwen2(dataclasses.replace(CONFIG, num_hidden_layers=1), nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def learner(shallow):
    graph, _ = nnx.split(shallow, nnx.Param)
    return build_learner(
        graph,
        data_mesh(1),
        objective=rl_fn.recipes.dapo(),
        sampling=Sampling(samples=8, groups=4, max_new_tokens=3),
        supervised_optimizer=optax.sgd(1e-3),
        optimizer=optax.sgd(1e-3),
    )


def problems(answer: list[int]) -> Problems:
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(2, 9, (32, 4)), jnp.int32)
    answers = jnp.tile(jnp.array([answer], jnp.int32), (32, 1))
    return Problems(prompts, prompts != 0, answers, answers != 0)


def test_groups_with_something_to_learn_come_first(shallow, learner):
    parameters = nnx.state(shallow, nnx.Param)
    # The answer is to say nothing, which a random model does now and then.
    rollout, metrics = learner.rollout(parameters, None, jax.random.key(0), problems([1, 0, 0]))
    assert 4 / 32 <= float(metrics["informative"]) < 1
    assert np.abs(np.asarray(rollout.advantages)).max(axis=1).all() and rollout.tokens.shape == (32, 3)
    right = np.asarray((rollout.tokens == jnp.array([[1, 0, 0]])).all(axis=1))
    assert ((np.asarray(rollout.advantages)[:, 0] > 0) == right).all() and right.any() and not right.all()
    before = learner.fresh(jax.tree.map(lambda x: x.copy(), parameters), supervised=False)
    after, trained = learner.update(before, rollout)
    assert float(trained["grad_norm"]) > 0 and float(trained["clip_fraction"]) == 0
    logprobs = score(nnx.merge(nnx.split(shallow)[0], after.parameters), *rollout[:4])[0]
    # A short step along the gradient: the advantages' own first-order promise.
    assert float(jnp.sum(jnp.where(rollout.mask, (logprobs - rollout.logprobs) * rollout.advantages, 0.0))) > 0


def test_nothing_to_learn_moves_nothing(shallow, learner):
    parameters = nnx.state(shallow, nnx.Param)
    # A second end of sequence is never sampled.
    rollout, metrics = learner.rollout(parameters, None, jax.random.key(0), problems([1, 1, 1]))
    assert float(metrics["reward"]) == 0 and not np.asarray(rollout.mask).any()
    after, trained = learner.update(
        learner.fresh(jax.tree.map(lambda x: x.copy(), parameters), supervised=False), rollout
    )
    assert float(trained["grad_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, after.parameters, parameters)
