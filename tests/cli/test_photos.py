"""Photos and videos on the command line: described, given poses and trained without a flag."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from nerfturbo.data.capture import video
from nerfturbo.data.capture.photos import copy_photos, find_photos
from nerfturbo.data.capture.process import MissingPosesError, fingerprint, has_poses, poses_folder
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import load_scene
from nerfturbo.evaluation.run_folder import open_run

from ..conftest import IN_CI
from ..data import folders, photo_scene
from ..tiny import TINY_FLAGS, write_video
from .conftest import Nerfturbo
from .test_interrupt import start

SMALL = ["--grid.resolution", 16, "--field.log2-entries", 10, "--train.batch-samples", 1024, "--turntable", 0]


def require_colmap() -> None:
    if shutil.which("colmap") is None:
        reason = "the program colmap is not installed: apt install colmap"
        pytest.fail(reason) if IN_CI else pytest.skip(reason)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_video_trains_without_a_flag(nerfturbo: Nerfturbo, cache: Path) -> None:
    """The poses are found once, into the cache; info, eval and a second training find them there. Its name has spaces
    and more than ASCII in it, and so has the command that is advised. Nothing appears beside the video."""
    require_colmap()
    pytest.importorskip("imageio_ffmpeg", reason="nothing to write an MP4 with")
    pictures = [torch.from_numpy(photo_scene.picture(eye)) for eye in photo_scene.eyes(6)]
    write_video(Path("der Weg ü.mp4"), pictures, fps=5)
    shown = nerfturbo("scene", "info", "der Weg ü.mp4")
    assert shown.code == 0 and "photos or video, without poses" in shown.out
    result = nerfturbo("train", "der Weg ü.mp4", "--steps", 2, "--downscale", 8, "--output", "run", *SMALL, "--json")
    assert result.code == 0, result.err
    assert "matcher exhaustive: all 15 pairs of 6 images" in result.err
    assert "poses will take about" in result.err
    placed, _, opened = result.err.partition("good: 6 of 6 images registered")
    assert (
        "4/4 poses" in placed
        and "4/4 poses" not in opened
        and f"opening {poses_folder(Path('der Weg ü.mp4'))}" in opened
    )
    assert open_run("run").read_config().data.source == str(Path("der Weg ü.mp4").resolve())
    made = poses_folder(Path("der Weg ü.mp4"))
    assert made.parent == cache / "colmap" and {path.name for path in Path().iterdir()} == {"der Weg ü.mp4", "run"}
    assert has_poses(Path("der Weg ü.mp4"))
    assert nerfturbo("eval", "run").code == 0
    described = nerfturbo("scene", "info", "der Weg ü.mp4", "--json", "--plot", "plot.png").json
    assert described["format"] == "photos or video" and described["name"] == "der Weg ü"
    assert described["splits"]["train"]["views"] == 5 and Path("plot.png").stat().st_size > 10_000
    shutil.copyfile("der Weg ü.mp4", "copy.mp4")
    assert poses_folder(Path("copy.mp4")) == made and has_poses(Path("copy.mp4"))
    again = nerfturbo("process", "der Weg ü.mp4", made, "--json")
    assert again.code == 0 and again.json["registered"] == 6 and "4/4 poses: done before" in again.err
    assert f"train it with: nerfturbo train '{made}'" in again.err


def test_ctrl_c_ends_colmap_too_and_says_how_to_go_on(tmp_path: Path) -> None:
    require_colmap()
    room, output = photo_scene.write_photos(tmp_path / "room", 6), tmp_path / "out"
    process = start("process", room, output)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "] 2/4 features" in line:
            break
    time.sleep(0.5)  # inside of COLMAP's work
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 130, said + rest
    assert "run the same command again to go on" in rest and "Traceback" not in rest
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [line for line in running.splitlines() if str(output) in line]
    state = json.loads((output / "process.json").read_text())
    assert list(state["stages"]) == ["pictures"] and not (output / "work" / "features.db").exists()


def test_a_video_without_poses_is_described(nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="nothing to write an MP4 with")
    write_video(Path("walk.mp4"), [torch.full((48, 64, 3), 20 * index, dtype=torch.uint8) for index in range(8)], fps=4)
    found = nerfturbo("scene", "info", "walk.mp4", "--json").json
    assert found["video"] == {"frames": 8, "size": [64, 48], "fps": 4.0, "seconds": 2.0, "taken": 8}
    shown = nerfturbo("scene", "info", "walk.mp4").out
    assert "walk.mp4: photos or video, without poses; a video: 8 frames, 64 x 48, 4 fps, 2.0 s" in shown
    assert f"next  nerfturbo process walk.mp4 {poses_folder(Path('walk.mp4'))}" in shown
    Path("damaged.mp4").write_bytes(b"no video" * 99)
    refused = nerfturbo("scene", "info", "damaged.mp4")
    assert refused.code == 2 and "damaged.mp4: expected a video" in refused.err
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    unread = nerfturbo("scene", "info", "walk.mp4")  # nothing here decodes it, and what to do next is said all the same
    assert unread.code == 0 and "pip install imageio-ffmpeg" in unread.out and "next  nerfturbo process" in unread.out


def test_photos_without_poses_are_described(nerfturbo: Nerfturbo) -> None:
    photo_scene.write_photos(Path("room"), 3)
    found = nerfturbo("scene", "info", "room", "--json").json
    assert found["poses"] is None and found["pictures"] == 3 and found["sizes"] == [[320, 240]]
    shown = nerfturbo("scene", "info", "room").out
    assert "without poses; 3 photos, 320 x 240" in shown and "nerfturbo train room" in shown
    assert found["next"] == f"nerfturbo process room {poses_folder(Path('room'))}"
    assert f"next  {found['next']}" in shown and found["preset"] is None
    assert "preset  {}, or {} where".format(*found["presets"]) in shown
    refused = nerfturbo("scene", "info", "room", "--plot", "a.png")
    assert refused.code == 2 and "nerfturbo process room" in refused.err and not Path("a.png").exists()
    with pytest.raises(MissingPosesError, match="expected images with poses"):
        load_scene("room")
    Path("room").rename("the room")
    assert "`nerfturbo train 'the room'`" in nerfturbo("scene", "info", "the room").out
    assert "nerfturbo process 'the room' " in nerfturbo("scene", "info", "the room", "--plot", "a.png").err
    with pytest.raises(MissingPosesError, match="nerfturbo process 'the room' "):
        load_scene("the room")


def test_poses_lie_in_the_cache_and_copies_share_them(tmp_path: Path, cache: Path) -> None:
    room = photo_scene.write_photos(tmp_path / "room", 2)
    own = poses_folder(room)
    assert own.parent == cache / "colmap" and own.name.startswith("room-") and not own.exists()
    (own / "sparse" / "0").mkdir(parents=True)
    state = {"stages": {"poses": {}}, "input": fingerprint(find_photos(room))}
    (own / "process.json").write_text(json.dumps(state))
    copy = shutil.copytree(room, tmp_path / "copy", copy_function=shutil.copyfile)  # with dates of its own
    assert poses_folder(copy) == own and has_poses(copy)
    Image.new("RGB", (64, 48)).save(copy / find_photos(copy)[0].name)
    assert poses_folder(copy) != own and not has_poses(copy)


def test_figures_are_not_taken_for_a_capture(nerfturbo: Nerfturbo, cache: Path) -> None:
    Path("figures").mkdir()
    for index in range(4):
        Image.new("RGB", (300 + 40 * index, 200)).save(f"figures/plot{index}.png")
    refused = nerfturbo("train", "figures")
    assert (
        refused.code == 2 and "figures: expected photos of one scene, got 4 images of 4 different sizes" in refused.err
    )
    assert "nerfturbo process figures FOLDER" in refused.err and "COLMAP" not in refused.err
    assert not cache.exists() and [path.name for path in Path().iterdir()] == ["figures"]


def test_process_refuses_with_one_line(nerfturbo: Nerfturbo) -> None:
    Path("empty").mkdir()
    for words, expected in (
        (["missing", "out"], "no such file or folder"),
        (["empty", "out"], "expected photos ending in .jpg"),
        (["empty", "out", "--max-size", 5], "--max-size: expected at least 100, got 5"),
    ):
        result = nerfturbo("process", *words)
        assert result.code == 2 and expected in result.err and "Traceback" not in result.err
        assert not Path("out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow only names that are text")
def test_names_that_are_no_text(nerfturbo: Nerfturbo) -> None:
    """Old zip files hold names in other encodings. They are shown escaped, and COLMAP gets names that are text."""
    folder = Path(os.fsdecode(b"f\xfcr \xff"))
    folder.mkdir()
    for index in range(2):
        path = folder / os.fsdecode(b"\xfe%d.jpg" % index)
        Image.new("RGB", (64, 48), (index, 0, 0)).save(path)
    shown = nerfturbo("scene", "info", folder)
    assert shown.code == 0 and "without poses; 2 photos" in shown.out
    photos = copy_photos(find_photos(folder), Path("out"), lambda text: None, lambda share: None)
    assert [photo.name for photo in photos] == ["_xfe0.jpg", "_xfe1.jpg"]
    assert nerfturbo("scene", "info", folder / "nothing").code == 2
    assert poses_folder(folder)


def test_pictures_outside_the_folder_need_a_flag(nerfturbo: Nerfturbo) -> None:
    folder = folders.write_transforms(Path("capture"), aabb_scale=1)
    shutil.move("capture/images", "elsewhere")
    file = folder / "transforms.json"
    for place in ("../elsewhere", str(Path("elsewhere").resolve())):
        document = json.loads(file.read_text())
        for frame in document["frames"]:
            frame["file_path"] = f"{place}/{Path(frame['file_path']).name}"
        file.write_text(json.dumps(document))
        refused = nerfturbo("scene", "info", folder)
        assert refused.code == 2 and "a path inside the scene's folder" in refused.err
        assert "--allow-outside" in refused.err
        assert nerfturbo("scene", "info", folder, "--allow-outside", "--json").json["splits"]["train"]["views"] == 14
        assert len(load_scene(folder, options=LoadOptions(allow_outside=True))) == 14
    words = ["--steps", 2, "--output", "run", "--allow-outside", *TINY_FLAGS, "--turntable", 0, "--downscale", 2]
    assert nerfturbo("train", folder, *words).code == 0
    assert nerfturbo("eval", "run", "--backend", "reference").code == 0  # a run remembers what was allowed
