"""Photographs of a corner of a room with known poses: three textured walls, seen by exact perspective."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, FOCAL = 320, 240, 300.0
_TEXELS = 256


def eyes(n_views: int) -> np.ndarray:
    """(n, 3): on an arc in front of the corner, at changing heights."""
    angle = np.linspace(0.35, 1.2, n_views)
    height = 1.0 + 0.25 * np.sin(5.0 * angle)
    return np.stack([3.2 * np.cos(angle), 3.2 * np.sin(angle), height], -1)


def picture(eye: np.ndarray, blur: int = 0) -> np.ndarray:
    """(HEIGHT, WIDTH, 3) uint8; `blur` smears it sideways by that many pixels."""
    forward = np.array([0.3, 0.3, 0.6]) - eye
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5 - WIDTH / 2, np.arange(HEIGHT) + 0.5 - HEIGHT / 2)
    rays = forward + (x[..., None] * right + y[..., None] * down) / FOCAL  # (H, W, 3)
    result, nearest = np.full((HEIGHT, WIDTH, 3), 30.0), np.full((HEIGHT, WIDTH), np.inf)
    for axis in range(3):  # the walls x = 0, y = 0 and the floor z = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            t = -eye[axis] / rays[..., axis]
        hit = eye + t[..., None] * rays
        u, v = (hit[..., other] for other in range(3) if other != axis)
        seen = (t > 0.0) & (t < nearest) & (u >= 0.0) & (v >= 0.0) & (u < 2.5) & (v < 2.5)
        result[seen] = _texture(axis, u[seen], v[seen])
        nearest[seen] = t[seen]
    if blur:
        kernel = np.ones(blur) / blur
        result = np.apply_along_axis(lambda row: np.convolve(row, kernel, mode="same"), 1, result)
    return result.clip(0.0, 255.0).astype(np.uint8)


def _texture(axis: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Smooth random spots, bilinear between texels."""
    draw = np.random.default_rng(axis)
    texels = draw.uniform(0.0, 255.0, (_TEXELS, _TEXELS, 3))
    texels = sum(np.roll(texels, (a, b), (0, 1)) for a in range(2) for b in range(2)) / 4.0
    a, b = u / 2.5 * (_TEXELS - 2), v / 2.5 * (_TEXELS - 2)
    i, j = a.astype(int), b.astype(int)
    fa, fb = (a - i)[:, None], (b - j)[:, None]
    upper = texels[i, j] * (1 - fb) + texels[i, j + 1] * fb
    return upper * (1 - fa) + (texels[i + 1, j] * (1 - fb) + texels[i + 1, j + 1] * fb) * fa


def write_photos(folder: Path, n_views: int = 8) -> Path:
    """JPEG and PNG files, one of them lying on its side with an EXIF tag that says so."""
    folder.mkdir(parents=True)
    for index, eye in enumerate(eyes(n_views)):
        image = Image.fromarray(picture(eye))
        if index == 2:  # taken with the camera turned: stored rotated, to be shown upright
            exif = Image.Exif()
            exif[0x0112] = 6
            image.rotate(90, expand=True).save(folder / f"p{index:02d}.jpg", quality=97, exif=exif)
        elif index == 3:
            image.save(folder / f"p{index:02d}.webp", lossless=True)
        elif index % 2:
            image.save(folder / f"p{index:02d}.png")
        else:
            image.save(folder / f"p{index:02d}.jpg", quality=97)
    (folder / "notes.txt").write_text("not a photo")
    return folder


def aligned_error(found: np.ndarray, true: np.ndarray) -> float:
    """Largest distance left after the best similarity, as a share of how far the true positions spread."""
    a, b = found - found.mean(0), true - true.mean(0)
    u, s, vt = np.linalg.svd(a.T @ b)
    flip = np.diag([1.0, 1.0, np.sign(np.linalg.det(u @ vt))])
    scale = (s * np.diag(flip)).sum() / (a**2).sum()
    return float(np.linalg.norm(scale * a @ (u @ flip @ vt) - b, axis=1).max() / np.linalg.norm(b, axis=1).max())
