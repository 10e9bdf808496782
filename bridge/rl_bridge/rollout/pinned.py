"""Every number that sampling depends on, said to an engine in each request: it takes none from its model's folder.

A folder's ``generation_config.json`` may have a temperature, truncations and penalties, which vLLM and SGLang take for
whatever a request does not say. Log-probabilities are then of another distribution than the one that was asked for.
"""

from collections.abc import Iterable
from typing import Any

from rl_bridge.data.requests import SamplingParams


def truncation(sampling: SamplingParams) -> dict[str, float]:
    """The steps of truncation that can cut something off; none where sampling is greedy.

    >>> truncation(SamplingParams(max_new_tokens=1, top_p=1.0, min_p=0.1))
    {'min_p': 0.1}
    """
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.temperature == 0:
        return {}
    return {name: value for name, value in cuts.items() if value is not None and not (name == "top_p" and value == 1)}


def pinned(sampling: SamplingParams) -> dict[str, Any]:
    """The numbers by the names that vLLM, SGLang and OpenAI's protocol have for them; what is not asked for is neutral.

    >>> pinned(SamplingParams(max_new_tokens=1, top_k=5))["top_k"], pinned(SamplingParams(max_new_tokens=1))["top_k"]
    (5, -1)
    """
    cuts = truncation(sampling)
    return {
        "temperature": float(sampling.temperature),
        "top_k": int(cuts.get("top_k", -1)),
        "top_p": float(cuts.get("top_p", 1.0)),
        "min_p": float(cuts.get("min_p", 0.0)),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def refuse_together(sampling: SamplingParams, pairs: Iterable[tuple[str, str]], engine: str) -> None:
    """Refuse truncations whose result depends on their order, where that is not top-k, top-p, min-p, or not known.

    Raises:
        ValueError: naming both.
    """
    cuts = truncation(sampling)
    for first, second in pairs:
        if first in cuts and second in cuts:
            raise ValueError(
                f"{engine} may cut by {first} and {second} in another order than this library (top_k, top_p, min_p), "
                f"which is another distribution: ask for one of them, got {cuts}"
            )
