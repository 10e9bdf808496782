"""Quantised engines of vLLM: from a checkpoint of codes, and by FlashRL's variables from any checkpoint."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.executors import LocalExecutor
from rl_bridge.models.compressed_tensors import write_checkpoint
from rl_bridge.models.model_source import PretrainedSource, StateSource
from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.modules.scoring import TokenScorer
from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.weights.source import LAYOUTS

pytestmark = pytest.mark.vllm
OPTIONS = {"max_num_seqs": 8, "kv_cache_gib": 0.05, "max_model_len": 64}
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]


@contextmanager
def opened(folder, precision="int8", dtype="float32"):
    from rl_bridge.rollout.vllm.vllm_engine import close_engine, open_engine

    engine = open_engine(folder, VLLMOptions(precision=precision, dtype=dtype, **OPTIONS))
    try:
        yield engine
    finally:
        close_engine(engine)


def generated(engine, tokens=16):
    """Tokens and log-probabilities of each prompt."""
    from vllm import SamplingParams as VLLMSampling
    from vllm.sampling_params import RequestOutputKind

    for number, prompt in enumerate(PROMPTS):
        sampling = VLLMSampling(
            temperature=1.0,
            max_tokens=tokens,
            logprobs=0,
            seed=number,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            [made] = output.outputs
            logprobs = [at[token].logprob for at, token in zip(made.logprobs, made.token_ids, strict=True)]
            found[output.request_id] = (list(made.token_ids), logprobs)
    return [found[str(number)] for number in range(len(PROMPTS))]


def runner(engine):
    [found] = engine.collective_rpc(lambda worker: worker.model_runner)
    return found


def update(engine, folder):
    """New weights into the engine, as vLLM itself loads them again; its cached prefixes are of the old ones."""
    runner(engine).reload_weights(weights_path=str(folder))
    engine.reset_prefix_cache()


def changed(model, seed):
    other = StateSource(model).empty()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for new, old in zip(other.parameters(), model.parameters(), strict=True):
            new.copy_(old + 0.02 * torch.randn(old.shape, generator=generator))
    return other


@pytest.fixture(scope="module", autouse=True, params=["without AMX", "as the processor is"])
def processor(request):
    """vLLM chooses its kernels by the processor: each test runs without AMX, and with AMX where there is AMX."""
    from rl_bridge.rollout.inside_vllm.plugin import register

    if request.param != "without AMX" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    register()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "without AMX":
            patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield request.param


@pytest.fixture(scope="module")
def models(model):
    return [model, changed(model, 1), changed(model, 2)]


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """Folders with all weights as they are trained."""
    folders = [tmp_path_factory.mktemp("plain") for _ in models]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def codes(plain, tmp_path_factory):
    """Folders with codes and scales."""
    folders = [tmp_path_factory.mktemp("codes") for _ in plain]
    for source, folder in zip(plain, folders, strict=True):
        write_checkpoint(PretrainedSource(str(source)), folder, "int8", dtype=torch.float32)
    return folders


@pytest.fixture(scope="module")
def fresh(codes):
    """What engines give that start from these codes."""
    found = []
    for folder in codes:
        with opened(folder) as engine:
            found.append(generated(engine))
    return found


def scored(model, prompt, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_scales_dangle_in_this_vllm_and_are_kept():
    """Fails when vLLM keeps them itself: then the plugin need not."""
    from vllm import _custom_ops

    from rl_bridge.rollout.inside_vllm import int8_scales

    create = _custom_ops.create_onednn_scaled_mm
    _custom_ops.create_onednn_scaled_mm = getattr(create, "create", create)
    try:
        assert int8_scales.state() == "missing"
        int8_scales.install()
        int8_scales.install()
        assert int8_scales.state() == "kept"
    finally:
        _custom_ops.create_onednn_scaled_mm = create


def product(create, codes, x, scales, token_scales, dtype, *, zero_point=None, bias=None):
    """Of an int8 layer, as vLLM calls for it."""
    from vllm import _custom_ops

    layer = create(codes.T, scales, dtype, True, zero_point is not None, 32)
    adjustment = None if zero_point is None else codes.sum(1, dtype=torch.float32)[None] * scales.reshape(1, -1)
    out = torch.empty(len(x), len(codes), dtype=dtype)
    _custom_ops.onednn_scaled_mm(layer, x, out, token_scales, zero_point, adjustment, bias)
    return out


def of_integers(codes, x, scales, token_scales, zero_point, bias):
    shifted = x.double() - (0 if zero_point is None else zero_point.double())
    exact = shifted @ codes.double().T * token_scales.double() * scales.double().reshape(1, -1)
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize("kind", ["of this processor", "without VNNI", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 1536])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("largest", [127, 40])
def test_int8_products_are_those_of_the_integers_on_every_processor(kind, dtype, inputs, symmetric, largest):
    """Without VNNI oneDNN sums pairs in 16 bits: codes of 127 make 8,160 of 1,032,256."""
    from vllm import _custom_ops

    from rl_bridge.rollout.inside_vllm.int8_scales import ExactLayer, saturates

    def exact(weight, scales, *_):
        return ExactLayer(weight, scales)

    kept = _custom_ops.create_onednn_scaled_mm
    if kind == "oneDNN" and largest > 40 and saturates(kept.create):
        pytest.skip("oneDNN cuts these sums off on this processor")
    # oneDNN itself borrows the scales, which this test holds.
    create = {"of this processor": kept, "without VNNI": exact, "oneDNN": kept.create}[kind]
    generator = torch.Generator().manual_seed(inputs)

    def draw(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    codes = draw(-largest, largest, 48, inputs).to(torch.int8)
    codes[0] = largest
    x = draw(-128, 127, 5, inputs).to(torch.int8)
    x[1] = 127
    scales = torch.rand(48, 1, generator=generator) + 0.5
    token_scales = torch.rand(5, 1, generator=generator) + 0.5
    zero_point = None if symmetric else draw(-20, 20, 5, 1).to(torch.int32)
    for bias in (None, 1000 * torch.randn(48, generator=generator).to(dtype)):
        wanted = of_integers(codes, x, scales, token_scales, zero_point, bias)
        found = product(create, codes, x, scales, token_scales, dtype, zero_point=zero_point, bias=bias)
        precision = 1e-5 if dtype == torch.float32 else 2**-7  # oneDNN rounds twice
        largest_term = float(of_integers(codes.abs(), x.abs(), scales, token_scales, None, None).max())
        assert float((found.double() - wanted).abs().max()) <= precision * (wanted.abs().max() + 1e-2 * largest_term)


def test_whether_onednn_cuts_sums_off_does_not_depend_on_the_default_dtype():
    from vllm import _custom_ops
    from vllm.utils.torch_utils import set_default_torch_dtype

    from rl_bridge.rollout.inside_vllm.int8_scales import saturates

    found = set()
    for dtype in (torch.float32, torch.bfloat16):
        saturates.cache_clear()
        with set_default_torch_dtype(dtype):
            found.add(saturates(_custom_ops.create_onednn_scaled_mm.create))
    assert len(found) == 1


def test_int8_layers_are_onednn_s_on_a_processor_with_amx(monkeypatch):
    """vLLM's own choice there takes no float32: "expect A to be bfloat16 or half"."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    sizes = (64, 64)
    assert utils.check_cpu_sgl_kernel(*sizes, torch.int8), "vLLM chooses otherwise now: the plugin need not"
    assert not cpu.check_cpu_sgl_kernel(*sizes, torch.int8)
    assert cpu.check_cpu_sgl_kernel(*sizes, torch.bfloat16), "others are vLLM's choice"


def test_updates_equal_fresh_engines_bit_for_bit_and_stay_where_they_were(models, codes, fresh):
    with opened(codes[0]) as engine:
        assert generated(engine) == fresh[0]
        parameters = dict(runner(engine).get_model().named_parameters())
        addresses = {name: tensor.data_ptr() for name, tensor in parameters.items()}
        for number in (1, 2, 0, 2):
            update(engine, codes[number])
            assert generated(engine) == fresh[number]
        parameters = dict(runner(engine).get_model().named_parameters())
        assert {name: tensor.data_ptr() for name, tensor in parameters.items()} == addresses
    # Near the model that was quantised, and not that model.
    gaps = [
        (scored(models[2], prompt, tokens) - torch.tensor(logprobs)).abs()
        for prompt, (tokens, logprobs) in zip(PROMPTS, fresh[2], strict=True)
    ]
    assert 1e-3 < float(torch.cat(gaps).mean()) < 0.2


@pytest.fixture
def applied():
    """Patches of one test."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from rl_bridge.rollout.inside_vllm import quantized_loading
    from rl_bridge.rollout.inside_vllm.flashrl import settings_of

    places = [(EngineArgs, "create_engine_config"), (BaseModelLoader, "create_model"), (BaseModelLoader, "load_model")]
    before = [getattr(owner, name) for owner, name in places]
    yield lambda **variables: quantized_loading.install(settings_of(variables))
    for (owner, name), original in zip(places, before, strict=True):
        setattr(owner, name, original)


def test_a_variable_quantises_any_checkpoint_and_any_update(applied, plain, fresh):
    from rl_bridge.rollout.inside_vllm.plugin import PROTOCOL, in_place

    applied(FLASHRL_CONFIG="int8", FLASHRL_LMHEAD_FP32="1", FLASHRL_TEST_RELOAD=str(plain[1]))
    with opened(plain[0]) as engine:
        quantised = {"precision": "int8", "weights": 14, "layers": 8, "head": "torch.float32", "reloads": 1}
        found = {"protocol": PROTOCOL, "scales": "kept", "quantised": quantised}
        [made] = engine.collective_rpc(in_place)
        assert {key: made[key] for key in found} == found and made["registered"]
        assert generated(engine) == fresh[1]
        for number in (2, 0):
            update(engine, plain[number])
            assert generated(engine) == fresh[number]
        # vLLM's own loader of one weight: AttributeError for fused layers, and into others without a word.
        bare, weights = runner(engine).get_model().load_weights, SafetensorsFolder.of_folder(plain[1])
        for name in weights.shapes:
            with pytest.raises(RuntimeError, match="reload_weights"):
                bare([(name, weights.read(name, ()))])
        engine.reset_prefix_cache()
        assert generated(engine) == fresh[0]


def put(host, name, state):
    host.workers[name].module.exported().load_state_dict(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sync_quantises_the_bytes_that_are_sent(models, tokenizer, dtype):
    """The trainer's float32 weights into an int8 engine, proved, and equal to an engine that starts from them."""
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    sampling = SamplingParams(max_new_tokens=12, n=2, seed=4)
    prompts = ["1+1=", "98-76", "(3+4)"]
    options = VLLMOptions(precision="int8", dtype=dtype, **OPTIONS)
    executor = LocalExecutor("cpu")
    found = []
    for source, others in ((models[0], models[1:]), (models[2], [])):
        policy = TrainEngine(partial(TokenScorer, StateSource(source)), executor=executor, name="policy").build()
        rollout = InferenceEngine(
            partial(VLLMRollout, StateSource(source), tokenizer, options), executor=executor, name="rollout"
        ).build()
        try:
            for other in others:
                executor.call(put, {0: (policy.name, other.state_dict())}, what="put")
                policy.sync_weights(rollout)
            found.append([(t.tokens, t.logprobs) for t in rollout.generate(prompts, sampling)])
        finally:
            rollout.release()
            policy.release()
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", LAYOUTS)
def test_codes_and_configuration_are_compressed_tensors_own(precision, plain, tmp_path):
    """Its schema takes what config.json says, and its quantiser makes the same bits of the same weights."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    write_checkpoint(PretrainedSource(str(plain[0])), tmp_path, precision, dtype=torch.bfloat16)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(described)
    [group] = config.config_groups.values()
    assert group.targets == ["Linear"]
    ours, weights = SafetensorsFolder.of_folder(tmp_path), SafetensorsFolder.of_folder(plain[0])
    names = [name for name in ours.shapes if f"{name}_scale" in ours.shapes]
    assert len(names) == 14
    for name in names:
        weight = weights.read(name, ()).bfloat16().float()
        codes, scale = ours.read(name, ()), ours.read(f"{name}_scale", ())
        if precision != "fp8_block":  # its observer makes the scales of blocks
            axes = (0, 1) if precision == "fp8" else (1,)
            low, high = weight.amin(axes, keepdim=True), weight.amax(axes, keepdim=True)
            wanted, _ = calculate_qparams(low, high, group.weights)
            assert torch.equal(scale.flatten(), wanted.flatten())
        made = quantize(weight, scale, torch.zeros_like(scale), group.weights, dtype=codes.dtype)
        assert torch.equal(made.view(torch.uint8), codes.view(torch.uint8))


ANY_TRAINER = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    if "masked" in sys.argv:
        import torch
        torch.cpu._is_amx_tile_supported = lambda: False
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=8,
              skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24)
    print("quantised:", [found["quantised"] for found in llm.collective_rpc(sys.modules["rl_plugin"].in_place)])
    print("logprobs:", llm.llm_engine.vllm_config.model_config.logprobs_mode)
"""


def any_trainer(folder, tmp_path, *words, **variables):
    """A program that knows vLLM and not us; our entry point is found as that of an installed package."""
    info = tmp_path / "rl_fn-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-fn\nVersion: 0.0.0\n")
    points = "[vllm.general_plugins]\nrl_fn = rl_bridge.rollout.inside_vllm.plugin:register\n"
    (info / "entry_points.txt").write_text(points)
    program = ANY_TRAINER.replace('sys.modules["rl_plugin"]', 'sys.modules["rl_bridge.rollout.inside_vllm.plugin"]')
    (tmp_path / "trainer.py").write_text(program)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables
    return subprocess.run(
        [sys.executable, str(tmp_path / "trainer.py"), str(folder), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_any_trainer_samples_quantised_by_setting_a_variable(processor, plain, tmp_path):
    """Rank 0 of a file in which ranks differ."""
    (tmp_path / "config.yaml").write_text("configs: [{fn: int8}, {fn: bf16}]")
    words = ["masked"] if processor == "without AMX" else []
    done = any_trainer(plain[0], tmp_path, *words, FLASHRL_CONFIG=str(tmp_path / "config.yaml"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "quantised: [{'precision': 'int8', 'weights': 14, 'layers': 8" in done.stdout
    assert "logprobs: LogprobsMode.PROCESSED" in done.stdout or "logprobs: processed_logprobs" in done.stdout


def test_a_variable_that_cannot_be_applied_stops_the_process(monkeypatch):
    """vLLM logs a plugin that cannot be imported; what a plugin raises when it is called comes through."""
    import vllm.plugins

    from rl_bridge.rollout.inside_vllm.plugin import register

    monkeypatch.setenv("FLASHRL_CONFIG", "int4")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(vllm.plugins, "load_plugins_by_group", lambda group: {"rl_fn": register})
    with pytest.raises(ValueError, match="FLASHRL_CONFIG must be one of bf16, int8"):
        vllm.plugins.load_general_plugins()
