"""All cases, by kind."""

from tests.bridge.bad_inputs import commands, data, models, options, rewards, surroundings, templates
from tests.bridge.bad_inputs.case import Case


def all_cases() -> list[Case]:
    found = [
        case
        for module in (data, options, templates, models, rewards, commands, surroundings)
        for case in module.cases()
    ]
    names = [case.id for case in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cases have one name: {sorted(twice)}")
    return found
