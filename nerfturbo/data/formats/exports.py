"""Poses that other programs export, each told in the words of a transforms file. And those that no format knows.

OpenSfM         world to camera, rotation vectors, OpenCV axes; lengths on the image in units of its larger side
Metashape       camera to world, OpenCV axes, in a component or chunk with a similarity of its own. With (x, y) on the
                plane at depth 1, distorted, its p1 OpenCV's p2: u = w/2 + cx + (f + b1) x + b2 y, v = h/2 + cy + f y
RealityCapture  focal length for a frame of 36 mm; principal point from the middle, in units of the larger side. CSV:
                heading, pitch, roll of a camera that looks down, y to the north; XMP: world to camera, OpenCV axes
Bundler         world to camera, OpenGL axes; the principal point is the middle
Polycam         camera to world, OpenGL axes; corrected_* are those after its own alignment
Record3D        quaternions (x y z w) and positions, camera to world, OpenGL axes; K by columns
NSVF            camera to world, OpenCV axes; names begin with 0_ (train), 1_ (val) or 2_ (test)
NeuS, IDR       world_mat_i projects to pixels; scale_mat_i leads from the unit sphere to the object

Readers take a file to be whole: what they stumble over, `reading` turns into an error that names it.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError, counted, refuse
from ..cameras import opencv_to_opengl, rotations, transform_poses, turned, world_to_camera
from ..capture.photos import PHOTO_ENDINGS
from ..json_checks import IMAGE_FOLDERS, read_json
from ..scene import SPLITS
from .colmap import text_lines
from .posed import ONE_FOCAL, reading
from .transforms import Capture, first_file, pose_format

_OPENSFM = dict.fromkeys(("perspective", "simple_radial", "radial", "brown"), "OPENCV")
_OPENSFM |= {"fisheye": "OPENCV_FISHEYE", "fisheye_opencv": "OPENCV_FISHEYE"}
_OPENSFM |= {"spherical": "EQUIRECTANGULAR", "equirectangular": "EQUIRECTANGULAR"}
_OPENSFM_NAMES = {"focal": "fl_x", "focal_x": "fl_x", "focal_y": "fl_y", "c_x": "cx", "c_y": "cy"}
_AGISOFT = {"frame": "OPENCV", "fisheye": "THIN_PRISM_FISHEYE", "equidistant_fisheye": "THIN_PRISM_FISHEYE"}
_AGISOFT |= {"spherical": "EQUIRECTANGULAR"}
_RC_NAMES = {"f": "fl_x", "px": "cx", "py": "cy"} | {k: k for k in ("k1", "k2", "k3", "k4")} | {"t1": "p1", "t2": "p2"}
_XMP = {"PrincipalPointU": "0", "PrincipalPointV": "0", "DistortionCoeficients": "0 " * 6, "AspectRatio": "1"}
_SIDES = {"per_side": True, "from_middle": True}
_MOST_BYTES = 64 << 20  # of the matrices of a scene: 100,000 images have 25 MB


def _tensor(values: Any, *shape: int) -> Tensor:
    """Of numbers, or of words: float64."""
    flat = np.array(values.split() if isinstance(values, str) else values, np.float64)
    return torch.from_numpy(flat.reshape(shape or flat.shape))


def _frame(name: str, pose: Tensor, lens: dict[str, Any], where: object = None) -> dict[str, Any]:
    named = {} if where is None else {"where": str(where)}
    return {"file_path": name, "transform_matrix": pose.tolist()} | lens | named


def _from_world(rotation: Tensor, translation: Tensor) -> Tensor:
    """Our pose of a camera that is given from world to camera, with OpenCV axes."""
    return opencv_to_opengl(world_to_camera(torch.cat([rotation, translation[:, None]], 1)))


def _opensfm(file: Path) -> Capture:
    parts = found if isinstance(found := read_json(file, kind=object), list) else [found]
    refuse(not parts, str(file), "at least one reconstruction", "none")
    best, frames = max(parts, key=lambda one: len(one["shots"])), []
    for name, shot in best["shots"].items():
        camera, (x, y, z) = best["cameras"][shot["camera"]], shot["rotation"]
        turn = torch.linalg.matrix_exp(_tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]]))
        lens = {str(_OPENSFM_NAMES.get(key, key)): value for key, value in camera.items()} | _SIDES
        lens["camera_model"] = _OPENSFM.get(camera["projection_type"], camera["projection_type"])
        frames.append(_frame(name, _from_world(turn, _tensor(shot["translation"], 3)), lens, f"{file}: {name}"))
    points = _tensor([point["coordinates"] for point in best.get("points", {}).values()], -1, 3)
    notes = (f"the largest of {len(parts)} reconstructions",) if len(parts) > 1 else ()
    notes += (ONE_FOCAL,) if any("focal" in camera for camera in best["cameras"].values()) else ()
    up = "its altitude, by GPS" if any(best.get("reference_lla", {}).values()) else ""
    return Capture({"frames": frames}, notes, points, up=up)


def _metashape(file: Path) -> Capture:
    chunks = list(ElementTree.fromstring(file.read_bytes()).iter("chunk"))
    chunk = max(chunks, key=lambda one: len(one.findall("cameras//camera/transform")))
    moved = [one for one in chunk.iter("component") if one.find("transform") is not None]
    whole, placed = _similarity(chunk), {one.get("id"): _similarity(one) for one in moved}
    lenses = {one.attrib["id"]: _metashape_lens(one) for one in chunk.iter("sensor")}
    frames, left = [], {"that Metashape did not align": 0, "marked as disabled": 0}
    for camera in chunk.iterfind("cameras//camera"):
        text, disabled = camera.findtext("transform"), camera.get("enabled") in ("false", "0")
        if text is None or disabled:
            left["marked as disabled" if disabled else "that Metashape did not align"] += 1
            continue
        outer, label = placed.get(camera.get("component_id"), whole), camera.attrib["label"]
        pose = opencv_to_opengl(transform_poses(_tensor(text, 1, 4, 4)[:, :3], outer)[0])
        frames.append(_frame(label, pose, lenses[camera.attrib["sensor_id"]], f"{file}: {label}"))
    notes = tuple(f"left out {counted(count, 'camera')} {which}" for which, count in left.items() if count)
    notes += (f"the largest of {len(chunks)} chunks",) if len(chunks) > 1 else ()
    skew = max([0.0, *(abs(lens["b2"] / lens["fl_y"]) * lens.get("h", 0.0) / 2 for lens in lenses.values() if lens)])
    return Capture({"frames": frames}, notes + ((f"warning: skew left out: {skew:.1f} pixels",) if skew > 0.25 else ()))


def _similarity(element: ElementTree.Element) -> Tensor:
    """(4, 4): of a component or chunk."""
    rotation, shift, scale = (element.findtext(f"transform/{name}") for name in ("rotation", "translation", "scale"))
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[:3, :3] = _tensor(rotation or "1 0 0 0 1 0 0 0 1", 3, 3) * float(scale or 1.0)
    matrix[:3, 3] = _tensor(shift or "0 0 0", 3)
    return matrix


def _metashape_lens(sensor: ElementTree.Element) -> dict[str, Any]:
    if not (found := sorted(sensor.findall("calibration"), key=lambda one: one.get("class") == "adjusted")):
        return {}
    values = {one.tag: float(one.text or "") for one in found[-1] if (one.text or "").strip()}
    f, b1, p1, p2 = (values.get(name, 0.0) for name in ("f", "b1", "p1", "p2"))
    lens = {"cx": 0.0, "cy": 0.0, "b2": 0.0} | values | {"fl_x": f + b1, "fl_y": f or 1e-9, "p1": p2, "p2": p1}
    for size in (*sensor.findall("resolution"), *found[-1].findall("resolution")):
        lens |= {"w": float(size.attrib["width"]), "h": float(size.attrib["height"])}
    kind = found[-1].get("type") or sensor.get("type") or "frame"
    model = "OPENCV_FISHEYE" if "fisheye" in kind and not (p1 or p2) else _AGISOFT.get(kind, kind)
    return lens | {"camera_model": model, "from_middle": True}


def _rc_lens(values: dict[str, float], aspect: float = 1.0) -> dict[str, Any]:
    lens = {ours: values.get(name, 0.0) for name, ours in _RC_NAMES.items()} | {"camera_model": "OPENCV"} | _SIDES
    return lens | {"fl_x": values["f"] / 36.0, "fl_y": values["f"] / 36.0 * aspect}


def _rc_csv(file: Path) -> Capture:
    rows = [[word.strip() for word in row] for row in csv.reader(line for _, line in text_lines(file, mark="\0"))]
    first = [row[0].lstrip("#").lower() for row in rows].index("name")  # a line before may say how many cameras
    header, frames = [re.sub("^#|_35mm$|_norm$", "", name.lower()) for name in rows[first]], []
    for name, *words in rows[first + 1 :]:
        refuse(len(words) != len(header) - 1, f"{file}: {name}", f"{len(header)} columns", len(words) + 1)
        values = dict(zip(header[1:], map(float, words), strict=True))
        turn = turned(2, -values["heading"]) @ turned(0, values["pitch"]) @ turned(1, values["roll"])
        pose = torch.cat([turn, _tensor([[values["x"]], [values["y"]], [values["alt"]]])], 1)
        frames.append(_frame(name, pose, _rc_lens(values), f"{file}: {name}"))
    return Capture({"frames": frames}, (ONE_FOCAL,), up="the file's altitude")


def _rc_xmp(first: Path) -> Capture:
    frames, unposed = [], 0
    for file in sorted(first.parent.glob(f"*{first.suffix}")):
        with reading(file, "RealityCapture"):
            values = dict(_XMP)
            for element in ElementTree.fromstring(file.read_bytes()).iter():
                values |= {name.rpartition("}")[2]: text for name, text in element.attrib.items()}
                values[element.tag.rpartition("}")[2]] = element.text or ""
            if "Rotation" not in values or "Position" not in values:
                unposed += 1
                continue
            bent = _tensor(values["DistortionCoeficients"], 6).tolist()  # as RealityCapture spells it
            model = values.get("DistortionModel", "perspective")
            refuse(any(bent) and not model.startswith("brown"), str(file), "one of the brown models", model)
            inner = [float(values[name]) for name in ("FocalLength35mm", "PrincipalPointU", "PrincipalPointV")]
            lens = _rc_lens(dict(zip(_RC_NAMES, inner + bent, strict=True)), float(values["AspectRatio"]))
            turn = _tensor(values["Rotation"], 3, 3)
            frames.append(_frame(file.stem, _from_world(turn, -turn @ _tensor(values["Position"], 3)), lens, file))
    return Capture({"frames": frames}, (f"left out {counted(unposed, 'image')}: no pose in XMP",) if unposed else ())


def _bundler(file: Path) -> Capture:
    stem = file.name.removesuffix(".out")
    names = (f"list{stem.removeprefix('bundle')}.txt", "list.txt", f"{file.name}.list.txt")  # bundle.rd: list.rd
    names += (f"{stem.removesuffix('.bundle')}.list.txt",)
    listed = first_file(*names)(file.parent) or first_file(*names)(file.parent.parent) or file.with_name("list.txt")
    images = [re.sub(r"\s+\d+\s+[\d.eE+-]+$", "", line) for _, line in text_lines(listed)]  # without 0 and focal length
    rows, first, frames = [line for _, line in text_lines(file)], 1 + 5 * len(images), []
    damaged = list(map(int, rows[0].split())) != [len(images), (len(rows) - first) / 3]
    expected, got = f"{len(images)} cameras, as in {listed.name}, and points", f"{rows[0]}, {len(rows)} lines"
    refuse(damaged, str(file), expected, got)
    for index, name in enumerate(images):
        (focal, k1, k2), *turn, shift = (_tensor(row, 3) for row in rows[1 + 5 * index : 6 + 5 * index])
        pose = world_to_camera(torch.cat([torch.stack(turn), shift[:, None]], 1))
        if focal:  # else it was not placed
            lens = {"fl_x": float(focal), "k1": float(k1), "k2": float(k2)}
            frames.append(_frame(name, pose, lens, f"{file}: camera {index}, {listed.name}"))
    left = (f"left out {counted(lost, 'image')} without a pose",) if (lost := len(images) - len(frames)) > 0 else ()
    return Capture({"frames": frames}, (ONE_FOCAL, *left), _tensor(" ".join(rows[first::3]), -1, 3))


def _find_polycam(folder: Path) -> Path | None:
    """The corrected cameras where they and their images are there, else those of the recording."""
    places = [(place, kind) for kind in ("corrected_", "") for place in (folder / "keyframes", folder)]
    pairs = ((place / f"{kind}cameras", place / f"{kind}images") for place, kind in places)
    return next((cameras for cameras, images in pairs if images.is_dir() and next(cameras.glob("*.json"), None)), None)


def _polycam(cameras: Path) -> Capture:
    frames, top, images = [], cameras.parent, cameras.name.replace("cameras", "images")
    for file in sorted(cameras.glob("*.json")):
        with reading(file, "Polycam"):
            values = read_json(file)
            pose = _tensor([values[f"t_{row}{column}"] for row in range(3) for column in range(4)], 3, 4)
            if (top / "depth" / f"{file.stem}.png").is_file():
                values["depth_file_path"] = f"{top.name}/depth/{file.stem}.png"
            frames.append(_frame(f"{top.name}/{images}/{file.stem}", pose, values, file))
    raw = not cameras.name.startswith("corrected")
    return Capture({"frames": frames}, ("poses as recorded, not corrected" if raw else "poses that Polycam corrected",))


def _photos(folder: Path, *names: str) -> list[str]:
    """The images in the first of these folders that is there, in the order of names."""
    place = next((folder / name for name in names if (folder / name).is_dir()), folder)
    found = sorted(path for path in place.iterdir() if path.suffix.lower() in PHOTO_ENDINGS)
    return [path.relative_to(folder).as_posix() for path in found]


def _numbered(photos: list[str]) -> dict[int, str]:
    """By the numbers that are their names, else by their places in the order of names."""
    stems = [Path(name).stem for name in photos]
    return dict(zip(map(int, stems) if all(map(str.isdecimal, stems)) else range(len(stems)), photos, strict=True))


def _find_record3d(folder: Path) -> Path | None:
    file = first_file("metadata.json", "metadata")(folder)
    if file is None or not any((folder / name).is_dir() for name in ("rgb", "rgbd")):
        return None
    return file if re.search(rb'"(poses|K|fps|perFrameIntrinsicCoeffs)"', _head(file)) else None


def _record3d(file: Path) -> Capture:
    document, photos = read_json(file), _photos(file.parent, "rgb", "rgbd")
    named, each, frames = _numbered(photos), document.get("perFrameIntrinsicCoeffs") or [], []
    for index, row in enumerate(document["poses"]):
        values = _tensor(row, 7)
        pose = torch.cat([rotations(values[[3, 0, 1, 2]] / values[:4].norm()), values[4:, None]], 1)
        if index in named:
            frames.append(_frame(named[index], pose, {"K": each[index]} if index < len(each) else {}))
    return Capture({key: document.get(key) for key in ("K", "w", "h")} | {"frames": frames})


def _words(file: Path) -> list[str]:
    return [word for _, line in text_lines(file) for word in line.split()]


def _nsvf(file: Path) -> Capture:
    words, lists = _words(file), {f"{split}_filenames": [] for split in SPLITS}
    refuse(len(words) < 3, str(file), "a focal length and principal point, or a matrix", " ".join(words) or "nothing")
    document, notes = dict(zip(("fl_x", "cx", "cy"), map(float, words[:3]), strict=True)), (ONE_FOCAL,)
    if float(words[1]) == 0.0:  # the skew of a matrix
        document, notes = {"K": list(map(float, words[: 16 if len(words) >= 16 else 9]))}, ()
    frames = []
    for path in sorted((file.parent / "pose").glob("*.txt")):
        with reading(path, "NSVF"):
            frames.append(_frame(f"rgb/{path.stem}", opencv_to_opengl(_tensor(_words(path), 4, 4)[:3]), {}, path))
        if path.name[:2] in ("0_", "1_", "2_"):
            lists[f"{SPLITS[int(path.name[0])]}_filenames"].append(f"rgb/{path.stem}")
    document |= {"frames": frames} | {key: names for key, names in lists.items() if names}
    if not (box := file.with_name("bbox.txt")).is_file():
        return Capture(document, notes)
    with reading(box, "NSVF"):
        low, high = _tensor(_words(box)[:6], 2, 3)
        refuse(not bool(((low < high) & (high - low).isfinite()).all()), str(box), "low < high", _words(box)[:6])
        corners = low + (high - low) * torch.cartesian_prod(*[torch.linspace(0.0, 1.0, 4).double()] * 3)
    return Capture(document, notes, corners, "the box of bbox.txt")


def _neus(file: Path) -> Capture:
    with zipfile.ZipFile(file) as archive:
        refuse(sum(one.file_size for one in archive.infolist()) > _MOST_BYTES, str(file), "matrices of images", "more")
    with np.load(file, allow_pickle=False) as arrays:
        matrices = {name: _tensor(arrays[name]) for name in arrays.files if "_mat_" in name}
    frames, photos = [], _numbered(_photos(file.parent, "image", "images", "rgb"))
    place = next((file.parent / name for name in ("mask", "masks") if (file.parent / name).is_dir()), None)
    masks = {} if place is None else _numbered(_photos(file.parent, place.name))
    given = sorted(int(name[10:]) for name in matrices if re.fullmatch(r"world_mat_\d+", name))
    by_place = list(photos) == list(range(len(photos)))
    refuse(by_place and len(given) != len(photos), str(file), f"world_mat of {len(photos)} images", len(given))
    indices = given if len(given) == len(photos) else sorted(photos)  # by place where there are as many
    for index, (own, name) in zip(indices, sorted(photos.items()), strict=True):
        matrix = matrices[f"world_mat_{index}"][:3, :4]
        left = matrix[:, :3] * torch.linalg.det(matrix[:, :3]).sign()
        turned, upper = torch.linalg.qr(left.flip(0).T)  # left = camera matrix, an upper triangle, times rotation
        inner, rotation = upper.T.flip(0, 1), turned.T.flip(0)
        inner, rotation = inner * inner.diagonal().sign(), rotation * inner.diagonal().sign()[:, None]
        pose = _from_world(rotation, rotation @ torch.linalg.solve(matrix[:, :3], matrix[:, 3]))
        mask = {"mask_path": masks[own]} if own in masks else {}
        frames.append(_frame(name, pose, {"K": (inner / inner[2, 2]).tolist()} | mask, f"{file}: world_mat_{index}"))
    sphere, masked = matrices.get("scale_mat_0"), masks.keys() >= photos.keys()
    if not masked or sphere is None:
        return Capture({"frames": frames}, ("no masks: what lies around the unit sphere is trained too",))
    around = torch.nn.functional.normalize(torch.cartesian_prod(*[torch.linspace(-1.0, 1.0, 4).double()] * 3), dim=1)
    ends = around @ sphere[:3, :3].T + sphere[:3, 3]
    return Capture({"frames": frames}, (), ends, "the unit sphere of scale_mat_0")


def _holding(ending: str, words: bytes) -> Callable[[Path], Path | None]:
    """Finds the first file of an ending that holds these words, in a folder or its folders of images."""
    places = ("", *IMAGE_FOLDERS)
    files = lambda folder: (path for place in places for path in sorted((folder / place).glob("*.*")))  # noqa: E731
    fits = lambda path: path.suffix.lower() == ending and re.search(words, _head(path))  # noqa: E731
    return lambda folder: next(filter(fits, files(folder)), None)


def _head(file: Path) -> bytes:
    with contextlib.suppress(OSError), file.open("rb") as source:
        return source.read(1 << 16)
    return b""


_POSE_WORDS = (
    rb"(?i)transform_?matrix|camera_?to_?world|world_?to_?camera|cam2world|\bc2w\b|\bw2c\b|t_00\b|NVM_V3|extrinsics?\s+-?\d"
    rb"|\"(poses?|rotation|translation)\"\s*:\s*\[|<(camera|transform|rotation|photogroup)\b|xcr:Position"
    rb"|heading\W+pitch\W+roll|omega\W+phi\W+kappa|\bq_?w\b|\btx,? ?ty|camera_?(pose|transform)|sfm_data_version"
    rb"|\"(orientation|transform)\"\s*:\s*\[|OrientationConique|# Bundle file"
)
_POSE_NAMES = r"(cameras?|(cam_?)?poses?|traj(ectory)?|extrinsics?)(_\w+)?\.(npz|npy|pkl|mat|nvm|sfm|xml|txt|csv)"
_POSE_ENDINGS = (".json", ".geojson", ".xml", ".csv", ".txt", ".xmp", ".sfm", ".yaml", ".yml", ".nvm", ".out", ".log")
_PROJECTS = (".camera", ".abc", ".psx", ".psz", ".p4d", ".theia")  # of other programs, whatever they hold
_PROSE = (".txt", ".csv", ".log")  # these are poses by their names only with a row of numbers
_ROW = rb"(?m)^(\S+[ ,;\t]+)?(-?\d[\d.eE+-]*[ ,;\t]+){6}-?\d"


def check_known(folder: Path) -> None:
    """Refuse photos beside a file of poses that no format knows: other poses would be found for them."""
    for place in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())] if folder.is_dir() else []:
        files = sorted(place.glob("*.*"))
        found = [path for path in files if place == folder and re.fullmatch(_POSE_NAMES, path.name.lower())]
        found = [path for path in found if path.suffix.lower() not in _PROSE or re.search(_ROW, _head(path))]
        texts = [path for path in files if path.suffix.lower() in _POSE_ENDINGS and path.stem != "README"][:16]
        found += [path for path in texts if re.search(_POSE_WORDS, _head(path)) or _has_poses(path)]
        found += [path for path in files if path.suffix.lower() in _PROJECTS]
        if found:
            hint = "export them in another format; to find new ones from the images: nerfturbo process FOLDER OUTPUT"
            raise InputError(str(found[0]), "poses in a known format", "what looks like poses in another", hint)


def _has_poses(file: Path) -> bool:
    """Whether a table has a matrix that ends by 0 0 0 1, or three rows of 12 or 16 numbers or with a quaternion."""
    rows: list[list[float]] = []
    for line in _head(file).decode("latin-1").splitlines() if file.suffix.lower() in _PROSE else ():
        rows.append([])
        with contextlib.suppress(ValueError):
            for word in reversed(re.split(r"[\s,;]+", line.strip())):  # up to a name
                rows[-1].insert(0, float(word))
    fours = lambda row: [row[i : i + 4] for i in range(len(row) - 3)] if len(row) >= 7 else []  # noqa: E731
    turned = lambda q: abs(math.hypot(*q) - 1.0) < 1e-3 and max(map(abs, q)) < 0.9999  # noqa: E731
    posed = sum(len(row) in (12, 16) or any(map(turned, fours(row))) for row in rows)
    blocks = (rows[i - 3 : i] for i, row in enumerate(rows) if i >= 3 and row == [0.0, 0.0, 0.0, 1.0])
    return posed >= 3 or any(all(len(row) == 4 for row in block) for block in blocks)


_BUNDLES = ("bundle.out", "bundle/bundle.out", "bundler/bundle.out", "scene.bundle.out")
_find_bundle = lambda folder: first_file(*_BUNDLES)(folder) or _holding(".out", b"^# Bundle file")(folder)  # noqa: E731
_OPENSFM_FILES = ("reconstruction.json", "opensfm/reconstruction.json")
_SPHERES = ("cameras_sphere.npz", "cameras.npz", "cameras_large.npz")
FORMATS = (
    pose_format("Polycam", "keyframes/cameras/*.json", _find_polycam, _polycam),
    pose_format("Record3D", "metadata.json and rgb", _find_record3d, _record3d),
    pose_format("NSVF", "intrinsics.txt, pose and rgb", first_file("intrinsics.txt", beside="pose"), _nsvf),
    pose_format("NeuS / IDR", "cameras_sphere.npz", first_file(*_SPHERES), _neus),
    pose_format("OpenSfM", "reconstruction.json", first_file(*_OPENSFM_FILES), _opensfm),
    pose_format("Metashape", "cameras.xml", _holding(".xml", b"<chunk"), _metashape),
    pose_format("RealityCapture", "a CSV of its camera parameters", _holding(".csv", b"name,.*heading,.*,px"), _rc_csv),
    pose_format("RealityCapture", "XMP files beside the images", _holding(".xmp", b"xcr:(Rotation|Position)"), _rc_xmp),
    pose_format("Bundler", "bundle.out and list.txt", _find_bundle, _bundler),
)
