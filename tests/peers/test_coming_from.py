"""The page for those who come from another library has every option of the installed one, mapped or as lacking."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from tests.repository.coming_from import section

pytestmark = pytest.mark.peers
CONFIGS = ("GRPOConfig", "SFTConfig", "DPOConfig", "RewardConfig")
SECTIONS = (
    *("data", "algorithm", "trainer", "critic", "reward", "actor_rollout_ref.actor", "actor_rollout_ref.ref"),
    *("actor_rollout_ref.rollout", "actor_rollout_ref.model"),
)


def lacking(library, names):
    words = set(re.findall(r"[A-Za-z_0-9]+", section(library)))
    return sorted(set(names) - words)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_trl_is_on_the_page(name):
    trl = pytest.importorskip("trl")
    fields = [field.name for field in dataclasses.fields(getattr(trl, name))]
    assert len(fields) > 100 and lacking("TRL", fields) == []


def test_a_new_field_would_be_missed():
    assert lacking("TRL", ["learning_rate", "a_field_of_tomorrow"]) == ["a_field_of_tomorrow"]


@pytest.mark.parametrize("place", SECTIONS)
def test_every_key_of_verl_is_on_the_page(place):
    verl = pytest.importorskip("verl")
    file = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    found = yaml.safe_load(file.read_text("utf-8"))
    for part in place.split("."):
        found = found[part]
    keys = [key for key in found if not key.startswith("_")]
    assert len(keys) > 4 and lacking("verl", keys) == []
