"""What a plan says that an engine of vLLM could do without."""

from dataclasses import replace
from typing import Any

import pytest

from rl_bridge.models.small import TinySource
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rollout.vllm import VLLMOptions
from rl_tools.plan import planning
from rl_tools.plan.planning import changes_of_vllm, knobs, plan
from rl_tools.plan.vllm_memory import engine_of
from rl_tools.plan.workload import Workload
from rl_train.policy_configs import quickstart

TINY = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
LOAD = Workload(prompts=2, responses=8, prompt_tokens=130, new_tokens=127)
BLOCK = 128 * 2 * 2 * 8 * 4
"""Bytes of a block of 128 tokens: keys and values of two heads of eight numbers. A request fills two blocks."""


def run_of(recompute: bool = True, **options: Any):
    start = quickstart()
    vllm = VLLMOptions(**{"kv_cache_gib": 20 * BLOCK / 2**30, "max_model_len": 512, **options})
    policy = replace(start.policy, recompute_old_logprobs=recompute)
    rollout = RolloutOptions(backend="vllm", vllm=vllm)
    return replace(start, rollout=rollout, policy=policy, micro_batch_tokens=600, track_kl=False)


@pytest.mark.parametrize(
    ("blocks", "max_num_seqs", "left", "together"),
    [
        (100, 256, 33, 16),  # two blocks for each of 16 requests, and vLLM's own
        (100, 4, 9, 4),
        (33, 256, 16, 7),  # no more than needed: half
        (20, 256, 10, 4),
        (5, 256, 3, 1),  # one request at least
        (3, 256, None, None),
    ],
)
def test_a_cache_that_is_enough_or_half_of_one_that_is_not(blocks, max_num_seqs, left, together):
    pipeline = run_of(kv_cache_gib=blocks * BLOCK / 2**30, max_num_seqs=max_num_seqs)
    found = {text: fields for text, fields in changes_of_vllm(pipeline, TINY, LOAD) if "kv-cache-gib" in text}
    if left is None:
        assert not found
        return
    ((text, fields),) = found.items()
    gib = fields["rollout"].vllm.kv_cache_gib
    assert left * BLOCK <= gib * 2**30 < (left + 1) * BLOCK and f"kv-cache-gib {gib:g}" in text
    share = engine_of(replace(pipeline, **fields), TINY, LOAD)
    assert share is not None and share.at_once == together and share.cache == left * BLOCK
    assert text.endswith(f" ({together} of 16 requests together)") == (together < 16)


@pytest.mark.parametrize(
    ("options", "recompute", "expected"),
    [
        ({}, False, ["bf16 --policy.recompute-old-logprobs", "int8 --policy.recompute-old-logprobs"]),
        ({}, True, ["bf16", "int8"]),
        ({"precision": "bf16"}, True, ["int8"]),
        ({"precision": "int8"}, True, []),
        ({"rank_precisions": ("int8",)}, True, []),
    ],
    ids=str,
)
def test_precisions_are_tried_with_what_they_need(options, recompute, expected):
    pipeline = run_of(recompute, kv_cache_gib=200 * BLOCK / 2**30, **options)
    found = dict(changes_of_vllm(pipeline, TINY, LOAD))
    name = "--rollout.vllm.precision "
    assert [text.removeprefix(name) for text in found if text.startswith(name)] == expected
    for fields in found.values():
        assert replace(pipeline, **fields).policy.recompute_old_logprobs or replace(pipeline, **fields).rollout.exact


def test_a_cache_given_in_bytes_is_left_alone_and_a_run_without_vllm_has_no_such_option():
    bytes_ = run_of(arguments=(f"kv_cache_memory_bytes={100 * BLOCK}",))
    assert not [text for text, _ in changes_of_vllm(bytes_, TINY, LOAD) if "kv-cache" in text]
    assert not list(changes_of_vllm(replace(bytes_, rollout=RolloutOptions()), TINY, LOAD))


def test_what_a_knob_of_vllm_saves_is_the_difference_of_two_plans(monkeypatch):
    pipeline = run_of(kv_cache_gib=400 * BLOCK / 2**30)
    monkeypatch.setattr(planning, "PHASES", ("generation",))
    monkeypatch.setattr(planning, "_changes", lambda *given: apart(pipeline, changes_of_vllm(*given)))
    now = plan(pipeline, TINY, LOAD)
    found = {knob.option: knob.saves for knob in knobs(pipeline, TINY, LOAD, now)}
    bf16, int8, cache = found.values()
    assert cache == (400 - 33) * BLOCK and int8 > bf16 > 0


def apart(pipeline, changes):
    """The options of vLLM alone, whose trainer stays as it is."""
    for option, fields in changes:
        yield option, replace(pipeline, **fields)


def test_the_command_tries_the_options_of_vllm_beside_the_trainers():
    options = [option for option, _ in planning._changes(run_of(), TINY, LOAD)]
    assert sum(".vllm." in option for option in options) == 3 < len(options)
