"""Rays to packed samples."""

from .estimator import DensityFn, Estimator, SigmaFn
from .occupancy_grid import OccupancyGrid
from .uniform import uniform_samples

__all__ = ["DensityFn", "Estimator", "OccupancyGrid", "SigmaFn", "uniform_samples"]
