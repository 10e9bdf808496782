"""Constants of a component are checked when the component is made, and those that passed are not traced again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.objectives.components import component


@dataclasses.dataclass(frozen=True)
class Part:
    """A component's constants, whatever they are; of the library, for a user's are looked at each time."""

    __module__ = "rl_fn.a_part"
    value: object


class OfAUser(Part):
    """A user's subclass, which may read what is no field."""

    __module__ = "my_losses"


class Changing:
    """A number that can be changed, with the hash of its object."""


@pytest.fixture
def checked(monkeypatch):
    """Makes a part and checks its constant; the list of constants that were looked at."""
    monkeypatch.setattr(component, "_accepted", set())
    seen = []

    def check(value):
        component.check_once(Part(value), lambda: seen.append(value))

    return check, seen


def test_equal_constants_of_one_type_are_looked_at_once(checked):
    check, seen = checked
    for value in (1, 1, True, True, 1.0, 1.0, "1", None, None, (1, 2), (1, 2), (True, 2)):
        check(value)
    assert [type(value) for value in seen] == [int, bool, float, str, type(None), tuple, tuple]


CHANGING = [np.ones(1), jnp.ones(1), [1], np.float32(1), Changing(), (1, Changing())]


@pytest.mark.parametrize("value", CHANGING, ids=["NumPy", "JAX", "list", "scalar", "object", "tuple"])
def test_what_may_change_is_looked_at_each_time(checked, value):
    check, seen = checked
    check(value)
    check(value)
    assert len(seen) == 2


def test_a_user_s_own_component_is_looked_at_each_time(monkeypatch):
    monkeypatch.setattr(component, "_accepted", set())
    seen = []
    for _ in range(2):
        component.check_once(OfAUser(1), lambda: seen.append(1))
    assert len(seen) == 2


def test_what_is_traced_is_looked_at_each_time(checked):
    check, seen = checked
    for _ in range(2):
        jax.make_jaxpr(lambda x: check(x) or x)(1.0)
    assert len(seen) == 2


def test_what_fails_is_not_accepted(monkeypatch):
    monkeypatch.setattr(component, "_accepted", set())
    for _ in range(3):
        with pytest.raises(ValueError, match="clip_low"):
            rl_fn.components.PPOClip(clip_low=-1.0)


def test_a_schedule_of_constants_does_not_fill_the_memory(checked, monkeypatch):
    check, seen = checked
    monkeypatch.setattr(component, "MOST_ACCEPTED", 4)
    for value in range(100):
        check(value)
    assert len(component._accepted) <= 4 and len(seen) == 100


def test_a_recipe_that_was_made_before_is_not_traced(monkeypatch):
    before = rl_fn.recipes.dapo()
    monkeypatch.setattr(jax, "eval_shape", lambda *_: pytest.fail("traced again"))
    assert rl_fn.recipes.dapo() == before
