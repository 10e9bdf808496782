"""Row-chunked PyTorch: the CPU's backend and every unknown device's.

The forward keeps two numbers a row besides the logits it was given; the backward recomputes p from them:
dx = p·(a + b·x) + g·onehot(token), with a = z − g + h·(lse − H), b = −h for the cotangents g (log-probability),
h (entropy) and z (logsumexp). A token of logit −inf has log-probability −inf and takes no gradient (g = 0), a row of
nothing but −inf has entropy 0: rl_fn's conventions.
"""

import torch

# Elements of a chunk's float32 temporaries: 64 MiB, whatever the number of rows.
_CHUNK = 1 << 24


def run(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float | torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability, entropy, logsumexp, each shaped like ``tokens``."""
    rows = logits.reshape(-1, logits.shape[-1])
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    inverse = 1.0 / torch.as_tensor(temperature, dtype=dtype, device=logits.device)
    inverse = inverse.expand(tokens.shape).reshape(-1)
    outputs = _LogitsLogprobs.apply(rows, tokens.reshape(-1).long(), inverse, softcap)
    logprobs, entropy, logsumexp = (value.view(tokens.shape) for value in outputs)
    return logprobs, entropy, logsumexp


class _LogitsLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, inverse, softcap):
        outputs = [torch.empty(logits.shape[0], dtype=inverse.dtype, device=logits.device) for _ in range(3)]
        for rows in _chunks(logits):
            x, _ = _scaled(logits[rows], inverse[rows], softcap)
            logsumexp = torch.logsumexp(x, -1)
            outputs[2][rows] = logsumexp
            logsumexp = _finite(logsumexp)
            p = torch.exp(x - logsumexp[:, None])
            outputs[0][rows] = x.gather(-1, tokens[rows, None])[:, 0] - logsumexp
            # 0·(−inf) would be NaN where a token cannot be drawn.
            outputs[1][rows] = logsumexp - (p * x.masked_fill(p == 0, 0.0)).sum(-1)
        ctx.save_for_backward(logits, tokens, inverse, outputs[1], outputs[2])
        ctx.softcap = softcap
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, tokens, inverse, entropy, logsumexp = ctx.saved_tensors
        logsumexp = _finite(logsumexp)
        g, h, z = (torch.zeros_like(logsumexp) if c is None else c for c in cotangents)
        g = g.masked_fill(logits.gather(-1, tokens[:, None])[:, 0] == float("-inf"), 0.0)
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            x, derivative = _scaled(logits[rows], inverse[rows], ctx.softcap)
            p = torch.exp(x - logsumexp[rows, None])
            a = z[rows] - g[rows] + h[rows] * (logsumexp[rows] - entropy[rows])
            dx = p * (a[:, None] - h[rows, None] * x.masked_fill(p == 0, 0.0))
            dx.scatter_add_(-1, tokens[rows, None], g[rows, None])
            gradient[rows] = (dx * inverse[rows, None] * derivative).to(gradient.dtype)
        return gradient, None, None, None


def _finite(logsumexp):
    """0 for a row of nothing but −inf, so that its p is 0 and not NaN."""
    return logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)


def _chunks(logits):
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def _scaled(logits, inverse, softcap):
    """The scaled logits and the softcap's derivative (1 without a softcap)."""
    z = logits.to(inverse.dtype)
    if softcap is None:
        return z * inverse[:, None], 1.0
    capped = torch.tanh(z / softcap)
    # tanh turns a masked token's −inf into a finite −softcap: it must stay impossible.
    x = (softcap * capped * inverse[:, None]).masked_fill(z == float("-inf"), float("-inf"))
    return x, 1.0 - capped * capped
