"""A module that receives weights, and a rollout that refuses to draw from half of them."""

import pytest
import torch

from rl_bridge.data.trajectory import SamplingParams, requests_of
from rl_bridge.models.model_source import StateSource
from rl_bridge.rollout import InProcessRollout
from rl_bridge.weights import Arrival, ModuleReceiver, WeightSyncError, checksum, receiver_of, transports
from rl_bridge.weights.manifest import Claim, Manifest, described, inside, module_tensors, whole
from tests.support.one_process import NAME, put, sync
from tests.support.weight_engines import model

SAMPLING = SamplingParams(max_new_tokens=2)


def arrival(name, tensor, *parts):
    """The tensor with true claims about its parts, the whole by default."""
    held = whole(tensor.shape)
    claims = [Claim(part, checksum(inside(tensor, held, part))) for part in parts or (held,)]
    return Arrival(name, tensor.detach(), held, claims)


@pytest.fixture
def receiver():
    """A model of seed 2 that has begun to receive."""
    made = ModuleReceiver(model(2), version=4)
    made.begin(Manifest(described(module_tensors(model(1)), "source")))
    return made


def arrivals():
    return [arrival(name, tensor) for name, tensor in module_tensors(model(1))]


def test_what_came_is_in_the_same_parameters_as_a_copy(receiver):
    target = receiver._module
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in target.named_parameters()}
    sent = arrivals()
    receiver.receive(sent)
    receiver.finish()
    for one in sent:
        one.tensor.add_(1)
    for (name, tensor), wanted in zip(target.named_parameters(), model(1).parameters(), strict=True):
        assert (tensor is before[name][0], tensor.data_ptr()) == (True, before[name][1])
        assert torch.equal(tensor, wanted)


def test_nothing_is_usable_between_begin_and_the_version(receiver):
    with pytest.raises(ValueError, match="an update failed; sync them first"):
        receiver.usable_version()
    receiver.receive(arrivals())
    receiver.finish()
    assert receiver.version is None
    receiver.version = 5
    assert receiver.usable_version() == 5


def test_missing_unknown_and_repeated_names(receiver):
    receiver.receive(arrivals()[:-2])
    with pytest.raises(ValueError, match=r"no weights came for 2 of 26 parameters, the first: 'model\.layers\.1"):
        receiver.finish()
    with pytest.raises(ValueError, match=r"weight 'model\.embed_tokens\.weight' came twice"):
        receiver.receive(arrivals()[:1])
    with pytest.raises(ValueError, match=r"unknown weight 'model\.extra'"):
        receiver.receive([arrival("model.extra", torch.zeros(2))])


def test_what_nobody_vouches_for_is_refused(receiver):
    rows = arrival("model.embed_tokens.weight", torch.zeros(15, 16), ((0, 7), (0, 16)), ((8, 7), (0, 16)))
    with pytest.raises(ValueError, match="no sender vouches for"):
        receiver.receive([rows])
    receiver.receive([arrival("model.embed_tokens.weight", rows.tensor, ((0, 7), (0, 16)), ((7, 8), (0, 16)))])


def test_a_rollout_draws_from_no_half_and_then_from_the_new_weights(executor, tmp_path, tokenizer, monkeypatch):
    rollout = put(executor, "rollout", InProcessRollout(StateSource(model(2)), tokenizer))

    def damaging(name, tensor, part, claims):
        return Arrival(name, tensor.neg() if name == NAME else tensor, part, claims)

    with monkeypatch.context() as patch:
        patch.setattr(transports, "Arrival", damaging)
        with pytest.raises(WeightSyncError, match=f"weight '{NAME}' was damaged on the way"):
            sync(executor, tmp_path)
    with pytest.raises(ValueError, match="the weights here are incomplete"):
        rollout.generate(requests_of(["1+1="], 0), SAMPLING)
    sync(executor, tmp_path, version=3)
    [[trajectory]] = rollout.generate(requests_of(["1+1="], 0), SAMPLING)
    assert {*trajectory.weights_versions} == {-1, 3}
    assert receiver_of(rollout).usable_version() == 3
    wanted = InProcessRollout(StateSource(model(1)), tokenizer).generate(requests_of(["1+1="], 0), SAMPLING)
    assert (trajectory.tokens, trajectory.logprobs) == (wanted[0][0].tokens, wanted[0][0].logprobs)
