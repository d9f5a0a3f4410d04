"""Philox4x32-10 (Salmon et al., SC 2011), the same bits as in every other backend.

key = (low, high word of the seed); counter = (index // 4, purpose, low, high word of the position); element `index` takes
output word index % 4, and is u = ((word >> 9) + 0.5) 2^-23: 23 bits, because 24 would round up to 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

SAMPLE_NOISE = tl.constexpr(0)  # purposes: independent streams at the same (seed, position)
ACCEPT = tl.constexpr(1)
RESAMPLE_NOISE = tl.constexpr(2)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 tensors."""
    m0 = tl.full([], 0xD2511F53, tl.uint32)
    m1 = tl.full([], 0xCD9E8D57, tl.uint32)
    w0 = tl.full([], 0x9E3779B9, tl.uint32)
    w1 = tl.full([], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        low0 = c0 * m0
        high0 = tl.umulhi(c0, c0 - c0 + m0)
        low1 = c2 * m1
        high1 = tl.umulhi(c2, c2 - c2 + m1)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def _unit(words):
    return ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def uniforms(seed, position, first, purpose, COUNT: tl.constexpr):
    """float32 [COUNT] in (0, 1): elements first .. first + COUNT - 1 of the stream of (seed, position); 4 divides both."""
    zero = tl.full([COUNT // 4], 0, tl.uint32)
    c0 = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    c1 = zero + purpose
    c2 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = _philox(c0, c1, c2, c3, k0, k1)
    return _unit(tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [COUNT]))


@triton.jit
def uniform_at(seed, position, index, purpose):
    """float32, one element for each of `index`: for tokens that are few and far between."""
    zero = (index - index).to(tl.uint32)
    c0 = (index // 4).to(tl.uint32)
    c1 = zero + purpose
    c2 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = _philox(c0, c1, c2, c3, k0, k1)
    word = index % 4
    words = tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3))
    return _unit(words)
