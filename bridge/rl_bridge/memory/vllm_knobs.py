"""What an engine of vLLM could do without: the options of a run that ``rl-fn plan`` tries."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rl_bridge.memory.vllm_rollout import engine_of, share_for
from rl_bridge.memory.vllm_share import EngineShare
from rl_bridge.memory.workload import Workload
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.policy import PolicyPipeline
from rl_bridge.rollout.vllm.options import VLLMOptions


def changes_of_vllm(
    pipeline: PolicyPipeline, source: ModelSource, workload: Workload
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options as they are written, and the fields of the pipeline that they change; none for a run without vLLM.

    Where requests would wait for room in the cache, the option says how many run together.
    """
    share = engine_of(pipeline, source, workload)
    if share is None:
        return
    options = pipeline.rollout.vllm
    # The old policy's log-probabilities are the trainer's where the engine computes with other numbers.
    exact = {"policy": replace(pipeline.policy, recompute_old_logprobs=True)}
    besides = "" if pipeline.policy.recompute_old_logprobs else " --policy.recompute-old-logprobs"
    tried: list[tuple[str, VLLMOptions, dict[str, Any]]] = []
    if not options.rank_precisions and options.precision in ("fp32", "bf16"):
        for precision in ("bf16", "int8"):
            if precision != options.precision:
                text = f"--rollout.vllm.precision {precision}{besides}"
                tried.append((text, replace(options, precision=precision), exact))
    gib = _smaller_cache(share, options.max_num_seqs)
    if gib is not None and "kv_cache_memory_bytes" not in options.engine_arguments():
        tried.append((f"--rollout.vllm.kv-cache-gib {gib:g}", replace(options, kv_cache_gib=gib), {}))
    for text, changed, fields in tried:
        rollout = replace(pipeline.rollout, vllm=changed)
        made = share_for(source, rollout, workload)
        waits = f" ({made.at_once} of {made.requests} requests together)" if made.at_once < made.requests else ""
        yield text + waits, {**fields, "rollout": rollout}


def _smaller_cache(share: EngineShare, together: int) -> float | None:
    """GiB: enough for the requests that may run ``together``, or half of what there is where that is less already."""
    each = share.needed // share.requests
    enough = _rounded(each * min(share.requests, together) + share.block_bytes)
    if enough * 2**30 < share.cache:
        return enough
    half = _rounded(max(share.cache // 2, each + share.block_bytes))
    return half if half * 2**30 < share.cache else None


def _rounded(size: int) -> float:
    """GiB with three digits, no less than ``size`` bytes.

    >>> _rounded(2**30), _rounded(1234567890)
    (1.0, 1.15)
    """
    unit = 10 ** (math.floor(math.log10(size / 2**30)) - 2)
    return round(math.ceil(size / 2**30 / unit) * unit, 12)
