"""What is replaced and put back, on a stand-in for TRL; tests/peers compares with the real one."""

import sys
import types

import pytest
import torch

from rl_bridge.integrations import trl as integration
from tests.kernels.cases import N, V, ids, normal
from tests.kernels.exact import exact

NAMES = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")


@pytest.fixture
def stand_in(monkeypatch):
    """trl.trainer.utils with functions of TRL's names, and a trainer that has imported one of them."""
    modules = {n: types.ModuleType(n) for n in ("trl", "trl.trainer", "trl.trainer.utils", "trl.trainer.dpo_trainer")}
    utils, trainer = modules["trl.trainer.utils"], modules["trl.trainer.dpo_trainer"]
    for name in NAMES:
        setattr(utils, name, lambda *a, n=name, **k: n)
    utils._ChunkedLogProbFunction = type("Original", (), {"apply": staticmethod(lambda *a: "original")})
    trainer.selective_log_softmax = utils.selective_log_softmax
    trainer.entropy_from_logits = "another thing of the same name"
    modules["trl"].__version__ = integration.CHECKED[0]
    modules["trl"].trainer, modules["trl.trainer"].utils = modules["trl.trainer"], utils
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    integration.unpatch()


def test_every_module_that_has_a_function_gets_ours_and_its_own_back(stand_in):
    utils, trainer = stand_in["trl.trainer.utils"], stand_in["trl.trainer.dpo_trainer"]
    before = dict(vars(utils)), dict(vars(trainer))
    integration.patch()
    assert trainer.selective_log_softmax is utils.selective_log_softmax is not before[0]["selective_log_softmax"]
    assert trainer.entropy_from_logits == "another thing of the same name"
    logits, tokens = normal(N, V).float(), ids(N)
    wanted = exact(logits, tokens, temperature=0.5)
    found = utils.selective_log_softmax_and_entropy(logits, tokens, temperature=0.5)
    for a, b in zip(found, wanted[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    integration.patch()  # twice is once
    integration.unpatch()
    assert (dict(vars(utils)), dict(vars(trainer))) == before
    integration.unpatch()


def test_rows_that_do_not_count_and_entropies_without_gradient(stand_in):
    integration.patch()
    utils = stand_in["trl.trainer.utils"]
    logits = normal(2, 3, V).float().requires_grad_()
    row_mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    logprobs, entropy = utils.selective_log_softmax_and_entropy(
        logits, ids(2, 3), entropy_requires_grad=False, row_mask=row_mask
    )
    assert not entropy.requires_grad and logprobs.requires_grad
    assert (logprobs[row_mask == 0] == 0).all() and (entropy[row_mask == 0] == 0).all()
    several = utils.selective_log_softmax(logits, ids(2, 3, 4))
    assert several.shape == (2, 3, 4)
    torch.testing.assert_close(utils.entropy_from_logits(logits)[row_mask == 1], entropy[row_mask == 1])
    with pytest.raises(ValueError, match="temperature must be positive"):
        utils.selective_log_softmax(logits, ids(2, 3), temperature=0.0)


def test_statistics_that_our_kernels_do_not_have_stay_with_trl(stand_in):
    integration.patch()
    apply = stand_in["trl.trainer.utils"]._ChunkedLogProbFunction.apply
    hidden, weight = normal(4, 8).float(), normal(V, 8, seed=1).float()
    arguments = (hidden, weight, None, ids(4), 1.0, 8192, None, 1.0)
    assert apply(*arguments, ("log_probs", "is_top1")) == "original"
    logprobs, entropy, *others = apply(*arguments, ("log_probs",))
    assert entropy is None and others == [None, None, None]
    wanted = exact(hidden.double() @ weight.double().T, ids(4))[0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_version_that_was_not_checked_is_refused(stand_in):
    stand_in["trl"].__version__ = "99.0.0"
    before = dict(vars(stand_in["trl.trainer.utils"]))
    with pytest.raises(NotImplementedError, match=r"TRL 99\.0\.0 was not checked with this patch.*checked: 1\.16\.0"):
        integration.patch()
    assert dict(vars(stand_in["trl.trainer.utils"])) == before
