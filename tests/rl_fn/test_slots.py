"""Each slot of an objective takes its own kinds of objects, and no others."""

import dataclasses
import functools

import jax
import jaxtyping
import pytest

import rl_fn
from rl_fn import components
from tests.rl_fn.component_table import ADVANTAGES, ARGUMENTS, COMPONENTS, CORRECTIONS, LOSSES
from tests.rl_fn.registry import RECIPES


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Without the tests' checker of annotations, which refuses most of these in its own words."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


DAPO = rl_fn.recipes.dapo()
SLOTS = [field.name for field in dataclasses.fields(rl_fn.Objective)]


def own(x):
    return x


# The components that each slot takes; a function of one's own goes into the first three besides.
TAKES = {
    "advantage": set(ADVANTAGES),
    "loss": set(LOSSES),
    "correction": set(CORRECTIONS) - {"none"},
    "aggregation": {"Aggregation"},
    "kl": {"KL"},
    "entropy": {"EntropyBonus"},
    "reward_kl": {"KL"},
    "value": {"ValueLoss"},
    "dynamic_sampling": {"DynamicSampling"},
    "kl_aggregation": {"Aggregation"},
    "entropy_aggregation": {"Aggregation"},
    "name": set(),
    "strict": set(),
}
FUNCTIONS = {"function": own, "partial": functools.partial(own), "jitted": jax.jit(own)}
PLAIN = {
    "number": 0.1,
    "text": "k3",
    "flag": True,
    "tuple": (1,),
    "none": None,
    "class": components.KL,
    "own class": set,
}
OPTIONAL = {field.name for field in dataclasses.fields(rl_fn.Objective) if field.default is None}


def is_right(slot, kind):
    plain = {"name": {"text"}, "strict": {"flag"}}.get(slot, set())
    functions = set(FUNCTIONS) if slot in ("advantage", "loss", "correction") else set()
    return kind in TAKES[slot] | plain | functions or (kind == "none" and slot in OPTIONAL)


OBJECTS = {**COMPONENTS, **FUNCTIONS, **PLAIN}
PAIRS = [(slot, kind) for slot in SLOTS for kind in OBJECTS]


@pytest.mark.parametrize(("slot", "kind"), [pair for pair in PAIRS if not is_right(*pair)])
def test_an_object_of_another_kind_is_refused_by_the_slot_s_name(slot, kind):
    with pytest.raises(TypeError, match=f"^{slot} is .*, got ") as refused:
        DAPO.replace(**{"strict": False, slot: OBJECTS[kind]})
    assert slot in ("advantage", "loss", "correction") or "function" not in str(refused.value).split(", got ")[0]


@pytest.mark.parametrize(("slot", "kind"), [pair for pair in PAIRS if is_right(*pair)])
def test_an_object_of_its_kind_is_taken(slot, kind):
    assert getattr(DAPO.replace(**{"strict": False, slot: OBJECTS[kind]}), slot) is not components.KL


@pytest.mark.parametrize("slot", ["advantage", "loss", "correction", "kl", "entropy", "value", "dynamic_sampling"])
def test_a_class_in_place_of_an_object_is_named(slot):
    kind = type(COMPONENTS[sorted(TAKES[slot])[0]])
    with pytest.raises(TypeError, match=f"^{slot} is .*, got the class {kind.__name__}, not an object$"):
        DAPO.replace(**{slot: kind})


def test_the_message_says_what_belongs_there():
    with pytest.raises(TypeError, match=r"^kl is KL\(estimator, coef\), got 0\.1$"):
        DAPO.replace(kl=0.1)
    with pytest.raises(TypeError, match=r"^loss is a loss component or a function of a Batch, got TIS\("):
        DAPO.replace(loss=components.TIS(2.0))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_and_what_replaces_in_it_is_taken(name):
    recipe = getattr(rl_fn.recipes, name)()
    assert dataclasses.replace(recipe) == recipe
    assert recipe.replace(strict=False, loss=components.Custom(own)).loss == components.Custom(own)
    assert recipe.replace(strict=False, correction=components.Custom(own)).correction == components.Custom(own)
    advantage = components.CustomAdvantage(own)
    assert recipe.replace(strict=False, advantage=advantage).advantage == advantage


@pytest.mark.parametrize(("several", "slot"), [(components.Sum, "loss"), (components.Product, "correction")])
def test_parts_of_several_are_of_their_slot(several, slot):
    parts = ARGUMENTS[several.__name__][0]
    assert several((*parts, own)).parts[-1] == components.Custom(own)
    assert several(list(parts)) == several(parts)
    for kind, wrong in OBJECTS.items():
        if not is_right(slot, kind) or kind == "none":
            with pytest.raises(TypeError, match=f"^{slot} is .*, got "):
                several((*parts, wrong))
    with pytest.raises(TypeError, match=f"a {several.__name__} is made of a tuple of components, got "):
        several(parts[0])


@pytest.mark.parametrize("wrong", [0.1, "ppo", None, set, components.GSPO])
@pytest.mark.parametrize("custom", [components.Custom, components.CustomAdvantage])
def test_a_function_of_one_s_own_can_be_called(custom, wrong):
    with pytest.raises(TypeError, match=r"^(function|of_rewards) is a function of .*, got "):
        custom(wrong)
