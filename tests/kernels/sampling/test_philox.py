"""The generator against its published vectors, and the noise's tails."""

import pytest
import torch
import triton
import triton.language as tl

from rl_kernels.sampling.philox import gumbel, philox, uniform
from rl_kernels.sampling.triton_kernels import gumbel as kernel_gumbel
from tests.kernels.operations import placed, returned

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers(counter, key, wanted):
    seed = key[0] | key[1] << 32
    seed = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed)
    got = philox(seed, *(torch.tensor(c) for c in counter))
    assert tuple(int(word) for word in got) == wanted


def test_uniforms_use_all_their_bits():
    u, upper = uniform(torch.tensor(3), torch.tensor(-9), torch.arange(200_000), 0)
    assert (u > 0).all() and (u <= 0.5).all()
    assert abs(upper.double().mean() - 0.5) < 0.005 and abs(u.double().mean() - 0.25) < 0.002
    # With 32 bits there would be no number below 2⁻³²; some of 24 bits would repeat.
    assert len(u.unique()) > 199_000


def test_gumbel_has_its_mean_variance_and_tails():
    g = gumbel(torch.tensor(1), torch.tensor(2), torch.arange(400_000), 1).double()
    assert abs(g.mean() - 0.5772157) < 0.01 and abs(g.var() - torch.pi**2 / 6) < 0.02
    for value in (-2.0, 4.0, 8.0):
        share = 1 - torch.exp(-torch.exp(torch.tensor(-value, dtype=torch.float64)))
        share = 1 - share if value < 0 else share
        found = ((g < value) if value < 0 else (g > value)).double().mean()
        assert abs(found - share) < 5 * (share / 400_000).sqrt()


@triton.jit
def kernel(seed, position, words, noise, N: tl.constexpr):
    index = tl.arange(0, N)[None, :].to(tl.int64)
    key, place = tl.load(seed + tl.arange(0, 4))[:, None], tl.load(position + tl.arange(0, 4))[:, None]
    zero = index * 0
    c0 = ((place & 0xFFFFFFFF) + zero).to(tl.uint32)
    c1 = (((place >> 32) & 0xFFFFFFFF) + zero).to(tl.uint32)
    w, _, _, _ = tl.philox(key + zero, c0, c1, index.to(tl.uint32), (zero + 1).to(tl.uint32))
    out = tl.arange(0, 4)[:, None] * N + index
    tl.store(words + out, w.to(tl.int64))
    tl.store(noise + out, kernel_gumbel(key, place, index, 1))


def test_the_triton_kernels_noise_is_the_same():
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**63) + 12345])
    position = torch.tensor([0, 7, -3, 2**45])
    words, noise = torch.empty(4, 256, dtype=torch.int64), torch.empty(4, 256)
    seed, position, words, noise = placed((seed, position, words, noise))
    kernel[(1,)](seed, position, words, noise, N=256)
    seed, position, words, noise = returned((seed, position, words, noise))
    index = torch.arange(256)
    mask = 0xFFFFFFFF
    wanted = philox(
        seed[:, None], position[:, None] & mask, (position[:, None] >> 32) & mask, index, torch.ones_like(index)
    )
    assert torch.equal(words, wanted[0])
    torch.testing.assert_close(noise, gumbel(seed[:, None], position[:, None], index, 1), rtol=2e-6, atol=1e-6)
