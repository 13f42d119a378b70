"""Sampling by proposal networks: cheap densities say where the next, finer samples go."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....errors import InputError, refuse
from ....ops.intervals import Spacing, spread
from .._rays import RayIntervals
from ..pdf import importance_sampling, searchsorted
from ..volrend import render_transmittance_from_density
from .base import AbstractEstimator

_SPACINGS: dict[str, Spacing] = {"uniform": "uniform", "lindisp": "disparity"}


class PropNetEstimator(AbstractEstimator):
    """Mip-NeRF 360's proposal sampling. The optimizer and its schedule, if given, are those of the networks."""

    def __init__(self, optimizer: Optimizer | None = None, scheduler: LRScheduler | None = None) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler
        self.prop_cache: list[tuple[RayIntervals, Tensor | None]] = []

    @torch.no_grad()
    def sampling(
        self, prop_sigma_fns: Sequence[Callable[[Tensor, Tensor], Tensor]], prop_samples: Sequence[int],
        num_samples: int, n_rays: int, near_plane: float, far_plane: float,
        sampling_type: Literal["uniform", "lindisp"] = "lindisp", stratified: bool = False,
        requires_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """t_starts, t_ends (n_rays, num_samples), drawn where the last of the proposal densities is.
        `prop_sigma_fns[i](t_starts, t_ends)` gives densities of `prop_samples[i]` samples per ray. "lindisp" spaces the
        first samples evenly in 1 / t. With `requires_grad` the densities keep their graph, and `compute_loss` or
        `update_every_n_steps` trains the networks with them."""
        numbers = [len(prop_sigma_fns), len(prop_samples)]
        refuse(numbers[0] != numbers[1], "prop_sigma_fns and prop_samples", "the same number", numbers)
        cdfs = torch.arange(2, dtype=torch.float32, device=self.device).expand(n_rays, 2).contiguous()
        intervals = RayIntervals(vals=cdfs)
        for sigma_fn, number in zip(prop_sigma_fns, prop_samples, strict=True):
            intervals, _ = importance_sampling(intervals, cdfs, number, stratified)
            t_vals = _transform_stot(sampling_type, intervals.vals, near_plane, far_plane)
            t_starts, t_ends = t_vals[..., :-1], t_vals[..., 1:]
            with torch.set_grad_enabled(requires_grad):
                sigmas = sigma_fn(t_starts, t_ends)
                refuse(sigmas.shape != t_starts.shape, "sigmas", f"shape {tuple(t_starts.shape)}", tuple(sigmas.shape))
                trans, _ = render_transmittance_from_density(t_starts, t_ends, sigmas)
                cdfs = _cdfs(trans)
                if requires_grad:
                    self.prop_cache.append((intervals, cdfs))
        intervals, _ = importance_sampling(intervals, cdfs, num_samples, stratified)
        t_vals = _transform_stot(sampling_type, intervals.vals, near_plane, far_plane)
        if requires_grad:
            self.prop_cache.append((intervals, None))
        return t_vals[..., :-1], t_vals[..., 1:]

    @torch.enable_grad()
    def compute_loss(self, trans: Tensor, loss_scaler: float = 1.0) -> Tensor:
        """() loss of the proposals against the transmittance (n_rays, num_samples) of the final samples."""
        if not self.prop_cache:
            return torch.zeros((), device=self.device)
        intervals, _ = self.prop_cache.pop()
        cdfs = _cdfs(trans).detach()
        loss = torch.zeros((), device=trans.device, dtype=trans.dtype)
        while self.prop_cache:
            proposal, proposal_cdfs = self.prop_cache.pop()
            assert proposal_cdfs is not None
            loss = loss + _pdf_loss(intervals, cdfs, proposal, proposal_cdfs).mean()
        return loss * loss_scaler

    @torch.enable_grad()
    def update_every_n_steps(self, trans: Tensor, requires_grad: bool = False, loss_scaler: float = 1.0) -> float:
        """Train the proposal networks on the last `sampling`, if it kept their graph; returns the loss."""
        loss = torch.zeros(())
        if requires_grad:
            refuse(not self.prop_cache, "requires_grad", "True in the last call of sampling", "nothing to learn from")
            if self.optimizer is None:
                raise InputError("optimizer", "the proposal networks' optimizer, given to PropNetEstimator", "none")
            loss = self.compute_loss(trans, loss_scaler)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.item()


def get_proposal_requires_grad_fn(target: float = 5.0, num_steps: int = 1000) -> Callable[[int], bool]:
    """A function of the step that says when to train the proposals: at first always, later every `target` steps."""
    since = 0

    def proposal_requires_grad_fn(step: int) -> bool:
        nonlocal since
        due = since > min(step / num_steps, 1.0) * target
        since = 1 if due else since + 1
        return due

    return proposal_requires_grad_fn


def _cdfs(trans: Tensor) -> Tensor:
    """What is absorbed up to each edge; the last edge absorbs the rest."""
    return 1.0 - torch.cat([trans, torch.zeros_like(trans[..., :1])], dim=-1)


def _transform_stot(transform_type: str, s_vals: Tensor, t_min: Any, t_max: Any) -> Tensor:
    """Normalised distances in [0, 1] to t, evenly in t or in 1 / t."""
    refuse(transform_type not in _SPACINGS, "sampling_type", '"uniform" or "lindisp"', repr(transform_type))
    # Numbers stay with the host, as tensors without dimensions may: copying them to a device would wait for it.
    near, far = (
        limit.to(s_vals) if isinstance(limit, Tensor) else torch.tensor(limit, dtype=s_vals.dtype)
        for limit in (t_min, t_max)
    )
    return spread(s_vals, near, far, kind=_SPACINGS[transform_type])


def _pdf_loss(
    segments_query: RayIntervals, cdfs_query: Tensor, segments_key: RayIntervals, cdfs_key: Tensor, eps: float = 1e-7
) -> Tensor:
    """How much each interval's weight exceeds what the key's intervals around it hold, squared, relative."""
    left, right = searchsorted(segments_key, segments_query)
    if segments_query.vals.dim() > 1:
        weights = cdfs_query[..., 1:] - cdfs_query[..., :-1]
        left, right = left[..., :-1], right[..., 1:]
    else:
        is_left, is_right = segments_query.is_left, segments_query.is_right
        if is_left is None or is_right is None:
            raise InputError("segments_query", "is_left and is_right beside flattened edges", "neither")
        weights = cdfs_query[is_right] - cdfs_query[is_left]
        left, right = left[is_left], right[is_right]
    around = cdfs_key.gather(-1, right) - cdfs_key.gather(-1, left)
    return (weights - around).clamp_min(0.0).square() / (weights + eps)


def _lossfun_outer(t: Tensor, w: Tensor, t_env: Tensor, w_env: Tensor) -> Tensor:
    """`_pdf_loss` from edges (..., n + 1) and weights (..., n), as the paper writes it."""
    cdfs, cdfs_env = (torch.nn.functional.pad(torch.cumsum(weights, dim=-1), (1, 0)) for weights in (w, w_env))
    return _pdf_loss(RayIntervals(t), cdfs, RayIntervals(t_env), cdfs_env, torch.finfo(t.dtype).eps)
