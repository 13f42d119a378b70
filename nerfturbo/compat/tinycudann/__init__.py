"""tiny-cuda-nn's torch interface over nerfturbo: the same configurations, on CPU and GPU, differentiable twice.
docs/migration/tinycudann.md lists what differs."""

from .. import install as _install
from .modules import Encoding, Module, Network, NetworkWithInputEncoding, free_temporary_memory, supports_jit_fusion

__all__ = [
    "Encoding",
    "Module",
    "Network",
    "NetworkWithInputEncoding",
    "free_temporary_memory",
    "install",
    "supports_jit_fusion",
]


def install() -> None:
    """Make `import tinycudann` resolve to this package; call it before the first such import."""
    _install("tinycudann")
