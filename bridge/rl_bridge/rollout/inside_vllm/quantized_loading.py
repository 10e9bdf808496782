"""Engines of vLLM that quantise the weights they load, whoever starts and updates them: installed by the plugin."""

# pyright: reportMissingImports=false

import copy
import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_bridge.models.compressed_tensors import quantization_config, tensors_of
from rl_bridge.models.model_source import PretrainedSource
from rl_bridge.rollout.inside_vllm.flashrl import Setting, Settings
from rl_bridge.weights.source import LAYOUTS, Quantize, linear_weights

logger = logging.getLogger(__name__)
PROCESSED = "processed_logprobs"
BEGUN = "rl_fn_begun"
"""Attribute of a model whose weights were loaded and are as the kernels want them."""


@dataclass
class InForce:
    """The quantisation that was applied to an engine's model; ``model.rl_fn_in_force``."""

    precision: str
    weights: int
    """How many of the checkpoint's weights are codes in the engine."""
    layers: int
    """How many of the engine's layers compute with codes: fused ones count once."""
    head: str
    """The dtype of the head's products."""
    reloads: int = 0


def install(settings: Settings) -> None:
    """Apply the settings to every engine that this process opens from now on.

    Raises:
        ImportError, AttributeError: this vLLM is not built as 0.32 is: nothing is patched then, and no engine starts.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    patches = (
        (EngineArgs, "create_engine_config", _asking),
        (BaseModelLoader, "create_model", _making),
        (BaseModelLoader, "load_model", _reloading),
    )
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for (owner, name, patch), original in zip(patches, originals, strict=True):
        before = getattr(original, "rl_fn_original", original)
        patched = functools.wraps(before)(patch(before, settings))
        patched.rl_fn_original = before  # type: ignore[attr-defined]
        setattr(owner, name, patched)
    for rank, setting in enumerate(settings.ranks):
        logger.info("rank %d of %d: %s", rank, len(settings.ranks), asdict(setting))


@contextmanager
def alone(precision: str) -> Iterator[None]:
    """Inside, engines that are opened quantise by this precision, whatever the variables say."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    places = ((EngineArgs, "create_engine_config"), (BaseModelLoader, "create_model"), (BaseModelLoader, "load_model"))
    before = [getattr(owner, name) for owner, name in places]
    try:
        install(Settings((Setting(precision),)))
        yield
    finally:
        for (owner, name), original in zip(places, before, strict=True):
            setattr(owner, name, original)


def in_force(worker: Any) -> dict[str, Any] | None:
    """For ``collective_rpc``: the quantisation of a worker's model as JSON; None where there is none."""
    applied = getattr(worker.model_runner.get_model(), "rl_fn_in_force", None)
    return None if applied is None else asdict(applied)


def _asking(create: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """The engine is asked for exact log-probabilities, a high head, and the settings' model."""

    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        self.model = settings.model or self.model
        self.logprobs_mode = PROCESSED
        if settings.head_fp32:
            if callable(self.hf_overrides):
                raise ValueError("FLASHRL_LMHEAD_FP32 cannot be applied: hf_overrides is a function")
            self.hf_overrides = {**(self.hf_overrides or {}), "head_dtype": "float32"}
        return create(self, *arguments, **options)

    return create_engine_config


def _making(create: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """The model is made with quantised layers, and quantises all that it loads."""

    def create_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        setting = settings.of(vllm_config.parallel_config.data_parallel_rank)
        if settings.head_fp32 and model_config.head_dtype != torch.float32:
            raise RuntimeError(f"FLASHRL_LMHEAD_FP32 was not applied: the head is {model_config.head_dtype}")
        if model_config.logprobs_mode != PROCESSED:
            raise RuntimeError(f"log-probabilities are {model_config.logprobs_mode} and not {PROCESSED}")
        if not setting.quantizes:
            if model_config.quantization is not None:
                raise ValueError(f"fn {setting.fn} is for a model that is not quantised, got {model_config.model}")
            model = create(self, vllm_config, model_config, prefix)
            model.rl_fn_in_force = InForce(setting.precision, 0, 0, str(model_config.head_dtype))
            return model
        send = _map_of(setting, vllm_config, model_config)
        model = create(self, vllm_config, model_config, prefix)
        layers = _quantized_layers(model, setting)
        model.load_weights = _quantizing(model, send, model_config.model)
        model.rl_fn_send = send  # for the comparison in ``held_weights``
        model.rl_fn_in_force = InForce(setting.precision, len(send.names), layers, str(model_config.head_dtype))
        logger.info("%s: %s", model_config.model, model.rl_fn_in_force)
        return model

    return create_model


def _map_of(setting: Setting, vllm_config: Any, model_config: Any) -> Quantize:
    """The map that the weights of this model go through; the engine is configured to expect its results."""
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    described = copy.deepcopy(model_config.hf_config)
    own = getattr(described, "quantization_config", None)
    if own is not None:
        delattr(described, "quantization_config")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    names = linear_weights(skeleton)
    if setting.profile is not None:
        listed = frozenset(json.loads(Path(setting.profile).read_text())["weights"])
        if strange := sorted(listed - names):
            raise ValueError(f"{setting.profile} lists {strange[0]!r}, which {model_config.model} does not have")
        names = listed
    expected_config = quantization_config(setting.precision, skeleton, names)
    if own is None:
        model_config.hf_config.quantization_config = expected_config
        model_config.quantization = expected_config["quant_method"]
        vllm_config.quant_config = VllmConfig._get_quantization_config(model_config, vllm_config.load_config)
    else:
        _require_same(own, expected_config, model_config.model)
        ignore = own.get("ignore", [])
        names = frozenset(n for n in names if not should_ignore_layer(n.removesuffix(".weight"), ignore=ignore))
    return Quantize(setting.precision, names, dtype=model_config.dtype)


def _require_same(own: dict[str, Any], expected: dict[str, Any], model: str) -> None:
    """Raise unless the checkpoint's own codes are of the kind that updates will be."""

    def kinds(config: dict[str, Any]) -> list[Any]:
        groups = config.get("config_groups", {}).values()
        keys = ("num_bits", "type", "strategy", "symmetric")
        return [[(group.get("weights") or {}).get(key) for key in keys] for group in groups]

    if own.get("quant_method") != expected["quant_method"] or kinds(own) != kinds(expected):
        raise ValueError(f"{model} is quantised in another way than updates would be: {own}")


def _quantized_layers(model: torch.nn.Module, setting: Setting) -> int:
    """How many layers expect codes.

    Raises:
        RuntimeError: none does, so that the run would go on unquantised.
    """
    dtype = LAYOUTS[setting.precision].dtype
    layers = sum(getattr(module, "weight", torch.empty(0)).dtype == dtype for module in model.modules())
    if not layers:
        raise RuntimeError(f"vLLM made no layer with {dtype} weights: {setting.fn} was not applied")
    return layers


def _quantizing(module: torch.nn.Module, send: Quantize, model: str) -> Callable[..., Any]:
    """``load_weights`` of a model, of quantised weights. The first call must bring every weight that has codes.

    Raises:
        RuntimeError: the engine has begun, and this is none of vLLM's own updates. A layer's codes then lie as its
            kernel wants them: vLLM loads into some of them in the order of the checkpoint, without a word.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    missing: set[str] | None = set(send.names)
    load: Callable[..., Any] = module.load_weights  # type: ignore[assignment]

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *arguments: Any, **options: Any) -> Any:
        nonlocal missing
        # vLLM marks every module for the time of an update, and this one, which has no weights, until the end.
        if getattr(module, BEGUN, False) and not get_layerwise_info(module).can_load():
            raise RuntimeError(
                f"model.load_weights of an engine that has begun cannot update {model}, which is quantised: its codes "
                "are where the kernels want them; take vLLM's reload_weights, or start_weight_update and "
                "finish_weight_update around the weights. Nothing was loaded"
            )

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if missing is not None:
                    missing.discard(name)
                # A checkpoint may have codes of its own, and their scales.
                is_code = tensor.dtype.itemsize == 1 or name.endswith("_scale")
                yield from [(name, tensor)] if is_code else send(name, tensor)

        loaded = load(stream(), *arguments, **options)
        if missing:
            raise RuntimeError(f"{len(missing)} weights of {model} were never quantised, the first: {min(missing)!r}")
        missing = None
        return loaded

    return load_weights


def _reloading(load: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """``load_model``, and then the models of FLASHRL_TEST_RELOAD one after another into the same memory."""

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights
        from vllm.utils.torch_utils import set_default_torch_dtype

        model = load(self, vllm_config, model_config, prefix)
        setattr(model, BEGUN, True)
        for name in settings.reload:
            source = PretrainedSource(name)
            with torch.device("meta"):
                skeleton = source.empty()
            with set_default_torch_dtype(model_config.dtype), set_current_vllm_config(vllm_config):
                reload_weights(vllm_config, model, tensors_of(source, skeleton), None, True)
            model.rl_fn_in_force.reloads += 1
            logger.info("loaded %s again", name)
        return model

    return load_model
