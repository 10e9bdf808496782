"""A plan says what a measurement finds."""

from dataclasses import replace

import pytest
import torch

from experiments.benchmarks.memory_grid import models, settings, workload
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.models.own_class import factory_of
from rl_bridge.models.own_model import OwnSource
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.rollout.sampling import draw
from rl_tools.plan import planning
from rl_tools.plan.plan_command import run as rl_fn_plan
from rl_tools.plan.planning import Plan, largest_micro_batch, measure, plan
from rl_tools.plan.rehearsal import Rehearsal
from rl_tools.plan.steps import PHASES
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import Peak
from rl_tools.profile.timeline import parse_bytes
from rl_train.policy_configs import quickstart

TOLERANCE = 0.05
SHORT = Workload(prompts=1, responses=2, prompt_tokens=3, new_tokens=3)
SMALL = [(model, setting) for model in ("qwen2", "llama", "qwen3") for setting, _ in settings(model)]


@pytest.mark.slow
def test_plan_and_measurement_of_every_phase_agree():
    source = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
    pipeline = dict(settings("qwen2"))["checkpointing"]
    pipeline = replace(pipeline, micro_batch_tokens=6, track_kl=False)
    planned, measured = plan(pipeline, source, SHORT), measure(pipeline, source, SHORT)
    assert tuple(planned.phases) == PHASES
    for phase, peak in measured.phases.items():
        assert abs(planned.phases[phase].bytes / peak.bytes - 1) <= TOLERANCE, (phase, planned.phases[phase], peak)


OWN = """
import torch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20)

    def forward(self, input_ids, position_ids, attention_mask=None):
        return self.head(torch.tanh(self.embedding(input_ids)))
"""


@pytest.mark.long
def test_a_class_of_the_user_s_own_is_planned_as_it_is_measured(tmp_path, capsys):
    """It has no cache, and no layers to checkpoint: what cannot be is no advice."""
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:Tiny"
    source, pipeline = OwnSource(factory_of(name), 20), replace(dict(settings("qwen2"))["plain"], micro_batch_tokens=12)
    planned, measured = plan(pipeline, source, SHORT), measure(pipeline, source, SHORT)
    for phase, peak in measured.phases.items():
        assert abs(planned.phases[phase].bytes / peak.bytes - 1) <= TOLERANCE, (phase, planned.phases[phase], peak)
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.save_pretrained(tmp_path / "words")
    words = ["--model", name, "--tokenizer", str(tmp_path / "words"), "--prompt-tokens", "3"]
    for trainer, more in (("sft", ["--completion-tokens", "3"]), ("policy", ["--data", "rows.jsonl"])):
        assert rl_fn_plan([trainer, *words, *more]) == 0
        printed = capsys.readouterr().out
        assert "--dtype bfloat16" in printed and "--activations" not in printed


LOSSES = {
    "torch": "from rl_bridge import torch_loss\n\n\n@torch_loss\ndef loss(batch):\n    ratio = (batch.logprobs - batch."
    "old_logprobs).exp()\n    return -ratio.clamp(0.8, 1.2) * batch.advantages\n",
    "jax": "import jax.numpy as jnp\n\n\ndef loss(batch):\n    ratio = jnp.exp(batch.logprobs - batch.old_logprobs)\n"
    "    return -ratio.clip(0.8, 1.2) * batch.advantages\n",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_the_user_s_own_is_planned_as_it_is_measured(kind, tmp_path):
    """Its trial compares numbers, of which a plan has none: every plan and dry run with such a loss ended there."""
    (tmp_path / "own.py").write_text(LOSSES[kind])
    pipeline = replace(dict(settings("qwen2"))["plain"], micro_batch_tokens=12)
    pipeline = replace(pipeline, objective=replace(pipeline.objective, loss=f"{tmp_path / 'own.py'}:loss"))
    source = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
    planned, measured = plan(pipeline, source, SHORT), measure(pipeline, source, SHORT)
    for phase, peak in measured.phases.items():
        assert abs(planned.phases[phase].bytes / peak.bytes - 1) <= TOLERANCE, (phase, planned.phases[phase], peak)


def test_a_loss_that_takes_numbers_out_of_tensors_has_no_plan(tmp_path):
    """A run allows this, and the command ended with torch's words about subclasses."""
    text = LOSSES["torch"].replace("-ratio.clamp(0.8, 1.2)", "-ratio * float(ratio.detach().numpy().max())")
    (tmp_path / "own.py").write_text(text.replace("@torch_loss", "@torch_loss(over_batch=True)"))
    pipeline = dict(settings("qwen2"))["plain"]
    pipeline = replace(pipeline, objective=replace(pipeline.objective, loss=f"{tmp_path / 'own.py'}:loss"))
    with pytest.raises(ValueError, match=r"takes numbers out of them by \.numpy\(\).*a run allows and a plan does not"):
        plan(pipeline, TinySource(vocabulary=20, hidden=16, layers=1, heads=2), SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setting"), SMALL)
def test_plan_within_five_percent_over_the_grid(model: str, setting: str):
    source, pipeline = models()[model], dict(settings(model))[setting]
    planned, measured = plan(pipeline, source, workload(model)), measure(pipeline, source, workload(model))
    for phase, peak in measured.phases.items():
        assert abs(planned.phases[phase].bytes / peak.bytes - 1) <= TOLERANCE, (phase, planned.phases[phase], peak)


@pytest.mark.parametrize(("updates", "rows"), [(1, 16), (2, 16), (4, 16), (8, 16), (4, 6)])
def test_the_micro_batch_that_is_proposed_is_smaller_than_an_update_s_share(monkeypatch, updates, rows):
    """SURV-11: a larger one is never full, so that the first line of the advice would save nothing."""

    def planned(pipeline, *_):
        return Plan({"update": Peak(pipeline.micro_batch_tokens, {}, "")})

    monkeypatch.setattr(planning, "plan", planned)
    policy = replace(quickstart().policy, updates_per_step=updates)
    pipeline = replace(quickstart(), policy=policy, micro_batch_tokens=10**6)
    load = Workload(prompts=rows // 2, responses=2, prompt_tokens=3, new_tokens=3)
    first = next(planning.knobs(pipeline, TinySource(vocabulary=20), load, planned(pipeline)))
    share = -(-rows // updates) * load.row_tokens
    assert first.option == f"--micro-batch-tokens {first.plan.bytes}"
    assert load.row_tokens <= first.plan.bytes < share or share == load.row_tokens


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_row_more_does_not():
    source, pipeline = models()["qwen2"], dict(settings("qwen2"))["padded, no shared prefixes"]
    load = Workload(prompts=4, responses=2, prompt_tokens=16, new_tokens=48)
    pipeline = replace(pipeline, policy=replace(pipeline.policy, updates_per_step=1))
    room = plan(replace(pipeline, micro_batch_tokens=5 * load.row_tokens), source, load).bytes
    found = largest_micro_batch(pipeline, source, load, room)
    assert found is not None and found[1].bytes <= room
    assert found[0] >= 5 * load.row_tokens
    more = plan(replace(pipeline, micro_batch_tokens=found[0] + load.row_tokens), source, load)
    assert more.bytes > room
    assert largest_micro_batch(pipeline, source, load, 1000) is None


def test_a_rehearsal_has_sizes_and_no_memory():
    with Rehearsal() as rehearsal:
        x = torch.zeros(1 << 20, 1 << 20, requires_grad=True)
        (x * x).sum().backward()
        assert rehearsal.bytes == 2 * (4 << 40) and x.grad is not None and x.grad.shape == x.shape


@pytest.mark.long
def test_a_model_that_no_machine_holds_is_planned():
    source = TinySource(vocabulary=20, hidden=1 << 17, layers=2, heads=2)
    pipeline = replace(dict(settings("qwen2"))["LoRA"], track_kl=False)
    found = plan(pipeline, source, SHORT, ("update",)).phases["update"]
    assert found.components["weights"] > 4 << 40  # of the trainer and of the rollout


def test_the_rehearsal_of_a_draw_from_many_allowed_tokens_ends():
    """The cutoff of more than 1024 tokens is sought by bisection, and of a rehearsal's numbers none is ever found."""
    seeds = torch.arange(3)
    with Rehearsal() as rehearsal:
        drawn = draw(torch.zeros(3, 3000), seeds, seeds, SamplingParams(max_new_tokens=1, top_k=2000))
        assert drawn.tokens.shape == (3,) and rehearsal.peak().bytes > 3 * 3000 * 4


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "12 pounds", "0"])
def test_what_is_no_amount_is_refused(text: str):
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize("value", ["-1GiB", "-1", "0", "0GiB", "nan", "-inf", "24XB", "24 pounds", "GiB", ""])
def test_room_that_is_no_amount_is_refused_before_anything_is_read(value, capsys):
    with pytest.raises(SystemExit, match="2"):
        rl_fn_plan(["no trainer", "--fits", value])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"rl-fn plan: error: argument --fits: {value!r} is no amount of memory: write it like 24GiB")


@pytest.mark.parametrize(
    ("trainer", "prompt", "completion"), [("sft", 99999, 3), ("sft", 6, 600), ("preference", 510, 3)]
)
def test_lengths_beyond_the_model_s_positions_are_refused_by_their_options(trainer, prompt, completion, tmp_path):
    source = TinySource(vocabulary=20, layers=1)
    with torch.device("meta"):
        source.empty().config.save_pretrained(tmp_path)
    words = [trainer, "--model", str(tmp_path), "--prompt-tokens", str(prompt), "--completion-tokens", str(completion)]
    with pytest.raises(ValueError) as refused:
        rl_fn_plan([*words, "--no-knobs"])
    assert f"--prompt-tokens {prompt} and --completion-tokens {completion} are a row of" in str(refused.value)
    assert "positions: give fewer" in str(refused.value) and "conversations" not in str(refused.value)
