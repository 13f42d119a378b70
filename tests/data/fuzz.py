"""Damaged scene files by the thousand: `python tests/data/fuzz.py --mutations 1000`.

Each file of each format is cut off, has bits flipped, numbers replaced and parts moved, and is opened as a user would
open it. What may happen: a scene whose rays are finite, or an InputError that names the file (or the picture that no
longer fits it). What may not: any other error, a crash, more than a few seconds, much memory. The cases run in a
process of their own, whose end is noticed; one is repeated by name and number: `--only cameras.bin --first 17
--mutations 1`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from PIL import features

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.data import exporters, folders

SECONDS = 10  # that one case may take; a busy machine needs some hundredths
MEMORY = 600 << 20  # bytes that a process may grow by over all of its cases

Write = Callable[[Path], Path]


def _text(folder: Path) -> Path:
    return folders.write_colmap(folder, text=True)


def _lens(folder: Path) -> Path:
    return folders.write_colmap(folder, model=4, parameters=[30.0, 30.0, 12.0, 8.0, -0.1, 0.01, 0.001, 0.002])


def _rich(folder: Path) -> Path:
    """As many of the entries of a transforms file as we read."""
    names = [f"images/view_{index:02d}.png" for index in range(folders.N_VIEWS)]
    lists = {"train_filenames": names[:7], "val_filenames": names[7:8], "test_filenames": names[8:]}
    transform = [[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0]]
    values = {"k1": 0.02, "p1": 0.001, "camera_model": "OPENCV", "applied_transform": transform, "applied_scale": 2.0}
    return folders.write_transforms(folder, "RGBA", **lists, **values, aabb_scale=4, scale=0.4, offset=[0.5, 0.5, 0.5])


def _wide(folder: Path) -> Path:
    small = [0.02, -0.01, 0.005, -0.001, 0.0, 0.0, 0.001, -0.002, 0.003, -0.001, 0.002, 0.001]
    return folders.write_colmap(folder, model=11, parameters=[30.0, 30.0, 12.0, 8.0, *small])


def _split_lenses(folder: Path) -> Path:
    """A split file of a Blender scene with lenses in it."""
    folders.write_transforms(folder, "RGBA", k1=0.02, camera_model="OPENCV")
    (folder / "transforms.json").rename(folder / "transforms_train.json")
    return folder


def _matrices(folder: Path) -> Path:
    """Camera matrices, and lenses of two kinds."""
    matrix = [[30.0, 0.0, 12.0], [0.0, 29.0, 8.0], [0.0, 0.0, 1.0]]
    folders.write_transforms(folder, fl_x=None, fl_y=None, cx=None, cy=None, K=matrix, k1=0.01)
    document = json.loads((folder / "transforms.json").read_text())
    document["frames"][3] |= {"camera_model": "OPENCV_FISHEYE", "intrinsics": [30.0, 31.0, 12.0, 8.0]}
    (folder / "transforms.json").write_text(json.dumps(document))
    return folder


def _points(folder: Path) -> Path:
    folders.write_transforms(folder, ply_file_path="points.ply")
    head = "ply\nformat binary_little_endian 1.0\nelement vertex 300\n"
    head += "".join(f"property double {axis}\n" for axis in "xyz") + "end_header\n"
    (folder / "points.ply").write_bytes(head.encode() + folders.points().numpy().tobytes())
    return folder


def _pictures(ending: str, mode: str = "RGB") -> Write:
    return lambda folder: folders.write_rich_pictures(folder, ending, mode)


# name -> (who writes the scene, which file of it is damaged)
FILES: dict[str, tuple[Write, str]] = {
    "cameras.bin": (_lens, "sparse/0/cameras.bin"),
    "images.bin": (folders.write_colmap, "sparse/0/images.bin"),
    "points3D.bin": (folders.write_colmap, "sparse/0/points3D.bin"),
    "cameras.txt": (_text, "sparse/0/cameras.txt"),
    "images.txt": (_text, "sparse/0/images.txt"),
    "points3D.txt": (_text, "sparse/0/points3D.txt"),
    "transforms.json": (_rich, "transforms.json"),
    "transforms_train.json": (folders.write_blender_json, "transforms_train.json"),
    "poses_bounds.npy": (folders.write_llff, "poses_bounds.npy"),
    "plain.png": (_pictures(".png"), "images/view_01.png"),
    "palette.png": (_pictures(".png", "P"), "images/view_01.png"),
    "deep.png": (_pictures(".png", "I;16"), "images/view_01.png"),
    "picture.jpg": (_pictures(".jpg"), "images/view_01.jpg"),
    "picture.webp": (_pictures(".webp", "RGBA"), "images/view_01.webp"),
    "wide cameras.bin": (_wide, "sparse/0/cameras.bin"),
    "lenses.json": (_split_lenses, "transforms_train.json"),
    "matrices.json": (_matrices, "transforms.json"),
    "points.ply": (_points, "points.ply"),
    "reconstruction.json": (exporters.write_opensfm, "reconstruction.json"),
    "cameras.xml": (exporters.write_metashape, "cameras.xml"),
    "cameras.csv": (lambda folder: exporters.write_rc_csv(folder, file="cameras.csv"), "cameras.csv"),
    "frame.xmp": (exporters.write_rc_xmp, "images/frame4.xmp"),
    "bundle.out": (exporters.write_bundler, "bundle.out"),
    "list.txt": (exporters.write_bundler, "list.txt"),
    "cameras_sphere.npz": (exporters.write_neus, "cameras_sphere.npz"),
    "intrinsics.txt": (exporters.write_nsvf, "intrinsics.txt"),
    "pose.txt": (exporters.write_nsvf, "pose/0_2.txt"),
    "bbox.txt": (exporters.write_nsvf, "bbox.txt"),
    "polycam.json": (exporters.write_polycam, "keyframes/corrected_cameras/8000017.json"),
    "metadata.json": (exporters.write_record3d, "metadata.json"),
}
if features.check("avif"):
    FILES["picture.avif"] = (_pictures(".avif"), "images/view_01.avif")
if importlib.util.find_spec("pillow_heif") is not None:
    FILES["picture.heic"] = (_pictures(".heic"), "images/view_01.heic")
_WORDS = (b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 40, b"null", b"true", b'"x"', b"[]", b"{}", b"1e-320")
_WORDS += (b"[" * 3000, b'"../../x.png"', b'"\\u0000"', b'"\\ud800"', b"\xff\xfe", b"-", b"", b'"' + b"a" * 5000 + b'"')
_BYTES = (
    b"\0" * 8,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\0" * 6 + b"\xf8\x7f",
    b"\0" * 6 + b"\xf0\x7f",
    b"\0\0\0\x80",
)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Cut off, bits flipped, values replaced, or a part moved, doubled or taken out."""
    damaged = bytearray(content)
    kind = draw.choice(("cut", "flip", "flip", "value", "splice", "word"))
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    if kind == "flip":  # often in the header, where the counts are
        for _ in range(draw.randint(1, 8)):
            end = len(damaged) if draw.random() < 0.6 else min(64, len(damaged))
            damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
    elif kind == "value":
        at = 8 * draw.randrange(len(damaged) // 8 + 1) if draw.random() < 0.5 else draw.randrange(len(damaged))
        value = draw.choice(_BYTES)
        damaged[at : at + len(value)] = value
    elif kind == "word":
        start = draw.randrange(len(damaged))
        end = next((i for i in range(start, len(damaged)) if damaged[i : i + 1] in b" ,]}\n"), len(damaged))
        damaged[start:end] = draw.choice(_WORDS)
    else:
        low, high = sorted(draw.randrange(len(damaged) + 1) for _ in range(2))
        part = bytes(damaged[low : min(high, low + 4096)])
        if draw.random() < 0.5:
            del damaged[low : low + len(part)]
        to = draw.randrange(len(damaged) + 1)
        damaged[to:to] = part * draw.randint(0, 2)
    return bytes(damaged)


def open_case(name: str, number: int, folder: Path, content: bytes, refused: list[int] | None = None) -> str | None:
    """What is wrong about how one damaged file is met; None if nothing is. `content` is the file as it was; `refused`
    gets the numbers of those that are refused."""
    from nerfturbo.data.scene import load_scene
    from nerfturbo.errors import InputError

    file = folder / FILES[name][1]
    file.write_bytes(mutated(content, random.Random(f"{name} {number}")))
    start = time.monotonic()
    try:
        _use(load_scene(folder))
    except InputError as error:
        if refused is not None:
            refused.append(number)
        pictures = [
            path.name for path in folder.rglob("*") if path.suffix in (".png", ".jpg", ".webp", ".avif", ".heic")
        ]
        if not any(known in str(error) for known in (file.name, *pictures)):
            return f"the file is not named: {error}"
    except TimeoutError:
        return f"not done after {SECONDS} s"
    except Exception:
        return traceback.format_exc()
    finally:
        file.write_bytes(content)
    seconds = time.monotonic() - start
    return f"it took {seconds:.1f} s" if seconds > SECONDS else None


def _use(scene: object) -> None:
    """What training does first: rays through the corners of every picture."""
    import torch

    from nerfturbo.data.scene import Scene

    assert isinstance(scene, Scene)
    cameras = scene.cameras
    index = torch.arange(len(cameras)).repeat_interleave(4)
    sides = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).repeat(len(cameras), 1)
    x, y = (sides * cameras.size[index]).unbind(-1)
    rays = cameras.rays(index, x, y)
    good = cameras.is_valid(index, x, y)
    for values in (rays.origins, rays.directions[good]):
        assert bool(torch.isfinite(values).all()), "a ray that is not finite"


def work(names: list[str], first: int, count: int) -> None:
    """In a process of its own: prints a line before each case, and one after each that failed."""
    import resource

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
            folder = FILES[name][0](Path(temporary) / "scene")
            content = (folder / FILES[name][1]).read_bytes()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for number in range(first, first + count):
                print(json.dumps([name, number]), flush=True)
                signal.alarm(SECONDS)
                wrong = open_case(name, number, folder, content)
                signal.alarm(0)
                grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                if wrong is None and grown > MEMORY:
                    wrong = f"memory grew by {grown >> 20} MiB"
                    before += grown // 1024
                if wrong is not None:
                    print(json.dumps([name, number, wrong]), flush=True)


def run(names: list[str], first: int, count: int) -> list[tuple[str, int, str]]:
    """All cases, in as many processes as crashes make necessary: (file, number, what was wrong) of each failure."""
    failures: list[tuple[str, int, str]] = []
    for name in names:
        at = first
        while at < first + count:
            words = ["--worker", "--only", name, "--first", str(at), "--mutations", str(first + count - at)]
            worker = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            lines = [json.loads(line) for line in worker.stdout.splitlines()]
            failures += [tuple(line) for line in lines if len(line) == 3]
            if worker.returncode == 0:
                break
            at = lines[-1][1] if lines else at
            last = (worker.stderr.strip().splitlines() or ["nothing"])[-1]
            failures.append((name, at, f"the process ended with {worker.returncode} and said {last}"))
            at += 1
    return failures


def main(words: list[str] | None = None) -> int:
    """Exit code 0 if every case was met well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000, help="of each file")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--only", choices=list(FILES), nargs="+", default=list(FILES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        work(args.only, args.first, args.mutations)
        return 0
    failed = 0
    for name in args.only:
        start = time.monotonic()
        failures = run([name], args.first, args.mutations)
        print(
            f"{name}: {args.mutations} mutations, {len(failures)} failures, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        for _, number, wrong in failures[:20]:
            print(f"  {name} {number}: {wrong}")
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
