"""What components and objectives say of themselves: every constant, every component."""

import dataclasses

import pytest

import rl_fn
from rl_fn.aggregation import MODES
from tests.rl_fn.component_table import ADVANTAGES, COMPONENTS, LOSSES


def _numbers(component):
    """Numeric hyper-parameters, and those that are None and could be a number."""
    for field in dataclasses.fields(component):
        value = getattr(component, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, type(value)
        elif value is None and "float" in str(field.type) and "tuple" not in str(field.type):
            yield field.name, float


@pytest.mark.parametrize("name", [name for name in COMPONENTS if dataclasses.fields(COMPONENTS[name])])
def test_an_explanation_has_every_number(name):
    """Every hyper-parameter gets a value of its own, and all of them occur; KL's coefficient stands before its term."""
    component = COMPONENTS[name]
    if isinstance(component, rl_fn.components.Sum | rl_fn.components.Product):
        assert all(part.explain() in component.explain() for part in component.parts)
        return
    values = {
        field: 7 + i if kind is int else round((3.5 if "dual" in field else 0.31) + 0.017 * i, 4)
        for i, (field, kind) in enumerate(_numbers(component))
    }
    changed = dataclasses.replace(component, **values)
    text = rl_fn.recipes.dapo().replace(kl=changed).explain() if name == "KL" else changed.explain()
    assert [field for field, value in values.items() if f"{value:g}" not in text] == []


@pytest.mark.parametrize("name", LOSSES | ADVANTAGES)
def test_an_objective_explains_its_components(name):
    component = COMPONENTS[name]
    mode = (
        "seq-mean-token-mean"
        if "seq-mean-token-mean" in (component.modes if name in LOSSES else MODES)
        else "seq-mean-token-sum"
    )
    slot = {"loss" if name in LOSSES else "advantage": component}
    objective = rl_fn.recipes.reinforce().replace(**slot, aggregation=rl_fn.components.Aggregation(mode))
    assert COMPONENTS[name].explain() in objective.explain()
