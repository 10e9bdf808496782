"""Weights that two workers load, hold and free: each reads and holds half."""

import gc
import time
from pathlib import Path

import pytest
import torch

from tests.support import one_step
from tests.support.ranks import as_rank, found_by_ranks

LAYOUTS = {"shard": (1, 2, 1, 1), "replicate": (2, 1, 1, 1), "tensor": (1, 1, 1, 2)}


def load(host, folder, sizes):
    """A folder's weights whole again, the bytes read, and the bytes that are held before and after a step."""
    from rl_bridge.models import model_source as sources
    from rl_bridge.models.stored_tensors import SafetensorsFolder
    from rl_bridge.parallel.parallelize import parallelize

    stored = SafetensorsFolder.of_folder(Path(folder))
    with torch.device("meta"):
        model = sources.PretrainedSource(str(folder)).empty()
    mesh = one_step.mesh_of(host, sizes)
    parallelize(model, mesh)
    sources.fill(model, stored)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    state = {name: one_step.whole(value).numpy() for name, value in model.state_dict().items()}
    held = one_step.storages(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=one_step.token_ids(), use_cache=False).logits.sum().backward()
    optimizer.step()
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    optimizer_bytes = sum(v.to_local().numel() * v.to_local().element_size() for v in moments)
    return {"state": state, "tied": tied, "read": stored.bytes_read, "held": held, "optimizer": optimizer_bytes}


def storages_alive():
    """Bytes of all CPU tensors that are referred to for longer than a moment: gloo may let go of a layer late."""
    found = []
    for _ in range(5):
        found.append(storages_now())
        time.sleep(0.05)
    return min(found)


def storages_now():
    """Bytes of all CPU tensors that anything still refers to, each storage once."""
    gc.collect()
    found = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor):
            local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
            if not local.is_meta:
                storage = local.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def free(host):
    """Bytes alive before the model, with the model, freed, and back; and the logits before and after."""
    from rl_bridge.models.model_source import StateSource
    from rl_bridge.parallel.config import ParallelConfig
    from rl_bridge.parallel.fsdp import move_weights

    original = one_step.make("Qwen2", tied=True)
    ids = one_step.token_ids()
    before = storages_alive()
    model = one_step.parallel(original, one_step.mesh_of(host, (1, 2, 1, 1)), ParallelConfig())
    with torch.no_grad():
        first = model(input_ids=ids, use_cache=False).logits.tolist()
    loaded = storages_alive()
    replaced = set(map(id, move_weights(model, torch.device("meta")).values()))
    freed = storages_alive()
    names = dict(model.named_parameters())
    move_weights(model, torch.device("cpu"))
    StateSource(original).load(model)
    with torch.no_grad():
        again = model(input_ids=ids, use_cache=False).logits.tolist()
    return {
        "bytes": (before, loaded, freed, storages_alive()),
        "weights": one_step.storages(model),
        "on meta": all(value.is_meta for value in names.values()),
        "replaced": set(map(id, names.values())) == replaced,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "same": first == again,
    }


def rank(number, address, queue):
    folder = address.removeprefix("file://").rsplit("/", 1)[0] + "/model"

    def work():
        host = one_step.host_of_rank()
        found = {name: load(host, folder, sizes) for name, sizes in LAYOUTS.items()}
        return found | {"free": free(host)}

    as_rank(work, 2, number, address, queue)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gloo")


@pytest.fixture(scope="module")
def model(folder):
    model = one_step.make("Qwen2", num_hidden_layers=3)
    model.save_pretrained(folder / "model", max_shard_size="8KB")
    return model


@pytest.fixture(scope="module")
def ranks(model, folder):
    return [found for _, found in found_by_ranks(rank, 2, folder)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_loading_equals_loading_whole_bit_for_bit(ranks, model, layout):
    wanted = model.state_dict()
    for found in ranks:
        assert found[layout]["tied"]
        assert found[layout]["state"].keys() == wanted.keys()
        for name, value in found[layout]["state"].items():
            assert torch.equal(torch.from_numpy(value), wanted[name]), name


def test_a_worker_reads_and_holds_half(ranks, model):
    everything = one_step.storages(model)
    rows = [len(parameter) for parameter in model.parameters()]
    assert all(count % 2 == 0 for count in rows)
    for found in ranks:
        assert found["shard"]["read"] == found["shard"]["held"] == everything / 2
        assert found["shard"]["optimizer"] == 2 * everything / 2
        # Norms and the biases of the rows stay whole.
        assert everything / 2 < found["tensor"]["read"] == found["tensor"]["held"] < 0.6 * everything
        assert found["replicate"]["read"] == found["replicate"]["held"] == everything
        assert found["replicate"]["optimizer"] == 2 * everything


def test_freed_weights_leave_no_memory_behind_and_come_back(ranks):
    for found in (found["free"] for found in ranks):
        before, loaded, freed, again = found["bytes"]
        assert found["weights"] <= loaded - before
        assert loaded - freed == found["weights"]
        assert freed - before < 0.1 * found["weights"]
        assert again == loaded
        assert found["on meta"] and found["replaced"] and found["tied"] and found["same"]
