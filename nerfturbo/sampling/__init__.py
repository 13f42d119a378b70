"""Rays to packed samples."""

from ..ops.positions import contract, uncontract
from .contracted_grid import ContractedGrid
from .estimator import DensityFn, Estimator, SigmaFn
from .histograms import Histogram, annealing, interlevel_loss
from .many_scenes import march_scenes
from .occupancy_grid import OccupancyGrid
from .proposals import Draw, HierarchyEstimator, ProposalEstimator, ProposedSamples, RayEstimator
from .spans import RaySpan
from .uniform import uniform_samples

__all__ = [
    "ContractedGrid",
    "DensityFn",
    "Draw",
    "Estimator",
    "HierarchyEstimator",
    "Histogram",
    "OccupancyGrid",
    "ProposalEstimator",
    "ProposedSamples",
    "RayEstimator",
    "RaySpan",
    "SigmaFn",
    "annealing",
    "contract",
    "interlevel_loss",
    "march_scenes",
    "uncontract",
    "uniform_samples",
]
