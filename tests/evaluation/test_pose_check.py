"""`nerfturbo scene check` on a room that is ray traced here, with cameras that are right, then wrong in known ways."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nerfturbo.cli.main import main
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation import pose_check

from ..conftest import IN_CI

if IN_CI:
    import cv2  # noqa: F401 CI installs it
else:
    pytest.importorskip("cv2", reason="OpenCV finds the features: pip install 'nerfturbo[check]'")

WIDTH, HEIGHT, VIEWS = 320, 240, 14
FX, FY, CX, CY = 300.0, 290.0, 164.0, 117.0
SIDE = 306  # pixels: 229.5 rows, which are rounded
K1 = -0.08
BOXES = [
    ((-4, -4, -1), (4, 4, 3)),
    ((-1, -1, -1), (0.2, 0, 0.3)),
    ((0.6, 0.3, -1), (1.4, 1.2, 1)),
    ((-0.6, 0.8, -1), (0.1, 1.6, 0.6)),
]


def textures() -> np.ndarray:
    """(24, 128, 128) greys with blobs of several sizes, one for each face."""
    random, faces = np.random.default_rng(3), np.zeros((6 * len(BOXES), 128, 128))
    for cells in (16, 32, 64):
        for face in faces:
            small = Image.fromarray(random.normal(size=(cells, cells)).astype(np.float32))
            face += np.asarray(small.resize((128, 128), Image.Resampling.BICUBIC))
    return np.clip(127.5 + 48.0 * faces, 0, 255)


def poses() -> np.ndarray:
    """(n, 4, 4) OpenGL axes: two arcs, one above the other, around the boxes."""
    result = []
    for k in range(VIEWS):
        angle, height = -1.2 + 2.4 * (k // 2) / (VIEWS // 2 - 1), 0.7 + 0.7 * (k % 2)
        eye = np.array([2.8 * np.cos(angle), 2.8 * np.sin(angle), height])
        back = eye - np.array([0.1, 0.3, 0.0])
        back /= np.linalg.norm(back)
        right = np.cross([0.0, 0.0, 1.0], back)
        right /= np.linalg.norm(right)
        pose = np.eye(4)
        pose[:3] = np.stack([right, np.cross(back, right), back, eye], -1)
        result.append(pose)
    return np.array(result)


def undistorted(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u, v = x, y
    for _ in range(20):
        scale = 1.0 + K1 * (u * u + v * v)
        u, v = x / scale, y / scale
    return u, v


def traced(pose: np.ndarray, faces: np.ndarray) -> np.ndarray:
    """(height, width) what the camera sees of the boxes, the first of them from inside; the lens bends."""
    columns, rows = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    u, v = undistorted((columns - CX) / FX, (rows - CY) / FY)
    ways = np.stack([u, -v, -np.ones_like(u)], -1).reshape(-1, 3) @ pose[:3, :3].T
    eye, nearest, image = pose[:3, 3], np.full(len(ways), np.inf), np.zeros(len(ways))
    for number, (low, high) in enumerate(BOXES):
        ends = (np.array([low, high])[:, None] - eye) / ways  # (2, n, 3)
        enter, leave = ends.min(0), ends.max(0)
        distance = leave.min(1) if number == 0 else enter.max(1)
        axis = leave.argmin(1) if number == 0 else enter.argmax(1)
        hit = distance < nearest if number == 0 else (distance < leave.min(1)) & (distance > 0) & (distance < nearest)
        points = eye + ways[hit] * distance[hit, None]
        axis, far = (
            axis[hit],
            (np.take_along_axis(points, axis[hit][:, None], 1)[:, 0] > np.take((np.array(low) + high) / 2, axis[hit])),
        )
        others = np.array([[1, 2], [0, 2], [0, 1]])[axis]
        place = np.clip(np.take_along_axis(points, others, 1) * 32.0 + 256.0, 0, None) % 127.0
        (i, j), (s, t) = place.astype(int).T, (place % 1.0).T
        face = 6 * number + 2 * axis + far
        at = [faces[face, i + a, j + b] for a, b in ((0, 0), (1, 0), (0, 1), (1, 1))]
        image[hit] = at[0] * (1 - s) * (1 - t) + at[1] * s * (1 - t) + at[2] * (1 - s) * t + at[3] * s * t
        nearest[hit] = distance[hit]
    return image.reshape(HEIGHT, WIDTH)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, faces = tmp_path_factory.mktemp("room"), textures()
    (folder / "images").mkdir()
    random = np.random.default_rng(5)
    for index, pose in enumerate(poses()):
        noisy = traced(pose, faces) + random.normal(scale=2.0, size=(HEIGHT, WIDTH))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / "images" / f"{index:02d}.png")
    return folder


def write(folder: Path, matrices: np.ndarray, **changed: float) -> Path:
    lens = {"w": WIDTH, "h": HEIGHT, "fl_x": FX, "fl_y": FY, "cx": CX, "cy": CY, "k1": K1} | changed
    frames = [
        {"file_path": f"images/{k:02d}.png", "transform_matrix": matrix.tolist()} for k, matrix in enumerate(matrices)
    ]
    (folder / "transforms.json").write_text(json.dumps(lens | {"frames": frames}))
    return folder


def turned(matrices: np.ndarray, degrees: float, which: list[int]) -> np.ndarray:
    """Some poses, each turned about an axis of its own."""
    import cv2

    random, result = np.random.default_rng(1), matrices.copy()
    for index in which:
        axis = random.normal(size=3)
        turn = cv2.Rodrigues(np.deg2rad(degrees) * axis / np.linalg.norm(axis))[0]
        result[index, :3, :3] = result[index, :3, :3] @ turn
    return result


Check = Callable[..., dict]
KNOWN: dict[tuple, tuple] = {}


@pytest.fixture(autouse=True)
def _features_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are the same in most tests: features of the same pixels are looked for once."""
    find = pose_check._features

    def known(scene: Scene, index: int, size: list[int]) -> tuple:
        used = scene.used_pixels(index)
        pixels = scene.images.image(index).numpy().tobytes()
        key = (pixels, None if used is None else used.numpy().tobytes(), *size)
        if key not in KNOWN:
            KNOWN[key] = find(scene, index, size)
        return KNOWN[key]

    monkeypatch.setattr(pose_check, "_features", known)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    def run(folder: Path, *flags: object) -> dict:
        capsys.readouterr()
        assert main(["scene", "check", str(folder), "--json", *map(str, flags)]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_right_cameras_are_right_and_nothing_is_written(room: Path, check: Check, tmp_path: Path) -> None:
    write(room, poses())
    before = sorted(room.rglob("*"))
    page = tmp_path / "page.html"
    found = check(room, "--output", page)
    assert found["verdict"] == "right" and found["text"].startswith("The poses are right"), found["text"]
    assert found["error"] < 0.4 and found["better"] == [] and found["wrong_images"] == []
    assert len(found["pairs"]) >= 20 and found["matches"] > 1000 and found["few_matches"] == []
    assert sorted(room.rglob("*")) == before
    text = page.read_text()
    assert "default-src 'none'" in text and text.count("data:image/webp") == 8 and "http-equiv" in text
    assert not re.search(r"(?:src|href)=\\?[\"']https?:", text)
    assert main(["scene", "check", str(room), "--output", str(page)]) == 2  # it is there


def test_a_wrong_focal_length_is_named_with_the_right_one(room: Path, check: Check) -> None:
    found = check(write(room, poses(), fl_x=1.02 * FX))
    assert found["verdict"] == "lens" and [row["what"] for row in found["better"]] == ["fx"], found["text"]
    (row,) = found["better"]
    assert row["given"] == pytest.approx(1.02 * FX) and row["better"] == pytest.approx(FX, rel=0.005)
    assert found["gain"][1] < 0.8 * found["gain"][0]
    assert f"fx {1.02 * FX:.5g} fits better as {row['better']:.5g}" in found["text"]


def test_lenses_are_told_in_pixels_of_the_files(room: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pose_check, "SIDE", SIDE)
    found = check(write(room, poses(), fl_y=1.02 * FY))
    (row,) = found["better"]
    assert found["size"] == [SIDE, round(HEIGHT * SIDE / WIDTH)] and found["size"][1] / HEIGHT != SIDE / WIDTH
    assert row["what"] == "fy" and row["given"] == pytest.approx(1.02 * FY)


def test_a_wrong_principal_point_is_named(room: Path, check: Check) -> None:
    found = check(write(room, poses(), cy=CY + 6.0))
    assert found["verdict"] == "lens" and "principal point" in found["text"]
    (row,) = [row for row in found["better"] if row["what"] == "cy"]
    assert row["better"] == pytest.approx(CY, abs=1.5)


def test_one_turned_image_is_named_as_the_worst(room: Path, check: Check) -> None:
    found = check(write(room, turned(poses(), 1.0, [5])))
    assert found["verdict"] == "images" and found["wrong_images"] == ["05.png"], found["text"]
    assert found["by_image"][0]["image"] == "05.png" and "05.png" in found["text"]
    assert found["better"] == []


def test_disturbed_poses_are_wrong_poses_not_a_wrong_lens(room: Path, check: Check) -> None:
    found = check(write(room, turned(poses(), 1.0, list(range(VIEWS)))))
    assert found["verdict"] == "poses" and found["error"] > 3.0 * found["floor"], found["text"]
    assert found["better"] == [] and "poses are wrong" in found["text"]


def test_too_little_to_say(room: Path, check: Check, tmp_path: Path) -> None:
    found = check(write(room, poses()), "--images", 2)
    assert found["verdict"] == "unknown" and found["images"] == ["00.png", "01.png"]
    plain = shutil.copytree(room, tmp_path / "plain")
    for file in (plain / "images").iterdir():
        Image.new("L", (WIDTH, HEIGHT), 90).save(file)
    found = check(plain, "--output", tmp_path / "empty.html")
    assert found["verdict"] == "unknown" and len(found["few_matches"]) == VIEWS
    assert "0 of" in found["text"] and (tmp_path / "empty.html").is_file()
    still = poses()
    still[:, :3, 3] = still[0, :3, 3]
    assert "from different places" in check(write(room, still))["text"]
    assert check("toybox", "--images", 4)["verdict"] in ("unknown", "right")


def test_bad_input_is_one_line(room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(room, poses())
    unposed = tmp_path / "photos"
    shutil.copytree(room / "images", unposed)
    cases = {
        str(unposed): "without",
        str(tmp_path / "nowhere"): "no such folder",
        f"{room} --images 1": "--images",
        f"{room} --output a.pdf": ".html",
    }
    for words, said in cases.items():
        assert main(["scene", "check", *words.split()]) == 2
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err, err


def test_without_opencv_the_command_to_install_it(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert main(["scene", "check", str(write(room, poses()))]) == 2
    assert "pip install 'nerfturbo[check]'" in capsys.readouterr().err


def test_an_interrupt_is_clean(room: Path) -> None:
    command = [sys.executable, "-m", "nerfturbo", "scene", "check", str(write(room, poses()))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    for line in process.stderr:
        if "features" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == "" and "Traceback" not in err and "interrupted" in err
