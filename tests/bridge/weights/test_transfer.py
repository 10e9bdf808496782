import importlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_bridge.data.requests import SamplingParams, requests_of
from rl_bridge.models.source import StateSource
from rl_bridge.rollout import InProcessRollout
from rl_bridge.splitmix64 import GOLDEN, MASK, mix, signed
from rl_bridge.weights import checksum, named_weights, receive_weights, replace_parameters

bits = importlib.import_module("rl_bridge.weights.bits")
WIDTHS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.int8: 1}
DTYPES = st.sampled_from(list(WIDTHS))


def random_tensor(dtype, count, seed, few=False):
    """Random values; with ``few``, most of them equal or of few bits, as in weights that were just made."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 4
    return (values.sign().clamp(min=0) if few else values).to(dtype)


@given(
    dtype=DTYPES,
    count=st.integers(1, 70),
    seed=st.integers(0, 999),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
    few=st.booleans(),
)
def test_any_flipped_bit_changes_the_checksum(dtype, count, seed, place, bit, few):
    tensor = random_tensor(dtype, count, seed, few)
    before = checksum(tensor)
    octets = tensor.view(torch.uint8)
    octets[place % octets.numel()] ^= 1 << bit
    assert checksum(tensor) != before


@given(dtype=DTYPES, count=st.integers(2, 2000), seed=st.integers(0, 999), few=st.booleans(), data=st.data())
@example(torch.float32, 514, 0, True, None)
@example(torch.float32, 2000, 1, True, None)
def test_any_two_exchanged_elements_change_the_checksum(dtype, count, seed, few, data):
    tensor = random_tensor(dtype, count, seed, few)
    if data is None:  # a 1 and a 0 in the same half of two words a power of two apart
        tensor[:] = 0
        tensor[1], i, j = 1, 1, 513
    else:
        i, j = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    exchanged = tensor.clone()
    exchanged[i], exchanged[j] = tensor[j], tensor[i]
    same = torch.equal(tensor.view(torch.uint8), exchanged.view(torch.uint8))
    assert (checksum(tensor) == checksum(exchanged)) == same


@pytest.mark.parametrize("distance", [2, 4, 256, 512, 1024])
def test_two_exchanged_elements_that_differ_in_the_sign_alone(distance):
    tensor = torch.full((2048,), 0.5)
    tensor[1] = -0.5
    exchanged = torch.full((2048,), 0.5)
    exchanged[1 + distance] = -0.5
    assert checksum(tensor) != checksum(exchanged)


def test_rows_and_columns_exchanged():
    tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    sums = {checksum(t) for t in (tensor, tensor.flip(0), tensor.flip(1), tensor.T, tensor.roll(1, 0), -tensor)}
    assert len(sums) == 6


def test_the_checksum_is_of_the_values_in_order_and_not_of_the_memory(monkeypatch):
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    wanted = checksum(tensor)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor.clone().requires_grad_()) == wanted
    monkeypatch.setattr(bits, "_CHUNK", 7)
    assert checksum(tensor) == wanted


def test_the_checksum_is_the_formula_of_its_docstring():
    def mixed(x):
        x = (x + GOLDEN) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    words = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    stored = torch.tensor([signed(word) for word in words])
    assert mix(stored).tolist() == [signed(mixed(word)) for word in words]
    assert checksum(stored) == signed(sum(mixed(word + place * GOLDEN) for place, word in enumerate(words)))


@given(dtype=DTYPES, count=st.integers(0, 300), seed=st.integers(0, 999), chunk=st.sampled_from([1, 7, 64, 1 << 16]))
def test_the_cpu_s_checksum_is_every_other_device_s(dtype, count, seed, chunk):
    tensor = random_tensor(dtype, count, seed)
    octets = tensor.view(torch.uint8)
    words = next(octets.view(kind) for size, kind in bits._WORDS if octets.numel() % size == 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "_CHUNK", chunk)
        patch.setattr(bits, "_DEVICE_CHUNK", 64)
        assert checksum(tensor) == bits._on_a_device(words)


@given(dtype=DTYPES, start=st.integers(0, 9), count=st.integers(0, 40), seed=st.integers(0, 999))
def test_the_checksum_of_a_part_is_of_its_values_wherever_it_begins(dtype, start, count, seed):
    part = random_tensor(dtype, 64, seed)[start : start + count]
    assert checksum(part) == checksum(part.clone())


def test_empty_and_zero_dimensional_tensors():
    assert checksum(torch.zeros(0)) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_every_parameter_once_tied_ones_too(new_model):
    model = new_model()
    names = [name for name, _, _ in named_weights(model)]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_received_weights_are_the_sender_s(new_model):
    sender, receiver = new_model(seed=1), new_model(seed=2)
    receive_weights(receiver, named_weights(sender))
    for (_, wanted), (_, got) in zip(sender.named_parameters(), receiver.named_parameters(), strict=True):
        assert torch.equal(wanted, got)


def damage(tensor):
    damaged = tensor.clone()
    damaged.view(-1)[-1] += 1
    return damaged


FAULTS = {
    "unknown": (lambda w: [*w, ("model.extra", torch.zeros(2), 0)], "unknown weight 'model.extra'"),
    "twice": (lambda w: [*w, w[0]], "weight 'model.embed_tokens.weight' came twice"),
    "missing": (lambda w: w[:-2], r"no weights came for 2 of \d+ parameters, the first: 'model\."),
    "nothing": (lambda w: [], "no weights came for"),
    "shape": (
        lambda w: [(w[0][0], w[0][1][:-1], w[0][2]), *w[1:]],
        r"expected .*\(15, 16\), got .*\(14, 16\)",
    ),
    "transposed": (lambda w: [(w[0][0], w[0][1].T, w[0][2]), *w[1:]], r"expected .*\(15, 16\), got .*\(16, 15\)"),
    "dtype": (
        lambda w: [(w[0][0], w[0][1].bfloat16(), w[0][2]), *w[1:]],
        "got torch.bfloat16",
    ),
    "damaged": (lambda w: [*w[:3], (w[3][0], damage(w[3][1]), w[3][2]), *w[4:]], "was damaged on the way"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_weights_are_refused_and_nothing_is_generated_with_them(new_model, tokenizer, fault):
    change, message = FAULTS[fault]
    rollout = InProcessRollout(StateSource(new_model()), tokenizer)
    good = list(named_weights(new_model(seed=1)))
    with pytest.raises(ValueError, match=message):
        rollout.update_weights(change(good), 1)
    with pytest.raises(ValueError, match="the weights here are incomplete"):
        rollout.generate(requests_of(["1+1="], 0), SamplingParams(max_new_tokens=2))
    rollout.update_weights(good, 1)
    [[trajectory]] = rollout.generate(requests_of(["1+1="], 0), SamplingParams(max_new_tokens=2))
    assert {*trajectory.weights_versions} == {-1, 1}


def test_a_sender_that_fails_half_way_leaves_no_usable_weights(new_model, tokenizer):
    rollout = InProcessRollout(StateSource(new_model()), tokenizer)

    def broken():
        yield next(iter(named_weights(new_model(seed=1))))
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        rollout.update_weights(broken(), 1)
    with pytest.raises(ValueError, match="an update failed; sync them first"):
        rollout.weights_version()


def test_stale_weights_are_refused_and_the_newer_ones_stay(new_model, tokenizer):
    rollout = InProcessRollout(StateSource(new_model()), tokenizer)
    rollout.update_weights(named_weights(new_model(seed=1)), 5)
    with pytest.raises(ValueError, match="stale weights: version 4 came after version 5"):
        rollout.update_weights(named_weights(new_model(seed=2)), 4)
    assert rollout.weights_version() == 5
    rollout.update_weights(named_weights(new_model(seed=1)), 5)  # the same again is no step back


def test_a_receiver_has_a_copy_and_its_parameters_stay_the_same_objects(new_model):
    sender, receiver = new_model(seed=1), new_model(seed=2)
    held = {name: (parameter, parameter.data_ptr()) for name, parameter in receiver.named_parameters()}
    receive_weights(receiver, named_weights(sender))
    before = {name: parameter.clone() for name, parameter in receiver.named_parameters()}
    with torch.no_grad():
        for parameter in sender.parameters():
            parameter.add_(1.0)
    for name, parameter in receiver.named_parameters():
        assert (parameter is held[name][0], parameter.data_ptr()) == (True, held[name][1])
        assert torch.equal(parameter, before[name])


def test_a_frozen_parameter_stays_frozen_on_another_device(new_model):
    model = new_model()
    frozen = next(model.parameters()).requires_grad_(False)
    replaced = replace_parameters(model, torch.device("meta"))
    assert not replaced[frozen].requires_grad
    assert all(new.requires_grad for old, new in replaced.items() if old is not frozen)
