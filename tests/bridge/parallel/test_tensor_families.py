"""Two tensor ranks give what one process gives, in every family that has a plan; the others are refused by name."""

import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_bridge.parallel.tensor_parallel import FAMILIES, cut_matrices, plan_of
from tests.bridge.families import zoo
from tests.bridge.parallel import tensor_ranks
from tests.support.ranks import found_by_ranks

# Together these have each style of a plan, an embedding with a scale, heads' sinks, experts with biases, and one whose
# first parameter stays whole.
USUAL = [
    *("phi3", "olmo2", "gemma3_text", "qwen3_moe", "gpt_oss, eager", "deepseek_v2", "apertus", "cohere, switched"),
    "hrm_text",
    "granite_swa, rl_fn",
]
KNOWN = sorted(FAMILIES & set(zoo.FAMILIES))
# Of hy_v4's other switches a gradient's sum cancels so far that one process alone is 1.6e-5 off its float64.
SWITCHED = [f"{family}, switched" for family in KNOWN if family != "hy_v4"]
ALL = [*KNOWN, *SWITCHED, *(name for name in USUAL if name not in SWITCHED and ", " in name), "qwen3_moe, eager"]
# Some families with images have the same class of causal language model as their text alone.
CLASSES = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in KNOWN}
JOBS = 16
WITHOUT = sorted(
    family
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if family not in FAMILIES and name not in CLASSES and zoo.reason(family) is None
)


def found(names, folder):
    return [found for _, found in found_by_ranks(partial(tensor_ranks.rank, names=names), 2, folder)]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return found(USUAL, tmp_path_factory.mktemp("gloo"))


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """What the ranks found of a model: several models make one job of two processes."""

    @functools.cache
    def job(start):
        return found(ALL[start::JOBS], tmp_path_factory.mktemp("gloo"))

    return lambda name: job(ALL.index(name) % JOBS)


def assert_one_process(ranks, name):
    for differences in (found[name] for found in ranks):
        spread = {kind: differences[kind] for kind in ("logits", "logprobs", "gradient", "norm")}
        assert all(difference <= 3e-5 for difference in spread.values()), (spread, differences["worst"])
        assert differences["sent"] and differences["written"] and differences["loaded"]
        assert 0.5 <= differences["held"] < 1.0


@pytest.mark.long
@pytest.mark.parametrize("name", USUAL)
def test_two_ranks_are_one_process(usual, name):
    assert_one_process(usual, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_two_ranks_are_one_process_in_every_family(every, name):
    assert_one_process(every(name), name)


def test_every_family_of_the_table_has_a_plan():
    assert {"llama", "mistral", "qwen3_moe", "gpt_oss"} < FAMILIES
    assert all(plan_of(CONFIG_MAPPING[family]()) for family in KNOWN)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit, in gpt_bigcode
@pytest.mark.parametrize("family", WITHOUT)
def test_every_other_family_is_refused_by_name(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.config(family))
    with pytest.raises(ValueError, match=r"has no tensor-parallel plan; there are plans for apertus, .*youtu"):
        cut_matrices(model, SimpleNamespace(size=lambda: 2))  # pyright: ignore[reportArgumentType]
