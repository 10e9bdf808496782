"""What an engine holds against what it was sent: every layout of vLLM's layers, every rank and precision (ROLL-7)."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from experiments.proof_of_updates import FAULTS, PRECISIONS, found_by, world_of
from rl_bridge.rollout.inside_vllm.held_weights import Held, against_adapter, against_checkpoint

HEAD, HIDDEN, WIDE, VOCABULARY = 4, 8, 12, 10
PREFIX = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    f"{PREFIX}self_attn.q_proj.weight": (4 * HEAD, HIDDEN),
    f"{PREFIX}self_attn.k_proj.weight": (HEAD, HIDDEN),
    f"{PREFIX}self_attn.v_proj.weight": (HEAD, HIDDEN),
    f"{PREFIX}self_attn.q_proj.bias": (4 * HEAD,),
    f"{PREFIX}self_attn.k_proj.bias": (HEAD,),
    f"{PREFIX}self_attn.v_proj.bias": (HEAD,),
    f"{PREFIX}self_attn.o_proj.weight": (HIDDEN, 4 * HEAD),
    f"{PREFIX}mlp.gate_proj.weight": (WIDE, HIDDEN),
    f"{PREFIX}mlp.up_proj.weight": (WIDE, HIDDEN),
    f"{PREFIX}mlp.down_proj.weight": (HIDDEN, WIDE),
    f"{PREFIX}input_layernorm.weight": (HIDDEN,),
}


class Layer(nn.Module):
    """A layer of an engine: some tensors, and the attributes by which vLLM's layers say what they hold."""

    def __init__(self, tensors=None, packed=False, **attributes):
        super().__init__()
        for name, tensor in (tensors or {}).items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
        if packed:  # as oneDNN has it: in a form that is not shown
            kept = self.weight.detach().clone()
            self.cpu_linear = lambda x, weight, bias: x @ kept.T
            self.kept, self.weight = kept, nn.Parameter(torch.empty(0), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def engine_of(weights, rank, *, packed):
    """What rank ``rank`` of two holds of these weights: the only key and value head is on both."""

    def of(name):
        return weights[PREFIX + name]

    def rows(tensor):
        return tensor.chunk(2)[rank]

    ranked = {"tp_rank": rank, "tp_size": 2}
    heads = {
        "num_heads": 2,
        "num_kv_heads": 1,
        "total_num_heads": 4,
        "total_num_kv_heads": 1,
        "num_kv_head_replicas": 2,
    }
    heads |= {"head_size": HEAD, "v_head_size": HEAD, "gather_output": False}
    qkv = {
        leaf: torch.cat([rows(of(f"self_attn.q_proj.{leaf}")), *(of(f"self_attn.{one}_proj.{leaf}") for one in "kv")])
        for leaf in ("weight", "bias")
    }
    gate_up = {"weight": torch.cat([rows(of("mlp.gate_proj.weight")), rows(of("mlp.up_proj.weight"))])}
    half = slice(rank * VOCABULARY // 2, (rank + 1) * VOCABULARY // 2)
    vocabulary = SimpleNamespace(org_vocab_start_index=half.start, org_vocab_end_index=half.stop)
    embeddings = torch.cat([weights["model.embed_tokens.weight"][half], torch.zeros(3, HIDDEN)])  # padding
    columns = {"input_is_parallel": True, **ranked}
    model = Layer()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.model, layer = Layer(), Layer()
    model.model.embed_tokens = Layer({"weight": embeddings}, shard_indices=vocabulary)
    model.model.layers = nn.ModuleList([layer])
    layer.self_attn, layer.mlp = Layer(), Layer()
    layer.self_attn.qkv_proj = Layer(qkv, packed, **heads, **ranked)
    output = {"weight": of("self_attn.o_proj.weight").chunk(2, 1)[rank]}
    layer.self_attn.o_proj = Layer(output, packed, **columns)
    layer.mlp.gate_up_proj = Layer(gate_up, packed, gather_output=False, output_sizes=[WIDE, WIDE], **ranked)
    layer.mlp.down_proj = Layer({"weight": of("mlp.down_proj.weight").chunk(2, 1)[rank]}, packed, **columns)
    layer.input_layernorm = Layer({"weight": of("input_layernorm.weight")})
    return model


def compared(weights, folder, **options):
    """Both ranks' engines of these weights against a checkpoint."""
    found = [against_checkpoint(engine_of(weights, rank, **options), folder, torch.float32) for rank in (0, 1)]
    return Held.of_ranks([tuple(one) for one in found])


@pytest.fixture
def checkpoint(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return weights, tmp_path


@pytest.mark.parametrize("packed", [False, True], ids=["as parameters", "packed"])
def test_every_element_is_compared_on_the_rank_that_holds_it(checkpoint, packed):
    """One changed element of any tensor is found, on its rank alone, or on both where both hold it."""
    weights, folder = checkpoint
    whole = compared(weights, folder, packed=packed)
    replicated = ("k_proj", "v_proj", "layernorm")
    twice = sum(tensor.numel() for name, tensor in weights.items() if any(part in name for part in replicated))
    assert (whole.different, whole.unread) == ({}, {})
    assert whole.compared == sum(tensor.numel() for tensor in weights.values()) + twice
    for name, tensor in weights.items():
        for place in (0, tensor.numel() - 1):
            other = tensor.clone()
            other.view(-1)[place] *= 1 + 1e-6
            found = compared({**weights, name: other}, folder, packed=packed).different
            assert len(found) == (2 if any(part in name for part in replicated) else 1)
            assert all("1 of " in what and name in what for what in found.values())


@pytest.mark.parametrize("packed", [False, True], ids=["as parameters", "packed"])
def test_a_checkpoint_with_fused_tensors_is_cut_like_its_parts(checkpoint, tmp_path, packed):
    """As Phi-3 has them."""
    weights, _ = checkpoint
    parts = {"self_attn.qkv_proj": ["q", "k", "v"], "mlp.gate_up_proj": ["gate", "up"]}
    fused = dict(weights)
    for owner, names in parts.items():
        for leaf in ("weight", "bias"):
            own = [f"{PREFIX}{owner.split('.')[0]}.{name}_proj.{leaf}" for name in names]
            if own[0] in weights:
                fused[f"{PREFIX}{owner}.{leaf}"] = torch.cat([fused.pop(name) for name in own])
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    found = compared(weights, tmp_path / "fused", packed=packed)
    assert (found.different, found.unread) == ({}, {})
    swapped = {**weights, f"{PREFIX}mlp.up_proj.weight": weights[f"{PREFIX}mlp.gate_proj.weight"]}
    assert len(compared(swapped, tmp_path / "fused", packed=packed).different) == 2


def test_a_layout_that_nobody_knows_is_said_and_not_called_wrong(checkpoint):
    weights, folder = checkpoint
    model = engine_of(weights, 0, packed=False)
    blocks = model.model.layers[0].mlp.down_proj
    blocks.weight = nn.Parameter(torch.zeros(2, 3, 5), requires_grad=False)
    model.own = Layer({"scale": torch.ones(2)})
    del model.model.layers[0].input_layernorm
    found = against_checkpoint(model, folder, torch.float32)
    assert not found.different
    assert list(found.unread) == [f"{PREFIX}input_layernorm.weight", f"{PREFIX}mlp.down_proj.weight", "own.scale"]


LORA_RANK, MOST_RANKS = 2, 3
LAYERS = {
    "self_attn": {"qkv_proj": ["q", "k", "v"], "o_proj": ["o"]},
    "mlp": {"gate_up_proj": ["gate", "up"], "down_proj": ["down"]},
}


def is_cut(name):
    """Whether each rank of two has a half of this factor: of the columns of A, or the rows of B."""
    return any(f"{one}_proj" in name for one in (("o", "down") if "lora_A" in name else ("q", "gate", "up")))


def adapted_engine_of(factors, rank, scaling_of):
    """What rank ``rank`` of two holds of an adapter, in places for more ranks; zeros where it has no factors."""
    model = engine_of({name: torch.zeros(shape) for name, shape in SHAPES.items()}, rank, packed=False)

    def held(block, part, factor):
        rows, columns = SHAPES[f"{PREFIX}{block}.{part}_proj.weight"]
        name, is_a = f"base_model.model.{PREFIX}{block}.{part}_proj.lora_{factor}.weight", factor == "A"
        tensor = factors.get(name, torch.zeros((LORA_RANK, columns) if is_a else (rows, LORA_RANK)))
        tensor = tensor.chunk(2, 1 if is_a else 0)[rank] if is_cut(name) else tensor
        more = MOST_RANKS - tensor.shape[not is_a]
        padded = nn.functional.pad(
            tensor if is_a else tensor * scaling_of(part), (0, 0, 0, more) if is_a else (0, more)
        )
        return padded[None, None]

    for block, owners in LAYERS.items():
        for owner, parts in owners.items():
            parent, layer = getattr(model.model.layers[0], block), Layer()
            layer.base_layer = getattr(parent, owner)
            layer.lora_a_stacked, layer.lora_b_stacked = (
                tuple(held(block, part, factor) for part in parts) for factor in "AB"
            )
            setattr(parent, owner, layer)
    return model


@pytest.mark.parametrize("patterns", [False, True], ids=["one rank", "ranks of their own"])
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("targets", [["_proj"], ["q_proj", "v_proj", "down_proj"], ["up_proj", "o_proj"]], ids=str)
def test_every_element_of_an_adapter_is_compared_on_the_rank_that_holds_it(tmp_path, targets, use_rslora, patterns):
    """One changed element of any factor is found, on its rank alone, or on both where both hold it."""
    generator, factors = torch.Generator().manual_seed(0), {}
    ranks = {"q": 3, "up": 1} if patterns else {}
    alphas = {"q": 7.0, "o": 2.0} if patterns else {}
    for name, shape in SHAPES.items():
        if name.endswith("weight") and any(target in name for target in targets):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            own = ranks.get(layer.rpartition(".")[2].removesuffix("_proj"), LORA_RANK)
            factors[f"{layer}.lora_A.weight"] = torch.randn(own, shape[1], generator=generator)
            factors[f"{layer}.lora_B.weight"] = torch.randn(shape[0], own, generator=generator)
    save_file(factors, tmp_path / "adapter_model.safetensors")
    config = {"r": LORA_RANK, "lora_alpha": 5.0, "use_rslora": use_rslora}
    config |= {"rank_pattern": {f"{part}_proj": own for part, own in ranks.items()}}
    config |= {"alpha_pattern": {rf"layers\.0\..*{part}_proj": own for part, own in alphas.items()}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    def scaling_of(part):
        return alphas.get(part, 5.0) / ranks.get(part, LORA_RANK) ** (0.5 if use_rslora else 1.0)

    def found_of(factors):
        engines = [adapted_engine_of(factors, rank, scaling_of) for rank in (0, 1)]
        return Held.of_ranks([tuple(against_adapter(engine, tmp_path)) for engine in engines])

    whole = found_of(factors)
    assert whole.compared > 0 and (whole.different, whole.unread) == ({}, {})
    for name, tensor in factors.items():
        for place in (0, tensor.numel() - 1):
            other = tensor.clone()
            other.view(-1)[place] *= 1 + 1e-6
            found = found_of({**factors, name: other}).different
            assert len(found) == (1 if is_cut(name) else 2)
            assert all("1 of " in what and name in what for what in found.values())


@pytest.mark.vllm
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_fault_of_an_update_is_found_in_real_vllm(precision, tmp_path):
    """Lost updates of 1e-6, exchanged tensors and heads, parts of versions before; and none where nothing is wrong."""
    with world_of(precision, tmp_path) as world:
        world.load(world.folder("right", world.weights))
        assert world.client.held(tmp_path / "right")[1:] == ({}, {})
        same, missed = 0, []
        for fault in FAULTS:
            _, found, _, held = found_by(world, fault)
            same += found is None
            missed += [fault.name] if found is False else []
            assert not held.unread
        assert not missed
        # Updates that bfloat16 rounds away are the same bytes: there is nothing to be lost.
        assert same <= (6 if precision == "bf16" else 0)
