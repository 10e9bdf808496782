"""A component of every kind, by its role."""

import inspect

import rl_fn
from rl_fn import components

TIS, ICEPOP = rl_fn.components.TIS(), rl_fn.components.IcePop()
# The arguments that a component has no default for.
ARGUMENTS = {
    "KL": ("k3", 0.1),
    "Aggregation": ("seq-mean-token-sum-norm", 16.0),
    "EntropyBonus": (0.1,),
    "Rejection": (0.5,),
    "OffPolicySequenceMask": (0.5,),
    "VACOMask": (0.5,),
    "Sum": ((rl_fn.components.PPOClip(), rl_fn.components.PositiveExample()),),
    "Product": ((TIS, rl_fn.components.M2POMask()),),
}
COMPONENTS = {
    name: getattr(components, name)(*ARGUMENTS.get(name, ()))
    for name in components.__all__
    if inspect.isclass(getattr(components, name)) and name not in ("Advantage", "PerToken", "Custom", "CustomAdvantage")
}


def _of(*modules):
    return {
        name: component
        for name, component in COMPONENTS.items()
        if type(component).__module__.split(".")[-1] in modules
    }


LOSSES = _of("loss_components")
CORRECTIONS = _of("corrections") | {"none": None}
ADVANTAGES = _of("advantage_components", "token_advantages")
