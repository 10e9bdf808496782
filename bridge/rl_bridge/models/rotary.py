"""Rotary frequencies that depend on the longest row of a call, and how long rows may be so that none does.

With the kinds "dynamic" and "longrope" transformers chooses the frequencies of a whole call by its largest position: a
row's values depend on the rows beside it, and cached keys keep the frequencies of the call that read them. As long as
no row is longer than the bound, every call has the short frequencies.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

LONG = ("longrope", "su")
"""Kinds with short and long factors; early Phi-3 says "su"."""


def rotary_bound(model: nn.Module) -> int | None:
    """Tokens that a row of this model may have at most, if its values shall not depend on the rows beside it.

    None: the model's frequencies are the same for every call. "longrope" is bounded by its
    ``original_max_position_embeddings``. "dynamic" is bounded by one less than ``max_position_embeddings``: a call of
    exactly that length keeps the frequencies that an earlier, longer call left in the model.
    """
    return min((bound for config in _configs(model) for bound in _bounds(config)), default=None)


def _configs(model: nn.Module) -> list[Any]:
    """Configurations of the model's own text and of its rotary modules, each once."""
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    configs = [module.config for module in rotary if hasattr(module, "config")]
    own: Any = getattr(model, "config", None)
    if own is not None:
        configs.append(own.get_text_config(decoder=True) if hasattr(own, "get_text_config") else own)
    return list({id(config): config for config in configs}.values())


def _bounds(config: Any) -> Iterator[int]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [x for x in parameters.values() if isinstance(x, Mapping)]
    for one in of_layers or [parameters]:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind in LONG or "long_mscale" in one:
            own = one.get("original_max_position_embeddings")
            yield own or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        elif "dynamic" in kind:
            yield config.max_position_embeddings - 1
