"""nerfacc 0.3: `nerfturbo.compat.nerfacc`, under that version's number."""

from .nerfacc import *  # noqa: F403

__version__ = "0.3.5"
