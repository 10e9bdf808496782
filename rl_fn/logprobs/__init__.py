"""Log-probabilities of tokens from logits and from hidden states."""

from rl_fn.logprobs.from_hidden import linear_logprobs
from rl_fn.logprobs.from_logits import logits_logprobs, sequence_logprobs
from rl_fn.logprobs.row_state import RowState, TokenLogprobs, finalize_row_state, merge_row_states, row_state

__all__ = [
    "RowState",
    "TokenLogprobs",
    "finalize_row_state",
    "linear_logprobs",
    "logits_logprobs",
    "merge_row_states",
    "row_state",
    "sequence_logprobs",
]
