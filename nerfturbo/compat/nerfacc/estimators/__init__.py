"""What places samples along rays."""

from .base import AbstractEstimator, N3TreeEstimator, VDBEstimator, traverse_vdbs
from .occ_grid import OccGridEstimator
from .prop_net import PropNetEstimator

__all__ = ["AbstractEstimator", "N3TreeEstimator", "OccGridEstimator", "PropNetEstimator", "VDBEstimator"]
__all__ += ["traverse_vdbs"]
