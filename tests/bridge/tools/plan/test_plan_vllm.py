"""What a plan says of an engine of vLLM, compared with the engine's own tensors."""

# pyright: reportMissingImports=false

import ctypes
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rl_bridge.models.model_source import StateSource
from rl_bridge.models.small import TinySource
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.pipelines.training import LoRAOptions
from rl_bridge.rollout.vllm import VLLMOptions
from rl_tools.plan.plan_command import run as rl_fn_plan
from rl_tools.plan.planning import Plan, measure, plan
from rl_tools.plan.rehearsal import Rehearsal
from rl_tools.plan.vllm_memory import PlannedRollout, share_of
from rl_tools.plan.workload import Workload
from rl_tools.profile.live_bytes import LiveBytes
from rl_train.policy_configs import quickstart

LOAD = Workload(prompts=2, responses=8, prompt_tokens=130, new_tokens=127)
SMALL = VLLMOptions(kv_cache_gib=0.05, max_model_len=512, max_num_seqs=64)


def model(tied: bool = False, layers: int = 1):
    config = Qwen2Config(
        vocab_size=1100,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def outline(tied: bool = False):
    with torch.device("meta"):
        return model(tied)


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def allocated() -> int:
    """Bytes that this process has of malloc, in which oneDNN's packed weights lie."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = _Allocated
    now = ask()
    return now.uordblks + now.hblkhd


def storages(tensors) -> int:
    """Bytes of the tensors, those of one storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def onednn_takes(dtype: torch.dtype) -> bool:
    import vllm._custom_ops as operations

    try:
        operations.create_onednn_mm(torch.ones(64, 64, dtype=dtype), 32)
    except RuntimeError:
        return False
    return True


def held_by_functions(module) -> list[torch.Tensor]:
    """Weights that vLLM has packed for AMX: the layer's function has the only reference."""
    cells = [
        cell.cell_contents
        for m in module.modules()
        for cell in getattr(m.__dict__.get("cpu_linear"), "__closure__", None) or ()
    ]
    return [found for found in cells if isinstance(found, torch.Tensor)]


def as_with_amx(patch) -> None:
    """Let vLLM pack what it packs where the CPU has AMX; a CPU without gets tensors of the same bytes."""
    from vllm.model_executor.layers import utils

    ask = utils.check_cpu_sgl_kernel

    def check_cpu_sgl_kernel(*layer: Any) -> bool:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            return ask(*layer)

    patch.setattr(utils, "check_cpu_sgl_kernel", check_cpu_sgl_kernel)
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        patch.setattr(torch.ops._C, "convert_weight_packed", torch.clone, raising=False)


@pytest.mark.vllm
@pytest.mark.parametrize("amx", [False, True], ids=["without AMX", "with AMX"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_weights_cache_and_update_are_those_of_an_engine(precision: Any, amx: bool, tmp_path, monkeypatch):
    """On a CPU vLLM gives linear layers to oneDNN and frees their tensors; of vocabularies it keeps both.

    With AMX small bfloat16 layers are packed in another way, and where oneDNN has no product in bfloat16 (a CPU without
    AVX-512) layers keep their tensors: both take as many bytes.
    """
    import vllm._custom_ops as operations

    from rl_bridge.rollout.inside_vllm import int8_scales
    from rl_bridge.rollout.inside_vllm.sampler_hooks import Draws
    from rl_bridge.rollout.vllm.vllm_engine import close_engine, opened
    from rl_bridge.rollout.vllm.weight_copies import checkpoint, header_of

    # The meter of an update sees PyTorch's tensors alone, and so nothing that oneDNN holds. Exact layers are tensors.
    monkeypatch.setattr(int8_scales, "saturates", lambda create: False)
    options = replace(SMALL, precision=precision)
    source = model()
    share = share_of(source, options, LOAD, device="cpu")
    folder, _ = checkpoint(StateSource(source), precision, getattr(torch, options.activations), tmp_path)
    packed: dict[tuple[int, ...], list[int]] = {}

    def measured(create):
        def packing(weight, *arguments, **named):
            before = allocated()
            made = create(weight, *arguments, **named)
            if min(weight.shape) > 64:  # smaller ones are the plugin's, which try what a layer does
                packed.setdefault(tuple(weight.shape), []).append(allocated() - before)
            return made

        return packing

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if amx:
        as_with_amx(monkeypatch)
    for name in ("create_onednn_mm", "create_onednn_scaled_mm"):
        monkeypatch.setattr(operations, name, measured(getattr(operations, name)))
    engine = opened(options, torch.device("cpu"), Draws(), folder)
    try:
        [runner] = engine.collective_rpc(lambda worker: worker.model_runner)
        module = runner.get_model()
        vocabularies = packed.pop((512, 1152), [])
        assert len(vocabularies) == 2 * onednn_takes(getattr(torch, options.activations))
        functions = held_by_functions(module)
        assert bool(functions) == (amx and precision == "bf16"), "which layers are packed"
        tensors = storages((*module.parameters(), *module.buffers(), *functions))
        weights = tensors + sum(size for sizes in packed.values() for size in sizes)
        assert abs(share.weights / weights - 1) <= 0.05, (share.weights, tensors, packed)
        once = 1152 * 512 * (4 if precision == "fp32" else 2)
        assert abs(sum(vocabularies) - once * len(vocabularies)) <= 0.1 * once
        assert share.cache == storages(runner.kv_caches)
        engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"protocol": 1}})
        with LiveBytes() as live:
            engine.collective_rpc("start_weight_update")
            info = {"folder": str(folder), "names": list(header_of(folder))}
            engine.collective_rpc("update_weights", kwargs={"update_info": info})
            engine.collective_rpc("finish_weight_update")
        assert abs(share.layer / live.peak().bytes - 1) <= 0.05, live.peak()
    finally:
        close_engine(engine)


@pytest.mark.vllm
def test_an_int8_layer_has_as_many_bytes_on_a_processor_without_vnni():
    from rl_bridge.rollout.inside_vllm.int8_scales import ExactLayer

    layer = ExactLayer(torch.ones(48, 512, dtype=torch.int8).T, torch.ones(48, 1))
    assert storages(value for value in vars(layer).values() if isinstance(value, torch.Tensor)) == 48 * 512 + 4 * 48


LINEAR = 512 * (1024 + 512 + 3072) + 1536 * 512
ROWS = 1024 + 512 + 3072 + 512
"""Outputs of a layer's linear layers: a scale each."""
SMALLER = 1024 + 3 * 512
"""Biases of queries, keys and values, and three norms."""
VOCABULARY, POSITIONS = 1152 * 512, 512 * 64


@pytest.mark.parametrize(
    ("options", "bytes_", "layer"),
    [
        ({}, 4 * (LINEAR + SMALLER + 2 * VOCABULARY + POSITIONS), 4 * 3072 * 512),
        ({"precision": "bf16"}, 2 * (LINEAR + SMALLER + 2 * VOCABULARY + POSITIONS), 2 * 3072 * 512),
        (
            {"precision": "int8"},
            LINEAR + 4 * ROWS + 2 * (SMALLER + 2 * VOCABULARY + POSITIONS),
            3072 * 512 + 4 * 3072,
        ),
        ({"precision": "fp8"}, LINEAR + 4 * 7 + 2 * (SMALLER + 2 * VOCABULARY + POSITIONS), 3072 * 512 + 4 * 2),
        (
            {"adapter_rank": 6},  # vLLM has room for rank 8 then, and queries, keys and values have a matrix each
            4 * (LINEAR + SMALLER + 2 * VOCABULARY + POSITIONS + 8 * (6 * 512 + 1536 + ROWS)),
            4 * 3072 * 512,
        ),
        (
            {"rank_precisions": ("int8",)},
            LINEAR + 4 * ROWS + 2 * (SMALLER + 2 * VOCABULARY + POSITIONS),
            3072 * 512 + 4 * 3072,
        ),
    ],
    ids=str,
)
def test_the_weights_of_an_engine_by_hand(options: dict, bytes_: int, layer: int):
    share = share_of(outline(), replace(SMALL, **options), LOAD, device="cpu")
    assert (share.weights, share.layer) == (bytes_, layer)


def test_an_engine_that_quantises_by_itself_is_sent_the_weights_as_they_are():
    share = share_of(outline(), replace(SMALL, rank_precisions=("int8",)), LOAD, device="cpu")
    assert sum(spec.nbytes for spec in share.sent.values()) == 2 * (LINEAR + SMALLER + 2 * 1100 * 512)
    share = share_of(outline(), replace(SMALL, precision="int8"), LOAD, device="cpu")
    assert sum(spec.nbytes for spec in share.sent.values()) == LINEAR + 4 * ROWS + 2 * (SMALLER + 2 * 1100 * 512)


def test_a_tied_head_has_no_weights_of_its_own():
    share = share_of(outline(tied=True), SMALL, LOAD, device="cpu")
    assert share.weights == 4 * (LINEAR + SMALLER + VOCABULARY + POSITIONS)


BLOCK = 128 * 2 * 4 * 64 * 4
"""Bytes of keys and values of 128 tokens; 256 tokens of a request, the last of 257 excepted, fill two blocks."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_cache_gib": 64 * BLOCK / 2**30}, (64 * BLOCK, 32 * BLOCK, True, 16)),
        ({"kv_cache_gib": 33 * BLOCK / 2**30}, (33 * BLOCK, 32 * BLOCK, True, 16)),
        ({"kv_cache_gib": 32.9 * BLOCK / 2**30}, (32 * BLOCK, 32 * BLOCK, True, 15)),
        ({"kv_cache_gib": 20 * BLOCK / 2**30, "max_num_seqs": 5}, (20 * BLOCK, 32 * BLOCK, True, 5)),
        ({"arguments": (f"kv_cache_memory_bytes={40 * BLOCK}",)}, (40 * BLOCK, 32 * BLOCK, True, 16)),
        ({"kv_cache_gib": None}, (32 * BLOCK, 32 * BLOCK, False, 16)),
        ({"precision": "bf16", "kv_cache_gib": 8 * BLOCK / 2**30}, (8 * BLOCK, 16 * BLOCK, True, 7)),
        ({"arguments": ("block_size=32",), "kv_cache_gib": None}, (32 * BLOCK, 32 * BLOCK, False, 16)),
    ],
    ids=str,
)
def test_the_cache_of_an_engine_and_what_it_holds(options: dict, expected: tuple, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    share = share_of(outline(), replace(SMALL, **options), LOAD, device="cpu")
    assert (share.cache, share.needed, share.reserved, share.at_once) == expected
    told = share.lines()[0]
    assert ("others wait" in told) == (share.at_once < 16) and ("finds left" in told) == (not share.reserved)
    assert ("max-num-seqs" in told) == (share.at_once == 5)


def test_the_environment_of_a_cpu_says_how_large_the_cache_is(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    options = replace(SMALL, kv_cache_gib=None)
    assert share_of(outline(), options, LOAD, device="cpu").cache == 2 << 30
    assert not share_of(outline(), options, LOAD, device="cuda").reserved
    assert share_of(outline(), SMALL, LOAD, device="cpu").cache == int(0.05 * 2**30) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_gib": 2 * BLOCK / 2**30}, "has 1 blocks of 128 tokens, and one request of 256 tokens needs 2"),
        ({"adapter_rank": 600}, "rank 512 at most, got adapter_rank=600"),
    ],
)
def test_an_engine_that_there_cannot_be_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        share_of(outline(), replace(SMALL, **options), LOAD, device="cpu")


TINY = TinySource(vocabulary=20, hidden=16, layers=1, heads=2)
SHORT = Workload(prompts=1, responses=2, prompt_tokens=3, new_tokens=3)


def run_of(backend: Any = "vllm", options: VLLMOptions | None = None, **fields):
    start = quickstart()
    rollout = RolloutOptions(backend=backend, vllm=options or replace(SMALL, kv_cache_gib=0.001))
    policy = replace(start.policy, recompute_old_logprobs=True)
    return replace(start, rollout=rollout, policy=policy, micro_batch_tokens=6, track_kl=False, **fields)


def components(plan: Plan, name: str) -> list[int]:
    """Of each phase, in order."""
    return [peak.components.get(name, 0) for peak in plan.phases.values()]


def test_every_phase_has_the_engine_and_a_sync_has_two_copies():
    pipeline = run_of(options=replace(SMALL, kv_cache_gib=0.001, precision="int8"))
    share = share_of(TINY.empty(), pipeline.rollout.vllm, SHORT, device="cpu")
    planned = plan(pipeline, TINY, SHORT, ("generation", "sync"))
    model = TINY.empty()
    trained = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    copy = sum(spec.nbytes for spec in share.sent.values())
    assert components(planned, "kv_cache") == [share.cache] * 2
    assert planned.phases["generation"].components["weights"] == trained + share.weights
    assert planned.phases["generation"].components["transfer"] == copy
    assert planned.phases["sync"].components["transfer"] >= 2 * copy


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_rehearsed_sync_is_within_five_percent_of_a_real_one(precision: str, rank: int):
    """The trainer's side of a sync for real: casts, codes, copies; the engine's side as planned."""
    options = replace(SMALL, kv_cache_gib=0.001, precision=precision)
    pipeline = run_of(options=options, lora=LoRAOptions(rank=rank))
    source = TinySource(vocabulary=1100, hidden=128, layers=2, heads=2)
    planned, measured = (made(pipeline, source, SHORT, ("sync",)).phases["sync"] for made in (plan, measure))
    assert abs(planned.bytes / measured.bytes - 1) <= 0.05, (planned, measured)


@pytest.mark.slow
def test_the_command_says_what_the_cache_holds(tmp_path, capsys):
    words = "--rollout.backend vllm_server --rollout.vllm.kv-cache-gib 0.01 --no-knobs --json"
    assert rl_fn_plan(["policy", *words.split(), str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert "holds 19 requests at once; of the step's 768, which need 384.0 MiB, 19 run together" in told
    assert "server: vLLM's process beside the worker" in told
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["rollout"]["at_once"], found["rollout"]["served"]) == (19, True)
    assert found["phases"]["update"]["components"]["server"] > found["rollout"]["cache"]


def test_an_engine_that_sleeps_is_at_its_device_while_it_works():
    with Rehearsal() as live:
        engine = PlannedRollout(TINY, run_of().rollout, SHORT, live, sleep=True)
        share = engine.share
        for works in (False, True):
            engine.awake(works)
            found = {name: live.components[name] for name in ("weights", "kv_cache", "offloaded")}
            there = {"weights": share.weights, "kv_cache": share.cache, "offloaded": 0}
            away = {"weights": 0, "kv_cache": 0, "offloaded": share.weights}
            assert found == (there if works else away)


def test_an_engine_that_never_sleeps_keeps_what_it_has():
    with Rehearsal() as live:
        engine = PlannedRollout(TINY, run_of().rollout, SHORT, live, sleep=False)
        engine.awake(False)
        assert live.components["kv_cache"] == engine.share.cache


def test_a_servers_engine_is_a_component_of_its_own():
    with Rehearsal() as live:
        engine = PlannedRollout(TINY, run_of("vllm_server").rollout, SHORT, live, sleep=False)
        assert live.components["server"] == engine.share.weights + engine.share.cache
        assert not {"weights", "kv_cache"} & set(live.components)
    assert "process beside" in engine.share.lines()[-1]
