"""Tiny models on a mesh of test processes, and what one step of them gives."""

import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.ranks import as_rank

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
    from rl_bridge.parallel.heads import token_logprobs

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
    from rl_bridge.parallel.mesh import clip_grad_norm

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


def documents_step(model, batch, mesh, data_part, data_parts, max_norm=0.5):
    """Log-probabilities, gradients and their norm where this rank's rows are documents of one packed row."""
    from rl_bridge.parallel.attention import use_rl_fn_attention
    from rl_bridge.parallel.documents import Documents
    from rl_bridge.parallel.heads import token_logprobs
    from rl_bridge.parallel.mesh import clip_grad_norm

    use_rl_fn_attention(model)
    ids, lengths = batch
    share = len(ids) // data_parts
    mine = slice(data_part * share, (data_part + 1) * share)
    documents = Documents(lengths[mine], mesh)
    targets = ids.roll(-1, 1)[mine]
    packed = documents.take(ids[mine]), documents.take(targets)
    logprobs, entropy = token_logprobs(model, *packed, **documents.forward_kwargs)
    scores = documents.put(torch.stack([logprobs, entropy], -1), targets.shape)
    kept = torch.arange(ids.shape[1] - 1) < lengths[mine, None] - 1
    logprobs, entropy = (scores[:, :-1] * kept[..., None]).unbind(-1)
    ((logprobs - 0.1 * entropy).sum() / ROWS).backward()
    found = {"rows of logprobs": logprobs.detach(), "rows of entropy": entropy.detach()}
    found |= {f"grad {name}": whole(p.grad) for name, p in model.named_parameters()}
    return found | {"norm": clip_grad_norm(model.parameters(), max_norm, mesh)}


def batch_of_documents():
    return token_ids(), torch.tensor([LENGTH, 3, 5, 6])


def documents_of_rank(host, family, sizes):
    from rl_bridge.parallel.config import ParallelConfig

    mesh = mesh_of(host, sizes)
    model = parallel(make(family), mesh, ParallelConfig())
    part = host.slot // (sizes[2] * sizes[3])
    found = documents_step(model, batch_of_documents(), mesh, part, sizes[0] * sizes[1])
    return {name: value.numpy() for name, value in found.items()}


def assert_documents_of_one_process(ranks, name, case):
    """The reference: each document alone, without padding, its logits in one process."""
    family, sizes = case
    model, (ids, lengths) = make(family), batch_of_documents()
    expected = {"rows of logprobs": torch.zeros(ROWS, LENGTH - 1), "rows of entropy": torch.zeros(ROWS, LENGTH - 1)}
    total = torch.zeros(())
    for row, length in enumerate(lengths.tolist()):
        log_p = torch.log_softmax(model(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0, :-1], -1)
        logprobs, entropy = log_p.gather(-1, ids[row, 1:length, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        expected["rows of logprobs"][row, : length - 1] = logprobs.detach()
        expected["rows of entropy"][row, : length - 1] = entropy.detach()
        total = total + (logprobs - 0.1 * entropy).sum() / ROWS
    total.backward()
    expected |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}
    expected["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert_equal(ranks, name, expected, (sizes[0], sizes[1], 1, sizes[2] * sizes[3]))


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
    from rl_bridge.models.model_source import StateSource
    from rl_bridge.parallel.parallelize import parallelize

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


def rank_of(layouts, documents, count, number, address, queue):
    """A test process: one step on each layout, or the traceback."""

    def work():
        host = host_of_rank()
        found = {name: step_of(host, *case) for name, case in layouts.items()}
        return found | {name: documents_of_rank(host, *case) for name, case in documents.items()}

    as_rank(work, count, number, address, queue)


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


def assert_one_process(ranks, name, case):
    family, sizes, _, changes = (*case, {})[:4]
    assert_equal(ranks, name, in_one_process(family, changes), sizes)


def assert_equal(ranks, name, expected, sizes, rounding=5e-6):
    for number, found in ranks:
        mine = {key: torch.from_numpy(value) for key, value in found[name].items()}
        assert mine.keys() == expected.keys()
        for key, value in mine.items():
            wanted = expected[key][rows_of(sizes, number)] if key.startswith("rows of") else expected[key]
            close = {"rtol": rounding, "atol": rounding * max(1.0, float(wanted.abs().max()))}
            torch.testing.assert_close(value, wanted, **close, msg=lambda m, key=key: f"{key}: {m}")
