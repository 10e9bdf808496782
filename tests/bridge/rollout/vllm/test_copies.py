"""Complete copies: filled by any sync, read back as they are, refused when damaged, removed when nobody uses them."""

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge.rollout.vllm.weight_copies import Copies, header_of, mapped
from rl_bridge.rollout.vllm.weight_probe import (
    Drawn,
    EngineLimits,
    Probe,
    ProbeFailed,
    Tolerance,
    check_drawn,
    check_scored,
)
from rl_bridge.rollout.vllm.weight_updates import buckets_by_layer
from rl_bridge.weights.manifest import Manifest, TensorSpec
from tests.bridge.rollout.vllm import arrivals
from tests.bridge.rollout.vllm.faults import shorten
from tests.bridge.rollout.vllm.policies import make_model
from tests.support.ranks import results

ODD = {
    "codes": TensorSpec((3, 1), torch.int8),
    "w": TensorSpec((3,), torch.float32),
    "scale": TensorSpec((), torch.bfloat16),
    "empty": TensorSpec((0, 4), torch.float32),
    "fp8": TensorSpec((5,), torch.float8_e4m3fn),
}


@pytest.fixture
def copies(tmp_path):
    make_model(tied=True).save_pretrained(tmp_path / "start")
    made = Copies(tmp_path / "start", tmp_path / "copies")
    yield made
    made.close()


@pytest.mark.long
def test_a_sync_fills_a_copy_from_every_layout_by_every_transport(tmp_path):
    arrivals.model(2).save_pretrained(tmp_path / "checkpoint")
    found = results(arrivals.run, 2, tmp_path)
    assert [wrong for _, wrong in found] == [[], []], found


def test_a_copy_is_a_checkpoint_with_the_bytes_that_were_written(copies):
    copy = copies.begin(Manifest(ODD))
    for number, tensor in enumerate(copy.tensors.values()):
        tensor.copy_(torch.full(tensor.shape, number + 1.0).to(tensor.dtype))
    assert header_of(copy.folder) == ODD
    for read in (load_file(copy.folder / "model.safetensors"), mapped(copy.folder)):
        assert read.keys() == ODD.keys()
        assert all(
            torch.equal(read[n].float(), t.float()) and read[n].dtype == t.dtype for n, t in copy.tensors.items()
        )
    assert (copy.folder / "config.json").read_text() == (copies.checkpoint / "config.json").read_text()
    assert "lm_head.weight" not in copies.expected


def test_a_copy_that_is_too_short_or_too_long_is_refused(copies):
    copy = copies.begin(Manifest(ODD))
    path = copy.folder / "model.safetensors"
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="promises"):
        mapped(copy.folder)
    shorten(path, to=30)
    with pytest.raises(ValueError, match="truncated: a header of"):
        mapped(copy.folder)


def test_the_proved_copy_stays_until_another_is_proved(copies):
    first = copies.begin(Manifest(ODD))
    copies.prove(first)
    second = copies.begin(Manifest(ODD))
    third = copies.begin(Manifest(ODD))
    assert first.folder.is_dir() and third.folder.is_dir() and not second.folder.exists()
    copies.prove(third)
    assert not first.folder.exists()
    copies.close()
    assert not third.folder.parent.exists()


def test_without_room_it_says_so(copies):
    with pytest.raises(ValueError, match=r"no room for a copy of the weights, 4,611,686,0.* name another folder"):
        copies.begin(Manifest({"w": TensorSpec((2**60,), torch.float32)}))


def test_buckets_hold_whole_layers():
    specs = {n: TensorSpec((10,), torch.float32) for n in ("e", "l.0.a", "l.1.a", "l.0.b", "l.1.b", "head")}
    assert list(buckets_by_layer(specs, 1)) == [["e"], ["l.0.a", "l.0.b"], ["l.1.a", "l.1.b"], ["head"]]
    assert list(buckets_by_layer(specs, 130)) == [["e", "l.0.a", "l.0.b"], ["l.1.a", "l.1.b", "head"]]


def test_a_probe_fits_the_engine_and_fills_a_block_of_its_cache():
    assert len(Probe.of(EngineLimits(60, 96, 32), 1.0).prompt) == 56
    short = Probe.of(EngineLimits(60, 20, 32), 1.0)
    assert len(short.prompt) + short.count == 20 and not short.cacheable
    assert max(Probe.of(EngineLimits(7, 300, 128), 1.0).prompt) < 7


NAN = float("nan")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cached": 32}, "32 tokens of the prompt came from the prefix cache"),
        ({"version": None}, "weights of version None drew"),
        ({"logprobs": (-1.0,)}, "2 tokens were asked for; 2 came, with 1"),
        ({"logprobs": (-1.0, NAN)}, "1 of 2 log-probabilities are no numbers"),
    ],
)
def test_a_draw_is_refused_without_the_trainer(changed, message):
    drawn = Drawn((1, 2), (3, 4), (-1.0, -2.0), 0, "5")
    probe = Probe((1, 2), 2)
    check_drawn(drawn, probe, "5")
    with pytest.raises(ProbeFailed, match=message):
        check_drawn(drawn._replace(**changed), probe, "5")


@pytest.mark.parametrize("expected", [(-1.0, -2.1), (-1.0,), (-1.0, NAN), (-1.04, -2.04)])
def test_other_log_probabilities_are_no_proof(expected):
    drawn = Drawn((1, 2), (3, 4), (-1.0, -2.0), 0, "5")
    check_scored(drawn, (-1.0, -2.04), Tolerance(0.03, 0.05))
    with pytest.raises(ProbeFailed):
        check_scored(drawn, expected, Tolerance(0.03, 0.05))
