"""Loops that learn from rows: measured on held-out rows, scored once by a reference, stopped where updates are lost."""

import gc
import json
import shutil
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    LoRAOptions,
    Policy,
    Reference,
    RewardModel,
    Run,
    ScoringConfig,
    current_executor,
    load_model,
    load_rows,
    preference_loss,
)
from rl_bridge.data.census import Census, SourceCensus
from rl_bridge.engines import Mesh, NeedParallel, TrainEngine
from rl_bridge.engines.engine import Engine
from rl_bridge.models.model_source import PretrainedValueSource
from rl_bridge.modules.value import ValueScorer
from rl_bridge.run.options import RunOptions
from tests.support.results import metrics

PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0" * (1 + i)} for i, row in enumerate(PROMPTS)]
LOSSES = {"sft": NLL(), "preference": preference_loss("dpo"), "reward model": preference_loss("bradley_terry")}
STEPS = 6


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


def weights(part):
    """Copies of the parameters by name, of the only worker."""
    module = part.engine.executor._host.workers[part.engine.name].module
    return {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}


@pytest.mark.parametrize("name", ["sft", "reward model"])
@pytest.mark.parametrize("options", [{"lora": LoRAOptions(rank=2)}, {"freeze": ("*.embed_tokens.*", "*.layers.*")}])
def test_adapters_or_what_is_not_frozen_alone_move(model, name, options):
    """Of a reward model the head of one number moves in every case: it begins at zero."""
    part, rows = trained(model, name, **options)
    with part:
        before = weights(part)
        for _ in range(3):  # of an adapter's two matrices one begins at 0, and so does the head of rewards
            part.update(rows.batch(4))
        moved = {key for key, value in weights(part).items() if not torch.equal(value, before[key])}
        kind = next(iter(options))
        assert moved and kind in part.settings()
        if kind == "lora":
            assert any("lora" in key for key in moved) and all("lora" in key or "score" in key for key in moved)
        else:
            assert not any(word in key for key in moved for word in ("embed_tokens", "layers"))


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("q_proj", "score")], ids="-".join)
def test_a_reward_model_of_adapters_learns_and_is_written_whole(model, targets, tmp_path):
    """Its head begins at zero: where nothing trained it, nothing behind it would have a gradient."""
    part, rows = trained(model, "reward model", lora=LoRAOptions(rank=2, target_modules=targets))
    with part:
        batch = rows.all()
        updates = [part.update(batch) for _ in range(4)]
        assert all(update["grad_norm"] > 0 for update in updates)
        assert updates[-1]["loss"] < 0.98 * updates[0]["loss"]
        scores = part.engine.scores(NeedParallel(batch.completions))
        assert any("lora_B" in key and bool(value.any()) for key, value in weights(part).items())
        part.save(tmp_path / "judge")
    again = PretrainedValueSource(str(tmp_path / "judge"))
    judge = TrainEngine(lambda: ValueScorer(again), name="judge").build()
    torch.testing.assert_close(judge.scores(NeedParallel(batch.completions)), scores, rtol=1e-5, atol=1e-6)
    judge.release()


@pytest.mark.parametrize(
    "options",
    [
        {"freeze": ("score.*",)},
        {"freeze": ("score.*",), "lora": LoRAOptions(rank=2, target_modules=("q_proj",))},
        {"freeze": ("sco*",), "lora": LoRAOptions(rank=2, target_modules=("q_proj", "score"))},
    ],
    ids=["whole", "beside adapters", "with an adapter"],
)
def test_a_head_that_stays_at_zero_is_refused(model, options):
    with pytest.raises(ValueError, match=r"hold the head 'score' at zero.* freeze the trunk alone, as model\.\*"):
        trained(model, "reward model", **options)


class Cycle:
    """Holds itself, and so lives until a collection."""

    def __init__(self):
        self.itself = self


def test_garbage_is_collected_between_two_steps_and_as_ever_around_them(model, tmp_path):
    part, rows = trained(model, "sft")
    with part, Run("run", state=[part, rows], output=tmp_path) as run:
        assert gc.isenabled()
        before = None
        for _ in run.steps(3):
            assert before is None or before() is None
            before = weakref.ref(Cycle())
            assert not gc.isenabled() and before() is not None
            run.log(part.update(rows.batch(2)))
        assert gc.isenabled()


@pytest.mark.parametrize("name", LOSSES)
def test_a_model_that_cannot_be_made_keeps_no_slot(model, name, monkeypatch):
    held = current_executor().held
    before = {slot: list(names) for slot, names in held.items() if names}

    def broken(engine, method, *arguments, **options):
        raise RuntimeError(method)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "call", broken)
        with pytest.raises(RuntimeError):
            trained(model, name)
    assert {slot: list(names) for slot, names in held.items() if names} == before


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_folder_is_exported_in_is_known_before_the_training(model, name, tmp_path):
    """The folder of the base model may be gone, or another, by then."""
    with trained(model, "sft")[0] as whole:
        whole.save(tmp_path / "base", "bfloat16")
    part, _ = trained(load_model(str(tmp_path / "base")), name)
    with part:
        part.engine.call("weights_version")
        shutil.rmtree(tmp_path / "base")
        part.save(tmp_path / "trained")
    assert {value.dtype for value in load_file(tmp_path / "trained" / "model.safetensors").values()} == {torch.bfloat16}


def test_stages_of_a_recipe_name_their_state(model, tmp_path):
    first, rows = trained(model, "sft")
    second, _ = trained(model, "sft")
    census = Census(data=SourceCensus(read=8, trained=8))
    with first, second, Run.of(RunOptions(output=tmp_path), {}, census=census) as run:
        with pytest.raises(ValueError, match="each stage of a recipe names its state"):
            next(run.steps(2))
        for part in (first, second):
            for _ in run.steps(2, [part, rows]):
                run.log(part.update(rows.batch(2)))
        with pytest.raises(ValueError, match="'left_out' is the run's own"):
            run.finish("over", left_out=3)
        run.finish("over", mine=4)
    assert run.summary["result"] == "over" and run.summary["rows"] == 8 and run.summary["mine"] == 4
    stages = [record["stage"] for record in metrics(tmp_path / "run") if "stage" in record]
    assert stages == ["sft", "sft", "sft-2", "sft-2"]


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
