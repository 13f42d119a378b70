"""Rays to packed samples."""

from .contraction import contract, uncontract
from .estimator import DensityFn, Estimator, SigmaFn
from .many_scenes import march_scenes
from .occupancy_grid import OccupancyGrid
from .uniform import uniform_samples

__all__ = [
    "DensityFn",
    "Estimator",
    "OccupancyGrid",
    "SigmaFn",
    "contract",
    "march_scenes",
    "uncontract",
    "uniform_samples",
]
