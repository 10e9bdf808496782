"""What two tensor ranks compute of tiny models of all families, against one process: a few numbers for each model."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.bridge.families import zoo
from tests.support import one_step
from tests.support.ranks import as_rank

ROWS, LENGTH = 2, 11
# Switches of configurations that change which modules a layer has, or what it does between them. Biases of layers that
# are cut by rows are among them (SURV-8).
SWITCHES = (
    *("attention_bias", "attention_k_eq_v", "attention_out_bias", "chain_hidden_post_norm", "enable_moe_block"),
    *("enable_moe_fp32_combine", "gating", "linear_allow_neg_eigval", "mlp_bias", "norm_topk_prob", "qk_layernorm"),
    *("qkv_bias", "rope_interleave", "tie_word_embeddings", "use_bias", "use_double_wide_mlp"),
    *("use_parallel_residual", "use_post_norm", "use_qk_norm"),
)
# The experts that a switch asks for.
NEEDED = {"gemma4_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}}


def model_of(name: str) -> PreTrainedModel:
    """A tiny model: "qwen3", "qwen3, switched" with each of ``SWITCHES`` the other way, or "qwen3, eager" experts.

    "qwen3, rl_fn" is the first again, and attention that the trainer puts into it when it is cut.
    """
    family, _, variant = name.partition(", ")
    if variant == "switched":
        config = zoo.config(family)
        fields = config.to_dict()
        other = {switch: not fields[switch] for switch in SWITCHES if isinstance(fields.get(switch), bool)}
        config = type(config).from_dict(fields | other | NEEDED.get(family, {}))
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_config(config, **options).eval()
        zoo.draw(model, torch.Generator().manual_seed(0))
        return model
    model = zoo.tiny(family)
    if variant == "eager":
        model.set_experts_implementation("eager")
    return model


def differences(name: str, mesh: Any) -> dict[str, Any]:
    """The largest differences of this tensor rank from one process, and whether every weight came back as it was.

    A difference is relative to the tensor's largest number where this is above 1. "held" is the fraction of the
    parameters that the rank holds.
    """
    from rl_bridge.models.model_source import PretrainedSource
    from rl_bridge.models.pretrained import save_sharded_model
    from rl_bridge.parallel.attention import use_rl_fn_attention
    from rl_bridge.parallel.config import ParallelConfig
    from rl_bridge.parallel.mesh import clip_grad_norm
    from rl_bridge.parallel.parallelize import parallelize
    from rl_bridge.weights.manifest import full, part_of
    from rl_bridge.weights.source import source_of

    plain = model_of(name)
    model = one_step.parallel(plain, mesh, ParallelConfig())
    if name.endswith(", rl_fn"):
        use_rl_fn_attention(model)
    ids = torch.randint(3, zoo.VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    logits, logprobs, gradients = _computed(plain, ids)
    cut_logits, cut_logprobs, cut_gradients = _computed(model, ids)
    assert gradients.keys() == cut_gradients.keys()
    errors = {n: _difference(cut_gradients[n], gradient) for n, gradient in gradients.items()}
    worst = max(errors, key=lambda n: errors[n])
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    state, sent = plain.state_dict(), dict(source_of(model).stream(adapter=False))
    for tensor in sent.values():
        part_of(tensor)  # a rectangle, or a sync could not send the tensor
    with tempfile.TemporaryDirectory() as own:
        save_sharded_model(model, own)
        wrote = bool(list(Path(own).iterdir()))
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        written = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).state_dict()
        source = PretrainedSource(folders[0])
        with torch.device("meta"):
            again = source.empty()
        parallelize(again, mesh)
        source.load(again)
        loaded = {n: full(tensor) for n, tensor in source_of(again).stream(adapter=False)}
        dist.barrier()
    return {
        "logits": _difference(cut_logits, logits),
        "logprobs": _difference(cut_logprobs, logprobs),
        "gradient": errors[worst],
        "worst": worst,
        "norm": _difference(clip_grad_norm(model.parameters(), 1.0, mesh), norm),
        "sent": all(torch.equal(full(tensor), state[n]) for n, tensor in sent.items()),
        "written": wrote == (dist.get_rank() == 0)
        and all(torch.equal(written[n], tensor) for n, tensor in state.items()),
        "loaded": all(torch.equal(tensor, state[n]) for n, tensor in loaded.items()) and loaded.keys() == sent.keys(),
        "held": one_step.storages(model) / one_step.storages(plain),
    }


def _computed(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    from rl_bridge.parallel.heads import token_logprobs

    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    logprobs, entropy = token_logprobs(model, ids, ids.roll(-1, 1))
    assert entropy is not None
    (logprobs.sum() - 0.1 * entropy.sum()).backward()
    gradients = {n: one_step.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return logits, logprobs.detach(), gradients


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def rank(number: int, address: str, queue: Any, names: list[str]) -> None:
    """A test process: ``differences`` of each model."""

    def work() -> dict[str, Any]:
        mesh = one_step.mesh_of(one_step.host_of_rank(), (1, 1, 1, 2))
        return {name: differences(name, mesh) for name in names}

    as_rank(work, 2, number, address, queue)
