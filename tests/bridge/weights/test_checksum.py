"""The checksum that proves what arrived."""

import importlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_bridge.common.splitmix64 import GOLDEN, MASK, mix, signed
from rl_bridge.weights import checksum

bits = importlib.import_module("rl_bridge.weights.manifest")
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


@pytest.mark.parametrize("count", range(18))
def test_tensors_of_any_number_of_bytes(count):
    """Words are as long as divides the bytes: 8, 4, 2 or 1."""
    octets = torch.arange(1, count + 1, dtype=torch.uint8)
    width = next(width for width in (8, 4, 2, 1) if count % width == 0)
    words = [
        int.from_bytes(bytes(octets[i : i + width].tolist()), "little", signed=True) for i in range(0, count, width)
    ]
    if width == 1:
        words = [word % 256 for word in words]
    mixed = [mix(signed((word + place * GOLDEN) & MASK)) & MASK for place, word in enumerate(words)]
    assert checksum(octets) & MASK == sum(mixed) & MASK


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
