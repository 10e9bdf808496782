"""What an adapter must have, from its configuration and a checkpoint's header."""

import pytest
import torch

from rl_bridge.rollout.vllm.lora_adapters import expected_adapter
from rl_bridge.weights.manifest import Manifest, TensorSpec

CHECKPOINT = {
    f"model.layers.{layer}.{name}.weight": TensorSpec(shape, torch.bfloat16)
    for layer in (0, 1)
    for name, shape in {"self_attn.q_proj": (8, 6), "mlp.down_proj": (6, 9), "input_layernorm": (6,)}.items()
}
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
}
A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB")


def sent(names=(B, A), dtype=torch.float32, **changed):
    return Manifest({name: TensorSpec((1,), dtype) for name in names}, CONFIG | changed)


def test_each_matrix_that_the_adapter_is_for_has_both_factors():
    found = expected_adapter(sent(), CHECKPOINT, 2)
    assert list(found.tensors)[:2] == [B, A], "in the order of the stream"
    assert found.tensors[A] == TensorSpec((2, 6), torch.float32) and found.tensors[B] == TensorSpec(
        (8, 2), torch.float32
    )
    assert {name.split(".")[4] for name in found.tensors} == {"0", "1"} and len(found.tensors) == 4


@pytest.mark.parametrize(
    "targets, count", [(["q_proj", "mlp.down_proj"], 8), ([], 0), (r".*\.1\..*_proj", 4), (["proj"], 0)]
)
def test_targets_are_ends_of_names_or_a_pattern_of_the_whole(targets, count):
    assert len(expected_adapter(sent(target_modules=targets), CHECKPOINT, 2).tensors) == count


def test_a_pattern_gives_a_matrix_another_rank():
    found = expected_adapter(sent(rank_pattern={r"0\.self_attn\.q_proj": 3}), CHECKPOINT, 3).tensors
    assert found[A].shape == (3, 6) and found[A.replace("layers.0", "layers.1")].shape == (2, 6)


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"r": 3}, "an adapter of rank 3 for an engine with adapter_rank=2"),
        ({"rank_pattern": {"q_proj": 4}}, "of rank 4"),
        ({"use_dora": True}, "use_dora=True: send it merged"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"dtype": torch.int8}, "of one floating dtype"),
    ],
)
def test_what_vllm_computes_otherwise_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        expected_adapter(sent(**changed), CHECKPOINT, 2)
