"""How many workers the run of a plan has, and how they are arranged."""

from pathlib import Path
from typing import Any

from rl_bridge.engines.mesh import Mesh
from rl_bridge.pipelines.placement import PlacementOptions
from rl_bridge.tracking.provenance import read_provenance


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
    wanted = pipeline.mesh
    workers = pipeline.workers or wanted.replicate * (wanted.shard or 1) * wanted.tensor * wanted.sequence
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
        raise ValueError(f"no plan of {workers} workers, {wanted}, with rollout.backend {backend}")
    return wanted.of(workers)


def started_with(path: Path) -> int | None:
    """Ranks of the torchrun job that a run's folder, or the folder of its config.json, was last written by."""
    attempts = read_provenance(path if path.is_dir() else path.parent)
    environment = attempts[-1].get("environment", {}) if attempts else {}
    return int(environment["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= environment.keys() else None
