"""Tensor parallelism: the matrices of a layer cut over ranks that work on the same rows, by the family's plan."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel

from rl_bridge.parallel import tensor_styles
from rl_bridge.parallel.tensor_styles import CUTS, EXPERTS, SharedInput
from rl_bridge.weights.manifest import is_peft

# Model types for which the plan gives what one process gives; a test walks over all that have a plan.
# fmt: off
FAMILIES = frozenset((
    "apertus", "arcee", "aria_text", "axk1", "axk2", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text",
    "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite", "granite_swa",
    "granitemoe_swa", "helium", "hrm_text", "hy_v3", "hy_v4", "hyperclovax", "jais2", "kimi_linear", "laguna",
    "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
))
# fmt: on

# The parts of a module with cut matrices that compute before the cut: their activations and gradients are whole.
WHOLE = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer"})

_OWN_HEADS = "replicated_with_grad_allreduce"
_ADDED = {
    # The activation has parameters, and works on a cut activation.
    "apertus": {"layers.*.mlp.act_fn": _OWN_HEADS},
    # Norms of heads that a configuration may ask for: of cohere a row for each head, of the others one for all.
    "cohere": {"layers.*.self_attn.q_norm.weight": "colwise", "layers.*.self_attn.k_norm.weight": "colwise"},
    "glm4_moe": {"layers.*.self_attn.q_norm": _OWN_HEADS, "layers.*.self_attn.k_norm": _OWN_HEADS},
    "phi": {"layers.*.self_attn.q_layernorm": _OWN_HEADS, "layers.*.self_attn.k_layernorm": _OWN_HEADS},
    # Mixtures of which transformers cuts the attention alone.
    "cohere2_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    "exaone_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    "minimax_m3_vl_text": {"layers.*.mlp.experts": "moe_tp_experts"},
    "qwen2_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    # Of this family transformers has a plan for experts only, whose exchange is another.
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}
for _family, _experts in (("qwen2_moe", "shared_expert"), ("exaone_moe", "shared_experts")):
    for _matrix, _style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise")):
        _ADDED[_family][f"layers.*.mlp.{_experts}.{_matrix}"] = _style


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """The styles of a model without its head, by names of modules and parameters with "*" for a layer's number."""
    return {**(config.base_model_tp_plan or {}), **_ADDED.get(config.model_type, {})}


# The cut of each matrix, by transformers' plans.

_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\.")
_HEADS = re.compile(r"(\w+_)?num_(\w+_)?(attention|key_value)_heads(_per_layer)?")


class _Cut(NamedTuple):
    """One entry of a plan: a module, or a parameter by itself."""

    name: str
    target: Any
    style: str


def cut_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the layers' matrices by their plan, embedding and head by the vocabulary; all in place.

    Cut parameters become DTensors over ``mesh``, each rank with a rectangle. Of a mixture's experts each rank holds
    equally many, whole. A vocabulary that the ranks do not divide stays whole on each of them.

    Args:
        model: of one of ``FAMILIES``, or a module that holds such a model; on the meta device or with its weights.
        mesh: the dimension "tensor" of a model's mesh.

    Raises:
        ValueError: another model, one with LoRA adapters, or with parameters that its plan does not know; attention
            heads, key-value heads, rows, columns or experts that the ranks do not divide. Nothing is cut then.
    """
    if is_peft(model):
        raise ValueError(f"LoRA adapters have no tensor-parallel plan: train them with tensor=1, not {mesh.size()}")
    trunks = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.base_model is m]
    if not trunks:
        raise ValueError(_no_plan(model))
    plans = [_cuts(trunk, mesh.size()) for trunk in trunks]
    holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]
    tied = [_is_tied(holder) for holder in holders]
    # A head that is more than a matrix stays whole, and so does the embedding whose weights it has.
    matrices = [type(holder.get_output_embeddings()) is nn.Linear for holder in holders]
    whole = [h.get_input_embeddings() for h, t, matrix in zip(holders, tied, matrices, strict=True) if t and not matrix]
    for trunk, cuts in zip(trunks, plans, strict=True):
        _cut_layers(trunk, cuts, mesh)
        if trunk.get_input_embeddings() not in whole:
            _cut_embedding(trunk, mesh)
    for holder, was_tied, matrix in zip(holders, tied, matrices, strict=True):
        if matrix:
            _cut_head(holder, mesh, tied=was_tied)


def _no_plan(model: nn.Module) -> str:
    return f"{type(model).__name__} has no tensor-parallel plan; there are plans for {', '.join(sorted(FAMILIES))}"


def _cuts(trunk: PreTrainedModel, ranks: int) -> list[_Cut]:
    """All cuts of a model without its head; raises ValueError where one of them is impossible."""
    if trunk.config.model_type not in FAMILIES:
        raise ValueError(_no_plan(trunk))
    cuts = list(_planned(trunk))
    for name, size in [*_heads(trunk, cuts), *_sizes(cuts)]:
        if size % ranks:
            raise ValueError(f"{type(trunk).__name__}: {name} is {size}, which {ranks} tensor ranks do not divide")
    _require_known_parameters(trunk, cuts)
    return cuts


def _planned(trunk: PreTrainedModel) -> Iterator[_Cut]:
    plan = plan_of(trunk.config)
    for name, target in [*trunk.named_modules(), *trunk.named_parameters()]:
        generic = re.sub(r"\.\d+(?=\.)", ".*", name)
        style = plan.get(generic)
        if style is None or plan.get(generic.rpartition(".")[0]) == EXPERTS:
            continue  # experts are cut by their number, not each of them
        if style == "embedding_rowwise" and target is trunk.get_input_embeddings():
            continue  # ``_cut_embedding`` does, tied or not; some versions of transformers name it where it is tied
        if style not in (CUTS.keys() | {EXPERTS} if isinstance(target, nn.Module) else {"colwise"}):
            raise ValueError(f"{type(trunk).__name__}: the plan's style {style!r} for {name} is not known")
        yield _Cut(name, target, style)


def _heads(trunk: PreTrainedModel, cuts: list[_Cut]) -> Iterator[tuple[str, int]]:
    """The numbers of heads that the ranks must divide: a width that they divide may still cut through a head."""
    if any(cut.style == "colwise" and _ATTENTION.search(cut.name) for cut in cuts):
        for name, value in trunk.config.to_dict().items():
            if _HEADS.fullmatch(name):
                yield from ((name, heads) for heads in (value if isinstance(value, list) else [value]) if heads)


def _sizes(cuts: list[_Cut]) -> Iterator[tuple[str, int]]:
    for name, target, style in cuts:
        if style == EXPERTS:
            yield f"the number of experts of {name}", target.num_experts
        elif not isinstance(target, nn.Module):
            yield f"the length of {name}", len(target)
        else:
            for parameter, dim in CUTS[style].items():
                if getattr(target, parameter, None) is not None:
                    side = "columns" if dim else "rows"
                    yield f"the number of {side} of {name}.{parameter}", getattr(target, parameter).shape[dim]


def _require_known_parameters(trunk: PreTrainedModel, cuts: list[_Cut]) -> None:
    """Raises ValueError for a parameter of which the plan does not say whether it works on a cut activation."""
    planned = {cut.name for cut in cuts}
    for reader in {cut.name.rpartition(".")[0] for cut in cuts if cut.style == "colwise"}:
        for name, _ in trunk.get_submodule(reader).named_parameters(reader):
            holders = {name[: dot.start()] for dot in re.finditer(r"\.", name)}
            if not planned & (holders | {name}) and not any(holder.rpartition(".")[2] in WHOLE for holder in holders):
                raise ValueError(f"{type(trunk).__name__}: the tensor-parallel plan does not know {name}")


def _cut_layers(trunk: PreTrainedModel, cuts: list[_Cut], mesh: DeviceMesh) -> None:
    inputs: dict[str, SharedInput] = {}
    for name, target, style in cuts:
        holder, _, parameter_name = name.rpartition(".")
        parent = trunk.get_submodule(holder)
        if isinstance(target, nn.Module):
            if holder not in inputs:
                inputs[holder] = SharedInput(parent, mesh.get_group())
            rotary = getattr(trunk.config, "qk_rope_head_dim", 0)
            tensor_styles.apply_style(style, target, mesh, inputs[holder], rotary)
        else:
            tensor_styles.cut_parameters(parent, mesh, {parameter_name: 0})
            tensor_styles.run(parent, partial(tensor_styles.with_local_parameters, forward=parent.forward))


def _cut_embedding(trunk: PreTrainedModel, mesh: DeviceMesh) -> None:
    embedding: Any = trunk.get_input_embeddings()
    if embedding.weight.shape[0] % mesh.size() == 0:
        tensor_styles.cut_parameters(embedding, mesh, {"weight": 0})
        tensor_styles.run(embedding, partial(tensor_styles.embed, group=mesh.get_group(), forward=embedding.forward))


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _cut_head(model: PreTrainedModel, mesh: DeviceMesh, *, tied: bool) -> None:
    head: Any = model.get_output_embeddings()
    if head.weight.shape[0] % mesh.size():
        return
    if tied:
        head.weight = model.get_input_embeddings().weight
    tensor_styles.cut_parameters(head, mesh, {"weight": 0, "bias": 0})
    tensor_styles.run(head, partial(tensor_styles.logits, group=mesh.get_group()))
