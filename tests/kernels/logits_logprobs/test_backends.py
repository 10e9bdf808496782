"""Every backend, with every option, against float64: values and gradients."""

import pytest
import torch

from tests.kernels.cases import INF, OPTIONS, N, V, ids, normal, tokens_for
from tests.kernels.exact import exact, gradients
from tests.kernels.operations import logits_logprobs, placed, returned
from tests.kernels.registry import DEVICE, backends

BACKENDS = backends("logits_logprobs")
each_option = pytest.mark.parametrize("option", list(OPTIONS))
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def cotangents(targets):
    first = normal(N, seed=5) if targets is None else normal(N, targets, seed=5)
    return first, normal(N, seed=6), normal(N, seed=7)


@each_backend
@each_option
@pytest.mark.parametrize("targets", [None, 3])
def test_values_and_gradients(backend, option, targets):
    options = OPTIONS[option]
    logits, tokens = normal(N, V).float(), tokens_for(options, targets=targets)
    logits[1, ::2] = -INF
    if "mask" in options:
        logits[~options["mask"]] = float("nan")
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, wanted = logits_logprobs(leaf, tokens, **options, backend=backend), exact(double, tokens, **options)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b.detach(), rtol=3e-6, atol=3e-5)
    c = cotangents(targets)
    # A cold row's gradient is large: 1/temperature.
    size = 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item()
    (mine,), (theirs,) = gradients(got, [x.float() for x in c], [leaf]), gradients(wanted, c, [double])
    torch.testing.assert_close(mine.double(), theirs.nan_to_num(), rtol=3e-5, atol=3e-5 * max(1.0, size))


@each_backend
@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("allowed", [False, True], ids=["all tokens", "allowed tokens"])
def test_tokens_of_masked_rows_may_be_no_token_ids(backend, targets, allowed):
    """Labels of −100 for what is left out: reading the logits there would be a device-side assert on a GPU."""
    logits, tokens = normal(N, V).float(), ids(N) if targets is None else ids(N, targets)
    mask = torch.arange(N) % 3 != 1
    options = {"mask": mask, "allowed_tokens": normal(N, V, seed=9) > -1.0 if allowed else None}

    def results(labels):
        leaf = logits.clone().requires_grad_()
        got = logits_logprobs(leaf, labels, **options, backend=backend)
        got.logprobs.masked_fill(got.logprobs == -INF, 0.0).sum().backward()
        return (*got, leaf.grad)

    expected = results(tokens)
    for label in (-100, V, 2**40):
        rows = mask if targets is None else mask[:, None]
        for a, b in zip(results(torch.where(rows, tokens, label)), expected, strict=True):
            assert torch.equal(a, b)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_as_they_are(backend, dtype):
    logits, tokens = normal(N, V).to(dtype), ids(N)
    leaf = logits.clone().requires_grad_()
    got = logits_logprobs(leaf, tokens, backend=backend)
    for a, b in zip(got, exact(logits, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)
    got.logprobs.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == dtype


@each_backend
@each_option
def test_the_gradient_may_take_the_logits_memory(backend, option):
    options = OPTIONS[option]
    tokens = tokens_for(options)
    allowed, gone = placed((normal(N, V).float(), normal(N, V).float()))

    def gradient(logits, **more):
        leaf = logits.detach().requires_grad_()
        outputs = logits_logprobs(
            leaf * 1.0 if not more else leaf.view(N, V), tokens, **options, **more, backend=backend
        )
        return returned(gradients(outputs, [c.float() for c in cotangents(None)], [leaf])[0])

    expected = gradient(allowed)
    actual = gradient(gone, inplace_backward=True)
    assert torch.equal(actual, expected)
    assert torch.equal(returned(gone), expected), "the gradient was written elsewhere"
    assert torch.equal(returned(allowed), normal(N, V).float()), "without inplace_backward the logits stay"


def test_the_gradient_of_a_sure_token_is_not_rounded_away():
    """p − 1 with p = 0.9999 is −1e-4; rounding p to bf16 first would make it 0."""
    logits = torch.tensor([[10.0, 0.0, 0.0]], dtype=torch.bfloat16).requires_grad_()
    logits_logprobs(logits, torch.tensor([0])).logprobs.sum().backward()
    p = torch.softmax(torch.tensor([10.0, 0.0, 0.0], dtype=torch.float64), 0)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0].double(), torch.tensor([1.0, 0, 0]).double() - p, rtol=5e-3, atol=0)


def test_the_full_set_as_support_changes_nothing_and_a_set_of_one_is_certain():
    logits, tokens = normal(N, V).float(), ids(N)
    whole = logits_logprobs(logits, tokens)
    for allowed_tokens in (torch.arange(V).flip(0).expand(N, V), torch.ones(V, dtype=torch.bool)):
        for a, b in zip(logits_logprobs(logits, tokens, allowed_tokens=allowed_tokens), whole, strict=True):
            assert torch.equal(a, b)
    alone = logits_logprobs(logits, tokens, allowed_tokens=tokens[:, None])
    assert alone.logprobs.abs().max() == 0 and alone.entropy.abs().max() == 0


def test_custom_operation():
    logits, tokens, inv_temperature = placed((normal(3, 5).float(), ids(3, 2, high=5), torch.ones(3)))
    arguments = (logits.requires_grad_(), tokens, inv_temperature, 2.0, None, None, False, "torch")
    torch.library.opcheck(torch.ops.rl_kernels.logits_logprobs.default, arguments)
    outputs = [x.detach() for x in torch.ops.rl_kernels.logits_logprobs(*arguments)]
    backward = (
        logits.detach(),
        tokens,
        inv_temperature,
        2.0,
        None,
        None,
        outputs,
        [torch.ones_like(x) for x in outputs],
    )
    torch.library.opcheck(torch.ops.rl_kernels.logits_logprobs_backward.default, (*backward, "torch"))
    torch.library.opcheck(torch.ops.rl_kernels.logits_logprobs_backward_.default, (*backward, "torch"))


def test_under_torch_compile_and_checkpointing_and_autocast():
    from torch.utils.checkpoint import checkpoint

    logits, tokens = normal(N, V).float(), ids(N)

    def loss(x):
        out = logits_logprobs(x, tokens, temperature=0.8)
        return (out.logprobs - 0.1 * out.entropy).sum()

    def gradient(function):
        leaf = logits.clone().requires_grad_()
        function(leaf).backward()
        return leaf.grad

    expected = gradient(loss)
    assert torch.equal(gradient(torch.compile(loss, fullgraph=True, backend="aot_eager")), expected)
    assert torch.equal(gradient(lambda x: checkpoint(loss, x, use_reentrant=False)), expected)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(gradient(loss), expected)
