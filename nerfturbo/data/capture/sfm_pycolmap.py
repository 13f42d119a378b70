"""One stage of structure from motion by the package `pycolmap`, as a program: `python sfm_pycolmap.py extract ...`. A
process of its own, because pycolmap holds the interpreter while it works; to start at once, without nerfturbo."""

import sys
from typing import Any


def main(words: list[str]) -> int:
    """extract DATABASE IMAGES CAMERA ONE_CAMERA MAX_SIZE MAX_FEATURES | match DATABASE HOW BLOCK OVERLAP
    | map DATABASE IMAGES MODELS"""
    import pycolmap  # type: ignore[import-not-found]

    verb, *rest = words
    if verb == "map":  # which finds poses
        pycolmap.incremental_mapping(*rest)
    else:
        (extract if verb == "extract" else match)(pycolmap, *rest)
    return 0


def extract(pycolmap: Any, *words: str) -> None:
    """Find features. Versions before 3.13 take SIFT's options by themselves, later ones inside others."""
    database, images, camera, one_camera, max_size, max_features = words
    mode = pycolmap.CameraMode.SINGLE if one_camera == "1" else pycolmap.CameraMode.AUTO
    later = hasattr(pycolmap, "FeatureExtractionOptions")
    options = pycolmap.FeatureExtractionOptions() if later else pycolmap.SiftExtractionOptions()
    options.max_image_size = int(max_size)
    (options.sift if later else options).max_num_features = int(max_features)
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = camera
    common = {"camera_mode": mode, "reader_options": reader, "device": pycolmap.Device.cpu}
    common["extraction_options" if later else "sift_options"] = options
    pycolmap.extract_features(database, images, **common)


def match(pycolmap: Any, *words: str) -> None:
    """Match features; later versions call the options of the order of pairs by another name."""
    database, how, block, overlap = words
    kind = "Pairing" if hasattr(pycolmap, "ExhaustivePairingOptions") else "Matching"
    options = getattr(pycolmap, f"{how.title()}{kind}Options")()
    if how == "exhaustive":
        options.block_size = int(block)
    else:
        options.overlap, options.quadratic_overlap = int(overlap), True
    run = pycolmap.match_exhaustive if how == "exhaustive" else pycolmap.match_sequential
    run(database, **{f"{kind.lower()}_options": options}, device=pycolmap.Device.cpu)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
