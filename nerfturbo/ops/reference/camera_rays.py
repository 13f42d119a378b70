"""Rays of a picture in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def camera_rays(camera: Tensor, *, width: int, height: int) -> tuple[Tensor, Tensor]:
    pose, (fx, fy, cx, cy) = camera[:12].view(3, 4), camera[12:]
    x = (torch.arange(width, device=camera.device) + 0.5 - cx) / fx
    y = (torch.arange(height, device=camera.device) + 0.5 - cy) / fy
    y, x = torch.meshgrid(y, x, indexing="ij")
    local = torch.stack([x, -y, -torch.ones_like(x)], dim=-1).view(-1, 3)
    directions = torch.nn.functional.normalize((pose[:, :3] * local[:, None, :]).sum(-1), dim=-1)
    return pose[:, 3].expand(directions.shape[0], 3).contiguous(), directions
