"""An option of another kind than its annotation is refused in Python, as it is on the command line, by its name."""

import dataclasses
import types
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_bridge import AdamW, LoRAOptions, Mesh, ParallelConfig, RolloutOptions, ScoringConfig, VLLMOptions
from rl_bridge.models.small import TinySource, character_tokenizer
from rl_bridge.pipelines.objective_options import ControlOptions, CorrectionOptions, KLOptions
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.served.openai import OpenAIEndpoint
from rl_tools.trainer_options import TRAINERS, load


def parts(options):
    """The options and those in them, by class."""
    yield type(options).__name__, options
    for option in dataclasses.fields(options):
        if dataclasses.is_dataclass(value := getattr(options, option.name)):
            yield from parts(value)


OBJECTS = dict(
    part
    for options in (
        *(load(TRAINERS[name].default)() for name in TRAINERS),
        AdamW(1e-3),
        ControlOptions(),
        CorrectionOptions(),
        KLOptions(),
        LoRAOptions(rank=2),
        Mesh(),
        OpenAIEndpoint(url="http://127.0.0.1:1/v1", model="policy"),
        ParallelConfig(),
        RolloutOptions(),
        ScoringConfig(),
        VLLMOptions(),
    )
    for part in parts(options)
)
# Constants of recipes and losses are refused by the functions that read them, and sampling has a check of its own.
OWN = {name for name in OBJECTS if name.endswith("_options")} | {"SamplingParams"}


def choices(annotation):
    unions = (typing.Union, types.UnionType)
    return typing.get_args(annotation) if typing.get_origin(annotation) in unions else (annotation,)


def looked_at(kind):
    return typing.get_origin(kind) is typing.Literal or kind in (int, float, bool, str, type(None))


FIELDS = [
    (name, option.name)
    for name, options in OBJECTS.items()
    if name not in OWN
    for option in dataclasses.fields(options)
    if option.init and all(map(looked_at, choices(typing.get_type_hints(type(options))[option.name])))
]
WRONG = {
    int: ("1", True, 1.5, [1]),
    float: ("1e-3", True, [0.5]),
    bool: ("no", 1, [True]),
    str: (5, True, ["a"]),
}


def wrong_values(annotation):
    kinds = choices(annotation)
    literals = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    values = ["sglang", "", 3, True] if literals else []
    for kind in kinds:
        values += WRONG.get(kind, ())
    right = {bool: {bool}, int: {int}, float: {float, int}, str: {str}}
    return [value for value in [*values, object()] if not any(type(value) in right.get(kind, ()) for kind in kinds)] + (
        [None] if type(None) not in kinds else []
    )


@pytest.mark.parametrize(("name", "option"), FIELDS)
def test_another_kind_is_refused_by_the_option_s_name(name, option):
    options = OBJECTS[name]
    for value in wrong_values(typing.get_type_hints(type(options))[option]):
        if not (name == "AdamW" and option == "decay" and value is None):
            with pytest.raises((TypeError, ValueError), match=f"^{option} is .*, got "):
                dataclasses.replace(options, **{option: value})


def test_every_choice_of_a_literal_is_looked_at():
    literals = {
        (name, option)
        for name, option in FIELDS
        if "Literal" in str(typing.get_type_hints(type(OBJECTS[name]))[option])
    }
    assert {
        ("RolloutOptions", "backend"),
        ("RolloutOptions", "precision"),
        ("ScalarOptions", "method"),
        ("AdamW", "decay"),
        ("ScoringConfig", "micro_batch_tokens"),
        ("ParallelConfig", "activations"),
        ("VLLMOptions", "dtype"),
        ("CorrectionOptions", "level"),
        ("PolicyPipeline", "reward_none"),
        ("SFTPipeline", "offload"),
        ("OpenAIEndpoint", "api"),
    } <= literals
    assert len(FIELDS) > 150


@pytest.mark.parametrize("name", sorted(set(OBJECTS) - OWN))
def test_what_options_hold_is_taken_again_and_numbers_of_numpy_are_numbers(name):
    options = OBJECTS[name]
    assert dataclasses.replace(options) == options
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        of_numpy = {int: np.int64, float: np.float64, bool: np.bool_, str: np.str_}
        if option.init and type(value) in of_numpy:
            as_numpy = of_numpy[type(value)](value)
            assert getattr(dataclasses.replace(options, **{option.name: as_numpy}), option.name) == value


def test_another_spelling_is_named_with_the_right_one():
    with pytest.raises(TypeError, match=r"^data is a text, as str\(path\), got PosixPath\('rows.jsonl'\)$"):
        dataclasses.replace(OBJECTS["SFTPipeline"], data=Path("rows.jsonl"))
    for value in (np.array(0.5), torch.tensor(0.5)):
        with pytest.raises(TypeError, match=r"^temperature is a number, as value\.item\(\), got "):
            ScoringConfig(temperature=value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(ScoringConfig):
    """Options of a user's, whose annotations are names of no module, or say more than this package's."""

    extra: "NoSuchName | None" = None  # noqa: F821
    packing: "bool | NoSuchName" = True  # type: ignore[assignment]  # noqa: F821


def test_a_user_s_class_of_options_has_its_own_looked_at_by_nobody():
    assert Mine(extra=5, packing="some").packing == "some"
    with pytest.raises(TypeError, match=r"^temperature is a number, got 'no'$"):
        Mine(temperature="no")


def test_the_message_names_the_choices():
    with pytest.raises(ValueError, match=r"^backend is one of in_process, vllm, vllm_server, got 'sglang'$"):
        RolloutOptions(backend="sglang")
    with pytest.raises(TypeError, match=r"^micro_batch_tokens is a whole number or one of auto, got 1.5$"):
        ScoringConfig(micro_batch_tokens=1.5)
    with pytest.raises(TypeError, match=r"^vllm is VLLMOptions\(…\), got "):
        RolloutOptions(vllm={"precision": "int8"})


def test_a_rollout_in_process_has_two_precisions():
    tokenizer = character_tokenizer("0123456789+=")
    with pytest.raises(ValueError, match=r"^precision is one of fp32, int8, got 'int4'$"):
        InProcessRollout(TinySource.for_tokenizer(tokenizer, hidden=16), tokenizer, precision="int4")


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["all-linear"], ("all-linear",), ["q_proj", "v_proj"], {"v_proj", "q_proj"}, frozenset(["q_proj"])],
    ids=lambda targets: f"{type(targets).__name__} {'-'.join(sorted(targets))}",
)
def test_target_modules_are_spelt_as_peft_spells_them(targets):
    """And what adapters there are does not depend on the spelling."""
    options = LoRAOptions(rank=4, target_modules=targets)
    expected = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    assert options == LoRAOptions(rank=4, target_modules=expected) and options.target_modules == expected
    tokenizer = character_tokenizer("0123456789+=")
    source = TinySource.for_tokenizer(tokenizer, hidden=16, layers=1, heads=2)
    adapted = options.of(source, seed=0).target_modules
    assert adapted == ("all-linear" if expected == ("all-linear",) else expected)


@pytest.mark.parametrize("targets", [5, None, [5], {"q_proj": 1}], ids=str)
def test_target_modules_are_texts(targets):
    with pytest.raises(TypeError, match=r"^target_modules is ends of module names, as .*, got "):
        LoRAOptions(rank=4, target_modules=targets)
