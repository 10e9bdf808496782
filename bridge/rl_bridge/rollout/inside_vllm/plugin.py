"""The plugin that every process of vLLM calls when it starts: the entry point ``rl_fn`` of ``vllm.general_plugins``.

vLLM logs a plugin that cannot be imported and goes on without it: nothing is imported here before ``register``, whose
exceptions stop the process.
"""

# pyright: reportMissingImports=false

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

BACKEND = "rl_fn"
"""Name of the transfer engine: an engine started with ``weight_transfer_config={"backend": BACKEND}`` needs it."""
PROTOCOL = 1
"""Version of the messages between a client and the transfer engine."""
ERRORS = "RL_FN_VLLM_ERRORS"
"""Variable with the file that the ranks of an engine write their errors to while it opens."""


def register() -> None:
    """Make the transfer engine known, mend vLLM's int8 scales, tied heads and shared files, apply FlashRL's variables.

    Again has no effect, but for variables that changed.

    Raises:
        ValueError: a variable that cannot be applied; the process ends, and does not sample unquantised instead.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from rl_bridge.rollout.inside_vllm import int8_scales, rank_files, tied_head
    from rl_bridge.rollout.inside_vllm.flashrl import set_logging, settings_of

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rl_bridge.rollout.inside_vllm.weight_transfer", "FolderTransfer"
        )
    if os.environ.get(ERRORS):
        logging.getLogger("vllm").addHandler(_errors_to(os.environ[ERRORS]))
    int8_scales.install()
    tied_head.install()
    rank_files.install()
    settings = settings_of(os.environ)
    if settings is not None:
        from rl_bridge.rollout.inside_vllm.quantized_loading import install

        set_logging(os.environ)
        install(settings)


def _errors_to(file: str) -> logging.Handler:
    handler = logging.FileHandler(file, delay=True)
    handler.setLevel(logging.ERROR)
    return handler


def in_place(worker: Any) -> dict[str, Any]:
    """For ``collective_rpc``: the parts of this plugin that are in place in the process of an engine's worker."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rl_bridge.rollout.inside_vllm import int8_scales
    from rl_bridge.rollout.inside_vllm.quantized_loading import in_force

    sizes = None
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    return {
        "registered": BACKEND in WeightTransferEngineFactory._registry,
        "protocol": PROTOCOL,
        "scales": int8_scales.state(),
        "quantised": in_force(worker),
        "head_size": worker.model_runner.model_config.get_head_size(),
        "head_sizes": sizes,
    }


def require_in_place(workers: Sequence[Mapping[str, Any]], quantised: str | None = None) -> None:
    """Refuse an engine that would work without this package, or fail at its first token. vLLM refuses neither.

    Args:
        workers: ``in_place`` of each of the engine's workers.
        quantised: the precision that the engine was told to quantise to by itself.

    Raises:
        RuntimeError: the plugin was not called in a worker's process, or did not quantise as asked for.
        ValueError: the attention of the worker's platform does not take the model's heads.
    """
    for number, plugin in enumerate(workers):
        if not plugin["registered"]:
            raise RuntimeError(
                f"worker {number} of the engine of vLLM works without rl_bridge's plugin: the entry point 'rl_fn' of "
                "vllm.general_plugins could not be imported (the engine's log says why), or VLLM_PLUGINS leaves it out"
            )
        if quantised is not None and (plugin["quantised"] or {}).get("precision") != quantised:
            raise RuntimeError(
                f"worker {number} of the engine has {plugin['quantised']}, and {quantised} was asked for"
            )
        size, sizes = plugin["head_size"], plugin["head_sizes"]
        if sizes is not None and size not in sizes:
            raise ValueError(
                f"the model's heads have size {size}, and vLLM's attention on a CPU takes "
                f"{', '.join(map(str, sizes))}: such a model needs backend in_process"
            )
