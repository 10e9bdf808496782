"""The libraries that track are there, in the versions that are pinned."""

from importlib.metadata import version
from pathlib import Path

import pytest

PINS = dict(line.split("==") for line in (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines())
LIBRARIES = (
    "wandb",
    "mlflow-skinny",
    "trackio",
)


@pytest.mark.tools
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_pinned_library_is_installed(library):
    assert version(library) == PINS[library]
