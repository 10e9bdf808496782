"""The workload of a plan: rows of given lengths, and how many workers share them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_bridge.common.terminal import given
from rl_bridge.data.token_batch import MicroBatch, TokenBatch
from rl_bridge.parallel.mesh import Mesh
from rl_bridge.pipelines.placement import PlacementOptions
from rl_bridge.run.provenance import read_provenance

# The rows of a step, for a plan and for a measurement.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The longest rows: ``prompts`` of ``prompt_tokens`` tokens, ``responses`` completions each of ``new_tokens``."""

    prompts: int
    responses: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        """Refuse a step without a token."""
        if min(self.prompts, self.responses, self.prompt_tokens, self.new_tokens) < 1:
            raise ValueError(
                "prompts, responses, prompt_tokens and new_tokens must be ≥ 1, got "
                f"{given(self, 'prompts', 'responses', 'prompt_tokens', 'new_tokens')}"
            )

    @property
    def rows(self) -> int:
        """Completions of a step."""
        return self.prompts * self.responses

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return self.prompt_tokens + self.new_tokens

    def batch(self, vocabulary: int, *, seed: int = 0) -> TokenBatch:
        """Rows whose completions count, with what a policy's objective reads."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.rows, self.row_tokens
        tokens = torch.randint(1, max(2, vocabulary), shape, generator=generator)
        groups = torch.arange(self.prompts).repeat_interleave(self.responses)
        first = groups * self.responses
        tokens[:, : self.prompt_tokens] = tokens[first, : self.prompt_tokens]
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, self.prompt_tokens :] = True
        numbers = [torch.full(shape, value) for value in (-1.0, -1.0, 0.5)]
        return TokenBatch(
            tokens,
            mask,
            torch.full((self.rows,), self.row_tokens),
            groups,
            rollout_logprobs=numbers[0],
            old_logprobs=numbers[1],
            advantages=numbers[2],
        )


class Largest(list[MicroBatch]):
    """Two micro-batches in the place of many, and all of them kept: the most memory is needed with the largest.

    The one before brings gradients into being, which the largest then finds.
    """

    def __init__(self, parts: list[MicroBatch]) -> None:
        sizes = [int(part.batch.lengths.sum()) for part in parts]
        largest = max(range(len(parts)), key=lambda i: (sizes[i], i))
        others = sorted((i for i in range(len(parts)) if i != largest), key=lambda i: sizes[i])
        super().__init__(parts[i] for i in sorted([largest, *others[-1:]]))
        self.all = parts


# The number of workers of a run, and their mesh.


def mesh_of(pipeline: PlacementOptions) -> Mesh:
    """The mesh of the trainers: of as many workers as the run says, else of the fewest that it can be of.

    >>> from rl_bridge.pipelines.placement import MeshOptions
    >>> mesh_of(PlacementOptions(mesh=MeshOptions(tensor=2)))
    Mesh(replicate=1, shard=1, tensor=2, sequence=1)
    >>> mesh_of(PlacementOptions(workers=4, mesh=MeshOptions(tensor=2)))
    Mesh(replicate=1, shard=2, tensor=2, sequence=1)

    Raises:
        ValueError: a mesh of another number of workers, one with vLLM, or workers that draw alone.
    """
    mesh = pipeline.mesh
    workers = pipeline.workers or mesh.replicate * (mesh.shard or 1) * mesh.tensor * mesh.sequence
    options: Any = pipeline  # a policy's has rollouts besides
    drawing = options.asynchronous.rollout_workers if hasattr(options, "asynchronous") else None
    backend = options.rollout.backend if hasattr(options, "rollout") else "in_process"
    if drawing and pipeline.workers:
        workers -= drawing
    if drawing:
        raise ValueError(
            f"a plan is of a worker that trains and draws, and here {drawing} rollout_workers draw alone, with "
            f"rollout.backend {backend}, beside {workers} that train"
        )
    if workers > 1 and backend != "in_process":
        raise ValueError(f"no plan of {workers} workers, {mesh}, with rollout.backend {backend}")
    return mesh.of(workers)


def started_with(path: Path) -> int | None:
    """Ranks of the torchrun job that a run's folder, or the folder of its run.toml, was last written by."""
    attempts = read_provenance(path if path.is_dir() else path.parent)
    environment = attempts[-1].get("environment", {}) if attempts else {}
    return int(environment["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= environment.keys() else None
