"""Cameras of real captures against their own pictures: what OpenCV matches in two photos must lie on one another's
epipolar lines, by OpenCV's own undistortion and the poses that our loaders give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nerfturbo.data.cameras import Cameras, opengl_to_opencv, world_to_camera
from nerfturbo.data.scene import load_scene
from nerfturbo.evaluation.evaluate import truth_image

cv2 = pytest.importorskip("cv2", reason="OpenCV finds the features and undoes the lenses")

# Downscale, and pixels that the median of all matches may be off. Features are found to a fifth of a pixel at best.
SCENES = {"ngp/fruit": (1, 0.8), "ngp/fox": (4, 0.5), "llff/fern": (1, 0.5), "colmap/beer": (2, 0.5)}
N_PAIRS = 4
Match = tuple[int, int, np.ndarray, np.ndarray]


def matches(folder: Path, downscale: int) -> tuple[Cameras, list[Match]]:
    """Pairs of neighbours, and where they show the same: pixel positions with the corner at 0, as our cameras count."""
    scene = load_scene(folder, downscale=downscale)
    sift, found = cv2.SIFT_create(1500), {}

    def features(view: int) -> tuple[np.ndarray, np.ndarray]:
        if view not in found:
            picture = (truth_image(scene, view) * 255.0 + 0.5).to(torch.uint8).numpy()
            points, words = sift.detectAndCompute(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), None)
            found[view] = np.array([point.pt for point in points]) + 0.5, words
        return found[view]

    distance = torch.cdist(scene.cameras.positions, scene.cameras.positions)
    pairs = []
    for view in range(0, len(scene), max(1, len(scene) // N_PAIRS)):
        other = int(distance[view].argsort()[2])  # the second nearest: not too much the same
        (here, words), (there, others) = features(view), features(other)
        near = cv2.BFMatcher().knnMatch(words, others, k=2)
        same = [(one.queryIdx, one.trainIdx) for one, two in near if one.distance < 0.7 * two.distance]
        here, there = here[[i for i, _ in same]], there[[j for _, j in same]]
        _, fits = cv2.findFundamentalMat(here, there, cv2.FM_RANSAC, 3.0, 0.999)  # matches alone decide, no pose
        keep = fits.ravel().astype(bool)
        if keep.sum() >= 20:
            pairs.append((view, other, here[keep], there[keep]))
    return scene.cameras, pairs


def epipolar_errors(cameras: Cameras, pairs: list[Match]) -> np.ndarray:
    """Pixels between a feature and the epipolar line of its match, the mean of both pictures."""
    poses = world_to_camera(opengl_to_opencv(cameras.camera_to_world.double())).numpy()
    errors = []
    for one, two, here, there in pairs:
        turn = poses[two, :, :3] @ poses[one, :, :3].T
        shift = poses[two, :, 3] - turn @ poses[one, :, 3]
        x, y, z = shift
        essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ turn
        first, second = (_undone(cameras, view, points) for view, points in ((one, here), (two, there)))
        lines, back = first @ essential.T, second @ essential
        off = np.abs((second * lines).sum(-1))
        focal = cameras.focal[one].mean().item()
        errors.append(0.5 * focal * off * sum(1.0 / np.linalg.norm(line[:, :2], axis=-1) for line in (lines, back)))
    return np.concatenate(errors)


def _undone(cameras: Cameras, view: int, points: np.ndarray) -> np.ndarray:
    """(n, 3): on the plane at depth 1, by OpenCV."""
    (fx, fy), (cx, cy) = cameras.focal[view].tolist(), cameras.center[view].tolist()
    matrix = np.array([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])
    lens = np.zeros(8) if cameras.distortion is None else cameras.distortion[view].double().numpy()
    plane = cv2.undistortPoints(points[:, None], matrix, lens)
    return np.concatenate([plane[:, 0], np.ones((len(points), 1))], axis=1)


@pytest.mark.parametrize("name", SCENES)
def test_cameras_fit_what_their_pictures_show(scene_dir: Callable[[str], Path], name: str) -> None:
    downscale, bound = SCENES[name]
    cameras, pairs = matches(scene_dir(name), downscale)
    assert len(pairs) >= 3 and sum(len(pair[2]) for pair in pairs) >= 200
    error = float(np.median(epipolar_errors(cameras, pairs)))
    assert error < bound
    if name == "ngp/fruit":  # a strong lens, off its centre: any other reading of it must fit worse
        assert cameras.distortion is not None
        signs = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
        others = {
            "tangential signs": replace(cameras, distortion=cameras.distortion * signs),
            "no lens": replace(cameras, distortion=torch.zeros_like(cameras.distortion)),
            "focal lengths swapped": replace(cameras, focal=cameras.focal.flip(-1)),
            "centred": replace(cameras, center=cameras.size / 2.0),
            "centre mirrored": replace(cameras, center=cameras.size - cameras.center),
        }
        worse = {other: float(np.median(epipolar_errors(changed, pairs))) for other, changed in others.items()}
        assert min(worse.values()) > 1.15 * error, worse
    flipped = cameras.camera_to_world * torch.tensor([1.0, -1.0, -1.0, 1.0])  # OpenCV's axes taken for OpenGL's
    wrong = epipolar_errors(replace(cameras, camera_to_world=flipped), pairs)
    assert np.median(wrong) > 5.0 * bound
