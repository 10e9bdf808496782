"""Tiny models on a mesh of test processes, and what one step of them gives."""

import math
import traceback
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN, ROWS, LENGTH, PAD = 40, 16, 4, 7, 3
FAMILIES = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make(family, *, tied=True, **changes):
    """A model whose weights are a function of its configuration alone, the biases and norms included."""
    config, cls = FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD,
    }
    model = cls(config(**(sizes | changes))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return model


def token_ids():
    """With padding, whose vector takes no gradient, and the token in its place on the other of two tensor ranks."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 2], ids[:, 4] = PAD, VOCABULARY // 2 + PAD
    return ids


def rows_of(mesh_sizes, rank):
    """The rows of this rank: cut over replicate × shard × sequence, the same on tensor-parallel neighbours."""
    replicate, shard, sequence, tensor = mesh_sizes
    share = ROWS // (replicate * shard * sequence)
    return slice(rank // tensor * share, (rank // tensor + 1) * share)


def loss_of(logits, ids):
    """A sum over tokens, divided by the number of tokens of all rows."""
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])
    return -logprobs.sum() / (ROWS * (LENGTH - 1))


def whole(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def scored(model, ids):
    """Log-probabilities and entropies at a temperature a token, from hidden states or, in one process, from logits."""
    from rl_bridge.parallel.head import token_logprobs

    temperature = 0.5 + ids / VOCABULARY
    targets = ids.roll(-1, 1)
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        with torch.no_grad():
            first = token_logprobs(model, ids, targets, temperature=temperature, entropy=False)
        assert first[1] is None and all(hasattr(p, "full_tensor") for p in model.parameters())
        logprobs, entropy = token_logprobs(model, ids, targets, temperature=temperature)
        assert torch.equal(first[0], logprobs)
        return logprobs, entropy
    log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float() / temperature[..., None], -1)
    return log_p.gather(-1, targets[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def one_step(model, ids, mesh, max_norm=0.5):
    """Logits, gradients, their norm, and the parameters after one clipped step of AdamW. Everything whole."""
    from rl_bridge.parallel.gradients import clip_grad_norm

    # With the usual epsilon the first step is the sign of a gradient, also of one that is rounding alone.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    logits = model(input_ids=ids, use_cache=False).logits
    loss_of(logits, ids).backward()
    found = {"rows of logits": logits.detach().float()}
    found |= {f"grad {name}": whole(p.grad) for name, p in model.named_parameters()}
    found["norm"] = clip_grad_norm(model.parameters(), max_norm, mesh)
    optimizer.step()
    optimizer.zero_grad()
    logprobs, entropy = scored(model, ids)
    ((logprobs - 0.1 * entropy).sum() / ROWS).backward()
    found |= {"rows of logprobs": logprobs.detach(), "rows of entropy": entropy.detach()}
    found |= {f"grad of logprobs {name}": whole(p.grad) for name, p in model.named_parameters()}
    return found | {f"after {name}": whole(p) for name, p in model.named_parameters()}


def host_of_rank():
    from rl_bridge.executors.host import Host

    return Host(dist.get_rank())


def mesh_of(host, sizes):
    from rl_bridge.parallel.mesh import make_mesh

    # In place of rl_bridge.engines.Mesh, with which every rank would import JAX.
    layout = SimpleNamespace(shape=sizes, size=math.prod(sizes))
    return make_mesh(host, range(layout.size), layout)


def parallel(model, mesh, config):
    """As a worker makes it: the structure on the meta device, parallelised, then filled."""
    from rl_bridge.models.source import StateSource
    from rl_bridge.parallel.plan import parallelize

    source = StateSource(model)
    with torch.device("meta"):
        empty = source.empty()
    parallelize(empty, mesh, config)
    source.load(empty)
    return empty


def storages(module: nn.Module):
    """Bytes of the parameters that this process holds."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return sum(p.numel() * p.element_size() for p in local)


def step_of(host, family, sizes, options, changes=None):
    from rl_bridge.parallel.config import ParallelConfig

    mesh = mesh_of(host, sizes)
    model = parallel(make(family, **(changes or {})), mesh, ParallelConfig(**options))
    ids = token_ids()[rows_of(sizes, host.slot)]
    return {name: value.numpy() for name, value in one_step(model, ids, mesh).items()}


def rank_of(layouts, count, number, address, queue):
    """A test process: one step on each layout, or the traceback."""
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=count)
    torch.set_num_threads(1)
    try:
        host = host_of_rank()
        queue.put((number, {name: step_of(host, *case) for name, case in layouts.items()}))
    except BaseException:
        queue.put((number, traceback.format_exc()))
        raise
    finally:
        dist.destroy_process_group()


def in_one_process(family, changes=None):
    return one_step(make(family, **(changes or {})), token_ids(), None)


def relative_errors(found, expected, sizes, number):
    """‖found − wanted‖ / ‖wanted‖ of what is computed forward, of each model's gradient and of its parameters."""
    sums = {}
    for key, value in found.items():
        wanted = expected[key][rows_of(sizes, number)] if key.startswith("rows of") else expected[key]
        kind = key if key.startswith("rows of") or key == "norm" else key.rpartition(" ")[0]
        difference, norm = sums.get(kind, (0.0, 0.0))
        difference += float((torch.from_numpy(value) - wanted).square().sum())
        sums[kind] = difference, norm + float(wanted.square().sum())
    return {kind: math.sqrt(difference / norm) for kind, (difference, norm) in sums.items()}


def assert_one_process(ranks, name, case, rounding=5e-6):
    family, sizes, _, changes = (*case, {})[:4]
    expected = in_one_process(family, changes)
    for number, found in ranks:
        mine = {key: torch.from_numpy(value) for key, value in found[name].items()}
        assert mine.keys() == expected.keys()
        for key, value in mine.items():
            wanted = expected[key][rows_of(sizes, number)] if key.startswith("rows of") else expected[key]
            close = {"rtol": rounding, "atol": rounding * max(1.0, float(wanted.abs().max()))}
            torch.testing.assert_close(value, wanted, **close, msg=lambda m, key=key: f"{key}: {m}")
