"""The most memory that tensors held at any moment inside a block, counted by their storages: the same on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts what operations inside the block allocate, until it is freed; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._seen or storage._cdata in before:
                continue
            self._seen.add(storage._cdata)
            self._now += storage.nbytes()
            self.n_bytes = max(self.n_bytes, self._now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, n_bytes: int) -> None:
        self._seen.discard(key)
        self._now -= n_bytes
