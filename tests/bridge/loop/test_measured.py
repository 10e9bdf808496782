"""Loops that learn from rows: measured on held-out rows, scored once by a reference, stopped where updates are lost."""

import gc
import json

import pytest
import torch
from safetensors import safe_open

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    LoRAOptions,
    Model,
    Policy,
    Reference,
    RewardModel,
    Run,
    ScoringConfig,
    current_executor,
    load_rows,
    preference_loss,
)
from rl_bridge.engines import Mesh
from rl_bridge.models.small import TinySource, character_tokenizer

PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0" * (1 + i)} for i, row in enumerate(PROMPTS)]
LOSSES = {"sft": NLL(), "preference": preference_loss("dpo"), "reward model": preference_loss("bradley_terry")}
STEPS = 6


@pytest.fixture(scope="module")
def model():
    """A tiny model; its engines are gone in the end."""
    current_executor().stop()
    tokenizer = character_tokenizer("0123456789+=")
    yield Model(TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2), tokenizer)
    current_executor().stop()


def trained(model, name, **options):
    """A model that learns by the loss of this name, and its rows."""
    loss = LOSSES[name]
    rows = load_rows(PROMPTS if name == "sft" else PAIRS, model, loss)
    kind = RewardModel if name == "reward model" else Policy
    return kind(model, loss, AdamW(1e-2, warmup=0), **options), rows


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_held_out_is_measured_under_the_present_weights_and_moves_nothing(model, name):
    part, rows = trained(model, name)
    with part:
        measured = rows.all()
        if name == "preference":
            with Reference(model) as reference:
                measured = reference.score(measured)
        before = part.held_out(measured)
        assert part.held_out(measured) == before
        metrics = part.update(measured)
        loss = "nll" if name == "sft" else "loss"
        assert before[f"held_out_{loss}"] == pytest.approx(metrics[loss], rel=1e-5)  # of the weights before the update
        assert part.held_out(measured)[f"held_out_{loss}"] < before[f"held_out_{loss}"]
        if name != "sft":
            after = part.held_out(measured)
            assert 0 <= after["held_out_accuracy_low"] <= after["held_out_accuracy"] <= after["held_out_accuracy_high"]


def test_batches_of_another_kind_are_refused(model):
    (imitating, imitated), (comparing, compared) = (trained(model, name) for name in ("sft", "preference"))
    with imitating, comparing:
        for part, other in ((imitating, compared), (comparing, imitated)):
            with pytest.raises(TypeError, match=r"is not measured on a (Pair|Token)Batch"):
                part.held_out(other.all())
        with Reference(model) as reference, pytest.raises(TypeError, match="a reference scores comparisons once"):
            reference.cache(imitated)
    with pytest.raises(ValueError, match="these rows are prompts"):
        load_rows(PROMPTS).all()


def test_rows_in_their_own_order_are_all_of_them(model):
    rows = load_rows(PROMPTS, model, NLL())
    first = rows.all()
    rows.batch(3)
    assert torch.equal(rows.all().tokens, first.tokens) and len(first.tokens) == len(PROMPTS)


def test_a_reference_that_scored_once_has_the_numbers_of_one_that_scores_each_step(model):
    """In the middle of an epoch, too: the rows keep their place."""
    updates = {}
    for cached in (True, False):
        policy, rows = trained(model, "preference")
        with policy, Reference(model) as reference:
            rows.take(3)
            if cached:
                reference.cache(rows)
                reference.release()
            batches = [rows.batch(4) for _ in range(3)]
            updates[cached] = [dict(policy.update(b if cached else reference.score(b))) for b in batches]
    for one, other in zip(updates[True], updates[False], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("name", ["sft", "reward model"])
def test_adapters_and_frozen_parameters_alone_move(model, name):
    whole, rows = trained(model, name)
    part, _ = trained(model, name, lora=LoRAOptions(rank=2), seed=3)
    frozen, _ = trained(model, name, freeze=("model.embed_tokens.*", "*.layers.*"))
    with whole, part, frozen:
        for one in (whole, part, frozen):
            one.update(rows.all()) if name == "sft" else one.update(rows.batch(4))
        assert {"lora"} <= part.settings().keys() and {"freeze"} <= frozen.settings().keys()
        assert not {"lora", "freeze"} & whole.settings().keys()


def test_settings_of_a_loss_are_checked_where_it_is_made():
    loss = preference_loss("bco", shift_momentum=0.5)
    assert (loss.shift_momentum, preference_loss("dpo", average=True, wpo=True).average) == (0.5, True)
    with pytest.raises(ValueError, match=r"shift_momentum 0\.5 has no effect with dpo"):
        preference_loss("dpo", shift_momentum=0.5)
    with pytest.raises(ValueError, match=r"shift_momentum must be in \[0, 1\)"):
        preference_loss("bco", shift_momentum=1.0)


class FakeEngine:
    """Skips the updates of ``bad``, by their numbers."""

    mesh, slots = Mesh(), ()

    def __init__(self, bad):
        self.bad, self.updates = bad, 0

    def scoring_config(self):
        return ScoringConfig()

    def train_step(self, *arguments):
        return {"loss": rl_fn.Ratio(torch.tensor(2.0), torch.tensor(4.0))}

    def optimizer_step(self):
        skipped = {"skipped": 1.0} if self.updates in self.bad else {}
        self.updates += 1
        return {"grad_norm": float("nan") if skipped else 1.0} | skipped

    def checkpoint_state(self):
        return {"updates": self.updates}

    def load_checkpoint_state(self, state):
        self.updates = state["updates"]


@pytest.mark.parametrize("name", LOSSES)
def test_skips_are_counted_and_kept_and_end_the_run_with_their_cause(model, tmp_path, name):
    part, rows = trained(model, name)
    if name == "preference":
        with Reference(model) as reference:
            reference.cache(rows)
    part.release()
    part.engine = FakeEngine(bad=(0, 2, 3))
    with (
        pytest.raises(FloatingPointError) as stopped,
        Run("run", state=[part, rows], output=tmp_path, stop_after_skips=2) as run,
    ):
        for _ in run.steps(STEPS):
            run.log(part.update(rows.batch(2)))
            assert not gc.isenabled()  # a collection comes between two steps
    assert gc.isenabled()
    assert "loss or gradient of the trained model was not finite in 2 steps in a row" in str(stopped.value)
    assert f"stopped after step 4 of {STEPS}" in str(stopped.value)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record.get("skipped") for record in records if "stage" in record] == [1.0, None, 1.0, 1.0]
    parts = sorted((tmp_path / "run" / "skipped").iterdir())
    assert [path.name for path in parts] == [f"step-{step:08d}-0.safetensors" for step in (0, 2, 3)]
    with safe_open(parts[0], "pt") as file:
        assert len(file.keys()) > 2
        assert json.loads(file.metadata()["about"])["skipped"] == ["the trained model"]
