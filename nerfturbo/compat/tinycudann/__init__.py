"""tiny-cuda-nn's torch interface over nerfturbo: the same configurations, on CPU and GPU, differentiable twice.
docs/migration/tinycudann.md lists what differs."""

from functools import partial

from .. import install as _install
from .modules import Encoding, Module, Network, NetworkWithInputEncoding, free_temporary_memory, supports_jit_fusion

__all__ = ["Encoding", "Module", "Network", "NetworkWithInputEncoding", "free_temporary_memory", "supports_jit_fusion"]

install = partial(_install, "tinycudann")
