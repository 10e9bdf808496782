import enum
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.checkpoints.writing import put_together, take_apart


def test_everything_comes_back_by_way_of_json():
    state = {
        "none": None,
        "numbers": [True, 0, -(2**80), 0.1, math.inf, 1e-320],
        "empty": [{}, [], (), ""],
        "tuple": (1, (2, [3])),
        3: {"a/b": torch.arange(3), "a": {"b": torch.tensor(2.5)}},
        "list": [torch.ones(2, dtype=torch.bfloat16), "text"],
    }
    structure, tensors = take_apart(state)
    assert sorted(tensors) == ["3/a/b", "3/a~1b", "list/0"]
    back = put_together(json.loads(json.dumps(structure)), tensors)
    assert str(back) == str(state) and type(back["tuple"]) is tuple and list(back) == list(state)
    assert back[3]["a/b"] is state[3]["a/b"] and back["list"][0] is state["list"][0]


KEYS = st.text("a~/01", min_size=1, max_size=4) | st.integers(-1, 12)
TREES = st.recursive(
    st.just(0) | st.builds(torch.zeros, st.just(1)),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3),
    max_leaves=8,
)


def tensors_of(state):
    """Every tensor of a state, in its order."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def same_keys(state):
    """Whether a number and its text are keys of one dictionary, which a name does not tell apart."""
    if isinstance(state, dict):
        return len({str(key) for key in state}) < len(state) or any(map(same_keys, state.values()))
    return isinstance(state, list) and any(map(same_keys, state))


@given(state=TREES)
def test_tensors_have_names_of_their_own_whatever_characters_the_keys_have(state):
    if same_keys(state):
        state = [tensors_of(state)]
    structure, tensors = take_apart(state)
    assert list(map(id, tensors.values())) == list(map(id, tensors_of(state)))
    back = put_together(json.loads(json.dumps(structure)), tensors)
    assert list(map(id, tensors_of(back))) == list(map(id, tensors_of(state))) and str(back) == str(state)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2, 3}]}, "got set at a/1"),
        ({"a": np.float32(1)}, "got float32 at a"),
        ({"a": {"b": Colour.RED}}, "got Colour at a/b"),
        (lambda: 0, "got function at the top"),
        ({"a": {1.5: 0}}, "keys are strings or integers, got 1.5 at a"),
        ({"a": {True: 0}}, "keys are strings or integers, got True at a"),
    ],
)
def test_what_json_would_change_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        take_apart(value)


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tensors of the state have the name '1'"):
        take_apart({1: torch.ones(1), "1": torch.ones(1)})
