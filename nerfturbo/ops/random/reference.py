"""Philox-4x32-10 in plain torch: 32-bit words held in int64, whose wrapped product keeps all 64 bits."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    product = b * a  # wraps; the arithmetic shift below still yields the unsigned high word
    return (product >> 32) & MASK, product & MASK


def draw(out: Tensor, *, seed: int, stream: int, step: int | Tensor, first: int) -> Tensor:
    index = torch.arange(first, first + out.shape[0], dtype=torch.int64, device=out.device)
    zero = torch.zeros_like(index)
    words = [index & MASK, (index >> 32) & MASK, zero + (step & MASK), zero + (stream & MASK)]
    key = [seed & MASK, (seed >> 32) & MASK]
    for _ in range(10):
        high0, low0 = _multiply(MULTIPLIERS[0], words[0])
        high1, low1 = _multiply(MULTIPLIERS[1], words[2])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(k + add) & MASK for k, add in zip(key, KEY_STEPS, strict=True)]
    drawn = torch.stack(words[: out.shape[1]], dim=-1)
    if out.is_floating_point():
        return out.copy_((drawn >> 8).to(torch.float32) * 2.0**-24)
    return out.copy_(drawn)  # the low 32 bits
