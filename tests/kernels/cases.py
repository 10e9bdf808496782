"""Arguments that every backend of both log-probability operations is tried with, at a size that suits interpreters."""

import torch

INF = float("inf")
N, V = 7, 37


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, scale=3.0, seed=0):
    return scale * torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def ids(*shape, seed=0, high=V):
    return torch.randint(high, shape, generator=generator(seed))


def sets(size=5):
    """Kept sets of 1 … size ids in no order, filled with −1; row 0's holds every drawn token's id."""
    order = torch.rand(N, V, generator=generator(3)).argsort(1)[:, :size]
    lengths = torch.arange(N)[:, None] % size + 1
    return torch.where(torch.arange(size) < lengths, order, -1)


def drawn_from(allowed_tokens):
    """A token in each row's set, but for the last row, whose token is outside it."""
    tokens = allowed_tokens[:, 0].clone()
    outside = next(v for v in range(V) if v not in allowed_tokens[-1].tolist())
    tokens[-1] = outside
    return tokens


def masked():
    mask = torch.ones(N, dtype=torch.bool)
    mask[[0, 4]] = False
    return mask


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.01, 10.0, N)},
    "softcap": {"softcap": 2.0, "temperature": 1.3},
    "scale": {"logit_scale": 0.25},
    "mask": {"mask": masked()},
    "nothing counts": {"mask": torch.zeros(N, dtype=torch.bool)},
    "allowed_tokens": {"allowed_tokens": sets()},
    "bool allowed_tokens": {"allowed_tokens": torch.rand(N, V, generator=generator(9)) < 0.5},
    "everything": {
        "temperature": torch.linspace(0.3, 2.0, N),
        "softcap": 4.0,
        "logit_scale": 1.5,
        "allowed_tokens": sets(),
        "mask": masked(),
    },
}


def tokens_for(options, *, targets=None):
    """Tokens [N], drawn from the kept set where there is one; or [N, K], one of them twice."""
    allowed_tokens = options.get("allowed_tokens")
    tokens = drawn_from(allowed_tokens) if allowed_tokens is not None and allowed_tokens.dtype != torch.bool else ids(N)
    if targets is None:
        return tokens
    more = torch.cat([tokens[:, None], ids(N, targets - 1, seed=4)], 1)
    more[:, -1] = more[:, 0]
    return more
