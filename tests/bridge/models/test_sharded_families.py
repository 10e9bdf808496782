"""Families with converted weights or computed buffers, over two workers: read by the part, written whole.

And a merged mixture: no test had written one (ENG-15; what part 6c found that no test would notice).
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_source import PretrainedSource
from rl_bridge.models.pretrained import save_sharded_model
from rl_bridge.models.stored_tensors import SafetensorsFolder
from tests.bridge.families import zoo
from tests.support import one_step
from tests.support.ranks import as_rank, found_by_ranks

pytestmark = pytest.mark.long

KINDS = ("mixtral", "gpt_neox", "falcon_h1", "gemma")
LAYOUTS = {"shard": (1, 2, 1, 1), "replicate": (2, 1, 1, 1)}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def load_and_save(host, path, kind, layout):
    """Load over two workers and write the folder anew; buffers and the bytes that were read."""
    from rl_bridge.models import model_source as sources
    from rl_bridge.parallel.parallelize import parallelize

    source = PretrainedSource(f"{path}/{kind}")
    with torch.device("meta"):
        model = source.empty()
    parallelize(model, one_step.mesh_of(host, LAYOUTS[layout]))
    stored = source.stored()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    sources.fill(model, stored)
    assert before.keys() == dict(model.named_parameters()).keys()
    save_sharded_model(model, f"{path}/{layout}-{kind}")
    return {
        "buffers": {name: buffer.numpy() for name, buffer in model.named_buffers()},
        "read": stored._stored.bytes_read,
        "held": one_step.storages(model),
    }


def rank(number, address, queue):
    path = address.removeprefix("file://").rsplit("/", 1)[0]

    def work():
        host = one_step.host_of_rank()
        found = {
            f"{layout} {kind}": load_and_save(host, path, kind, layout)
            for kind in KINDS
            for layout in (LAYOUTS if kind == "mixtral" else ["shard"])
        }
        if number == 1:
            save_sharded_model(zoo.tiny("mixtral"), f"{path}/second")  # an engine of the second worker alone
        return found

    as_rank(work, 2, number, address, queue)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gloo")
    for kind in KINDS:
        zoo.folder(kind, path / kind)
    return path


@pytest.fixture(scope="module")
def ranks(path):
    return [found for _, found in found_by_ranks(rank, 2, path)]


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_same(model, wanted):
    ours, theirs = model.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_write_what_they_read(ranks, path, kind):
    wanted = plain(path / kind)
    assert_same(plain(path / f"shard-{kind}"), wanted)
    names = [{*(path / folder).glob("*.safetensors*")} for folder in (kind, f"shard-{kind}")]
    assert [len(found) for found in names] == [1, 1]
    for found in ranks:
        for name, buffer in wanted.named_buffers():
            assert torch.equal(torch.from_numpy(found[f"shard {kind}"]["buffers"][name]), buffer), name


def test_the_files_have_the_hub_s_names_whoever_writes(ranks, path):
    """FSDP gives a class another name, by which transformers would find no names of the hub; rank 1 may write alone."""
    for kind in KINDS:
        theirs, ours = (SafetensorsFolder.of_folder(path / name).shapes for name in (kind, f"shard-{kind}"))
        assert theirs == ours
    assert_same(plain(path / "second"), plain(path / "mixtral"))


def test_each_worker_reads_its_own_experts(ranks):
    for found in ranks:
        half, whole = found["shard mixtral"], found["replicate mixtral"]
        assert half["read"] == half["held"] == whole["read"] / 2 == whole["held"] / 2


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", *EXPERTS)], ids=["attention", "experts"])
def test_a_merged_mixture_is_read_by_plain_transformers(path, tmp_path, targets):
    """ENG-15, S37: experts included, logits equal those of the model with adapters."""
    source = LoRASource(PretrainedSource(str(path / "mixtral")), 2, 4, targets, seed=1)
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_sharded_model(model, str(tmp_path))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        merged = plain(tmp_path)(input_ids=ids, use_cache=False).logits
        base = plain(path / "mixtral")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(merged, wanted, rtol=0, atol=2e-4)
    assert (base - wanted).abs().max() > 0.1
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), read_by_us(tmp_path))


def read_by_us(folder):
    source = PretrainedSource(str(folder))
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model
