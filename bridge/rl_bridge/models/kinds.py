"""Which models can be trained: causal language models whose weights are numbers, not codes."""

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of stored weights that can be trained, in the words of safetensors."""


def require_causal(config: Any, name: str) -> None:
    """Refuse a model that does not predict the next token, or whose weights are quantised.

    Raises:
        ValueError: with the kind of the model and what to do.
    """
    kind = config.model_type
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised.quant_method
        raise ValueError(
            f"the weights of {name!r} are quantised ({method}), and quantised weights cannot be trained: "
            "take the model that they were made from"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{name!r} is a {kind!r}, of which transformers has no causal language model")
    if config.is_encoder_decoder:
        raise ValueError(f"{name!r} is a {kind!r} with an encoder and a decoder, and no causal language model")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"{name!r} is a {kind!r} whose tokens attend to later ones (config.is_decoder is False): "
            "no causal language model"
        )


def require_floats(dtypes: Mapping[str, str], name: str) -> None:
    """Refuse stored tensors that are whole numbers: codes of quantised weights, whatever the configuration says.

    Raises:
        ValueError: with the first of them.
    """
    coded = sorted(tensor for tensor, dtype in dtypes.items() if dtype not in FLOATS)
    if coded:
        raise ValueError(
            f"{len(coded)} weights of {name!r} are quantised or whole numbers, which cannot be trained; the first is "
            f"{coded[0]!r} of type {dtypes[coded[0]]}: take the model that they were made from"
        )
