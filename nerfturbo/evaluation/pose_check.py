"""Are the poses right? What neighbouring images both show, against where their cameras say that it can lie.

N = a . (t x b)   of two rays a, b in world axes and the way t from one camera to the other: 0 where the rays meet
r = N / |dN|      dN is the derivative to the four pixel coordinates: Sampson's distance, in pixels

A fundamental matrix of each pair, by RANSAC and without any pose, drops wrong matches and says what error is the
features' own. Lenses are fitted to one half of the matches and judged by the other: a focal length or principal point
fits better where it moves by `SIGMAS` standard deviations, if the errors of an image move together as those of a wrong
pose do, and the median error falls by `GAIN`. Lengths of baselines do not show in this error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.cameras import PIXEL_CENTER, Cameras
from ..data.images import image_size, to_bytes
from ..data.lenses import distinct_lenses
from ..data.scene import Scene
from .evaluate import truth_image
from .report import data_uri

SIDE, FEATURES = 1024, 2000  # pixels of the longer side that features are looked for in, and how many of them
RATIO, BAND = 0.8, 2.0  # of the best distance to the second best; pixels that RANSAC allows
LEAST_MATCHES, LEAST_SHARE, MOST_MATCHES = 24, 0.4, 160  # of a pair that counts
RANKS, WIDEST, BASELINE = (0, 1, 2, 4, 7), 50.0, 0.05  # neighbours to pair with; degrees; of the usual distance
SIGMAS, GAIN, LEAST_CHANGE = 3.0, 0.05, 0.001  # the last as a share of the focal length
LARGE, TIMES = 1.0, 3.0  # errors are large beyond so many pixels and so many times the usual one
_AROUND = torch.tensor([[0.0, 0.0], [0.5, 0.0], [-0.5, 0.0], [0.0, 0.5], [0.0, -0.5]])
_PARTS = (slice(None), slice(0, None, 2), slice(1, None, 2))  # all matches, those to fit, those to judge
_Words = tuple[np.ndarray, Tensor]  # (k, 2) pixels and (k, 128) unit descriptors


class Matches:
    """m features, each at pixels[:, 0] (m, 2, 2) in image views[:, 0] (m, 2) and at pixels[:, 1] in views[:, 1]. Lenses
    change by (n, 4): logarithms of factors of fx and fy, then shifts of the principal point in focal lengths."""

    def __init__(self, cameras: Cameras, views: Tensor, pixels: Tensor) -> None:
        self.views, self.n, index = views, len(cameras), views.reshape(-1).repeat_interleave(len(_AROUND))
        around = (pixels.reshape(-1, 1, 2).float() + _AROUND).reshape(-1, 2)
        at = cameras.local_directions(index, *around.unbind(-1)).double().view(-1, 2, len(_AROUND), 3).unbind(2)
        poses = cameras.camera_to_world.double()[views]  # (m, 2, 3, 4)
        self.rays = poses[..., :3] @ torch.stack([at[0], at[1] - at[2], at[3] - at[4]], -1)  # and slopes to a pixel
        self.way = poses[:, 1, :, 3] - poses[:, 0, :, 3]
        self.focal = cameras.focal.double()[views]
        self.offsets = (pixels - cameras.center.double()[views]) / self.focal

    def residuals(self, *lenses: Tensor) -> Tensor:
        """(m,) signed, in pixels; lenses of the first images and of the second."""
        ends = []
        for side, lens in enumerate(lenses):
            scale, shift = lens[self.views[:, side]].split(2, dim=-1)
            offset, rays = self.offsets[:, side], self.rays[:, side]
            by = ((offset - shift) * torch.exp(-scale) - offset) * self.focal[:, side]  # in pixels of the lens as it is
            slopes = rays[..., 1:] * torch.exp(-scale)[:, None]
            ends.append((rays[..., 0] + (rays[..., 1:] * by[:, None]).sum(-1), slopes))
        (a, slopes_a), (b, slopes_b) = ends
        normal, other = torch.linalg.cross(self.way, b), torch.linalg.cross(a, self.way)
        slopes = torch.cat([(slopes_a * normal[..., None]).sum(1), (slopes_b * other[..., None]).sum(1)], -1)
        return (a * normal).sum(-1) / slopes.norm(dim=-1).clamp_min(1e-12)

    def errors(self, lens: Tensor | None = None) -> Tensor:
        lens = torch.zeros(self.n, 4).double() if lens is None else lens
        return self.residuals(lens, lens).abs()

    def fit(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 4) the lenses, alike in a `group` (n,), that fit best (Gauss-Newton, Cauchy's loss); their deviations."""
        columns = 4 * group[:, None] + torch.arange(4)
        found = torch.zeros(int(columns.max()) + 1).double()
        for _ in range(12):
            lens, step = found[columns], 1e-6
            value, slopes = self.residuals(lens, lens), torch.zeros(len(self.views), len(found)).double()
            for k, change in enumerate(step * torch.eye(4).double()):
                for side, both in enumerate(((lens + change, lens), (lens, lens + change))):
                    slope = (self.residuals(*both) - value) / step
                    slopes.scatter_add_(1, columns[self.views[:, side], k, None], slope[:, None])
            width = 3.0 * value.abs().median().clamp_min(0.1)
            weighted = slopes / (1.0 + (value / width).square())[:, None]
            matrix = weighted.T @ slopes
            matrix = matrix + 1e-9 * matrix.diagonal().max() * torch.eye(len(found))
            found = found - torch.linalg.solve(matrix, weighted.T @ value).clamp(-0.1, 0.1)
        scores = torch.zeros(self.n, len(found)).double()
        for side in (0, 1):
            scores.index_add_(0, self.views[:, side], weighted * value[:, None])
        return found[columns], torch.linalg.solve(matrix, scores.T).norm(dim=1)[columns]


def check_poses(scenes: Sequence[Scene], most: int, report: Callable[[str, float], None]) -> dict[str, Any]:
    """What the images of a scene's splits say about its cameras, as plain values, with drawings of the worst pairs. Of
    more than `most` images, runs of neighbours by name are compared; `report` hears what is done and how far it is."""
    views = [(scene, i) for scene in scenes for i in range(len(scene))]
    views.sort(key=lambda view: view[0].files[view[1]] if view[0].files else "")
    n_views, run = len(views), min(4, most)
    if n_views > most:
        views = [views[k * n_views // (most // run) + j] for k in range(most // run) for j in range(run)]
    cameras, words, kept = _joined([scene.cameras[i] for scene, i in views]), [], {}
    for (scene, i), size in zip(views, cameras.size.tolist(), strict=True):
        report("looking for features", len(words) / len(views))
        words.append(_features(scene, i, size))
    tried = choose_pairs(cameras)
    for k, pair in enumerate(tried):
        report("matching", k / len(tried))
        if (matched := _match(cameras, pair, words)) is not None:
            kept[pair] = matched
    files = [Path(scene.files[i] if scene.files else f"{scene.split}/{i}") for scene, i in views]
    depth = 1 if len({file.name for file in files}) == len(files) else 2
    names = ["/".join(file.parts[-depth:]) for file in files]
    few = [name for k, name in enumerate(names) if not any(k in pair for pair in kept)]
    found = {"scene": scenes[0].name, "views": n_views, "images": names, "size": cameras.size[0].tolist()}
    found |= {"tried_pairs": len(tried), "matches": sum(len(pixels) for pixels, _ in kept.values()), "few_matches": few}
    if len(kept) < 2 or 2 * len(few) > len(names):
        shared = f"{len(kept)} of {len(tried)} pairs of neighbouring images share {LEAST_MATCHES} features or more"
        why = shared if tried else f"no two of {len(names)} images look one way from different places"
        found |= {key: [] for key in ("pairs", "by_image", "wrong_images", "better", "drawings")}
        return found | {"verdict": "unknown", "text": f"Too little to say: {why}."}
    whole = [image_size(f) if s.files else s.cameras.size[i].tolist() for f, (s, i) in zip(files, views, strict=True)]
    whole, wide = torch.tensor(whole), cameras.size[:, :1] > cameras.size[:, 1:]
    whole = torch.where((whole[:, :1] > whole[:, 1:]) == wide, whole, whole.flip(1))  # stored sideways
    found |= judge(cameras, kept, names, whole / cameras.size)
    found["drawings"] = []
    for i, j, _, error in sorted(found["pairs"], key=lambda row: -row[3])[:4]:
        some = kept[i, j][0][:: max(1, len(kept[i, j][0]) // 10)]
        sides = [_drawn(views[i], cameras, (j, i), some.flip(1)), _drawn(views[j], cameras, (i, j), some)]
        found["drawings"].append({"names": [names[i], names[j]], "error": error, "sides": sides})
    return found | {"text": _sentence(found)}


def _joined(parts: Sequence[Cameras]) -> Cameras:
    """With images of at most `SIDE` pixels."""
    names = ("camera_to_world", "focal", "center", "size", "distortion")[: 4 if parts[0].distortion is None else 5]
    joined = replace(parts[0], times=None, **{name: torch.cat([getattr(p, name) for p in parts]) for name in names})
    return joined.resized((joined.size * (SIDE / joined.size.amax(1, keepdim=True)).clamp(max=1.0)).round().long())


def _features(scene: Scene, index: int, size: list[int]) -> _Words:
    """Of an image of `size`, inside its mask."""
    import cv2

    grey = cv2.cvtColor(to_bytes(truth_image(scene, index, (0.5, 0.5, 0.5))).numpy(), cv2.COLOR_RGB2GRAY)
    used = scene.used_pixels(index)
    mask = None if used is None else cv2.resize(used.byte().numpy(), size, interpolation=cv2.INTER_NEAREST)
    sift = cv2.SIFT_create(FEATURES, enable_precise_upscale=True)  # pyright: ignore[reportAttributeAccessIssue]
    points, words = sift.detectAndCompute(cv2.resize(grey, size, interpolation=cv2.INTER_AREA), mask)
    words = torch.from_numpy(words) if points else torch.zeros(0, 128)
    pixels = np.array([point.pt for point in points]).reshape(-1, 2) + PIXEL_CENTER
    return pixels, torch.nn.functional.normalize(words, p=1.0, dim=1).sqrt()


def choose_pairs(cameras: Cameras) -> list[tuple[int, int]]:
    """Neighbours in place and view, some of them farther, and in name: poses may be wrong. None without a baseline."""
    n, places = len(cameras), cameras.positions
    apart = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")  # exactly 0 to itself
    apart = apart / apart.sort(1).values[:, min(3, n - 1)].median().clamp_min(1e-9)
    angle = (cameras.forward @ cameras.forward.T).clamp(-1.0, 1.0).arccos().rad2deg()
    far = (apart + angle / 10.0).masked_fill((angle > WIDEST) | (apart < BASELINE), torch.inf)
    near = far.argsort(1).tolist()
    found = [(i, near[i][rank]) for i in range(n) for rank in RANKS if rank < n and far[i, near[i][rank]] < torch.inf]
    found += [(i, i + 1) for i in range(n - 1) if apart[i, i + 1] >= BASELINE]
    return sorted({(min(pair), max(pair)) for pair in found})


def _match(cameras: Cameras, pair: tuple[int, int], words: list[_Words]) -> tuple[Tensor, float] | None:
    """(k, 2, 2) pixels of what two images show, and the error that is the features' own; None where they are few."""
    import cv2

    (here, one), (there, two) = (words[view] for view in pair)
    if min(len(here), len(there)) < LEAST_MATCHES:
        return None
    alike = one @ two.T
    (best, second), (to, _) = (each.unbind(1) for each in alike.topk(2, dim=1))
    mutual = alike.max(0).indices[to] == torch.arange(len(one))  # half the time of argmax
    rows = (mutual & (1.0 - best < RATIO**2 * (1.0 - second))).nonzero()[:, 0]
    pixels = torch.from_numpy(np.stack([here[rows], there[to[rows]]], 1))
    index = torch.tensor(pair).repeat(len(rows))
    local = cameras.local_directions(index, *pixels.float().view(-1, 2).unbind(-1)).view(-1, 2, 3)
    ahead = (local[..., 2] < -0.1 * local.norm(dim=-1)).all(-1)  # what a plane can show
    plane = (local[ahead, :, :2] / local[ahead, :, 2:] * cameras.focal[pair[0]].mean()).numpy()
    if len(plane) < LEAST_MATCHES:
        return None
    matrix, fits = cv2.findFundamentalMat(plane[:, 0], plane[:, 1], cv2.USAC_MAGSAC, BAND, 0.999, 5000)
    if matrix is None or fits.sum() < max(LEAST_MATCHES, LEAST_SHARE * len(plane)):
        return None
    kept = np.flatnonzero(fits)
    kept = kept[:: -(-len(kept) // MOST_MATCHES)]
    x, y = (np.pad(plane[kept, side], ((0, 0), (0, 1)), constant_values=1.0) for side in (0, 1))
    slope = np.linalg.norm(np.hstack([(x @ matrix.T)[:, :2], (y @ matrix)[:, :2]]), axis=1)
    return pixels[ahead][kept], float(np.median(np.abs((y * (x @ matrix.T)).sum(1)) / slope))


def judge(
    cameras: Cameras, kept: dict[tuple[int, int], tuple[Tensor, float]], names: list[str], ratio: Tensor
) -> dict[str, Any]:
    """Errors of pairs and images, lenses that fit better, and the kind of the verdict. A pair has its matches (k, 2, 2)
    and the error that is theirs; lenses are told in pixels of the files, `ratio` (n, 2) times those of the cameras."""
    counts, floors = [len(pixels) for pixels, _ in kept.values()], [floor for _, floor in kept.values()]
    floor = float(np.median(floors))
    views = torch.tensor(list(kept)).repeat_interleave(torch.tensor(counts), 0)
    pixels = torch.cat([pixels for pixels, _ in kept.values()])
    images, group = distinct_lenses(cameras)
    if len(images) > 4 or int(torch.bincount(group).min()) < 5:  # lenses of few images each: one factor for all
        images, group = torch.zeros(1, dtype=torch.int64), torch.zeros_like(group)
    every, learning, judging = (Matches(cameras, views[k], pixels[k]) for k in _PARTS)
    lens, spread = learning.fit(group)
    gain, better = [float(judging.errors(one).median()) for one in (None, lens)], []
    for k in images.tolist() if gain[1] < (1.0 - GAIN) * gain[0] else []:
        focal, center = cameras.focal[k].double() * ratio[k], cameras.center[k].double() * ratio[k]
        new, unit = torch.cat([focal * lens[k, :2].exp(), center + focal * lens[k, 2:]]), focal.repeat(2)
        columns = (torch.cat([focal, center]), new, unit * spread[k], unit)
        for what, *row in zip(("fx", "fy", "cx", "cy"), *(column.tolist() for column in columns), strict=True):
            if abs(row[1] - row[0]) > max(LEAST_CHANGE * row[3], SIGMAS * row[2]):
                better.append({"what": what, "given": row[0], "better": row[1], "deviation": row[2], "image": names[k]})
    errors, left = every.errors(), every.errors(lens if better else None)
    by_pair, left_by_pair = (np.array([part.median() for part in values.split(counts)]) for values in (errors, left))
    owned = {k: own for k in range(len(names)) if (own := [place for place, pair in enumerate(kept) if k in pair])}
    by_image = [
        {"image": names[k], "error": np.median(by_pair[own]), "left": np.median(left_by_pair[own]), "pairs": len(own)}
        for k, own in owned.items()
    ]
    by_image.sort(key=lambda row: -row["left"])
    limit = max(LARGE, TIMES * float(np.median([row["left"] for row in by_image])))
    wrong = [row["image"] for row in by_image if row["left"] > limit]
    found = {"error": float(errors.median()), "left": float(left.median()), "floor": floor, "gain": gain}
    found |= {"better": better, "by_image": by_image, "wrong_images": wrong}
    found["pairs"] = [(*pair, n, error) for pair, n, error in zip(kept, counts, by_pair.tolist(), strict=True)]
    found["histogram"] = torch.histc(errors, 40, 0.0, 4.0 * max(0.5, found["error"])).tolist()
    if found["left"] > max(LARGE, 2.0 * floor) or len(wrong) > 0.3 * len(by_image):
        return found | {"verdict": "poses", "better": []}
    return found | {"verdict": "lens" if better else "images" if wrong else "right"}


def _sentence(found: dict[str, Any]) -> str:
    missed, parts, wrong = "matches miss their epipolar lines by {:.2f} px in the median", [], found["wrong_images"]
    if found["verdict"] == "right":
        return f"The poses are right: {missed.format(found['error'])}."
    if found["verdict"] == "poses":
        allowed = f"where features alone allow {found['floor']:.2f} px"
        return f"The poses are wrong: {missed.format(found['error'])}, {allowed}."
    if rows := found["better"]:
        most = max(rows, key=lambda row: abs(row["better"] - row["given"]) / row["deviation"])["what"]
        of = (lambda row: f" of {row['image']}") if len({row["image"] for row in rows}) > 1 else lambda row: ""
        fits = ", ".join(f"{r['what']}{of(r)} {r['given']:.5g} fits better as {r['better']:.5g}" for r in rows)
        kind = "focal length" if most in ("fx", "fy") else "principal point"
        parts = [f"The {kind} is off: {fits} ({found['gain'][0]:.2f} px -> {found['gain'][1]:.2f} px)"]
    if wrong:
        named = ", ".join(f"{row['image']} by {row['left']:.1f} px" for row in found["by_image"][: min(3, len(wrong))])
        among = f"{len(wrong)} of {len(found['by_image'])} images, {named}{', ...' if len(wrong) > 3 else ''}"
        parts += [f"Wrong poses: {among}, where {found['left']:.2f} px is usual"]
    return "; ".join(parts) + "."


def _drawn(view: tuple[Scene, int], cameras: Cameras, pair: tuple[int, int], pixels: Tensor) -> dict[str, Any]:
    """The second image of a pair, with matches (k, 2, 2) and the epipolar line of each."""
    (first, second), size, buffer = pair, cameras.size[pair[1]].tolist(), io.BytesIO()
    Image.fromarray(to_bytes(truth_image(*view)).numpy()).resize(size).save(buffer, "WEBP", quality=80)
    rays = cameras.rays(torch.full((len(pixels),), first), *pixels[:, 0].float().unbind(-1))
    reach = (cameras.positions[first] - cameras.positions[second]).norm() * torch.logspace(-1.0, 4.0, 96)
    points = (rays.origins[:, None] + rays.directions[:, None] * reach[:, None]).view(-1, 3)
    at, depth = cameras.project(torch.full((len(points),), second), points)
    seen = ((depth > 0.0) & (at.abs().amax(-1) < 4.0 * SIDE)).view(len(pixels), -1)
    lines = [line[shown].round().tolist() for line, shown in zip(at.view(len(pixels), -1, 2), seen, strict=True)]
    image = data_uri("image/webp", buffer.getvalue())
    return {"size": size, "image": image, "points": pixels[:, 1].tolist(), "lines": lines}
