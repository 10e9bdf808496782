"""Modules under the names of libraries that have no kernels for this machine: they record the call and compute in torch
what the library documents.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from rl_kernels import backends


def install(monkeypatch, backend, module, **functions):
    """Make ``module`` importable with these functions, and ``backend`` runnable on this machine."""
    parts = module.split(".")
    for path in (".".join(parts[: n + 1]) for n in range(len(parts))):
        made = ModuleType(path)
        made.__spec__, made.__path__ = ModuleSpec(path, None, is_package=True), []
        monkeypatch.setitem(sys.modules, path, made)
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)
    real = backends.refusal
    monkeypatch.setattr(backends, "refusal", lambda b, device: None if b == backend else real(b, device))


def scaled_cross_entropy(calls):
    """``LigerFusedLinearScaledCrossEntropyFunction``: NLL in float32, entropy in the inputs' precision."""

    class Function:
        @staticmethod
        def apply(
            _input,
            weight,
            target,
            temperature=1.0,
            ignore_index=-100,
            m_tiles_per_cluster=1,
            return_entropy=False,
            selected_token_ids=None,
        ):
            calls.append((tuple(_input.shape), target.dtype, temperature, ignore_index, m_tiles_per_cluster))
            assert return_entropy and selected_token_ids is None and isinstance(temperature, float)
            log_p = (_input.float() @ weight.float().T / temperature).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            return -log_p.gather(-1, target[:, None])[:, 0], entropy.to(_input.dtype)

    return Function


def sampling_from_logits(calls):
    """``flashinfer.sampling.sampling_from_logits``: Gumbel noise of each row's own generator."""

    def function(logits, indices=None, deterministic=True, generator=None, check_nan=False, seed=None, offset=None):
        calls.append((logits.clone(), seed, offset))
        tokens = []
        for row, number in zip(logits, torch.as_tensor(seed).tolist(), strict=True):
            noise = torch.empty(len(row)).exponential_(generator=torch.Generator().manual_seed(number))
            tokens.append(int((row - noise.log()).argmax()))
        return torch.tensor(tokens, dtype=torch.int32)

    return function


def random_sample_outer_exponential(calls):
    """``aiter.ops.sample.random_sample_outer_exponential``, which reads whole groups of four entries."""

    def function(out, input, exponentials, temperatures, eps=1e-10):
        assert input.shape[1] % 4 == 0 and exponentials.shape == input.shape and exponentials.dtype == torch.float32
        calls.append((input.clone(), exponentials, temperatures, eps))
        p = (input / temperatures[:, None]).softmax(-1)
        out.copy_((p / (exponentials + eps)).argmax(-1))

    return function
