"""An adapter has what its configuration and a checkpoint's header promise, and requests run with the one that came."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from rl_bridge.rollout.vllm.client import InProcessEngine
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
        ({"layers_to_transform": [1]}, r"layers_to_transform=\[1\]: send it merged"),
        ({"layers_to_transform": 0}, "layers_to_transform=0: send it merged"),
        ({"exclude_modules": ["q_proj"]}, r"exclude_modules=\['q_proj'\]: send it merged"),
        ({"exclude_modules": ".*1.*"}, r"exclude_modules='.*1.*': send it merged"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"dtype": torch.int8}, "of one floating dtype"),
    ],
)
def test_what_vllm_computes_otherwise_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        expected_adapter(sent(**changed), CHECKPOINT, 2)


class AdapterRequest(NamedTuple):
    """vLLM's request for an adapter: it knows an adapter by the number."""

    name: str
    number: int
    folder: str
    load_inplace: bool = False


class Engine:
    """Notes the folder of the adapter that each request begins with; its scheduler takes all calls."""

    pause_scheduler = collective_rpc = set_weight_version = lambda self, *arguments, **options: None

    def __init__(self, folder):
        model = SimpleNamespace(get_vocab_size=lambda: 9, max_model_len=64)
        self.vllm_config = SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=False)
        )
        self.engine_core = SimpleNamespace(engine_core=self)
        self.adapters, self.requests = {}, {}

    def add_lora(self, request):
        if request.load_inplace or request.number not in self.adapters:
            self.adapters[request.number] = request.folder

    def list_loras(self):
        return set(self.adapters)

    def add_request(self, name, prompt, params, lora_request=None):
        self.requests[name] = None if lora_request is None else self.adapters[lora_request.number]

    def abort_request(self, names):
        for name in names:
            del self.requests[name]


def test_every_request_begins_with_the_newest_adapter_and_the_first_one_begins_those_that_run_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=AdapterRequest))
    client = InProcessEngine(Engine, lambda engine: None, Path("checkpoint"), sampling=SimpleNamespace)
    params = SimpleNamespace(clone=lambda: None)
    client.add_request("before", {}, params)
    assert client.engine.requests == {"before": None}
    for number, folder in enumerate(("one", "two")):
        client.adopt(Path(folder), str(number))
        client.add_request(folder, {}, params)
    assert client.engine.requests == {"before": "one", "one": "one", "two": "two"}
    client.replace(Path("checkpoint"), "3", Path("three"))
    assert client.engine.requests == dict.fromkeys(("before", "one", "two"), "three")
