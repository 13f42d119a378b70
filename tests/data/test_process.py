"""Photos to poses by the real COLMAP: poses against the truth, interrupts, changed input, and what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nerfturbo.data.capture import sfm
from nerfturbo.data.capture.process import ProcessConfig, is_current, process
from nerfturbo.data.capture.sfm import SfmError, _share, judge, largest_model, run
from nerfturbo.data.formats.colmap import read_cloud, read_images
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError

from ..conftest import IN_CI
from . import photo_scene
from .folders import N_VIEWS, write_colmap

FAST = ProcessConfig(max_features=500)


@pytest.fixture(scope="session")
def colmap() -> None:
    if shutil.which("colmap") is None:
        reason = "the program colmap is not installed: apt install colmap"
        pytest.fail(reason) if IN_CI else pytest.skip(reason)


class Words:
    """A report that keeps what it hears and can interrupt at a word."""

    def __init__(self, stop_at: str = "", stop_in: str = "") -> None:
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.updates: list[tuple[str, float]] = []
        self.stop_at, self.stop_in = stop_at, stop_in

    def phase(self, text: str) -> None:
        self.phases.append(text)
        if self.stop_at and self.stop_at in text:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, fraction: float) -> None:
        self.updates.append((self.phases[-1], fraction))
        if self.stop_in and self.stop_in in self.phases[-1]:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_scene.write_photos(tmp_path_factory.mktemp("process") / "room", 7)


@pytest.fixture(scope="session")
def done(colmap: None, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Words]:
    """Processed in three goes: interrupted before the poses, then inside of matching, then to the end."""
    output, words = tmp_path_factory.mktemp("scene") / "out", Words()
    with pytest.raises(KeyboardInterrupt):
        process(photos, output, FAST, report=Words(stop_in="matches"))
    assert not (output / "sparse").exists() and not is_current(photos, output)
    features = (output / "work" / "features.db").stat().st_mtime_ns
    with pytest.raises(KeyboardInterrupt):
        process(photos, output, FAST, report=Words(stop_at="poses"))
    verdict = process(photos, output, FAST, report=words)
    assert (output / "work" / "features.db").stat().st_mtime_ns == features
    assert verdict.text.startswith("good: 7 of 7 images registered") and not verdict.advice
    return output, words


def test_poses_are_the_true_ones(done: tuple[Path, Words], photos: Path) -> None:
    """JPEG, PNG and WebP, one of them lying on its side: all land where they were taken from."""
    output, words = done
    assert any("1/4 images: done before" in note for note in words.notes)
    assert any("3/4 matches: done before" in note for note in words.notes) and words.phases == ["4/4 poses"]
    assert any("SIMPLE_RADIAL: 7 images, one camera for all" in note for note in words.notes)
    scenes = [load_scene(output, split) for split in ("train", "test")]
    assert [len(scene) for scene in scenes] == [6, 1] and is_current(photos, output)
    images = sorted(read_images(output / "sparse" / "0" / "images.bin"), key=lambda image: image.name)
    assert [image.name[:3] for image in images] == [f"p{index:02d}" for index in range(7)]
    to_original = scenes[0].to_original
    assert to_original is not None
    note = next(note for note in scenes[0].notes if "most central" in note)
    held = next(index for index in range(7) if f"p{index:02d}" in note)
    assert 2 <= held <= 4  # in the middle of the walk
    placed = np.insert(scenes[0].cameras.positions.numpy(), held, scenes[1].cameras.positions.numpy(), axis=0)
    original = placed @ to_original[:3, :3].numpy().T + to_original[:3, 3].numpy()
    assert photo_scene.aligned_error(original, photo_scene.eyes(7)) < 0.01


def test_a_mean_error_is_colmaps_own(done: tuple[Path, Words]) -> None:
    model = done[0] / "sparse" / "0"
    printed = subprocess.run(["colmap", "model_analyzer", "--path", model], capture_output=True, text=True)
    expected = (printed.stdout + printed.stderr).split("Mean reprojection error: ")[1].split("px")[0]
    verdict = json.loads((done[0] / "process.json").read_text())["verdict"]
    assert verdict["mean_error"] == pytest.approx(float(expected), abs=1e-5)
    assert float(read_cloud(model / "points3D.bin").errors.mean()) == pytest.approx(float(expected), abs=1e-5)


def test_a_finished_scene_needs_no_work_folder(done: tuple[Path, Words], photos: Path, tmp_path: Path) -> None:
    output, words = shutil.copytree(done[0], tmp_path / "out"), Words()
    shutil.rmtree(output / "work")
    assert process(photos, output, FAST, report=words).registered == 7 and words.phases == []


def test_changed_photos_are_noticed(done: tuple[Path, Words], photos: Path, tmp_path: Path) -> None:
    output = shutil.copytree(done[0], tmp_path / "out")
    more = shutil.copytree(photos, tmp_path / "photos")
    assert is_current(more, output)
    shutil.copy(more / "p00.jpg", more / "p99.jpg")
    (more / "p98.jpg").write_bytes((more / "p00.jpg").read_bytes()[:2000])
    assert not is_current(more, output)
    words = Words(stop_at="features")
    with pytest.raises(KeyboardInterrupt):
        process(more, output, FAST, report=words)
    assert any(note.startswith("warning: left out p98.jpg") for note in words.notes)
    assert len(list((output / "images").iterdir())) == 8 and not (output / "sparse").exists()


def test_the_largest_model_is_taken_and_the_rest_is_named(tmp_path: Path) -> None:
    for name, folder in (("0", write_colmap(tmp_path / "a")), ("1", write_colmap(tmp_path / "b"))):
        shutil.copytree(folder / "sparse" / "0", tmp_path / "models" / name)
    file = tmp_path / "models" / "0" / "images.bin"
    content = file.read_bytes()
    size = (len(content) - 8) // N_VIEWS
    file.write_bytes((4).to_bytes(8, "little") + content[8 : 8 + 4 * size])
    best, sizes = largest_model(tmp_path / "models", "here")
    assert best.name == "1" and sizes == [N_VIEWS, 4]
    names = [f"view_{index:02d}.png" for index in range(N_VIEWS)]
    verdict = judge(tmp_path / "models" / "0", tmp_path, names, "sequential")
    assert verdict.quality == "poor" and verdict.missing == tuple(names[4:])
    assert any("view_09.png" in line for line in verdict.advice)
    assert any("--matcher exhaustive" in line for line in verdict.advice)


def test_pictures_that_do_not_fit_together(colmap: None, tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "noise"
    folder.mkdir()
    for index in range(2):
        noise = np.random.default_rng(index).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((160, 120)).save(folder / f"{index}.png")
    with pytest.raises(InputError, match=r"noise: expected images that show the same things, got no two that fit"):
        process(folder, tmp_path / "out", FAST, report=Words())
    assert not (tmp_path / "out" / "sparse").exists()


def wrong_inputs(folder: Path) -> list[tuple[Path, Path, str]]:
    for name, file in (("phone", "a.dng"), ("film", "a.mp4"), ("text", "a.txt"), ("full/inside", "p.png")):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_bytes(b"x")
    photo_scene.write_photos(folder / "one", 1)
    return [
        (folder / "missing", folder / "out", "no such file or folder"),
        (folder / "phone", folder / "out", r"\.dng files; convert them"),
        (folder / "film", folder / "out", r"the video a\.mp4; name the file itself"),
        (folder / "text", folder / "out", r"only \.txt files"),
        (folder / "text" / "a.txt", folder / "out", "a folder of photos, or a video"),
        (folder / "full", folder / "out", "photos only in inside"),
        (folder / "one", folder / "out", "at least 2 images, got 1"),
        (folder / "one", folder / "text", "a new or empty folder"),
        (folder / "one", folder / "one", "the folder of the photos itself"),
    ]


def test_what_is_not_photos_is_named(colmap: None, tmp_path: Path) -> None:
    for source, output, words in wrong_inputs(tmp_path):
        there = output.exists()
        with pytest.raises(InputError, match=words):
            process(source, output, FAST, report=Words())
        assert output.exists() == there  # a mistake leaves no folder behind
    with pytest.raises(InputError, match="--frames: expected at least 2"):
        process(tmp_path / "one", tmp_path / "out", ProcessConfig(frames=1), report=Words())


def test_two_at_once_do_not_meet(colmap: None, photos: Path, tmp_path: Path) -> None:
    class Second(Words):
        def phase(self, text: str) -> None:
            process(photos, tmp_path / "out", FAST, report=Words())

    with pytest.raises(InputError, match="another process at it"):
        process(photos, tmp_path / "out", FAST, report=Second())


def test_without_colmap_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sfm.importlib.util, "find_spec", lambda name: None)
    for name in ("auto", "colmap", "pycolmap"):
        with pytest.raises(
            InputError, match=r"none installed; install COLMAP \(`apt install colmap`.*pip install pycolmap"
        ):
            sfm.open_tool(name)


def test_a_stage_that_fails_says_why_and_one_that_is_interrupted_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(SfmError, match=r"exit code 3 and said: went wrong; see .*log"):
        run([sys.executable, "-c", "print('went wrong'); raise SystemExit(3)"], log, lambda done: None)
    assert "went wrong" in log.read_text()
    child = tmp_path / "pid"
    script = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid()))\n"
    script += "print('Processed file [1/2]', flush=True); time.sleep(60)"

    def interrupt(done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", script], log, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("Processed file [3/12]\n", 0.25),
        ("Matching block [2/2, 1/2]", 0.5),
        ("Processing block [2/4, 3/4]", 0.375),
        ("Matching image [5/10] in 0.1s", 0.5),
        ("Registering image #8 (3)", 0.3),
        ("Registering image #8 (num_reg_frames=4)", 0.4),
        ("Elapsed time: 0.1 [minutes]", None),
    ],
)
def test_progress_in_the_words_of_old_and_new_versions(text: str, share: float | None) -> None:
    assert _share(text, 10) == share


def test_options_are_named_as_the_installed_version_names_them(tmp_path: Path) -> None:
    """A stand-in that only answers for its flags: newer versions moved `use_gpu` out of SIFT's options."""
    from nerfturbo.data.capture.sfm import ColmapProgram, Extraction

    program = tmp_path / "colmap"
    flags = "--FeatureExtraction.use_gpu arg --FeatureExtraction.max_image_size arg --SiftExtraction.max_num_features"
    program.write_text(
        f"#!/bin/sh\ncase \"$*\" in help) echo 'COLMAP 4.0';; *-h) echo '{flags}';; *) echo \"$*\";; esac\n"
    )
    program.chmod(0o755)
    what = Extraction(tmp_path, "OPENCV", True, 1600, 4096)
    ColmapProgram(str(program)).extract(tmp_path / "db", what, tmp_path / "log", lambda done: None)
    said = (tmp_path / "log").read_text()
    assert "--FeatureExtraction.use_gpu 0 --FeatureExtraction.max_image_size 1600" in said
    assert "--SiftExtraction.max_num_features 4096" in said and "--SiftExtraction.use_gpu" not in said


PYCOLMAP = """
import json, sys
class Options:
    pass
class FeatureExtractionOptions(Options):
    def __init__(self): self.sift = Options()
class Device: cpu = "cpu"
class CameraMode: SINGLE, AUTO = "SINGLE", "AUTO"
ImageReaderOptions = ExhaustivePairingOptions = SequentialPairingOptions = Options
def plain(value):
    return {k: plain(v) for k, v in vars(value).items()} if isinstance(value, Options) else value
def keep(name):
    def call(*words, **options):
        print(name, json.dumps([words, {k: plain(v) for k, v in options.items()}]))
    return call
extract_features, match_exhaustive = keep("extract_features"), keep("match_exhaustive")
match_sequential, incremental_mapping = keep("match_sequential"), keep("incremental_mapping")
"""


def test_the_package_gets_what_the_program_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the names of pycolmap 3.13 that prints its calls: the package has no build for every machine."""
    (tmp_path / "pycolmap.py").write_text(PYCOLMAP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    tool, log = sfm.open_tool("pycolmap"), tmp_path / "log"
    tool.extract(tmp_path / "db", sfm.Extraction(tmp_path, "OPENCV", True, 1600, 4096), log, lambda done: None)
    tool.match(tmp_path / "db", "exhaustive", 30, log, lambda done: None)
    tool.match(tmp_path / "db", "sequential", 30, log, lambda done: None)
    tool.map(tmp_path / "db", tmp_path, tmp_path / "models", log, lambda done: None)
    calls = dict(line.split(" ", 1) for line in log.read_text().splitlines() if not line.startswith("$"))
    where, options = json.loads(calls["extract_features"])
    assert where == [str(tmp_path / "db"), str(tmp_path)] and options["camera_mode"] == "SINGLE"
    assert options["reader_options"] == {"camera_model": "OPENCV"} and options["device"] == "cpu"
    assert options["extraction_options"] == {"max_image_size": 1600, "sift": {"max_num_features": 4096}}
    assert json.loads(calls["match_exhaustive"])[1]["pairing_options"] == {"block_size": 5}
    assert json.loads(calls["match_sequential"])[1]["pairing_options"] == {"overlap": 10, "quadratic_overlap": True}
    assert json.loads(calls["incremental_mapping"])[0] == [
        str(tmp_path / "db"),
        str(tmp_path),
        str(tmp_path / "models"),
    ]


@pytest.mark.slow
def test_sceaux_castle(colmap: None, scene_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Eleven photos of 6 megapixels from the real world, at reduced size to be quick: all of them find their place."""
    config = ProcessConfig(max_size=600, max_features=1000)
    verdict = process(scene_dir("photos/sceaux_castle"), tmp_path / "castle", config, report=Words())
    assert verdict.registered == 11 and verdict.mean_error < 1.0


def test_how_much_is_done_never_shrinks(tmp_path: Path) -> None:
    """COLMAP begins a second model after the first: 40% came after 100%."""
    lines = [f"Registering image #{n} ({n})" for n in (2, 5, 2, 4)]
    script = f"import time\nfor line in {lines!r}:\n    print(line, flush=True)\n    time.sleep(0.05)"
    heard: list[float] = []
    run([sys.executable, "-c", script], tmp_path / "log", heard.append, n_images=5)
    assert heard == sorted(heard) and heard[-1] == 1.0 and len(heard) >= 2
