"""One ring of cameras as other programs export it: each writer follows the program's description of its format, in
numpy and scipy alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.spatial.transform import Rotation

N, WIDTH, HEIGHT = 18, 48, 30
FX, FY, CX, CY = 61.0, 55.0, 26.5, 13.25


class Ring(NamedTuple):
    """Cameras from world to camera with OpenCV axes: x_cam = rotation x + shift."""

    rotations: np.ndarray  # (n, 3, 3)
    shifts: np.ndarray  # (n, 3)

    @property
    def positions(self) -> np.ndarray:
        return -np.einsum("nji,nj->ni", self.rotations, self.shifts)


def ring(n: int = N) -> Ring:
    """Cameras about a point that look inwards, tilted and rolled: nothing is symmetric."""
    rotations, shifts = [], []
    for index in range(n):
        angle = 0.5 + 2.0 * np.pi * index / n
        eye = np.array([3.0 * np.cos(angle), 2.5 * np.sin(angle), 1.1 + 0.3 * np.sin(2.0 * angle)])
        forward = np.array([0.1, -0.2, 0.15]) - eye
        forward /= np.linalg.norm(forward)
        right = np.cross(forward, [0.05, 0.02, 1.0])
        right /= np.linalg.norm(right)
        rotation = Rotation.from_rotvec([0.0, 0.0, 0.1]).as_matrix() @ np.stack(
            [right, np.cross(forward, right), forward]
        )
        rotations.append(rotation)
        shifts.append(-rotation @ eye)
    return Ring(np.stack(rotations), np.stack(shifts))


RING = ring()
POINTS = np.random.default_rng(0).uniform(-0.8, 0.8, (200, 3))
NAMES = [f"frame{index}" for index in range(1, N + 1)]  # frame2 before frame10


def write_images(
    folder: Path, names: list[str] = NAMES, ending: str = ".png", size: tuple[int, int] = (WIDTH, HEIGHT)
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(names):
        Image.new("RGB", size, (12 * index, 100, 120)).save(folder / f"{name}{ending}")  # far enough apart for JPEG


def camera_to_world(*, opengl: bool) -> np.ndarray:
    """(n, 4, 4)."""
    poses = np.tile(np.eye(4), (N, 1, 1))
    poses[:, :3, :3] = RING.rotations.transpose(0, 2, 1) * ([1, -1, -1] if opengl else [1, 1, 1])
    poses[:, :3, 3] = RING.positions
    return poses


def write_opensfm(folder: Path, kind: str = "brown") -> Path:
    write_images(folder / "images")
    camera = {"projection_type": kind, "width": WIDTH, "height": HEIGHT}
    if kind == "brown":
        camera |= {
            "focal_x": FX / WIDTH,
            "focal_y": FY / WIDTH,
            "k1": -0.1,
            "k2": 0.02,
            "p1": 0.003,
            "p2": -0.002,
            "k3": 0.01,
        }
        camera |= {"c_x": (CX - WIDTH / 2) / WIDTH, "c_y": (CY - HEIGHT / 2) / WIDTH}
    else:
        camera |= {"focal": FX / WIDTH, "k1": -0.1, "k2": 0.02}
    shots = {
        f"{name}.png": {
            "rotation": Rotation.from_matrix(turn).as_rotvec().tolist(),
            "translation": shift.tolist(),
            "camera": "c",
        }
        for name, turn, shift in zip(NAMES, RING.rotations, RING.shifts, strict=True)
    }
    points = {str(index): {"coordinates": point.tolist(), "color": [1, 2, 3]} for index, point in enumerate(POINTS)}
    small = {"cameras": {"c": camera}, "shots": {}, "points": {}}
    document = [small, {"cameras": {"c": camera}, "shots": shots, "points": points}]
    (folder / "reconstruction.json").write_text(json.dumps(document))
    return folder


SIMILARITY = (Rotation.from_euler("xyz", [0.4, -0.7, 1.1]).as_matrix(), 2.5, np.array([10.0, -20.0, 5.0]))


def write_metashape(folder: Path, *, kind: str = "frame", place: str = "component", k4: float = 0.0) -> Path:
    """World = scale * turn * (chunk) + shift, so the poses in the file are those of the chunk."""
    write_images(folder / "images", ending=".jpg")
    turn, scale, shift = SIMILARITY
    lines = []
    for index, (name, pose) in enumerate(zip(NAMES, camera_to_world(opengl=False), strict=True)):
        inside = np.eye(4)
        inside[:3, :3] = turn.T @ pose[:3, :3]
        inside[:3, 3] = turn.T @ (pose[:3, 3] - shift) / scale
        text = " ".join(f"{value:.17g}" for value in inside.ravel())
        lines.append(
            f'<camera id="{index}" sensor_id="3" component_id="0" label="{name}"><transform>{text}</transform></camera>'
        )
    lines[1] = f'<group id="0" label="g" type="folder">{lines[1]}</group>'
    lines.append('<camera id="90" sensor_id="3" component_id="0" label="lost" />')
    off = re.sub('id="0"', 'id="91" enabled="false"', lines[0], count=1)
    lines.append(off)
    whole = "<transform><rotation>{}</rotation><translation>{}</translation><scale>{!r}</scale></transform>".format(
        " ".join(map(repr, turn.ravel().tolist())), " ".join(map(repr, shift.tolist())), scale
    )
    calibration = f"<f>{FY}</f><b1>{FX - FY}</b1><cx>{CX - WIDTH / 2}</cx><cy>{CY - HEIGHT / 2}</cy>"
    calibration += f"<k1>-0.1</k1><k2>0.02</k2><k3>0.01</k3><k4>{k4}</k4><p1>0.003</p1><p2>-0.002</p2>"
    size = f'<resolution width="{WIDTH}" height="{HEIGHT}"/>'
    components = f'<components><component id="0">{whole if place == "component" else ""}</component></components>'
    if place == "chunk":
        components = whole
        lines = [line.replace(' component_id="0"', "") for line in lines]
    (folder / "cameras.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?><document version="1.5.0"><chunk label="c" enabled="true"><sensors>'
        f'<sensor id="3" type="{kind}">{size}<calibration type="{kind}" class="initial"><f>1</f></calibration>'
        f'<calibration type="{kind}" class="adjusted">{size}{calibration}</calibration></sensor></sensors>'
        f"{components}<cameras>{''.join(lines)}</cameras>"
        '<frames><frame id="0"><cameras><camera camera_id="0"/></cameras></frame></frames></chunk></document>'
    )
    return folder


RC_HEADER = "#name,x,y,alt,heading,pitch,roll,f,px,py,k1,k2,k3,k4,t1,t2"


def write_rc_csv(folder: Path, header: str = RC_HEADER, file: str = "export.csv") -> Path:
    """A camera with all angles 0 looks down with the top of its image to the north; heading turns clockwise."""
    write_images(folder / "images", ending=".jpg")
    lines = [f"#cameras {N}", header]
    for name, pose in zip(NAMES, camera_to_world(opengl=True), strict=True):
        yaw, pitch, roll = Rotation.from_matrix(pose[:3, :3]).as_euler("ZXY", degrees=True)
        outer = [*pose[:3, 3], -yaw, pitch, roll]
        inner = [
            FX * 36.0 / WIDTH,
            (CX - WIDTH / 2) / WIDTH,
            (CY - HEIGHT / 2) / WIDTH,
            -0.1,
            0.02,
            0.01,
            0.0,
            0.003,
            -0.002,
        ]
        lines.append(",".join([f"{name}.jpg", *(f"{value:.17g}" for value in (*outer, *inner))]))
    (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def write_rc_xmp(folder: Path) -> Path:
    write_images(folder / "images", ending=".jpg")
    for name, turn, position in zip(NAMES, RING.rotations, RING.positions, strict=True):
        text = lambda values: " ".join(f"{value:.17g}" for value in np.ravel(values))  # noqa: E731
        (folder / "images" / f"{name}.xmp").write_text(
            '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            '<rdf:Description xmlns:xcr="http://www.capturingreality.com/ns/xcr/1.1#" xcr:Version="3" '
            f'xcr:DistortionModel="brown3t2" xcr:FocalLength35mm="{FX * 36.0 / WIDTH:.17g}" xcr:Skew="0" '
            f'xcr:AspectRatio="{FY / FX:.17g}" xcr:PrincipalPointU="{(CX - WIDTH / 2) / WIDTH:.17g}" '
            f'xcr:PrincipalPointV="{(CY - HEIGHT / 2) / WIDTH:.17g}">'
            f"<xcr:Rotation>{text(turn)}</xcr:Rotation><xcr:Position>{text(position)}</xcr:Position>"
            "<xcr:DistortionCoeficients>-0.1 0.02 0.01 0 0.003 -0.002</xcr:DistortionCoeficients>"
            "</rdf:Description></rdf:RDF></x:xmpmeta>"
        )
    return folder


def write_bundler(folder: Path) -> Path:
    write_images(folder / "images", ending=".jpg")
    lines = ["# Bundle file v0.3", f"{N + 1} {len(POINTS)}"]
    for turn, shift in zip(RING.rotations, RING.shifts, strict=True):
        flip = np.diag([1.0, -1.0, -1.0])
        lines.append(f"{FX} -0.1 0.02")
        lines += [" ".join(f"{value:.17g}" for value in row) for row in (*(flip @ turn), flip @ shift)]
    lines += ["0 0 0"] * 5  # an image that was not placed
    for point in POINTS:
        lines += [" ".join(map(repr, point.tolist())), "1 2 3", "1 0 5 1.0 2.0"]
    (folder / "bundle.out").write_text("\n".join(lines) + "\n")
    (folder / "list.txt").write_text("".join(f"./images/{name}.jpg 0 {FX}\n" for name in [*NAMES, "lost"]))
    return folder


def write_nsvf(folder: Path, *, single: bool = False) -> Path:
    prefixes = ["2" if index % 5 == 0 else "1" if index % 5 == 1 else "0" for index in range(N)]
    names = [f"{prefix}_{index}" for index, prefix in enumerate(prefixes)]
    write_images(folder / "rgb", names)
    (folder / "pose").mkdir()
    for name, pose in zip(names, camera_to_world(opengl=False), strict=True):
        np.savetxt(folder / "pose" / f"{name}.txt", pose)
    if single:
        (folder / "intrinsics.txt").write_text(f"{FX} {CX} {CY} 0.\n0. 0. 0.\n1.\n{HEIGHT} {WIDTH}\n")
    else:
        np.savetxt(folder / "intrinsics.txt", np.array([[FX, 0, CX, 0], [0, FY, CY, 0], [0, 0, 1, 0], [0, 0, 0, 1]]))
    (folder / "bbox.txt").write_text("-1.0 -1.1 -0.9 1.0 0.9 1.2 0.4")
    return folder


def write_neus(folder: Path, *, masks: bool = True) -> Path:
    write_images(folder / "image", [f"{index:03d}" for index in range(N)])
    inner, arrays = np.array([[FX, 0, CX], [0, FY, CY], [0, 0, 1.0]]), {}
    for index, (turn, shift) in enumerate(zip(RING.rotations, RING.shifts, strict=True)):
        world = np.eye(4)
        world[:3] = inner @ np.hstack([turn, shift[:, None]]) * (-3.0 if index % 2 else 0.5)  # of any scale and sign
        scale = np.diag([1.5, 1.5, 1.5, 1.0])
        scale[:3, 3] = [0.1, -0.2, 0.15]
        arrays |= {
            f"world_mat_{index}": world,
            f"scale_mat_{index}": scale,
            f"world_mat_inv_{index}": np.linalg.inv(world),
        }
    np.savez(folder / "cameras_sphere.npz", **arrays)
    if masks:
        (folder / "mask").mkdir()
        for index in range(N):
            mask = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            mask[5:, 10:] = 255
            Image.fromarray(mask).save(folder / "mask" / f"{index:03d}.png")
    return folder


def write_polycam(folder: Path, *, corrected: bool = True) -> Path:
    stem = "corrected_" if corrected else ""
    names = [str(8_000_000 + 17 * index) for index in range(N)]
    write_images(folder / "keyframes" / f"{stem}images", names, ".jpg")
    for place in ("cameras", f"{stem}cameras"):
        (folder / "keyframes" / place).mkdir(exist_ok=True)
        for name, pose in zip(names, camera_to_world(opengl=True), strict=True):
            values = {f"t_{row}{column}": pose[row, column] for row in range(3) for column in range(4)}
            values |= {"fx": FX, "fy": FY, "cx": CX, "cy": CY, "width": WIDTH, "height": HEIGHT, "blur_score": 50.0}
            (folder / "keyframes" / place / f"{name}.json").write_text(
                json.dumps(values if place.startswith(stem) else {})
            )
    return folder


def write_record3d(folder: Path, *, each: bool = False) -> Path:
    write_images(folder / "rgb", [str(index) for index in range(N)], ".jpg")
    poses = camera_to_world(opengl=True)
    rows = [[*Rotation.from_matrix(pose[:3, :3]).as_quat().tolist(), *pose[:3, 3].tolist()] for pose in poses]
    document: dict[str, object] = {
        "w": WIDTH,
        "h": HEIGHT,
        "K": [FX, 0, 0, 0, FY, 0, CX, CY, 1],
        "poses": rows,
        "fps": 60,
    }
    if each:
        document |= {"K": [1, 0, 0, 0, 1, 0, 1, 1, 1], "perFrameIntrinsicCoeffs": [[FX, FY, CX, CY]] * N}
    (folder / "metadata.json").write_text(json.dumps(document))
    return folder
