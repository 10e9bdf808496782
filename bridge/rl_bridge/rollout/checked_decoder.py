"""Whether rows that share calls of a model draw what each would draw alone: tried once, before anything is sampled.

    arrangement = check_decoder(model)
    decoder = Decoder(model, sampling, stop=stop, arrangement=arrangement)

Nothing is known of a family but what its own forward pass computes. Some rows of unlike length, 64 tokens in all, are
drawn together, of which one joins late and one leaves early. What was drawn is compared with the model's own eager
forward pass of each row alone. Where the two differ, fewer rows share a call.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from rl_bridge.data.requests import SamplingParams
from rl_bridge.models.rotary import rotary_bound
from rl_bridge.rollout.cached_model import Arrangement
from rl_bridge.rollout.decoder import Decoder, Drawn
from rl_bridge.rollout.quantized import Int8Linear

logger = logging.getLogger(__name__)

EXACT, CODED, ROUNDED = 1e-4, 3e-3, 5e-2
"""A log-probability may be off by this times the largest distance of a logit from their mean: in float32, where layers
make codes of few bits anew from activations, which rounding moves by a whole step, and in lower precision."""
ROUNDING = 1e-5
"""And by this."""
ARRANGEMENTS = (
    Arrangement(),
    Arrangement(read_packed=False),
    Arrangement(attention="eager", read_packed=False),
    Arrangement(attention="eager", read_packed=False, step_together=False),
    Arrangement(attention="eager", read_packed=False, step_together=False, give_positions=False),
)
"""In the order in which they are tried."""
LATE = 3
"""Steps after which the last row joins."""


class _Row(NamedTuple):
    prompt: Sequence[int]
    limit: int


_found: dict[tuple[object, ...], Arrangement] = {}


def check_decoder(model: PreTrainedModel) -> Arrangement:
    """What is right for this model, which is left with the attention that belongs to it.

    A model of the same class, configuration and layers is tried once in a process. Under fake tensors, which have no
    values, nothing is tried.

    Raises:
        NotImplementedError: in no arrangement the rows draw what each draws alone.
    """
    arrangement = ARRANGEMENTS[0]
    if not any(isinstance(x, FakeTensor) or x.is_meta for x in model.parameters()):
        key = _key(model)
        if key not in _found:
            _found[key] = _first_right(model)
        arrangement = _found[key]
    model.set_attn_implementation(arrangement.attention)
    return arrangement


def _first_right(model: PreTrainedModel) -> Arrangement:
    tried: list[str] = []
    error: Exception | None = None
    seen: set[Arrangement] = set()
    for arrangement in ARRANGEMENTS:
        model.set_attn_implementation(arrangement.attention)
        try:
            decoder = Decoder(model, SamplingParams(max_new_tokens=1), stop=[], arrangement=arrangement)
            if decoder.arrangement in seen:
                continue
            seen.add(decoder.arrangement)
            rows = _rows(model)
            gap, allowed = _gap(model, rows, _drawn(decoder, rows))
        except Exception as raised:  # Whatever a model raises here: the next arrangement asks less of it.
            error, why = raised, f"{type(raised).__name__}: {raised}"
        else:
            why = f"log-probabilities are {gap:.2g} nats off, allowed are {allowed:.2g}"
            if gap <= allowed:
                if tried:
                    line = "%s is sampled by %s, since %s"
                    logger.warning(line, type(model).__name__, decoder.arrangement, "; ".join(tried))
                return decoder.arrangement
        tried.append(f"by {arrangement}: {why}")
    if isinstance(error, NotImplementedError):
        raise error
    raise NotImplementedError(
        f"cannot sample from {type(model).__name__} in this process: rows that are drawn together differ from what the "
        f"model computes of each alone ({'; '.join(tried)}). Sample with vLLM (--rollout.backend vllm)"
    ) from error


def _rows(model: PreTrainedModel) -> list[_Row]:
    """Rows of unlike length, two of them with one prompt. The last joins late, and is then as long as the first."""
    config = model.config.get_text_config(decoder=True)
    longest = min(
        (n for n in (rotary_bound(model), getattr(config, "max_position_embeddings", None)) if n), default=10**9
    )
    vocabulary = config.vocab_size
    prompts = [[(17 * n * n + 29 * n + 7 * length) % vocabulary for n in range(length)] for length in (3, 10, 10, 1, 6)]
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < vocabulary:
        prompts[1][5] = prompts[2][5] = padding  # within a row it is a token: some models count positions by it
    limits = (9, 9, 3, 5, 8)
    rows = [_Row(prompt[: longest // 2], limit) for prompt, limit in zip(prompts, limits, strict=True)]
    return [row._replace(limit=min(row.limit, longest - len(row.prompt))) for row in rows]


@torch.no_grad()
def _drawn(decoder: Decoder, rows: Sequence[_Row]) -> dict[int, Drawn]:
    """What the rows draw together, by their number."""
    drawn: dict[int, Drawn] = {}
    early = len(rows) - 1
    for number, row in enumerate(rows[:early]):
        decoder.add(number, row.prompt, seed=number, limit=row.limit)
    for _ in range(LATE):
        drawn |= {row.key: row for row in decoder.step()}  # pyright: ignore[reportAssignmentType]
    decoder.add(early, rows[early].prompt, seed=early, limit=rows[early].limit)
    while decoder.running or decoder.waiting:
        drawn |= {row.key: row for row in decoder.step()}  # pyright: ignore[reportAssignmentType]
    return drawn


@torch.no_grad()
def _gap(model: PreTrainedModel, rows: Sequence[_Row], drawn: Mapping[int, Drawn]) -> tuple[float, float]:
    """How far the drawn log-probabilities are from those of an eager forward pass of each row alone, and may be."""
    gaps, largest = [], 0.0
    attention = str(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    for number, row in enumerate(rows):
        tokens = torch.tensor([[*row.prompt, *drawn[number].tokens]], device=model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt) - 1 : -1].float()
        largest = max(largest, float((logits - logits.mean(-1, keepdim=True)).abs().max()))
        wanted = logits.log_softmax(-1).gather(1, tokens[0, len(row.prompt) :, None])[:, 0]
        gaps.append((torch.tensor(drawn[number].logprobs) - wanted.cpu()).abs())
    model.set_attn_implementation(attention)
    coded = any(isinstance(module, Int8Linear) for module in model.modules())
    part = ROUNDED if model.dtype in (torch.bfloat16, torch.float16) else CODED if coded else EXACT
    return float(torch.cat(gaps).max()), part * largest + ROUNDING


def _key(model: PreTrainedModel) -> tuple[object, ...]:
    """What the tried model has in common with others of which nothing needs to be tried again."""
    config = {name: value for name, value in model.config.to_dict().items() if "attn_implementation" not in name}
    kinds = frozenset(type(module) for module in model.modules())
    return type(model), repr(sorted(config.items())), kinds, model.dtype, model.device.type
