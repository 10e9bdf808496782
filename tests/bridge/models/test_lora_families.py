"""Adapters of every kind of layer: what they train is what they merge to (MUSB-1, MUSB-2, MUSB-5, ENG-11, ENG-15)."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_bridge.executors import LocalExecutor
from rl_bridge.models import model_source
from rl_bridge.models.lora import LoRASource
from rl_bridge.models.lora_targets import is_linear, routers
from rl_bridge.models.model_source import StateSource
from rl_bridge.models.pretrained import save_sharded_model
from rl_bridge.parallel.heads import token_logprobs
from rl_bridge.weights import EngineRef, source_of, sync_weights
from tests.support.lora_families import FAMILIES, tiny

IDS = torch.randint(2, 32, (2, 9), generator=torch.Generator().manual_seed(0))
ENDS = ["embed_tokens", "lm_head"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ASKED = {
    "gpt2": ["wte", "lm_head", "c_attn"],
    "mixtral": [*ENDS, *EXPERTS, "gate.weight", "v_proj"],
    "qwen2_moe": [*ENDS, *EXPERTS, "shared_expert_gate", "down_proj"],
    "qwen3_moe": [*EXPERTS, "gate_proj"],
    "deepseek_v3": [*EXPERTS, "gate.weight", "shared_experts.up_proj"],
    "gpt_oss": [*ENDS, *EXPERTS, "router.weight"],
    "jamba": [*EXPERTS, "router", "in_proj"],
    "jetmoe": ["input_linear.weight", "mlp.output_linear.weight", "router.layer"],
    "phimoe": ["experts.down_proj", "k_proj"],
}
CASES = [(family, "all-linear") for family in FAMILIES] + list(ASKED.items())


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # transformers says that its fast kernels are not installed.
        warnings.filterwarnings("ignore", ".*fast path|.*is_gradient_checkpointing")
        yield


def loaded(source):
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model


def adapters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def scrambled(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def scores(model):
    return token_logprobs(model, IDS[:, :-1], IDS[:, 1:], entropy=False)[0]


def sync(policy, other, **options):
    executor = LocalExecutor("cpu")
    workers = executor._host.workers
    workers["policy"], workers["other"] = SimpleNamespace(module=policy), SimpleNamespace(module=other)
    return sync_weights(executor, EngineRef("policy", (0,)), EngineRef("other", (0,)), version=1, **options)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(("family", "targets"), CASES, ids=lambda x: x if isinstance(x, str) else "asked")
def test_what_an_adapter_trains_is_what_it_merges_to(family, targets, tmp_path, monkeypatch):
    base = tiny(family)
    source = LoRASource(StateSource(base), 3, 8, targets, seed=1)

    def dirty(model, device):
        found = materialize(model, device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        return found

    materialize = model_source.materialize
    monkeypatch.setattr(model_source, "materialize", dirty)
    policy, twin = loaded(source), loaded(source)
    close(logits(policy), logits(base))  # to rounding: Jamba is 7e-7 off on one CPU
    drawn = dict(twin.named_parameters())
    assert all(torch.equal(p, drawn.pop(name)) for name, p in policy.named_parameters()) and not drawn
    scrambled(policy, 3)
    trained = logits(policy)
    assert float((trained - logits(base)).abs().max()) > 0.1
    scored = scores(policy)
    close(scored, trained[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0])
    scored.sum().backward()
    assert not [name for name, p in adapters(policy).items() if p.grad is None or not p.grad.any()]
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)

    plain = tiny(family, seed=5)
    sync(policy, plain)
    close(logits(plain), trained)
    sync(policy, twin, adapter=True)
    assert torch.equal(logits(twin), trained)
    save_sharded_model(policy, str(tmp_path / "merged"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    close(logits(read), trained)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*embedding layers found")
        policy.save_pretrained(tmp_path / "adapter")
    again = loaded(LoRASource(StateSource(base), 3, 8, targets, adapter=str(tmp_path / "adapter")))
    assert torch.equal(logits(again), trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_leaves_routers_heads_and_experts_alone(family):
    model = tiny(family)
    left_out = routers(model)
    adapted = {name.partition(".lora_")[0] for name in adapters(loaded(LoRASource(StateSource(model), 2, 4)))}
    adapted = {name.removeprefix("base_model.model.") for name in adapted}
    assert not adapted & left_out and not any("expert" in name.split(".")[-1] for name in adapted)
    linear = {name for name, module in model.named_modules() if is_linear(module)}
    others = {name.rpartition(".")[2] for name in linear - adapted}
    known = {"jamba": {"router", "dt_proj"}, "bamba": {"out_proj"}, "jetmoe": {"layer"}}
    known |= {name: {"shared_expert_gate"} for name in ("qwen2_moe", "qwen3_next")}
    assert others == {"lm_head"} | known.get(family, set())
    mixture = any("expert" in name for name, _ in model.named_modules())
    assert bool(left_out) == (mixture or family == "jetmoe")


def test_an_embedding_s_adapter_is_drawn_from_the_seed():
    one, same, other = (
        adapters(loaded(LoRASource(StateSource(tiny("llama")), 8, 8, ["embed_tokens"], seed=s))) for s in (1, 1, 2)
    )
    (a, b), (_, twin), (_, differs) = ([p.detach() for p in found.values()] for found in (one, same, other))
    assert not a.any() and torch.equal(b, twin) and not torch.equal(b, differs)
    assert float(b.std()) == pytest.approx(1, abs=0.25)


REFUSED = {
    ("llama", ("q_proj", "w1")): r"no module of LlamaForCausalLM ends with the LoRA target 'w1': it has linear layers",
    ("mixtral", ("w1",)): r"has linear layers \['k_proj', .*and weights \['experts.down_proj', 'experts.gate_up_proj'",
    ("qwen3_moe", ("experts",)): r"'model.layers.0.mlp.experts' of Qwen3Moe.* no layer; of its weights, name \['exper",
    ("mixtral", ("down_proj",)): r"'down_proj' is no module of Mix.*: name it as \['experts.down_proj'\]",
    ("mixtral", ("gate",)): r"'model.layers.0.mlp.gate' of Mix.* is a MixtralTopKRouter, no layer.*\['gate.weight'\]",
    ("jamba", ("dt_proj",)): r"'model.layers.0.mamba.dt_proj': JambaMambaMixer reads its weight itself",
    ("bamba", ("conv1d",)): r"'model.layers.0.mamba.conv1d' of Bamba.* is a convolution in groups",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: "-".join([case[0], *case[1]]))
def test_what_would_act_otherwise_than_merged_is_refused_before_anything_is_trained(case):
    family, targets = case
    with pytest.raises(ValueError, match=REFUSED[case]), torch.device("meta"):
        LoRASource(StateSource(tiny(family)), 2, 4, targets).empty()


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_weight_is_refused_before_anything_is_trained(target):
    with pytest.raises(ValueError, match=f"LoRA target '.*{target}' has the weight of .*: leave it out"):
        LoRASource(StateSource(tiny("llama", tie_word_embeddings=True)), 2, 4, ["q_proj", target]).empty()


def test_an_adapter_beside_another_base_is_refused(tmp_path):
    """peft writes embeddings that have an adapter with the adapter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*embedding layers found")
        loaded(LoRASource(StateSource(tiny("llama")), 2, 4, ["lm_head"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"belongs to another base model: its .*lm_head.base_layer.weight differs"):
        loaded(LoRASource(StateSource(tiny("llama", seed=1)), 2, 4, ["lm_head"], adapter=str(tmp_path)))


def test_mixture_stream_has_the_plain_names():
    policy = loaded(LoRASource(StateSource(tiny("mixtral")), 2, 4, ["experts.gate_up_proj", "experts.down_proj"]))
    names = [name for name, _ in source_of(policy).outline(adapter=False)]
    assert names == [name for name, _ in source_of(tiny("mixtral")).outline(adapter=False)]
