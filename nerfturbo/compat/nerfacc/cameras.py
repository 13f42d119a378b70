"""OpenCV's lens models with nerfacc's names: those of `data.lenses`, whose Newton steps wait for no device."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...data.lenses import LENS_MODELS, CameraModel
from ...errors import refuse

__all__ = ["opencv_lens_undistortion", "opencv_lens_undistortion_fisheye"]


@torch.no_grad()
def opencv_lens_undistortion(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """(..., 2) undistorted points on the plane at depth 1, for params (..., n) or (n,). n is 0 (nothing to undo), 1
    (k1), 2 (k1 k2), 4 (k1 k2 p1 p2) or 8 (k1 k2 p1 p2 k3 k4 k5 k6). Not differentiable. `eps` and `iters` are accepted
    and not needed: there are always as many steps as float32 can use."""
    return _through("opencv", uv, params, (0, 1, 2, 4, 8), back=True)


@torch.no_grad()
def opencv_lens_undistortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-6, iters: int = 10) -> Tensor:
    """`opencv_lens_undistortion` of a fisheye lens: params (..., 4) or (4,) are k1 k2 k3 k4."""
    return _through("fisheye", uv, params, (4,), back=True)


_opencv_lens_undistortion = opencv_lens_undistortion


def _opencv_lens_distortion(uv: Tensor, params: Tensor) -> Tensor:
    """Where the lens puts undistorted points (..., 2)."""
    return _through("opencv", uv, params, (0, 1, 2, 4, 8), back=False)


def _opencv_lens_distortion_fisheye(uv: Tensor, params: Tensor, eps: float = 1e-10) -> Tensor:
    """Where a fisheye lens puts undistorted points (..., 2)."""
    return _through("fisheye", uv, params, (4,), back=False)


def _through(model: CameraModel, uv: Tensor, params: Tensor, sizes: tuple[int, ...], *, back: bool) -> Tensor:
    refuse(uv.shape[-1] != 2, "uv", "shape (..., 2)", tuple(uv.shape))
    n, lens, points = params.shape[-1], LENS_MODELS[model], uv.reshape(-1, 2)
    refuse(n not in sizes, "params", f"{', '.join(map(str, sizes))} coefficients", n)
    coefficients = pad(params, (0, 8 - n)).expand(*uv.shape[:-1], 8).reshape(-1, 8)
    if back:
        directions = lens.unproject(points, coefficients)
        return (directions[:, :2] / directions[:, 2:]).view(uv.shape)
    return lens.project(pad(points, (0, 1), value=1.0), coefficients).view(uv.shape)
