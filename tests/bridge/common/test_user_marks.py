"""Marks of functions and objects: the same for the same content in every process, and others for other content."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_bridge.common.user_marks import mark_of
from tests.bridge.common.mark_kinds import FORMS, KINDS, SECRET, STATES, Scorer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def processes():
    """The marks that two processes print, with other hashes of texts and sets and mappings filled in another order."""
    program = [sys.executable, "-m", "tests.bridge.common.mark_kinds"]
    begun = [
        subprocess.Popen(
            [*program, way], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed, way in (("1", "forth"), ("2", "back"))
    ]
    return [json.loads(process.communicate(timeout=300)[0]) for process in begun]


def is_compared(kind, form):
    """A number alone is no function; and what is called by its class is known by that."""
    return form != "alone" or callable(KINDS[kind](0))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_contents_have_one_mark_and_others_another(processes, kind, form):
    (one, changed), again = processes[0][f"{kind}, {form}"], processes[1][f"{kind}, {form}"]
    assert [one, changed] == again
    assert one != changed or not is_compared(kind, form)
    assert len(max(one, changed, key=len)) <= 200 and SECRET not in one + changed and "horse" not in one + changed


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", STATES)
def test_what_has_no_content_has_a_mark_of_its_type(processes, kind, form):
    (one,) = processes[0][f"{kind}, {form}"]
    assert [one] == processes[1][f"{kind}, {form}"] and 0 < len(one) <= 200 and "0x" not in one


def test_what_an_object_counts_for_itself_is_no_content():
    scorer = Scorer(1.0)
    before = mark_of(scorer)
    scorer.calls += 1  # a field without compare
    assert mark_of(scorer) == before
    scorer.client = 1  # one that counts
    assert mark_of(scorer) != before


def test_a_long_name_is_cut_and_still_its_own():
    kinds = [type(f"{'Long' * 100}{n}", (), {"__call__": lambda self, completion, row: 0.0}) for n in range(2)]
    marks = {mark_of(kind()) for kind in kinds}
    assert len(marks) == 2 and max(map(len, marks)) <= 200


@pytest.mark.parametrize("value", [3, 0.5, 1j, "text", b"text", bytearray(b"text")], ids=repr)
def test_a_number_or_text_of_a_class_of_its_own_has_a_mark_of_its_class(value):
    """Also where both print alike: what the class does with it is content."""
    kinds = [type(value), *(type(name, (type(value),), {}) for name in ("Mine", "Other"))]
    marks = {mark_of(functools.partial(min, kind(value))) for kind in (*kinds, *kinds)}
    assert len(marks) == len(kinds)
