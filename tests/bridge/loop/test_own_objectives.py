"""A resumed run notices another function in an objective: by its file, what it imports and the values around it."""

import functools
import importlib.util
import shutil
import sys

import jax
import pytest

import rl_fn
from rl_bridge import AdamW, Policy, Run, torch_loss
from rl_bridge.modules.own_loss import load_loss, own_marks

GRPO = rl_fn.recipes.grpo().replace(kl=None)
SOURCE = """
import dataclasses
import helper_of_objectives
import rl_fn
from rl_fn.objectives.components.component import PerToken

def plain(values):
    return values

def around(number):
    return lambda values: values * number

def times(values, number):
    return values * number

@dataclasses.dataclass(frozen=True)
class Scaled(PerToken):
    number: float

    def __call__(self, batch):
        return batch.advantages * self.number
"""
HELPER = "SCALE = 1.0\n"
PARTS = {
    "loss": lambda function: GRPO.replace(loss=function),
    "correction": lambda function: GRPO.replace(correction=function),
    "advantage": lambda function: GRPO.replace(advantage=function),
    "declared": lambda function: GRPO.replace(loss=rl_fn.components.Custom(function, over_batch=False)),
    "in PyTorch": lambda function: GRPO.replace(loss=torch_loss(function)),
    "one of several": lambda function: GRPO.replace(loss=rl_fn.components.Sum((GRPO.loss, function))),
}
FORMS = {
    "plain": lambda module, number: module.plain,
    "with a value around it": lambda module, number: module.around(number),
    "partial": lambda module, number: functools.partial(module.times, number=number),
    "compiled": lambda module, number: jax.jit(module.around(number)),
    "a class": lambda module, number: module.Scaled(number),
}


@pytest.fixture
def load(monkeypatch):
    def load(folder, source=SOURCE, helper=HELPER):
        folder.mkdir(parents=True)
        (folder / "objectives.py").write_text(source)
        (folder / "helper_of_objectives.py").write_text(helper)
        spec = importlib.util.spec_from_file_location(f"objectives of {folder}", folder / "objectives.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            spec.loader.exec_module(module)
            sys.modules.pop("helper_of_objectives")
        return module

    return load


# A class of a loss or a correction is no advantage.
@pytest.mark.parametrize(("part", "form"), [(p, f) for p in PARTS for f in FORMS if (p, f) != ("advantage", "a class")])
def test_a_function_has_a_mark_of_all_that_it_is(tmp_path, load, part, form):
    function, objective = FORMS[form], PARTS[part]

    def marks(folder, number=0.2, **sources):
        return own_marks(objective(function(load(tmp_path / folder, **sources), number)))

    first = marks("first")
    assert len(first) == 1 and first == marks("another place")
    edited = marks("edited", source=SOURCE.replace("values * number", "values * 2 * number"))
    imported = marks("imported", helper="SCALE = 2.0\n")
    assert first != edited and first != imported and edited != imported
    assert form == "plain" or first != marks("number", number=0.3)


def test_what_is_declared_of_a_function_counts_and_the_library_s_parts_have_no_mark(tmp_path, load):
    plain = load(tmp_path / "one").plain
    declared = [
        own_marks(GRPO.replace(loss=loss))["loss"]
        for loss in (torch_loss(plain), torch_loss(plain, reads=()), rl_fn.components.Custom(plain, over_batch=False))
    ]
    assert len(set(declared)) == 3
    for recipe in (rl_fn.recipes.ppo(), rl_fn.recipes.dapo(), rl_fn.recipes.gspo()):
        assert own_marks(recipe) == {}


def test_a_loss_of_a_file_is_known_by_the_file_wherever_it_lies(tmp_path, load):
    load(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    load(tmp_path / "three", source=SOURCE + "\n# edited\n")
    one, two, three = (
        own_marks(GRPO.replace(loss=load_loss(f"{tmp_path / place}/objectives.py:plain")))
        for place in ("one", "two", "three")
    )
    assert one == two != three


@pytest.mark.parametrize("part", ["loss", "correction", "advantage"])
def test_another_function_is_refused_where_a_loop_is_resumed(model, tmp_path, part):
    """All lambdas had one name, and the run went on with the other one without a word."""

    def made(number):
        if part == "advantage":
            return lambda rewards: rewards * number
        return lambda batch: -batch.logprobs * batch.advantages * number

    def go(steps, number, **how):
        objective = GRPO.replace(**{part: made(number)})
        with Policy(model, objective, AdamW(1e-3)) as policy, Run("own", [policy], output=tmp_path, **how) as run:
            return list(run.steps(steps))

    assert go(1, 0.2) == [0]
    with pytest.raises(ValueError, match=rf"the policy's {part} is another one"):
        go(2, 0.3, resume=True)
    assert go(2, 0.2, resume=True) == [1]
    assert go(3, 0.3, resume_anyway=True) == [2]
