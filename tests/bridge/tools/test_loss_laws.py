"""``rl-fn check FILE.py:loss``: our own losses obey each law, and each law has a loss that breaks it."""

import dataclasses

import pytest

import rl_fn
from rl_fn.objectives.components.component import Custom
from rl_tools.check.loss_laws import LossLaws, verdicts
from rl_tools.cli import main

HEAD = """import torch
import rl_fn
from rl_bridge import torch_loss
"""
TORCH = """
@torch_loss()
def loss(batch):
    ratio = (batch.logprobs - batch.old_logprobs).exp()
"""
CLIPPED = TORCH + "    return -torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)\n"
RECIPES = {name: getattr(rl_fn.recipes, name) for name in rl_fn.recipes.__all__}
LOSSES = {
    repr(loss): loss for make in RECIPES.values() if isinstance((o := make()), rl_fn.Objective) and (loss := o.loss)
}


@pytest.fixture
def source(tmp_path):
    """Write a file with a loss; its name on the command line."""

    def write(text):
        file = tmp_path / f"loss{len(list(tmp_path.iterdir()))}.py"  # a file is loaded once
        file.write_text(HEAD + text, "utf-8")
        return f"{file}:loss"

    return write


def broken(laws):
    return [verdict.law for verdict in laws if verdict.problem]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_a_recipe_obeys(name):
    loss = LOSSES[name]
    declared = {
        field.name: getattr(loss, field.name) for field in dataclasses.fields(Custom) if field.name != "function"
    }
    assert broken(LossLaws(Custom(loss.__call__, **declared)).laws()) == []


BREAKS = {
    "a run takes it": TORCH + "    return ratio * batch.advantages * torch.arange(batch.mask.shape[1])\n",
    "finite where it counts": TORCH + "    return (0.9 - ratio.log()).log()\n",
    "finite where a token of a completion has moved": TORCH + "    return -(ratio**6) * batch.advantages\n",
    "the order of completions": TORCH.replace("torch_loss()", "torch_loss(over_batch=True)")
    + "    return ratio * batch.advantages * torch.arange(len(ratio))[:, None]\n",
    "micro-batches add up": TORCH
    + "    return ratio * (batch.advantages - (len(ratio) > 4) * batch.advantages.mean())\n",
    "float32 has the numbers": TORCH + "    return -ratio * batch.advantages + 3e4 - 3e4\n",
    "declared: no gradient": TORCH.replace("torch_loss()", "torch_loss(gradient_without_advantage=False)")
    + "    return -ratio * batch.advantages + (ratio.log().abs() - 1).relu()\n",
    "it has the digits of float32": TORCH + "    return -(ratio.bfloat16() * batch.advantages).float()\n",
    "finite where π is π_old": TORCH
    + "    return -ratio * batch.advantages + (ratio.log().abs().sqrt() if len(ratio) > 4 else 0)\n",
    "declared: each token": TORCH.replace("torch_loss()", "torch_loss(sequence_level=True)")
    + "    return -ratio * batch.advantages\n",
}


@pytest.mark.parametrize("law", BREAKS)
def test_a_loss_that_breaks_one_law_is_named_with_that_law_and_where(law, source, capsys):
    name = source(BREAKS[law])
    laws, _ = verdicts(name)
    assert [x for x in broken(laws) if x.startswith(law)], laws
    assert main(["check", name]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"broken  {law}")] and lines[-1].endswith("laws hold")


def test_what_is_known_of_a_loss_beyond_the_laws(source, capsys):
    assert main(["check", source(CLIPPED)]) == 0
    out = capsys.readouterr().out
    assert "\nbroken" not in out and "9 of 9 laws hold" in out
    assert "note    its gradient is the derivative of its value\n" in out
    assert "note    where π is π_old its gradient is −A, that of REINFORCE\n" in out
    assert "torch_loss(gradient_without_advantage=False) saves" in out and "over_batch" not in out
    unread = (
        TORCH.replace("torch_loss()", 'torch_loss(reads=("old_logprobs", "advantages", "noise"))')
        + "    return -2 * ratio * batch.advantages\n"
    )
    assert main(["check", source(unread)]) == 0
    out = capsys.readouterr().out
    assert "its gradient is not −A" in out and "it reads noise, which changes nothing" in out
    cispo = "loss = rl_fn.components.CISPO(0.2, 0.28)\n"
    assert main(["check", source(cispo)]) == 0
    assert "its gradient is not the derivative of its value: something in it is detached" in capsys.readouterr().out
    plain = "def loss(batch):\n    return -batch.logprobs * batch.advantages\n"
    assert main(["check", source(plain)]) == 0
    assert "rl_fn.components.Custom(loss, over_batch=False) allows micro-batches" in capsys.readouterr().out


def test_a_clip_so_narrow_that_it_cuts_every_token_is_no_loss_without_a_gradient(source):
    laws, _ = verdicts(source("loss = rl_fn.components.GSPO(3e-4, 4e-4)\n"))
    assert broken(laws) == []
    laws, _ = verdicts(source("@torch_loss\ndef loss(batch):\n    return batch.logprobs.detach() * batch.advantages\n"))
    assert "has no gradient in batch.logprobs" in laws[0].problem and len(laws) == 1


PLAIN = "\n\ndef loss(b):\n    return -b.logprobs * b.advantages"
WRONG = {
    "write @torch_loss (of rl_bridge) above a function": "\n\ndef loss(b):\n    return -b.logprobs.exp()\n",
    "takes numbers out of JAX's arrays (by if, float() or numpy)": PLAIN + " if b.logprobs.sum() < 1 else b.logprobs\n",
    "required_fields=('ref_logprobs',)) names what it reads": PLAIN + " + b.ref_logprobs\n",
    "KeyError: 'kl' (": TORCH + "    return ratio * {}['kl']\n",
    "SystemExit: 3": TORCH + "    raise SystemExit(3)\n",
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_loss_raises_is_one_line_with_the_place_and_the_way_on(message, source, capsys):
    assert main(["check", source(WRONG[message])]) == 1
    printed = capsys.readouterr()
    assert printed.err == "" and message in printed.out, printed.out
    assert len(printed.out.splitlines()) == 2 and printed.out.startswith("broken  a run takes it: ")


def test_a_row_without_a_token_that_a_loss_cannot_read_breaks_that_law(source, capsys):
    most = TORCH + "    top = torch.stack([x[m].max() for x, m in zip(ratio, batch.mask)])\n"
    assert main(["check", source(most + "    return -ratio * batch.advantages + 0 * top[:, None]\n")]) == 1
    out = capsys.readouterr().out
    assert (
        "broken  finite where it counts, also where no token of a row does: RuntimeError: max()" in out
        and "line 8)" in out
    )


def test_a_loss_that_names_float32_itself_breaks_no_law(source, capsys):
    """Training never sees float64, and a division by the tokens of an empty row reaches no gradient that counts."""
    narrow = (
        TORCH
        + "    out = torch.zeros(batch.mask.shape)\n    out[batch.mask] = (-ratio * batch.advantages)[batch.mask]\n"
    )
    for text in (
        narrow + "    return out\n",
        TORCH + "    return -(ratio.float()) * batch.advantages / batch.mask.sum(1, keepdim=True)\n",
    ):
        assert main(["check", source(text)]) == 0
        assert "its gradient is the derivative of its value\n" in capsys.readouterr().out


def test_entropies_that_a_loss_reads_have_a_gradient_of_their_own(source, capsys):
    bonus = TORCH.replace("torch_loss()", 'torch_loss(reads=("old_logprobs", "advantages", "entropies"))')
    assert main(["check", source(bonus + "    return -ratio * batch.advantages - 0.01 * batch.entropies\n")]) == 0
    assert "gradient_without_advantage" not in capsys.readouterr().out
    steep = (
        bonus + "    return -ratio * batch.advantages - 0.01 * (batch.entropies - batch.entropies.detach()).sqrt()\n"
    )
    assert main(["check", source(steep)]) == 1
    assert "the loss loss is not finite on an ordinary batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss = rl_fn.components.GSPO\n", "loss is a class of components, and a loss is one of its objects, loss(…)"),
        ("loss = rl_fn.recipes.grpo()\n", "loss is an objective, and --objective.loss takes the loss of one"),
        ("loss = 0.5\n", "has no function 'loss': loss is of the type float"),
        ("loss = rl_fn.components.Custom(len, ('foo',))\n", "required_fields names ['foo']; a Batch has logprobs, "),
    ],
)
def test_what_is_no_loss_is_named(text, message, source, capsys):
    assert main(["check", source(text)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["loss.py:loss"], 1, "no such loss file: "),
        (["nothing.py:loss:"], 1, "a loss is named FILE.py:name, got 'nothing.py:loss:'"),
        (["loss.py"], 2, "takes one library of trl, verl, openrlhf, tunix, or a loss FILE.py:name, got loss.py"),
        ([], 2, "or a loss FILE.py:name, got none"),
    ],
)
def test_what_is_no_loss_is_refused(words, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *words]) == status
    assert message in capsys.readouterr().err
