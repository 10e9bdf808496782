"""ROLL-4: an argument of vLLM is allowed with a reason, or refused by name before anything starts."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.rollout.vllm.engine_options import ALLOWED, REFUSED

DOCS = Path(__file__).parents[4] / "docs" / "rollouts.md"


@pytest.mark.vllm
def test_every_argument_of_vllm_is_allowed_or_refused():
    """A release with a new one fails here: somebody decides whether it changes draws."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    assert not ALLOWED.keys() & REFUSED.keys()
    assert (known - ALLOWED.keys() - REFUSED.keys(), (ALLOWED.keys() | REFUSED.keys()) - known) == (set(), set())


def test_what_is_refused_says_why_in_every_spelling():
    for name, reason in REFUSED.items():
        for spelt in (name, name.replace("_", "-"), f"--{name.replace('_', '-')}"):
            with pytest.raises(ValueError, match=re.escape(f"argument {name!r} is refused: {reason}")):
                VLLMOptions(arguments=(f"{spelt}=null",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('speculative_config={"method": "ngram"}', "'speculative_config' is refused: it changes what is drawn"),
        ("gpu_memory_utilisation=0.4", "'gpu_memory_utilisation' is no argument .*did you mean gpu_memory_utilization"),
        ("qqq=1", r"'qqq' is no argument of vLLM that may be given \(docs/rollouts.md"),
        ("", "'' is no argument of vLLM"),
    ],
)
def test_names_that_are_on_no_list_have_near_names(text, message):
    with pytest.raises(ValueError, match=message):
        VLLMOptions(arguments=(text,))


def test_the_page_lists_what_is_allowed_with_its_reason():
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \|$", DOCS.read_text(), re.MULTILINE)
    listed = {name: reason for reason, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert {name: listed.get(name) for name in ALLOWED} == ALLOWED
    given = VLLMOptions(arguments=tuple(f"{name}=1" for name in ALLOWED))
    assert given.engine_arguments() == dict.fromkeys(ALLOWED, 1)
