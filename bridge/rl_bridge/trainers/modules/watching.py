"""What a policy's loss had of single completions: kept for a reader, without a second forward pass."""

import torch

from rl_bridge.data.token_batch import TokenBatch

COLUMNS = ("logprob", "old_logprob", "ratio", "advantage", "entropy", "rollout_logprob")


class Watch:
    """Keeps the ``COLUMNS`` of watched rows, a number for each of the row's tokens; what is masked is 0 or not read.

    ``ratio`` is exp(logprob − old_logprob): the token's own, of which a loss over sequences makes another.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, list[float]]] = {}

    def see(self, batch: TokenBatch, logprobs: torch.Tensor, entropies: torch.Tensor, marks: torch.Tensor) -> None:
        """Keep the rows whose mark is not −1; ``marks`` is [N] on the host, all others [N, L] of one update."""
        places = (marks >= 0).nonzero()[:, 0]
        if not len(places):
            return
        here = places.to(batch.tokens.device)
        assert batch.old_logprobs is not None and batch.advantages is not None
        rollout = batch.old_logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        new, old = logprobs.detach()[here].float(), batch.old_logprobs[here].float()
        columns = [new, old, (new - old).exp(), batch.advantages[here], entropies.detach()[here], rollout[here]]
        # One transfer for all of them.
        found = torch.stack([column.float() for column in columns], 1).cpu()
        lengths = batch.lengths[here].tolist()
        for mark, values, length in zip(marks[places].tolist(), found, lengths, strict=True):
            self._rows[mark] = dict(zip(COLUMNS, values[:, :length].tolist(), strict=True))

    def take(self) -> dict[int, dict[str, list[float]]]:
        """The rows kept since the last call."""
        rows, self._rows = self._rows, {}
        return rows


class Seen:
    """Log-probabilities and entropies of a loss inside the head, which has some tokens at a time."""

    def __init__(self, batch: TokenBatch) -> None:
        self._shape = batch.tokens.shape
        count = self._shape[0] * max(1, self._shape[1] - 1)
        self._found = torch.zeros(2, count, device=batch.tokens.device)

    def __call__(self, logprobs: torch.Tensor, entropies: torch.Tensor, rows: slice) -> None:
        """Take those of the tokens ``rows`` of all rows that lie one behind another, the first column left out."""
        self._found[0, rows], self._found[1, rows] = logprobs.detach(), entropies.detach()

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as [N, L]."""
        whole = torch.zeros(2, *self._shape, device=self._found.device)
        whole[:, :, 1:] = self._found.view(2, self._shape[0], -1)[:, :, : self._shape[1] - 1]
        return whole[0], whole[1]
