"""Both ways of the head with a loss, against float64 logits that are whole: values, metrics, gradients, refusals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_kernels.linear_policy_loss import fused
from tests.kernels.cases import OPTIONS, N, V, ids, normal, tokens_for
from tests.kernels.exact import exact
from tests.kernels.live_bytes import LiveBytes
from tests.kernels.operations import linear_policy_loss, placed
from tests.kernels.registry import DEVICE, backends

H = 19
# Blocks of 1, 2 and all rows.
WORKSPACES = [1, 4000, None]
both = pytest.mark.parametrize("one_pass", [False, True], ids=["unfused", "fused"])


def model(dtype=torch.float32):
    return normal(N, H, scale=1.0).to(dtype), normal(V, H, scale=1.0, seed=1).to(dtype), normal(V, seed=2).to(dtype)


def local_loss(targets=None):
    """Clipped ratios against old log-probabilities, an entropy bonus and a z-loss: different for each row."""
    old = -3.0 + (normal(N, seed=5) if targets is None else normal(N, targets, seed=5)) * 0.3
    advantages = normal(N, seed=6)

    def loss(logprobs, entropy, logsumexp, rows):
        ratio = torch.exp((logprobs.clamp(min=-20.0) - old[rows].to(logprobs)).clamp(max=2.0))
        a = advantages[rows].to(logprobs).reshape(-1, *[1] * (logprobs.dim() - 1))
        surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        total = surrogate.sum() - 0.3 * entropy.sum() + 0.02 * (logsumexp.clamp(min=-50.0) ** 2).sum()
        return total / N, {"ratio": ratio.sum(), "rows": rows.stop - rows.start}

    return loss


def run(arguments, tokens, loss, **options):
    """Value, metrics and gradients, with an upstream gradient of 3."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    total, metrics = linear_policy_loss(
        *leaves[:2], tokens, loss, bias=leaves[2] if len(leaves) > 2 else None, **options
    )
    return total, metrics, torch.autograd.grad(3.0 * total, leaves)


def assert_equal_to_float64(options, *, targets=None, backend=None, dtype=torch.float32, biased=True, **more):
    arguments = model(dtype)[: 3 if biased else 2]
    tokens = tokens_for(options, targets=targets)
    loss = local_loss(targets)
    doubles = [x.double().requires_grad_() for x in arguments]
    logits = doubles[0] @ doubles[1].T + (doubles[2] if biased else 0.0)
    wanted, wanted_metrics = loss(*exact(logits, tokens, **options), slice(0, N))
    wanted_gradients = torch.autograd.grad(3.0 * wanted, doubles, allow_unused=True)
    if "mask" in options:  # what is left out may hold anything
        arguments[0][~options["mask"]] = float("nan")
    total, metrics, gradients = run(arguments, tokens, loss, **options, **more, backend=backend)
    assert total.dtype == torch.float32 and not metrics["ratio"].requires_grad
    torch.testing.assert_close(total.double(), wanted.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(metrics["ratio"].double(), wanted_metrics["ratio"].detach(), rtol=1e-4, atol=1e-4)
    assert metrics["rows"] == N
    size = max(1.0, 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item())
    rounding = {torch.float32: 3e-5, torch.bfloat16: 2**-7}[dtype]
    for mine, theirs, of in zip(gradients, wanted_gradients, arguments, strict=True):
        assert mine.dtype == of.dtype
        theirs = torch.zeros_like(mine).double() if theirs is None else theirs
        torch.testing.assert_close(mine.double(), theirs, rtol=rounding, atol=max(rounding, 1e-4) * size)


@both
@pytest.mark.parametrize("option", list(OPTIONS))
def test_values_and_gradients(option, one_pass):
    assert_equal_to_float64(OPTIONS[option], fused=one_pass)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("option", ["plain", "everything"])
@pytest.mark.parametrize("targets", [None, 3])
def test_any_cut_into_blocks(workspace, option, targets):
    assert_equal_to_float64(OPTIONS[option], targets=targets, biased=False, workspace=workspace, fused=True)


@pytest.mark.parametrize("backend", backends("linear_policy_loss"))
def test_other_backends(backend):
    assert_equal_to_float64(OPTIONS["everything"], backend=backend, fused=True)


@both
def test_half_precision(one_pass):
    assert_equal_to_float64({"temperature": 0.7}, dtype=torch.bfloat16, fused=one_pass, workspace=WORKSPACES[1])


def test_the_blocks_are_those_that_the_workspace_has_room_for():
    assert [fused.sizes(V, H, w or 1 << 30, 4).tokens for w in WORKSPACES[:2]] == [1, 2]
    large = fused.sizes(128256, 4096, 1 << 30, 4)
    numbers = large.tokens * (128256 + large.vocab + 3 * 4096) + 2 * large.vocab * 4096 + 5 * (1 << 22)
    assert large.vocab == 8192 and 0.98 * (1 << 30) < 4 * numbers <= 1 << 30


@both
def test_shapes_batches_and_what_the_loss_sees(one_pass):
    hidden, weight, _ = model()
    seen = []

    def loss(logprobs, entropy, logsumexp, rows):
        seen.append((tuple(logprobs.shape), tuple(entropy.shape), rows))
        return logprobs.sum()

    batched = hidden[:6].view(2, 3, H).requires_grad_()
    for tokens, shape in ((ids(2, 3), (6,)), (ids(2, 3, 4), (6, 4))):
        total, metrics = linear_policy_loss(batched, weight, tokens, loss, fused=one_pass, check=False)
        assert total.dim() == 0 and metrics is None and seen.pop() == (shape, (6,), slice(0, 6))
        assert torch.autograd.grad(total, batched)[0].shape == (2, 3, H)


@both
def test_no_rows(one_pass):
    hidden, weight, _ = model()
    leaf = hidden[:0].clone().requires_grad_()
    total, _ = linear_policy_loss(leaf, weight, ids(0), local_loss(), fused=one_pass)
    assert total.item() == 0.0 and torch.autograd.grad(total, leaf)[0].shape == (0, H)


def test_only_what_requires_a_gradient_gets_one():
    hidden, weight, _ = model()
    frozen = linear_policy_loss(hidden.clone().requires_grad_(), weight, ids(N), local_loss(), fused=True)[0]
    frozen.backward()
    head = weight.clone().requires_grad_()
    linear_policy_loss(hidden, head, ids(N), local_loss(), fused=True)[0].backward()
    torch.testing.assert_close(head.grad, run((hidden, weight), ids(N), local_loss())[2][1] / 3, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not linear_policy_loss(hidden, head, ids(N), local_loss(), fused=True)[0].requires_grad


def test_a_loss_without_a_gradient():
    total, _, gradients = run(model()[:2], ids(N), lambda *a: a[0].sum() * 0 + 1, fused=True)
    assert total.item() == 1.0 and all(not g.any() for g in gradients)
    total, _, gradients = run(model()[:2], ids(N), lambda *a: a[0].detach().sum(), fused=True)
    assert all(not g.any() for g in gradients)


@both
def test_autocast_rounds_nothing(one_pass):
    hidden, weight, _ = (x.requires_grad_() for x in model())
    totals = [linear_policy_loss(hidden, weight, ids(N), local_loss(), fused=one_pass)[0]]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        totals.append(linear_policy_loss(hidden, weight, ids(N), local_loss(), fused=one_pass)[0])
    expected, actual = (torch.autograd.grad(total, (hidden, weight)) for total in totals)
    assert torch.equal(*totals) and all(map(torch.equal, actual, expected))


class Products(TorchDispatchMode):
    """Floating-point operations of matrix products."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm_"):
            a, b = args[-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def test_three_products_instead_of_four():
    with Products() as products:
        run(model(), ids(N), local_loss(), fused=True, workspace=WORKSPACES[1])
    assert products.total == 6 * N * V * H


def test_memory_is_flat_in_the_number_of_rows():
    """Forward and backward: the most bytes alive beyond dL/dhidden, dL/dweight and a few numbers a row."""
    vocabulary, hidden_size, workspace = 300, 12, 64 << 10

    def peak(count):
        hidden, weight = placed((normal(count, hidden_size).float(), normal(vocabulary, hidden_size, seed=1).float()))
        hidden.requires_grad_(), weight.requires_grad_()
        tokens = placed(ids(count, high=vocabulary))
        with LiveBytes() as memory:
            total, _ = linear_policy_loss(
                hidden, weight, tokens, lambda *a: -a[0].sum() - a[1].sum(), fused=True, workspace=workspace
            )
            total.backward()
        return memory.peak

    small, large = peak(200), peak(600)
    assert large - small <= 400 * 4 * (hidden_size + 8) < 400 * 4 * vocabulary / 10
    assert large <= workspace + 4 * vocabulary * hidden_size + 600 * 4 * (hidden_size + 8)


INTERACTING = {
    "mean": lambda logprobs, entropy, logsumexp, rows: -logprobs.mean(),
    "whitening": lambda logprobs, *rest: ((logprobs - logprobs.mean()) ** 2).sum(),
    "sequence ratio": lambda logprobs, *rest: torch.exp(0.1 * logprobs.sum()),
    "entropy": lambda logprobs, entropy, *rest: -(entropy.sum() ** 2),
}


@pytest.mark.parametrize("name", list(INTERACTING))
def test_rows_that_interact_are_refused(name):
    with pytest.raises(ValueError, match="rows of the loss interact: cut in two, rows 0 to 7"):
        run(model()[:2], ids(N), INTERACTING[name], fused=True)


def test_what_an_unchecked_mean_is():
    """The documented difference: a sum of the blocks' means, where unfused it is the mean."""
    arguments, mean = model()[:2], INTERACTING["mean"]
    each = -torch.stack([run((arguments[0][n : n + 1], arguments[1]), ids(N)[n : n + 1], mean)[0] for n in range(N)])
    blocks = run(arguments, ids(N), mean, fused=True, check=False, workspace=1)[0]
    torch.testing.assert_close(blocks, -each.sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(arguments, ids(N), mean)[0], -each.mean(), rtol=1e-5, atol=1e-5)


def test_the_backward_runs_once():
    hidden, weight, _ = model()
    total, _ = linear_policy_loss(hidden.requires_grad_(), weight, ids(N), local_loss(), fused=True)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="its backward runs once"):
        total.backward()


FACTOR = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(V, H + 1)}, rf"weight must be \(V, {H}\), got \({V}, {H + 1}\)"),
        ({"bias": torch.zeros(V + 1)}, rf"bias must be \({V},\), got \({V + 1},\)"),
        ({"workspace": 0}, "workspace must be a positive number of bytes, got 0"),
        ({"group": object()}, "fused=True needs the whole vocabulary"),
        ({"start": 3}, "fused=True needs the whole vocabulary"),
        ({"loss": lambda *a: a[0]}, r"loss must return a scalar tensor, .* got torch.float32 \(7,\)"),
        ({"loss": lambda *a: (1.0, {})}, "loss must return a scalar tensor, .* got float"),
        ({"loss": lambda *a: a[0].sum() * FACTOR * 2}, r"holds a tensor \(\) that requires a gradient"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, _ = model()
    arguments = {"hidden": hidden.requires_grad_(), "weight": weight, "tokens": ids(N), "loss": local_loss()} | change
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**arguments, fused=True)


def test_a_backend_that_does_not_exist_is_refused():
    with pytest.raises(NotImplementedError, match="linear_policy_loss has no backend 'cutlass'"):
        run(model(), ids(N), local_loss(), fused=True, backend="cutlass")


def test_under_torch_compile():
    """Unfused it is one graph; fused it is refused there, and runs where the graph is left."""
    hidden, weight, _ = (x.requires_grad_() for x in model())
    tokens = ids(N)

    def head(h, w, one_pass):
        return linear_policy_loss(h, w, tokens, lambda *a: -a[0].sum(), fused=one_pass)[0]

    outside = torch.compiler.disable(head)
    expected = torch.autograd.grad(head(2 * hidden, weight, False), (hidden, weight))
    one_graph = torch.compile(lambda h, w: head(2 * h, w, False), fullgraph=True, backend="aot_eager")
    left = torch.compile(lambda h, w: outside(2 * h, w, True), backend="aot_eager")
    for compiled in (one_graph, left):
        actual = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match=r"torch\.compile cannot trace fused=True"):
        torch.compile(lambda h, w: head(h, w, True), fullgraph=True, backend="aot_eager")(hidden, weight)
