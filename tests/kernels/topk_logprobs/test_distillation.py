"""What a teacher reports here is what rl_fn's distillation takes, and a student's K targets give its value and gradient
without the student's logits.
"""

import jax
import jax.numpy as jnp
import pytest
import torch

import rl_fn
from tests.kernels.cases import N, V, masked, normal
from tests.kernels.operations import linear_logprobs, linear_topk_logprobs

H, K, HEAT = 6, 5, 1.7


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop"])
def test_forward_kl_of_the_teachers_top_k(tail):
    teacher = linear_topk_logprobs(normal(N, H, scale=1.0).float(), normal(V, H, seed=1, scale=1.0).float(), K)
    hidden, weight = (normal(n, H, seed=s, scale=1.0).float().requires_grad_() for n, s in ((N, 2), (V, 3)))
    mask = masked()

    def divergence(h, w):
        return rl_fn.top_k_distillation(
            jnp.matmul(h, w.T, precision="highest"),
            jnp.asarray(teacher.logprobs.numpy()),
            jnp.asarray(teacher.tokens.numpy()),
            jnp.asarray(mask.numpy()),
            temperature=HEAT,
            tail=tail,
        )

    arrays = jnp.asarray(hidden.detach().numpy()), jnp.asarray(weight.detach().numpy())
    value_and_gradients = jax.value_and_grad(lambda *x: (lambda d: (d.sum(), d))(divergence(*x)), (0, 1), has_aux=True)
    (_, wanted), wanted_gradients = jax.jit(value_and_gradients)(*arrays)

    log_q, log_p = linear_logprobs(hidden, weight, teacher.tokens, temperature=HEAT).logprobs, teacher.logprobs
    if tail == "renormalise":
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    if tail == "bucket":
        log_p, log_q = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (log_p, log_q))
    ours = (log_p.exp() * (log_p - log_q)).sum(-1).masked_fill(~mask, 0.0)
    ours.sum().backward()
    torch.testing.assert_close(ours.detach(), torch.tensor(wanted.tolist()), rtol=1e-4, atol=1e-5)
    for leaf, gradient in zip((hidden, weight), wanted_gradients, strict=True):
        torch.testing.assert_close(leaf.grad, torch.tensor(gradient.tolist()), rtol=1e-4, atol=1e-5)
