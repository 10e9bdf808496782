"""A head that shares the embeddings' weights, on a CPU: it computes with the weights that are there.

vLLM 0.32 packs the head's weights once, when the engine starts. An update changes the embeddings, and nothing packs the
tied head again: its logits stay those of the old embeddings. A copy that is not packed cannot be stale.

The file stands alone since each fault of vLLM that the plugin mends has one, to be removed with that fault.
"""

# pyright: reportMissingImports=false

import functools
from typing import Any

import torch

_MARK = "rl_fn_tied"


def install() -> None:
    """Let tied heads multiply with the shared weights themselves, in this process; again has no effect."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod as Method

    if getattr(Method.process_weights_after_loading, _MARK, False):
        return
    process, tie = Method.process_weights_after_loading, Method.tie_weights

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        process(self, layer)
        if getattr(layer, _MARK, False):
            _unpack(layer)

    @functools.wraps(tie)
    def tie_weights(self: Any, layer: torch.nn.Module, embed_tokens: Any) -> Any:
        tied = tie(self, layer, embed_tokens)
        setattr(tied, _MARK, True)
        _unpack(tied)
        return tied

    setattr(process_weights_after_loading, _MARK, True)
    Method.process_weights_after_loading, Method.tie_weights = process_weights_after_loading, tie_weights


def _unpack(layer: Any) -> None:
    """Only where vLLM packs, which is on a CPU; the weights themselves are always there."""
    if layer.weight.device.type == "cpu":
        layer.cpu_linear = torch.nn.functional.linear
