"""Families on vLLM (ROLL-6): an engine draws what the trainer's model says after each update, or is refused by name."""

import pytest
from transformers import Olmo2Model

from rl_bridge.rollout.vllm.weight_copies import require_updates
from tests.bridge.families import zoo
from tests.bridge.rollout.vllm import families


def test_a_family_whose_updates_vllm_loses_is_refused_by_name():
    require_updates(zoo.tiny("llama"))
    with pytest.raises(NotImplementedError, match=r"rollouts of GptOssForCausalLM: sinks and .* backend in_process"):
        require_updates(zoo.tiny("gpt_oss"))
    with pytest.raises(NotImplementedError, match=r"rollouts of Qwen3MoeForCausalLM: .* backend in_process"):
        require_updates(zoo.tiny("qwen3_moe"))


@pytest.mark.vllm
def test_a_class_that_vllm_computes_with_is_the_trainers_again():
    """An engine between two models of OLMo 2: all three compute, and the class is what it was."""
    bases, attributes = Olmo2Model.__bases__, attributes_of(Olmo2Model)
    assert families.cell("olmo2") == ["✓", ""]
    assert Olmo2Model.__bases__ == bases
    assert attributes_of(Olmo2Model) == attributes


def attributes_of(kind):
    """Without what transformers itself keeps of an answer that it has found."""
    return {name: value for name, value in vars(kind).items() if not name.endswith("_cached_value")}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in families.FAMILIES if family != "olmo2"])
def test_every_family_is_as_the_table_says(family):
    """Right, or refused as it was when the table was made."""
    verdict, why = families.cell(family)
    assert verdict == families.measured()["families"][family][0] != "WRONG", why
