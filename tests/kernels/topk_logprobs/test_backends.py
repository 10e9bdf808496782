"""Both entry points, with every option, against float64: ids, values and gradients."""

import pytest
import torch

from tests.kernels.cases import INF, OPTIONS, N, V, ids, masked, normal
from tests.kernels.exact import allowed_mask, exact, gradients
from tests.kernels.linear_logprobs.inputs import H, model
from tests.kernels.operations import linear_topk_logprobs, logits_logprobs, placed, topk_logprobs
from tests.kernels.registry import backends

K = 4
# The reference is the definition in other words: a few options show that it is wired as the others are. In Triton's
# kernels the options are one another's neighbours; test_triton.py has what is theirs alone.
FEWER = {
    "triton": ("plain", "softcap", "nothing counts", "bool allowed_tokens", "everything"),
    "reference": ("temperatures", "bool allowed_tokens", "everything"),
}
BACKENDS = backends("topk_logprobs")
CASES = [(backend, option) for backend in BACKENDS for option in FEWER.get(backend, OPTIONS)]
each_case = pytest.mark.parametrize(("backend", "option"), CASES)
EVERY = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def expected_ids(logits, k, *, allowed_tokens=None, mask=None, **_):
    """By a stable sort: value falling, then id rising; 0 where masked."""
    z = logits.double().masked_fill(~allowed_mask(allowed_tokens, logits.shape[1], len(logits)), -INF)
    found = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return found if mask is None else found.masked_fill(~mask[:, None], 0)


def cotangents(k):
    return normal(N, k, seed=5), normal(N, seed=6), normal(N, seed=7)


def assert_equal_to_float64(got, logits, leaves, doubles, options, k=K):
    assert torch.equal(got.tokens, expected_ids(logits.detach(), k, **options))
    wanted = exact(logits, got.tokens, **options)
    for a, b in zip(got[1:], wanted, strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-4)
    size = max(1.0, 1.0 / torch.as_tensor(options.get("temperature", 1.0)).min().item())
    c = cotangents(k)
    mine, theirs = gradients(got[1:], [x.to(got.logprobs) for x in c], leaves), gradients(wanted, c, doubles)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.nan_to_num(), rtol=3e-5, atol=1e-4 * size)


@each_case
def test_from_logits(backend, option):
    options = OPTIONS[option]
    # Halves, so that many entries tie; and one row with fewer possible tokens than K.
    logits = (normal(N, V) * 2).round().float() / 2
    logits[1, 2:] = -INF
    if "mask" in options:
        logits[~options["mask"]] = float("nan")
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = topk_logprobs(leaf, K, **options, backend=backend)
    assert_equal_to_float64(got, double, [leaf], [double], options)


@each_case
def test_from_hidden_states(backend, option):
    options = OPTIONS[option]
    leaves = [x.clone() for x in model()]
    if "mask" in options:
        leaves[0][~options["mask"]] = float("nan")
    doubles = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    got = linear_topk_logprobs(leaves[0], leaves[1], K, bias=leaves[2], **options, backend=backend)
    clean = doubles[0] if "mask" not in options else torch.where(options["mask"][:, None], doubles[0], 0.0)
    assert_equal_to_float64(got, clean @ doubles[1].T + doubles[2], leaves, doubles, options)


@pytest.mark.parametrize("workspace", [1, 4 * 5 * H * 3, 1 << 20])
@pytest.mark.parametrize("k", [1, 3, V])
def test_any_cut_into_blocks_keeps_the_order_of_ties(workspace, k):
    """Small integers: logits are exact and tie within tiles and across them."""
    hidden, weight = ids(N, H, high=3).float(), ids(V, H, seed=1, high=2).float()
    doubles = [x.double().requires_grad_() for x in (hidden, weight)]
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    got = linear_topk_logprobs(leaves[0], leaves[1], k, temperature=0.7, workspace=workspace)
    logits = doubles[0] @ doubles[1].T
    assert len(logits[0].unique()) < V - 3
    assert_equal_to_float64(got, logits, leaves, doubles, {"temperature": 0.7}, k)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_precisions(dtype, backend):
    logits = normal(N, V).to(dtype)
    logits[2, 5:9], logits[3, :9] = 50.0, torch.tensor([0.0, -0.0, 0.0] * 3)
    for k in (1, 5):
        assert torch.equal(topk_logprobs(logits, k, backend=backend).tokens, expected_ids(logits, k))
    hidden, weight, bias = model(dtype)
    got = linear_topk_logprobs(hidden, weight, K, bias=bias, backend=backend)
    assert got.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = hidden.double() @ weight.double().T + bias.double()
    assert torch.equal(got.tokens, expected_ids(wide, K))
    torch.testing.assert_close(got.logprobs.double(), exact(wide, got.tokens)[0], rtol=1e-5, atol=1e-5)


@each_backend
def test_zero_has_no_sign_and_neither_cap_nor_temperature_makes_ties(backend):
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0], [200.0, 100.0, 300.0, -1.0]])
    got = topk_logprobs(logits, 3, softcap=1.0, temperature=1e-3, backend=backend)
    assert got.tokens.tolist() == [[0, 1, 3], [2, 0, 1]]
    assert (got.logprobs[1] == got.logprobs[1, 0]).all(), "the cap saturates: the log-probabilities do tie"


@each_backend
def test_not_a_number_is_not_hidden(backend):
    """Of either sign: that of inf − inf is the machine's."""
    negative = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32)
    assert negative.isnan() and negative.signbit()
    logits = normal(3, V).float()
    logits[1, 7], logits[1, 3] = float("nan"), negative
    got = topk_logprobs(logits, 2, backend=backend)
    assert got.tokens[1].tolist() == [3, 7] and got.logprobs[1].isnan().all() and got.logprobs[::2].isfinite().all()
    weight = torch.eye(V)
    linear = linear_topk_logprobs(logits.nan_to_num(nan=float("inf")), weight, 2, backend=backend)
    assert linear.logprobs[1].isnan().all() and linear.logprobs[::2].isfinite().all()


def test_masked_rows_are_zero_and_batch_shapes_are_kept():
    logits = normal(N, V).float()
    got = topk_logprobs(logits, 2, mask=masked())
    assert all((field[~masked()] == 0).all() for field in got)
    hidden, weight, _ = model()
    flat = linear_topk_logprobs(hidden[:6], weight, 3)
    shaped = linear_topk_logprobs(hidden[:6].view(2, 3, H), weight, 3)
    assert [tuple(x.shape) for x in shaped] == [(2, 3, 3), (2, 3, 3), (2, 3), (2, 3)]
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(shaped, flat, strict=True))
    empty = linear_topk_logprobs(hidden[:0], weight, 3)
    assert [tuple(x.shape) for x in empty] == [(0, 3), (0, 3), (0,), (0,)]


@pytest.mark.parametrize("k", [0, V + 1, 2.0, True])
def test_k_out_of_range_is_named(k):
    hidden, weight, _ = model()
    for call in (lambda: topk_logprobs(normal(N, V), k), lambda: linear_topk_logprobs(hidden, weight, k)):
        with pytest.raises(ValueError, match=rf"k must be an integer in 1 … {V}, got {k}"):
            call()


def test_other_arguments_are_checked_and_an_unknown_backend_names_the_others():
    hidden, weight, _ = model()
    with pytest.raises(ValueError, match=rf"weight must be \(V, {H}\)"):
        linear_topk_logprobs(hidden, weight[:, 1:], 2)
    with pytest.raises(ValueError, match="softcap must be positive"):
        topk_logprobs(normal(N, V), 2, softcap=-1.0)
    with pytest.raises(NotImplementedError, match="no backend 'gluon'; available: triton, torch, reference"):
        linear_topk_logprobs(hidden, weight, 2, backend="gluon")


def test_custom_operations_and_torch_compile():
    hidden, weight, bias = (x.detach().requires_grad_() for x in model())
    # Autograd and compilers see one operation; what a backend can do wrong is to change or return its inputs.
    for backend, tests in (("torch", EVERY), ("triton", EVERY[:1])):
        none = torch.empty(N, 0, dtype=torch.long)
        arguments = (hidden, weight, bias, none, torch.ones(N), 2.0, None, None, 0, None, 10000, backend, 3)
        torch.library.opcheck(torch.ops.rl_kernels.linear_topk_logprobs.default, placed(arguments), test_utils=tests)
        arguments = (normal(3, 5).float(), None, None, 2, backend)
        torch.library.opcheck(torch.ops.rl_kernels.topk_ids.default, placed(arguments), test_utils=tests)

    def loss(h, w):
        return linear_topk_logprobs(h, w, 3).logprobs.sum() + topk_logprobs(h @ w.T, 2).logprobs.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, actual = (torch.autograd.grad(f(hidden, weight), (hidden, weight)) for f in (loss, compiled))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_whole_vocabulary_is_the_whole_distribution():
    logits = normal(N, V).float()
    got = topk_logprobs(logits, V)
    torch.testing.assert_close(got.logprobs.exp().sum(-1), torch.ones(N))
    torch.testing.assert_close(-(got.logprobs.exp() * got.logprobs).sum(-1), got.entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.logsumexp, logits_logprobs(logits, ids(N)).logsumexp)
