"""Document isolation: rows of a padded batch as documents of one packed row that do not see each other.

    documents = Documents(lengths, mesh)
    values = model(documents.take(tokens), **documents.forward_kwargs)
    values = documents.put(values, tokens.shape)

This is the only place that says which tokens belong together. Targets are shifted before they are taken: behind a
document's last token lies another document, and a token's neighbour may be on another rank. Every sequence-parallel
rank holds its own part of the packed row, and every rank gets all rows back.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
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
        groups: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Documents of a batch.

        Args:
            lengths: tokens of each of the batch's N rows; a row of length 0 has no document.
            mesh: the worker's; the ranks of its dimension "sequence" share the documents and give the same lengths.
            rows: the rows to pack, all of them by default.
            groups: with ``shared``, [N]: the packed rows of a group have their first tokens once, as a prefix that
                each of them continues. Numbers and gradients are the same as without.
            shared: [N], the number of those tokens; ``rl_bridge.data.token_batch.shared_prefixes`` finds it. Whatever
                is taken is equal there.
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

        pieces = _pieces(lengths, rows, groups, shared)
        if ranks == 1:
            pieces = _by_length(pieces)
        tokens = sum(piece.stop - piece.start for piece in pieces)
        multiple = 1 if ranks == 1 else 2 * ranks
        padding = -tokens % multiple if tokens else multiple
        if padding:
            pieces.append(_Piece((), 0, padding, None))
        sizes = [piece.stop - piece.start for piece in pieces]
        self.segments = segments_of(sizes, [piece.prefix for piece in pieces])
        self.plan = AttentionPlan(self.segments, self.device, self.group)
        self.batch_rows, self.longest = len(lengths), max((lengths[row] for row in rows), default=0)

        of_ranks = [torch.cat([torch.arange(*span) for span in held(sum(sizes), r, ranks)]) for r in range(ranks)]
        columns = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
        self._positions = columns[of_ranks[rank]].to(self.device)
        places, gathered = _places(pieces), torch.cat(of_ranks).argsort()
        self._write_places = places._replace(tokens=gathered[places.tokens]).to(self.device)
        first_places = _places([piece._replace(rows=piece.rows[:1]) for piece in pieces])
        offsets = gathered[first_places.tokens] - rank * self.tokens
        local = ((offsets >= 0) & (offsets < self.tokens)).nonzero()[:, 0]
        self._read_places = _Places(first_places.rows[local], first_places.columns[local], offsets[local]).to(
            self.device
        )
        self._passed_on = False

    @property
    def tokens(self) -> int:
        """Tokens of the packed row that this rank holds, padding included."""
        return self.plan.rank_plan.tokens

    @property
    def forward_kwargs(self) -> dict[str, Any]:
        """Arguments of the model's call beside the tokens. The model must use the attention "rl_fn"."""
        self._passed_on = True
        return {
            "position_ids": self._positions[None],
            "attention_mask": None,
            "use_cache": False,
            "attention_plan": self.plan,
        }

    @property
    def boundaries(self) -> dict[str, Any]:
        """Where documents begin, in the words of layers that keep states: only such layers read them.

        Some read ``seq_idx``, others ``cu_seq_lens_q``; some none, and are wrong. A document that another continues, or
        that lies on several ranks, has no words there.
        """
        starts = [0, *(segment.stop for segment in self.segments)]
        edges = torch.tensor(starts, dtype=torch.int32, device=self.device)
        lengths = edges[1:] - edges[:-1]
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=self.device).repeat_interleave(lengths)
        longest = max(stop - start for start, stop in itertools.pairwise(starts))
        return {
            "seq_idx": numbers[None],
            "cu_seq_lens_q": edges,
            "cu_seq_lens_k": edges,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """[N, L, …] packed, [1, T, …]: this rank's tokens, zero where there is padding.

        A shared token is taken from the first of its rows. The gradient of ``values`` is the part that comes from this
        rank's tokens.
        """
        self._check_shape(values.shape)
        places = self._read_places
        packed = values.new_zeros((self.tokens, *values.shape[2:]))
        return packed.index_put((places.tokens,), values[places.rows, places.columns])[None]

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
        if self._passed_on and not self.plan.uses:
            raise ValueError(
                "the model ignored the attention plan, so its documents saw each other:"
                ' call rl_bridge.parallel.attention.use_rl_fn_attention(model) ("rl_fn") before the forward pass'
            )
        packed = values[0] if self.group is None else _Gather.apply(values[0], self.group)
        places = self._write_places
        out = packed.new_zeros((*shape, *values.shape[2:]))
        return out.index_put((places.rows, places.columns), packed[places.tokens])

    def _check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 2 or shape[0] != self.batch_rows or shape[1] < self.longest:
            raise ValueError(
                f"expected a batch of {self.batch_rows} rows of at least {self.longest} tokens, got {tuple(shape)}"
            )


class _Piece(NamedTuple):
    """Columns start … stop of a row, or of several rows that have them in common; padding is of no row.

    ``prefix`` is the number of the piece that this one continues.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    prefix: int | None


def _pieces(
    lengths: Sequence[int], rows: Sequence[int], groups: torch.Tensor | None, shared: torch.Tensor | None
) -> list[_Piece]:
    """Documents that share nothing, shortest first, then each group's prefix and what continues it.

    Documents of one length beside each other share a call, and zigzag gives each rank short ones and long ones.
    """
    rows = sorted((row for row in rows if lengths[row] > 0), key=lambda row: lengths[row])
    if groups is None or shared is None:
        return [_Piece((row,), 0, lengths[row], None) for row in rows]
    numbers, common = groups.tolist(), shared.tolist()
    if not len(numbers) == len(common) == len(lengths) or any(not 0 <= common[row] <= lengths[row] for row in rows):
        raise ValueError(f"rows share from 0 to all of their tokens, got shared {common} and lengths {list(lengths)}")
    members: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        members.setdefault((numbers[row], -1) if common[row] else (numbers[row], row), []).append(row)
    alone = [group[0] for group in members.values() if len(group) == 1]
    pieces = [_Piece((row,), 0, lengths[row], None) for row in alone]
    for group in members.values():
        if len(group) > 1:
            stop, prefix = min(common[row] for row in group), len(pieces)
            pieces.append(_Piece(tuple(group), 0, stop, None))
            pieces += [_Piece((row,), stop, lengths[row], prefix) for row in group if lengths[row] > stop]
    return pieces


def _by_length(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Prefixes, then all other pieces, shortest first: of all groups, the pieces of one length share a call.

    Ranks of a sequence keep a group's pieces together instead, so that they exchange few keys.
    """
    prefixes = {piece.prefix for piece in pieces}
    order = sorted(range(len(pieces)), key=lambda i: (i not in prefixes, pieces[i].stop - pieces[i].start))
    number: dict[int | None, int | None] = {None: None} | {old: new for new, old in enumerate(order)}
    return [pieces[i]._replace(prefix=number[pieces[i].prefix]) for i in order]


class _Places(NamedTuple):
    """Rows and columns of the batch, and the packed token that belongs to each."""

    rows: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor

    def to(self, device: torch.device) -> "_Places":
        return _Places(*(x.to(device) for x in self))


def _places(pieces: Sequence[_Piece]) -> _Places:
    """Every place in the batch that has a token of the packed row, in that row's order."""
    entries, token = [], 0
    for piece in pieces:
        length = piece.stop - piece.start
        entries += [(row, piece.start, token, length) for row in piece.rows]
        token += length
    rows, starts, tokens, lengths = torch.tensor(entries, dtype=torch.int64).reshape(-1, 4).unbind(1)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    rows, starts, tokens = (x.repeat_interleave(lengths) for x in (rows, starts, tokens))
    return _Places(rows, starts + within, tokens + within)


class _Gather(torch.autograd.Function):
    """[T, …] of every rank, [R · T, …] on each. Backward, a rank takes the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.tokens = group, len(values)
        gathered = values.new_empty((group.size() * len(values), *values.shape[1:]))
        dist.all_gather(list(gathered.chunk(group.size())), values.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
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
