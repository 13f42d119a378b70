"""Smaller copies of scenes that travel: the pictures shrunk by a whole number, everything else as it is.

    python scripts/stage_scenes.py DATA OUTPUT [--scenes ngp/fox llff/fern] [--factor ngp/fox=4] [--limit-mib 60]

A loader scales a camera to the picture it finds, so transforms.json, COLMAP's files and poses_bounds.npy need no
change. Pictures with alpha are written as lossless WebP, others as JPEG (quality 95, full colour); those that are not
shrunk are copied. Each new pixel is the mean of the old ones, as `--downscale` computes it. Of D-NeRF's lego the test
split stays behind: it is known not to match its training views, and without it the val split is scored.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from nerfturbo.data.images import decode_image

# What a GPU trains on in a minute: about 400 to 1000 pixels.
FACTORS = {
    "blender/lego": 2,
    "dnerf/lego": 2,
    "ngp/fox": 2,
    "ngp/fruit": 1,
    "llff/fern": 1,
    "colmap/beer": 1,
}
LEFT_OUT = {"dnerf/lego": ("test", "transforms_test.json")}
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def stage(source: Path, target: Path, factor: int, left_out: tuple[str, ...] = ()) -> int:
    """Copy one scene; returns the bytes written."""
    total = 0
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        inside = file.relative_to(source)
        if inside.parts[0] in left_out:
            continue
        place = target / inside
        place.parent.mkdir(parents=True, exist_ok=True)
        if factor > 1 and file.suffix.lower() in PICTURES:
            place = write_smaller(file, place, factor)
        else:
            shutil.copyfile(file, place)
        total += place.stat().st_size
    return total


def write_smaller(file: Path, place: Path, factor: int) -> Path:
    """Write a shrunk picture under the same name; with alpha as .webp, which file_path without extension finds."""
    from PIL import Image

    pixels = decode_image(file, factor)
    image = Image.fromarray(pixels.numpy())
    if pixels.shape[-1] == 4:
        place = place.with_suffix(".webp")
        image.save(place, lossless=True, exact=True, quality=90, method=4)
    elif place.suffix.lower() in (".jpg", ".jpeg"):
        image.save(place, "JPEG", quality=95, subsampling=0)
    else:
        image.save(place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--scenes", nargs="*", choices=sorted(FACTORS), help="all of them unless given")
    parser.add_argument("--factor", nargs="*", default=[], metavar="SCENE=N", help="shrink a scene by another factor")
    parser.add_argument("--limit-mib", type=float, default=60.0, help="fail where the copies take more than this")
    args = parser.parse_args()
    factors = FACTORS | {name: int(value) for name, value in (text.split("=") for text in args.factor)}
    total = 0
    for name, factor in factors.items():
        if args.scenes and name not in args.scenes:
            continue
        written = stage(args.data / name, args.output / name, factor, LEFT_OUT.get(name, ()))
        total += written
        print(f"{name}: 1/{factor} of its size, {written / 2**20:.1f} MiB", flush=True)
    print(f"{total / 2**20:.1f} MiB in {args.output}")
    if total > args.limit_mib * 2**20:
        raise SystemExit(f"more than {args.limit_mib:g} MiB: leave scenes out, or shrink them more (--factor)")


if __name__ == "__main__":
    main()
