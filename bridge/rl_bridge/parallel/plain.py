"""What other ways are compared with: a model's own eager forward of each row alone, and rows to do that with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl_bridge.parallel.layers import without_peft
from rl_bridge.parallel.values import token_values

LENGTHS, GROUPS, COMMON = (9, 14, 6), (0, 0, 1), 5
"""Of the rows: the first two begin with the same tokens. All of these but the last, which predicts another token in
each of the rows, are a shared prefix.
"""


class Rows(NamedTuple):
    ids: Tensor
    lengths: Tensor
    weights: Tensor


def plain_values(model: PreTrainedModel, row: Tensor) -> Tensor:
    """The plain computation that all else is compared with: the model's own forward of one row, [T] ids, alone.

    Returns the log-probability of each token after the first, [T − 1], or of a classifier its number at each token,
    [T].
    """
    if not is_language_model(model):
        values = token_values(model, row[None])[0]
        with torch.no_grad():
            pooled = model(input_ids=row[None], use_cache=False).logits[0, 0]
        if not torch.allclose(pooled.float(), values[-1].detach(), rtol=1e-2, atol=1e-2 * float(values.detach().std())):
            raise ValueError(
                f"{type(model).__name__} scores a row of {len(row)} tokens with {float(pooled):.4g}, and its head "
                f"gives {float(values[-1].detach()):.4g} at the last token"
            )
        return values
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, row[1:, None])[:, 0]


def rows_for(model: PreTrainedModel) -> Rows:
    """Rows of random ordinary tokens, the same in every process, and a weight for each token."""
    inner = cast(PreTrainedModel, without_peft(model))
    generator = torch.Generator().manual_seed(0)
    special = set(_token_ids(inner.config.to_dict()))
    size = int(cast(Any, inner.get_input_embeddings()).weight.shape[0])
    size = min(size, getattr(inner.config.get_text_config(), "vocab_size", size))
    # Of a large vocabulary the first ids are bytes and marks.
    ordinary = torch.tensor([i for i in range(min(size, 4096)) if i not in special] or list(range(size)))
    ids = ordinary[torch.randint(len(ordinary), (len(LENGTHS), max(LENGTHS)), generator=generator)]
    ids[1, :COMMON] = ids[0, :COMMON]
    padding = inner.config.get_text_config().pad_token_id
    if isinstance(padding, int) and 0 <= padding < size:
        ids[1, COMMON + 1] = padding  # within a row it is a token: some models count a row's tokens by it
    weights = torch.randn(ids.shape, generator=generator)
    lengths = torch.tensor(LENGTHS)
    ids = ids.masked_fill(torch.arange(max(LENGTHS)) >= lengths[:, None], int(ordinary[0]))
    device = _compute_device(model)
    return Rows(ids.to(device), lengths, weights.to(device))


def _token_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Ids that a configuration names, such as those of padding and of pictures."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _token_ids(value)
        elif str(name).endswith(("token_id", "token_ids", "token_index")):
            values = value if isinstance(value, Sequence) else [value]
            yield from (v for v in values if isinstance(v, int))


def is_language_model(model: PreTrainedModel) -> bool:
    return cast(PreTrainedModel, without_peft(model)).get_output_embeddings() is not None


def attention_of(model: PreTrainedModel) -> str:
    return str(cast(PreTrainedModel, without_peft(model)).config._attn_implementation)


def use_attention(model: PreTrainedModel, name: str) -> None:
    if attention_of(model) != name:
        cast(PreTrainedModel, without_peft(model)).set_attn_implementation(name)


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model's own attention, for what other ways are compared with."""
    before = attention_of(model)
    use_attention(model, "eager")
    try:
        yield
    finally:
        use_attention(model, before)


def _compute_device(model: PreTrainedModel) -> torch.device:
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device
