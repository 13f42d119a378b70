"""The most memory that tensors held at any moment inside a block: what `bench` and `tune` measure a CPU with."""

from __future__ import annotations

from nerfturbo.bench.tune import PeakBytes

__all__ = ["PeakBytes"]
