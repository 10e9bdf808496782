"""Fused log-probabilities of a model that FSDP2 has sharded over two processes: gradients are the whole batch's."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.bridge.integrations.tiny_models import tiny
from tests.support.ranks import results as results_of_ranks

pytestmark = pytest.mark.long

RANKS = 2
WAYS = ["registered", "checkpointed", "compiled"]


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(61, (2 * RANKS, 9), generator=generator)


def loss(out):
    return (out.logprobs - 0.1 * out.entropy).mean()


def sharded(name, method):
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from rl_bridge.integrations.huggingface import fuse_linear_logprobs

    model = fuse_linear_logprobs(tiny(name))
    for layer in model.model.layers:
        fully_shard(layer)
    if not method:
        fully_shard(model.model)
    fully_shard(model)
    if method:
        register_fsdp_forward_method(model, "token_logprobs")
    return model


def gradients(model):
    named = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
    return {name: p.grad.full_tensor().numpy() for name, p in named.items() if p.grad is not None}


def results(number, way):
    model = sharded("Llama" if way == "checkpointed" else "Qwen2", True)
    if way == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: module in model.model.layers)
    ids = batch()[2 * number : 2 * number + 2]
    call = model.token_logprobs
    if way == "compiled":
        # torch's compiler goes through its table of sharded modules, and what the ways before left must not leave then.
        gc.collect()
        call = torch.compile(call, backend="aot_eager")
    loss(call(ids)).backward()
    return gradients(model)


def refusal():
    model = sharded("Qwen2", False)
    try:
        model.token_logprobs(batch())
    except ValueError as error:
        return str(error)
    return ""


def rank(number, address, queue):
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=RANKS)
    torch.set_num_threads(1)
    try:
        queue.put((number, {way: results(number, way) for way in WAYS}, refusal()))
    except Exception as error:
        queue.put((number, {}, repr(error)))
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(rank, RANKS, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(ranks, way):
    model = tiny("Llama" if way == "checkpointed" else "Qwen2")
    ids = batch()
    log_p = torch.log_softmax(model(input_ids=ids).logits[:, :-1], -1)
    own, entropy = log_p.gather(-1, ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    (own - 0.1 * entropy).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for _, received, _ in ranks:
        assert received[way].keys() == expected.keys()
        for name, gradient in received[way].items():
            torch.testing.assert_close(torch.from_numpy(gradient), expected[name], rtol=2e-4, atol=1e-5)


def test_a_head_that_fsdp_has_not_gathered_is_refused(ranks):
    """Its gradient would be this rank's alone."""
    for _, _, message in ranks:
        assert "register_fsdp_forward_method" in message
