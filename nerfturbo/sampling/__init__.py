"""Rays to packed samples."""

from ..ops.positions import contract, uncontract
from .contracted import ContractedGrid
from .grid import GridSampler, MarchSettings, OccupancyGrid, march_scenes
from .histograms import Histogram, RaySpan, annealing, interlevel_loss
from .proposals import HierarchyEstimator, ProposalEstimator
from .sampler import DensityFn, Draw, Pruning, Sampler, SigmaFn
from .uniform import ProposedSamples, UniformEstimator

__all__ = ["ContractedGrid", "DensityFn", "Draw", "GridSampler", "HierarchyEstimator", "Histogram", "MarchSettings"]
__all__ += ["OccupancyGrid", "ProposalEstimator", "ProposedSamples", "Pruning", "RaySpan", "Sampler", "SigmaFn"]
__all__ += ["UniformEstimator", "annealing", "contract", "interlevel_loss", "march_scenes", "uncontract"]
