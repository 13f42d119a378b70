"""On a CPU wide products run at the speed of torch's matrix library."""

from ..reference.wide_mlp import wide_mlp

__all__ = ["wide_mlp"]
