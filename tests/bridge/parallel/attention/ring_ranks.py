"""What one rank of a sequence-parallel group computes in the tests of the ring: NumPy arrays, a result a check."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_bridge.data.token_batch import shared_prefixes
from rl_bridge.parallel.attention import AttentionPlan, ring
from rl_bridge.parallel.attention.plan import held, rank_plan, segments_of
from rl_bridge.parallel.attention.rectangles import Rectangles
from rl_bridge.parallel.documents import Documents
from rl_bridge.parallel.tensor_parallel import cut_matrices
from tests.bridge.parallel.attention import broken_plans, reference
from tests.kernels.live_bytes import LiveBytes
from tests.support.attending_models import batch, grouped_batch, tiny, transformers_checkpointing

SCALE = 0.3
# One long document, documents cut by chunks, of one token, alike, many short ones, and completions of shared prompts.
PACKINGS = {
    "one": ([96], None),
    "cut": ([10, 50, 36], None),
    "single tokens": ([1, 1, 1, 93], None),
    "alike": ([24, 24, 24, 24], None),
    "unlike": ([70, 3, 2, 1, 20], None),
    "short": ([5] * 19 + [1], None),
    "shared prompts": ([40, 5, 9, 6, 20, 7, 9], [None, 0, 0, 0, None, 4, 4]),
}
# Of layers: a window that cuts chunks and documents, one of a token, one longer than most documents; caps and sinks.
SCORES = {
    "window": {"window": 7},
    "window of a token": {"window": 1},
    "long window, sinks": {"window": 33, "sinks": True},
    "soft cap": {"softcap": 2.0},
    "all": {"window": 10, "softcap": 2.0, "sinks": True},
}
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 3e-2}
# Rows of a batch: 2 · R does not divide their sum.
LENGTHS = [31, 0, 1, 12, 7, 40, 3]
GROUPS = [1, 2, 3, 1, 1, 3, 4]
MODELS = {
    "Qwen2": {},
    "Llama": {"name": "Llama"},
    "checkpointed": {"checkpointed": True},
    "sharded": {"sharded": True},
    "sharded and checkpointed": {"sharded": True, "checkpointed": True},
    "some rows": {"rows": [5, 2]},
    "no rows": {"rows": []},
    "shared prefixes": {"groups": GROUPS},
}
CHANGED = 3
SPOILED = ("unlike", "float32", 0)


def segments(packing):
    return segments_of(*PACKINGS[packing])


def numpy(tensors):
    return [x.detach().double().numpy() for x in tensors]


def sinks(dtype=torch.float64):
    return torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=dtype)


def attention(packing, dtype, group, spoiled=None, **score):
    """This rank's part of the output and of the gradients of q, k, v and sinks. A spoiled segment is not a number."""
    cut = segments(packing)
    total = cut[-1].stop
    plan = AttentionPlan(cut, torch.device("cpu"), group)
    own = torch.cat([torch.arange(*span) for span in held(total, group.rank(), group.size())])
    arrays = reference.tensors(total, dtype=getattr(torch, dtype))
    if spoiled is not None:
        for x in arrays:
            x[cut[spoiled].start : cut[spoiled].stop] = float("nan")
    *inputs, grad = (x[own] for x in arrays)
    inputs += [sinks(inputs[0].dtype)] if score.pop("sinks", False) else []

    def attend(q, k, v, of_heads=None):
        return plan.attend(q, k, v, SCALE, sinks=of_heads, **score)

    return numpy(reference.with_gradients(attend, *inputs, grad))


def changed_batch(row=None, groups=None):
    """The batch, one of its documents made of other tokens, or with a common beginning in each group."""
    ids, mask = batch(LENGTHS) if groups is None else grouped_batch(LENGTHS, groups)
    if row is not None:
        ids[row] = ((ids[row] + 1) % 61).where(mask[row], 0)
    return ids, mask


def outputs(mesh, *, name="Qwen2", checkpointed=False, sharded=False, **options):
    """Logits of the batch and the gradients of a loss of them, summed over the ranks of a sequence."""
    model = tiny(name)
    if checkpointed:
        transformers_checkpointing(model.train())
    if sharded:
        for module in [*model.model.layers, model]:
            fully_shard(module, mesh=mesh["sequence"])
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    logits = through(model, mesh, **options)
    if not sharded:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("sequence"))
    return logits, whole_gradients(model)


def tensor_parallel(mesh, changed=None):
    """The same where two ranks cut the layers' matrices and compute the heads of one half each."""
    model = tiny()
    cut_matrices(model, mesh)
    return through(model, None, changed=changed), whole_gradients(model)


def through(model, mesh, rows=None, changed=None, groups=None):
    """Logits of the batch, and gradients in the model's parameters."""
    ids, mask = changed_batch(changed, groups)
    lengths, shared = mask.sum(1), {}
    if groups is not None:
        shared = {"groups": torch.tensor(groups), "shared": shared_prefixes(ids, lengths, torch.tensor(groups))}
        assert shared["shared"].tolist() == [4, 0, 0, 4, 4, 0, 0]
    documents = Documents(lengths, mesh, rows=rows, **shared)
    logits = documents.put(model(documents.take(ids), **documents.forward_kwargs).logits, ids.shape)
    logits.square().sum().backward()
    return logits.detach().numpy()


def whole_gradients(model):
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).numpy() for name, x in gradients.items()}


def with_broken_plan(mesh, broken):
    ring.rank_plan = getattr(broken_plans, broken)
    try:
        return outputs(mesh)[0]
    finally:
        ring.rank_plan = rank_plan


def merged(packing, group):
    """Types of what the parts of a token's attention are added up in, of bfloat16 queries."""
    found, forward = set(), Rectangles.forward

    def watched(self, q, keys_values, out, lse, **score):
        found.update(str(x.dtype) for x in (out, lse))
        forward(self, q, keys_values, out, lse, **score)

    Rectangles.forward = watched
    try:
        attention(packing, "bfloat16", group)
    finally:
        Rectangles.forward = forward
    return found


def memory(tokens, group):
    """Bytes kept for the backward pass of one long document, and the most bytes alive in both passes."""
    plan = AttentionPlan(segments_of([tokens]), torch.device("cpu"), group)
    q, k, v, grad = reference.tensors(plan.rank_plan.tokens)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kept = []
    with (
        LiveBytes() as alive,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x),
    ):
        plan.attend(*inputs, SCALE).backward(grad)
    return sum(kept), alive.peak


def refusal(group):
    """The message where the mesh does not say which ranks share a sequence."""
    try:
        Documents([3], DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",)))
    except ValueError as error:
        return str(error)
    return ""


def checks(mesh):
    group = mesh.get_group("sequence")
    # Also where the ranks of a sequence are some of the job's ranks, and other numbers in their group.
    pairs = init_device_mesh("cpu", (group.size() // 2, 2), mesh_dim_names=("shard", "sequence"))
    return {
        "pairs": outputs(pairs, changed=CHANGED if dist.get_rank() >= 2 else None),
        "tensor": tensor_parallel(pairs["sequence"]),
        "tensor, changed": tensor_parallel(pairs["sequence"], CHANGED),
        "spoiled": attention(*SPOILED[:2], group, spoiled=SPOILED[2]),
        "attention": {(p, d): attention(p, d, group) for p in PACKINGS for d in TOLERANCE},
        "scores": {(p, s): attention(p, "float64", group, **SCORES[s]) for p in PACKINGS for s in SCORES},
        "models": {way: outputs(mesh, **options) for way, options in MODELS.items()},
        "changed": outputs(mesh, changed=CHANGED),
        "broken": {broken: with_broken_plan(mesh, broken) for broken in broken_plans.NAMES},
        "merged": [merged(packing, group) for packing in PACKINGS],
        "memory": {tokens: memory(tokens, group) for tokens in (256, 512)},
        "refusal": refusal(group),
    }


def rank(number, address, queue, ranks):
    torch.set_num_threads(1)
    try:
        patience = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=address, rank=number, world_size=ranks, timeout=patience)
        queue.put((number, checks(DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("sequence",)))))
        dist.destroy_process_group()
    except Exception as error:
        queue.put((number, repr(error)))
        raise
