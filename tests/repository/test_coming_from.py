"""The page for those who come from another library names options, algorithms and losses that there are."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from rl_bridge.cli import TRAINERS
from rl_bridge.pipelines.losses import LOSSES, REWARD_MODEL_LOSSES
from rl_bridge.pipelines.objective import ALGORITHMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
CODE = " ".join(re.findall(r"`([^`]+)`", PAGE))
CHOICES = {"objective": ALGORITHMS, "loss": {**LOSSES, **REWARD_MODEL_LOSSES}}


def written(name):
    return name.replace("_", "-")


def options_of(config, before=""):
    """The options of a config as they are written on the command line."""
    found = set()
    for field in dataclasses.fields(config):
        found.add(name := before + written(field.name))
        value = getattr(config, field.name, None)
        if field.name in CHOICES and not before:
            kinds = CHOICES[field.name].values()
            # A sub-command's class is made without arguments unless a constant has no default.
            found |= {f"{name}.{written(constant.name)}" for kind in kinds for constant in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= options_of(value, f"{name}.")
    return found


@pytest.fixture(scope="module")
def options():
    found = {}
    for command, trainer in TRAINERS.items():
        module, _, name = trainer.default.partition(":")
        found[command] = options_of(getattr(importlib.import_module(module), name)())
    return found


def test_every_option_on_the_page_is_on_a_command_line(options):
    named = set(re.findall(r"--([a-z][a-z0-9.-]*[a-z0-9])", CODE))
    known = set().union(*options.values())
    positive = {name.removeprefix("no-") if name not in known else name for name in named}
    assert len(named) > 60 and positive <= known, sorted(positive - known)


def test_every_algorithm_and_loss_on_the_page_is_one(options):
    for kind, choices in CHOICES.items():
        named = set(re.findall(rf"\b{kind}:([a-z0-9-]+)", CODE))
        assert named and named <= {written(name) for name in choices}, named


def test_the_page_reads_the_options_that_a_command_line_reads(options):
    assert {"policy.sampling.temperature", "objective.kl.coef", "objective.clip-high"} <= options["policy"]
    assert "loss.beta" in options["preference"] and "objective.kl.coef" not in options["sft"]


def test_every_section_says_what_is_lacking():
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    libraries = [section for section in sections if section.startswith(("RL2", "RLite", "TRL", "verl"))]
    assert len(libraries) == 4 and all("Not here" in section for section in libraries)
