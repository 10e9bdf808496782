"""Document isolation: rows of a padded batch as documents of one packed row that do not see each other.

    documents = Documents(lengths, mesh)
    values = model(documents.take(tokens), **documents.forward_kwargs)
    values = documents.put(values, tokens.shape)

This is the only place that says which tokens belong together. Every sequence-parallel rank holds its own part of the
packed row, and every rank gets all rows back.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.parallel.attention import AttentionPlan
from rl_bridge.parallel.attention.plan import held, segments_of

SEQUENCE = "sequence"


class Documents:
    """Some rows of a right-padded batch, packed one after another, shortest first, without padding.

    The packed row is as long as its documents; cut over R > 1 sequence-parallel ranks it is padded to a multiple of
    2 · R, and the padding is a document of its own. Without any document there is only padding, so that the model runs
    and the ranks' collectives match.
    """

    def __init__(
        self,
        lengths: Iterable[int] | torch.Tensor,
        mesh: DeviceMesh | None = None,
        *,
        rows: Iterable[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Documents of a batch.

        Args:
            lengths: tokens of each of the batch's N rows; a row of length 0 has no document.
            mesh: the worker's; the ranks of its dimension "sequence" share the documents and give the same lengths.
            rows: the rows to pack, all of them by default.
            device: where the batch is; by default where ``lengths`` is, or else the mesh's kind of device.

        Raises:
            ValueError: for a negative length, or a row that is not there or is named twice.

        >>> import torch
        >>> documents = Documents([2, 3])
        >>> packed = documents.take(torch.tensor([[1, 2, 0], [3, 4, 5]]))
        >>> packed
        tensor([[1, 2, 3, 4, 5]])
        >>> documents.put(packed, (2, 3))
        tensor([[1, 2, 0],
                [3, 4, 5]])
        >>> documents.forward_kwargs["position_ids"]
        tensor([[0, 1, 0, 1, 2]])
        """
        self.device = _device(lengths, mesh) if device is None else torch.device(device)
        lengths = lengths.tolist() if isinstance(lengths, torch.Tensor) else [int(length) for length in lengths]
        rows = list(range(len(lengths)) if rows is None else rows)
        _check_rows(lengths, rows)
        self.group = _sequence_group(mesh)
        ranks, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())

        # Documents of one length beside each other share a call, and zigzag gives each rank short ones and long ones.
        documents = sorted(((row, lengths[row]) for row in rows if lengths[row] > 0), key=lambda document: document[1])
        used = sum(length for _, length in documents)
        multiple = 1 if ranks == 1 else 2 * ranks
        padding = -used % multiple if used else multiple
        segments = segments_of([length for _, length in documents] + [padding] * (padding > 0))
        self.plan = AttentionPlan(segments, self.device, self.group)
        self.batch_rows, self.longest = len(lengths), max((length for _, length in documents), default=0)

        # Row and column in the batch of every token of the packed row; padding has row −1.
        owners = torch.tensor([row for row, _ in documents] + [-1] * (padding > 0))
        sizes = torch.tensor([segment.stop - segment.start for segment in segments])
        starts = torch.tensor([segment.start for segment in segments])
        rows_of = owners.repeat_interleave(sizes)
        columns_of = torch.arange(len(rows_of)) - starts.repeat_interleave(sizes)
        order = [torch.cat([torch.arange(*span) for span in held(len(rows_of), r, ranks)]) for r in range(ranks)]
        self._local = _Places(rows_of[order[rank]], columns_of[order[rank]], self.device)
        self._gathered = _Places(rows_of[torch.cat(order)], columns_of[torch.cat(order)], self.device)
        self._asked = False

    @property
    def tokens(self) -> int:
        """Tokens of the packed row that this rank holds, padding included."""
        return self.plan.rank_plan.tokens

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """Arguments of the model's call beside the tokens. The model must use the attention "rl_fn"."""
        self._asked = True
        return {
            "position_ids": self._local.columns[None],
            "attention_mask": None,
            "use_cache": False,
            "attention_plan": self.plan,
        }

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """[N, L, …] packed, [1, T, …]: this rank's tokens, zero where there is padding.

        The gradient of ``values`` is the part that comes from this rank's tokens.
        """
        self._check_shape(values.shape)
        places, used = self._local, self._local.used
        packed = values.new_zeros((self.tokens, *values.shape[2:]))
        return packed.index_put((used,), values[places.rows[used], places.columns[used]])[None]

    def put(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Packed values of this rank's tokens, [1, T, …], back in their rows, [N, L, …]: zero where no token is.

        Every sequence-parallel rank gets the tokens of all of them. All of these ranks compute the same loss from the
        result, so the backward pass gives each the gradient of its own tokens, and their parameters' gradients add up.

        Raises:
            ValueError: if ``shape`` is not the batch's, the values are not this rank's tokens, or a model was called
                with ``forward_kwargs`` and its attention did not follow the plan.
        """
        self._check_shape(shape)
        if values.shape[:2] != (1, self.tokens):
            raise ValueError(f"expected values [1, {self.tokens}, …], got {tuple(values.shape)}")
        if self._asked and not self.plan.uses:
            raise ValueError(
                "the model ignored the attention plan, so its documents saw each other:"
                ' call rl_bridge.parallel.attention.use_rl_fn_attention(model) ("rl_fn") before the forward pass'
            )
        packed = values[0] if self.group is None else _Gather.apply(values[0], self.group)
        places, used = self._gathered, self._gathered.used
        out = packed.new_zeros((*shape, *values.shape[2:]))
        return out.index_put((places.rows[used], places.columns[used]), packed[used])

    def _check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 2 or shape[0] != self.batch_rows or shape[1] < self.longest:
            raise ValueError(
                f"expected a batch of {self.batch_rows} rows of at least {self.longest} tokens, got {tuple(shape)}"
            )


class _Places:
    """Rows and columns of packed tokens, and the numbers of those that are no padding."""

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor, device: torch.device) -> None:
        self.rows, self.columns = rows.to(device), columns.to(device)
        self.used = (rows >= 0).nonzero()[:, 0].to(device)


class _Gather(torch.autograd.Function):
    """[T, …] of every rank, [R · T, …] on each. Backward, a rank takes the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.tokens = group, len(values)
        gathered = values.new_empty((group.size() * len(values), *values.shape[1:]))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(0, ctx.group.rank() * ctx.tokens, ctx.tokens), None


def _sequence_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return None
    if SEQUENCE not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"the mesh needs a dimension {SEQUENCE!r}, got {mesh.mesh_dim_names}")
    group = mesh.get_group(SEQUENCE)
    return group if group.size() > 1 else None


def _device(lengths: Iterable[int] | torch.Tensor, mesh: DeviceMesh | None) -> torch.device:
    if isinstance(lengths, torch.Tensor):
        return lengths.device
    kind = "cpu" if mesh is None else mesh.device_type
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _check_rows(lengths: Sequence[int], rows: Sequence[int]) -> None:
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {min(lengths)}")
    if len(set(rows)) < len(rows) or any(not 0 <= row < len(lengths) for row in rows):
        raise ValueError(f"rows must be different numbers from 0 to {len(lengths) - 1}, got {rows}")
