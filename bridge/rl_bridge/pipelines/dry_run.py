"""A dry run reads the weights of a run's models, where that takes seconds, and compares a class of the user's own."""

from collections.abc import Iterator
from pathlib import Path

import torch

from rl_bridge.common.terminal import say
from rl_bridge.models.model_source import ModelSource, PretrainedSource, PretrainedValueSource
from rl_bridge.models.own_model import OwnSource
from rl_bridge.parallel.probe import probe
from rl_bridge.pipelines.training import TrainingOptions, own_model

READ = 2 << 30
"""Bytes of weights that a dry run reads, of all models together."""
COMPARED = 50_000_000
"""Parameters of a class of the user's own that a dry run compares: twenty passes of a few tokens."""


def try_models(options: TrainingOptions) -> None:
    """Load each model of the run, one after another, and compare a class of the user's own as the run will.

    What is too large is left out, and a line says so.

    Raises:
        ValueError: weights that the run would refuse when it loads them, as those that are NaN or infinite; or a class
            whose rows do not give its own numbers.
    """
    left = READ
    for name, source in _models(options):
        with torch.device("meta"):
            model = source.empty()
        size, parameters = _bytes_of(source), sum(parameter.numel() for parameter in model.parameters())
        is_own = isinstance(source, OwnSource)
        if is_own and parameters > COMPARED:
            say(
                f"{name} was not compared with its own forward of single rows: it has {parameters:,} parameters, and a "
                f"dry run compares up to {COMPARED:,}; the run does it when it begins"
            )
        if size > left:
            say(
                f"the weights of {name} were not read: {size / 2**30:.1f} GiB, of {READ / 2**30:.1f} GiB that a dry "
                "run reads in all; the run refuses numbers that are NaN or infinite when it begins"
            )
        elif size or parameters <= COMPARED:
            left -= size
            source.load(model)
            if is_own and parameters <= COMPARED:
                probe(model)


def _models(options: TrainingOptions) -> Iterator[tuple[str, ModelSource]]:
    """The models that the run begins with but a reward model, which has scored completions by now."""
    for role, name in options.models().items():
        if role == "model" and options.of_class:
            yield str(name), own_model(options)[0]
        elif name is not None:
            yield name, (PretrainedSource if role in ("model", "teacher") else PretrainedValueSource)(name)


def _bytes_of(source: ModelSource) -> int:
    """The size of its files; of a new model's nothing."""
    if isinstance(source, PretrainedSource):
        place = source.folder()
    elif (weights := getattr(source, "weights", None)) is not None:
        place = Path(weights)
    else:
        return 0
    files = place.glob("*.safetensors") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files)
