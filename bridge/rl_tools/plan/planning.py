"""The plan of a run before anything is loaded: its bytes, the savings of each option, the micro-batch that fits."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rl_bridge.models.model_source import ModelSource
from rl_bridge.pipelines.training import LoRAOptions
from rl_bridge.rollout.vllm.engine_options import VLLMOptions
from rl_tools.plan.rehearsal import Rehearsal, world_of
from rl_tools.plan.steps import PHASES, SUPERVISION_PHASES, PolicyStep, Rows, Supervision, SupervisionStep
from rl_tools.plan.vllm_memory import EngineShare, engine_of, share_for
from rl_tools.plan.workload import Workload, mesh_of
from rl_tools.profile.live_bytes import LiveBytes, Peak
from rl_train.policy_options import PolicyPipeline
from rl_train.preference import PreferencePipeline

# Options of vLLM that ``rl-fn plan`` tries, to need less memory.


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
    changes: list[tuple[str, VLLMOptions, dict[str, Any]]] = []
    if not options.rank_precisions and options.precision in ("fp32", "bf16"):
        for precision in ("bf16", "int8"):
            if precision != options.precision:
                text = f"--rollout.vllm.precision {precision}{besides}"
                changes.append((text, replace(options, precision=precision), exact))
    gib = _smaller_cache(share, options.max_num_seqs)
    if gib is not None and "kv_cache_memory_bytes" not in options.engine_arguments():
        changes.append((f"--rollout.vllm.kv-cache-gib {gib:g}", replace(options, kv_cache_gib=gib), {}))
    for text, changed, fields in changes:
        rollout = replace(pipeline.rollout, vllm=changed)
        footprint = share_for(source, rollout, workload)
        waits = (
            f" ({footprint.at_once} of {footprint.requests} requests together)"
            if footprint.at_once < footprint.requests
            else ""
        )
        yield text + waits, {**fields, "rollout": rollout}


def _smaller_cache(share: EngineShare, together: int) -> float | None:
    """GiB: enough for the requests that may run ``together``, or half of what there is where that is less already."""
    request_bytes = share.needed // share.requests
    enough = _rounded(request_bytes * min(share.requests, together) + share.block_bytes)
    if enough * 2**30 < share.cache:
        return enough
    half = _rounded(max(share.cache // 2, request_bytes + share.block_bytes))
    return half if half * 2**30 < share.cache else None


def _rounded(size: int) -> float:
    """GiB with three digits, no less than ``size`` bytes.

    >>> _rounded(2**30), _rounded(1234567890)
    (1.0, 1.15)
    """
    unit = 10 ** (math.floor(math.log10(size / 2**30)) - 2)
    return round(math.ceil(size / 2**30 / unit) * unit, 12)


# The plan, the savings of each knob, and the largest micro-batch that fits.

Pipeline = PolicyPipeline | Supervision
Load = Workload | Rows


class Plan(NamedTuple):
    """The peak of each phase of a step."""

    phases: dict[str, Peak]

    @property
    def bytes(self) -> int:
        """The highest peak: what the run needs."""
        return max(peak.bytes for peak in self.phases.values())

    @property
    def phase(self) -> str:
        """The phase that needs it."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)


class Knob(NamedTuple):
    """An option that a run could have: ``plan`` with it, and how many bytes the run's peak is lower."""

    option: str
    plan: Plan
    saves: int


def plan(pipeline: Pipeline, source: ModelSource, workload: Load, phases: tuple[str, ...] | None = None) -> Plan:
    """The bytes of one worker of the run, the first of its mesh, by a rehearsal of a step with the longest rows.

    ``source`` gives the structure of the model alone. Bytes are those of tensors: what kernels allocate inside, and
    what an allocator rounds up, come on top.

    Raises:
        ValueError: a mesh that the run's workers are not of, several workers where this process is in a process
            group already, or a loss of one's own that takes numbers out of tensors.
    """
    try:
        return _peaks(Rehearsal(), pipeline, source, workload, phases)
    except RuntimeError as error:
        if "not supported for tensor subclasses" not in str(error):
            raise
        raise ValueError(
            "a plan has tensors without numbers, and a function of this run takes numbers out of them by .numpy() or "
            ".tolist(), which a run allows and a plan does not: measure a step of the run (--profile)"
        ) from error


def measure(pipeline: Pipeline, source: ModelSource, workload: Load, phases: tuple[str, ...] | None = None) -> Plan:
    """The same for real: the step is computed, and its live tensors are counted.

    Of several workers the first one is, alone: its numbers are not those of a run, and its sizes are.
    """
    return _peaks(LiveBytes(), pipeline, source, workload, phases)


def _peaks(
    live: LiveBytes, pipeline: Pipeline, source: ModelSource, workload: Load, phases: tuple[str, ...] | None
) -> Plan:
    with world_of(mesh_of(pipeline).size), live:
        step: PolicyStep | SupervisionStep
        if isinstance(pipeline, PolicyPipeline):
            assert isinstance(workload, Workload)
            step, all_of = PolicyStep(pipeline, source, workload, live), PHASES
        else:
            assert isinstance(workload, Rows)
            step, all_of = SupervisionStep(pipeline, source, workload, live), SUPERVISION_PHASES
        try:
            return Plan(step.run(all_of if phases is None else phases))
        finally:
            step.close()


def knobs(pipeline: Pipeline, source: ModelSource, workload: Load, now: Plan) -> Iterator[Knob]:
    """Savings at the peak by each option that the run does not have, the run's other options staying."""
    for option, changed in _changes(pipeline, source, workload):
        try:
            changed_plan = plan(changed, source, workload)
        except ValueError:  # the model excludes this one, as a class without layers does checkpointing
            continue
        yield Knob(option, changed_plan, now.bytes - changed_plan.bytes)


def _changes(pipeline: Pipeline, source: ModelSource, workload: Load) -> Iterator[tuple[str, Any]]:
    updates = pipeline.policy.updates_per_step if isinstance(pipeline, PolicyPipeline) else 1
    mesh = mesh_of(pipeline)
    of_update = -(-workload.rows // (updates * mesh.data_parts)) * workload.row_tokens
    assert pipeline.micro_batch_tokens != "auto"
    tokens = max(workload.row_tokens, min(pipeline.micro_batch_tokens, of_update) // 2)
    changes: list[tuple[str, dict]] = [(f"--micro-batch-tokens {tokens}", {"micro_batch_tokens": tokens})]
    if pipeline.activations == "keep" and not pipeline.gradient_checkpointing:
        changes += [(f"--activations {name}", {"activations": name}) for name in ("full", "offload")]
    # Where a mesh cuts the vocabulary or the rows no loss is fused with the head, and cut matrices take no adapters.
    if isinstance(pipeline, PolicyPipeline) and not pipeline.fused_loss and mesh.tensor == mesh.sequence == 1:
        changes.append(("--fused-loss", {"fused_loss": True}))
    if not pipeline.lora.rank and mesh.tensor == 1:
        changes.append(("--lora.rank 16", {"lora": LoRAOptions(rank=16)}))
    if pipeline.dtype == "float32":
        if isinstance(pipeline, PolicyPipeline):
            exact = replace(pipeline.policy, recompute_old_logprobs=True)
            changes.append(("--dtype bfloat16 --policy.recompute-old-logprobs", {"dtype": "bfloat16", "policy": exact}))
        else:
            changes.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if isinstance(pipeline, PreferencePipeline) and not pipeline.cache_reference:
        changes.append(("--cache-reference", {"cache_reference": True}))
    if isinstance(pipeline, PolicyPipeline) and pipeline.track_kl:
        changes.append(("--no-track-kl", {"track_kl": False}))
    if isinstance(pipeline, PolicyPipeline) and isinstance(workload, Workload):
        changes += changes_of_vllm(pipeline, source, workload)
    for option, fields in changes:
        try:
            yield option, replace(pipeline, **fields)
        except ValueError:  # the run's other options exclude this one
            continue


def largest_micro_batch(pipeline: Pipeline, source: ModelSource, workload: Load, room: int) -> tuple[int, Plan] | None:
    """The most ``micro_batch_tokens``, in whole rows, with which the run stays within ``room`` bytes, and its plan.

    None where not even one row at a time fits.
    """
    least, most = 1, -(-workload.rows // mesh_of(pipeline).data_parts)

    def with_rows(rows: int) -> Plan:
        return plan(replace(pipeline, micro_batch_tokens=rows * workload.row_tokens), source, workload)

    fitting = with_rows(least)
    if fitting.bytes > room:
        return None
    whole = with_rows(most)
    if whole.bytes <= room:
        return most * workload.row_tokens, whole
    while most - least > 1:
        middle = (least + most) // 2
        trial = with_rows(middle)
        if trial.bytes <= room:
            least, fitting = middle, trial
        else:
            most = middle
    return least * workload.row_tokens, fitting
