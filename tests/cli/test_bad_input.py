"""Whatever is wrong: exit code 2, one line that says what, no traceback, nothing half-written left behind."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nerfturbo.errors import InputError
from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.graph import _not_captured
from nerfturbo.training.trainer import Trainer
from nerfturbo.types import Aabb, Rays

from ..tiny import TINY_FLAGS, ball_scene, tiny_config
from .conftest import Nerfturbo, Outcome


def assert_refused(result: Outcome, *says: str) -> None:
    assert result.code == 2, result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert "Traceback" not in result.err and result.out == ""
    for text in says:
        assert re.search(text, errors[0]), errors[0]


def nothing_left(*except_names: str) -> bool:
    return {path.name for path in Path(".").iterdir()} <= set(except_names)


def edit_pose(scene: Path, row: int, value: float) -> None:
    file = scene / "transforms_train.json"
    document = json.loads(file.read_text())
    document["frames"][1]["transform_matrix"][row][0] = value
    file.write_text(json.dumps(document))


def empty(scene: Path) -> None:
    shutil.rmtree(scene)
    scene.mkdir()


def not_finite(scene: Path) -> None:
    """A float image with one pixel that is none."""
    file = scene / "train" / "r_1.png"
    with Image.open(file) as image:
        values = np.zeros((image.height, image.width), np.float32)
    values[1, 2] = np.nan
    Image.fromarray(values).save(file, format="TIFF")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (shutil.rmtree, "expected a folder with a scene, got no such folder"),
    "empty folder": (empty, "got an empty folder"),
    "wrong folder": (lambda scene: [file.unlink() for file in scene.glob("*.json")], "a scene in a known format"),
    "broken json": (lambda scene: (scene / "transforms_train.json").write_text("{"), "expected valid JSON"),
    "undecodable image": (lambda scene: (scene / "train" / "r_1.png").write_bytes(b"no"), r"r_1\.png.*decodes"),
    "not finite image": (not_finite, r"train/r_1\.png: expected pixels that are finite, got NaN or infinity"),
    "cut image": (
        lambda scene: (scene / "test" / "r_0.png").write_bytes((scene / "test" / "r_0.png").read_bytes()[:60]),
        r"test/r_0\.png.*decodes",
    ),
    "NaN pose": (lambda scene: edit_pose(scene, 0, float("nan")), "frame 1: transform_matrix: expected a finite"),
    "skewed pose": (lambda scene: edit_pose(scene, 0, 9.0), "frame 1: transform_matrix: expected a rotation"),
}


def test_training_images_that_are_all_missing(nerfturbo: Nerfturbo, scene: Path) -> None:
    for file in (scene / "train").iterdir():
        file.unlink()
    refused = nerfturbo("train", scene, *TINY_FLAGS, "--output", "out")
    assert refused.code == 2 and "frame 0: file_path" in refused.err and "train/r_0" in refused.err, refused.err
    assert "train split left out" in nerfturbo("scene", "info", scene).out


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_scenes(nerfturbo: Nerfturbo, scene: Path, damage: str) -> None:
    make, says = DAMAGES[damage]
    make(scene)
    assert_refused(nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1, "--output", "out"), says)
    assert nothing_left()
    assert_refused(nerfturbo("scene", "info", scene), says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--steps", "0"], r"--steps: expected a number > 0, got 0"),
        (["--time-limit", "-1"], r"--time-limit: expected a number > 0"),
        (["--downscale", "0"], r"--downscale: expected a number > 0"),
        (["--eval-views", "0"], "--eval-views"),
        (["--turntable", "-1"], "--turntable"),
        (["--grid.resolution", "7"], "resolution: expected a multiple of 4"),
        (["--train.max-rays", "0"], r"train\.max_rays: expected a whole number from 1 to .*, got 0"),
        (["--field.log2-entries", "99"], r"field\.log2_entries: expected a whole number from 4 to 28, got 99"),
        (["--optim.lr", "-1"], r"optim\.lr: expected a number > 0 and <= 1000, got -1\.0"),
        (["--optim.final-lr-fraction", "0"], r"optim\.final_lr_fraction: expected a number > 0"),
        (["--optim.warmup-steps", "-1"], r"optim\.warmup_steps: expected a whole number from 0 to"),
        (["--train.time-limit", "inf"], r"train\.time_limit: expected a number > 0 and <= .* or null, got inf"),
        (["--grid.decay", "1.5"], r"grid\.decay: expected a number from 0 to below 1, got 1\.5"),
        (["--seed", "-1"], r"train\.seed: expected a whole number from 0"),
        (["--field", "hash"], "--field: expected one of ngp, .*, or your own: path/to/file.py:ClassName, got 'hash'"),
        (["--field", "nowhere.py:Field"], r"--field: expected a Python file, got .*/nowhere\.py, which is not there"),
        (["--sampler", "random"], "--sampler: expected one of grid, uniform, hierarchy, proposal, or your own"),
        (["--backend", "triton"], "backend 'triton' needs CUDA tensors"),
        (["--preset", "fast"], "preset: expected one of auto, "),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:77"], "--device: expected a GPU that torch can use.*doctor"),
        (["--resume", "nowhere"], "nowhere: expected a run folder, got no such folder"),
    ],
)
def test_bad_values(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = [] if "--resume" in flags else [scene, *TINY_FLAGS, "--output", "out"]
    assert_refused(nerfturbo("train", *words, *flags), says)
    assert nothing_left()


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag"],
        ["--steps", "many"],
        ["--backend", "cuda"],
        ["a", "b", "c"],
        ["--field.n-features", "3"],
        ["--field", "ngp", "--field.motion", "time"],  # of vanilla
        ["--sampler", "uniform", "--sampler.prune"],  # of grid
    ],
)
def test_bad_flags_exit_with_2(nerfturbo: Nerfturbo, flags: list[str]) -> None:
    result = nerfturbo("train", *flags)
    assert result.code == 2 and result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("render", "RUN: expected a run folder, got nothing; `nerfturbo render --help`"),
        ("train toybox --steps 1.5", "--steps: expected a whole number, got '1.5'"),
        ("train toybox --field.n-levels x", "--field.n-levels: expected a whole number, got 'x'"),
        ("train toybox --time-limit soon", "--time-limit: expected a number, got 'soon'"),
        ("train toybox --optim.lr=fast", "--optim.lr: expected a number, got 'fast'"),
        ("train toybox --optim.lr", "--optim.lr: expected a value, got nothing"),
        ("train toybox --loss.kind mze", "--loss.kind: expected one of .*, got mze; did you mean mse?"),
        ("bench scene toybox --marks a b", "--marks: expected SECONDS, got 'a', 'b'"),
        ("train toybox --device cpu more", "Unrecognized options: more; `nerfturbo train --help` lists all$"),
    ],
)
def test_the_parser_answers_in_one_line(nerfturbo: Nerfturbo, words: str, says: str) -> None:
    assert_refused(nerfturbo(*words.split()), f"^error: {says}")
    assert nothing_left()


@pytest.mark.parametrize("words", [["frobnicate"], ["scene"], ["scene", "inof"], ["bench", "everything"]])
def test_unknown_commands_list_the_known_ones(nerfturbo: Nerfturbo, words: list[str]) -> None:
    result = nerfturbo(*words)
    assert result.code == 2 and "usage: nerfturbo" in result.err and result.out == ""


@pytest.mark.parametrize("study", ["ops", "precision", "ablation", "trainers"])
def test_studies_are_found_where_they_are(nerfturbo: Nerfturbo, study: str) -> None:
    result = nerfturbo("bench", study, "toybox")
    assert result.code == 2 and f"did you mean python benchmarks/{study}.py?" in result.err
    assert (Path(__file__).parents[2] / "benchmarks" / f"{study}.py").is_file()


def test_an_output_that_cannot_be_made_is_refused_before_the_scene_is_opened(nerfturbo: Nerfturbo, scene: Path) -> None:
    Path("file").write_text("x")
    result = nerfturbo("train", scene, *TINY_FLAGS, "--output", "file/run")
    assert_refused(result, "file/run: expected a place that can be written, got file is a file")
    assert "opening" not in result.err and Path("file").read_text() == "x" and nothing_left("file")


@pytest.mark.parametrize("verb", ["tune", "profile", "bench step", "bench scene"])
def test_results_that_could_not_be_written_are_refused_before_the_work(
    nerfturbo: Nerfturbo, scene: Path, verb: str
) -> None:
    Path("there.json").mkdir()
    words = [*verb.split(), *([] if verb == "bench step" else [scene]), "--output"]
    assert_refused(nerfturbo(*words, "there.json"), "there.json: expected a file, got a folder of that name")
    assert_refused(nerfturbo(*words, "plot.svg"), "--output: expected a file ending in .json, got plot.svg")
    assert [path.name for path in Path.cwd().iterdir()] == ["there.json"]


def test_other_peoples_folders_are_left_alone(nerfturbo: Nerfturbo, scene: Path) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter").write_text("x")
    assert_refused(nerfturbo("train", scene, *TINY_FLAGS, "--output", "thesis"), "holds other files.*--overwrite")
    assert [path.name for path in Path("thesis").iterdir()] == ["chapter"]
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1, "--output", "thesis", "--overwrite")
    assert result.code == 0 and Path("thesis/chapter").read_text() == "x"


def test_a_run_is_not_written_into_its_scene(nerfturbo: Nerfturbo, scene: Path) -> None:
    before = sorted(scene.rglob("*"))
    result = nerfturbo("train", scene, *TINY_FLAGS, "--output", scene.parent / "." / scene.name, "--overwrite")
    assert_refused(result, "--output: expected another folder than the scene's")
    assert sorted(scene.rglob("*")) == before


@pytest.mark.parametrize("value", [None, "many"])
def test_metrics_without_a_rate(nerfturbo: Nerfturbo, run_folder: Path, value: str | None) -> None:
    file = run_folder / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples_per_second": value}))
    result = nerfturbo("eval", run_folder, "--backend", "reference")
    assert result.code == 0 and "rays/s" not in result.out


def test_a_run_is_not_overwritten_by_accident(nerfturbo: Nerfturbo, scene: Path, run_folder: Path) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--output", run_folder)
    assert_refused(result, "got a run; go on with it by --resume .* or replace it by --overwrite")


def test_a_run_is_not_overwritten_for_a_logger_that_is_not_installed(
    nerfturbo: Nerfturbo, scene: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = (run_folder / "config.json").read_bytes()
    result = nerfturbo("train", scene, *TINY_FLAGS, "--log", "wandb", "--overwrite", "--output", run_folder)
    assert_refused(result, "--log: expected loggers whose packages are installed, got wandb; pip install wandb")
    assert (run_folder / "config.json").read_bytes() == before and any((run_folder / "checkpoints").iterdir())


def test_a_finished_run_is_not_resumed_without_more_steps(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    assert_refused(nerfturbo("train", "--resume", run_folder), "more than the 12 steps of the run, got 12.*eval")
    result = nerfturbo("train", "--resume", run_folder, "--steps", 20, "--seed", 3)
    assert_refused(result, "--seed: expected nothing beside --resume")
    result = nerfturbo("train", "--resume", run_folder, "--steps", 20, "--preset", "vanilla")
    assert_refused(result, "--preset: expected nothing beside --resume, got 'vanilla'; a run keeps its own")


def test_a_checkpoint_of_another_model(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    before = (run_folder / "config.json").read_text()
    flags = ["--steps", 20, "--field.width", 32, "--backend", "reference"]
    assert_refused(nerfturbo("train", "--resume", run_folder, *flags), "belongs to another model")
    assert (run_folder / "config.json").read_text() == before


@pytest.mark.parametrize("verb", ["eval", "render"])
def test_broken_runs(nerfturbo: Nerfturbo, run_folder: Path, verb: str) -> None:
    tensors = next(run_folder.glob("checkpoints/*12/tensors.safetensors"))
    content = tensors.read_bytes()
    tensors.write_bytes(content[: len(content) // 2])
    assert_refused(nerfturbo(verb, run_folder, "--backend", "reference"), "not a readable safetensors file")
    tensors.write_bytes(content)
    state = tensors.with_name("state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"bounds": {}}))
    assert_refused(nerfturbo(verb, run_folder, "--backend", "reference"), "bounds: expected low, high")
    shutil.rmtree(run_folder / "checkpoints")
    assert_refused(nerfturbo(verb, run_folder), "found none; train one first")
    (run_folder / "config.json").unlink()
    assert_refused(nerfturbo(verb, run_folder), "expected a run folder with config.json")


@pytest.mark.parametrize("file", ["config.json", "metrics.json", "log.jsonl", "state.json"])
def test_json_that_is_nested_too_deeply(nerfturbo: Nerfturbo, run_folder: Path, file: str) -> None:
    path = sorted(run_folder.rglob(file))[-1]
    path.write_text("[" * 200_000 + "]" * 200_000)
    if file == "log.jsonl":  # a line that cannot be read is left out
        assert RunFolder(run_folder).read_log() == []
    else:
        assert_refused(nerfturbo("eval", run_folder), re.escape(file))


def test_a_run_whose_pictures_have_moved(nerfturbo: Nerfturbo, run_folder: Path, scene: Path) -> None:
    document = json.loads((run_folder / "config.json").read_text())
    document["config"]["data"]["source"] = str(scene.parent / "gone")
    (run_folder / "config.json").write_text(json.dumps(document))
    assert_refused(nerfturbo("eval", run_folder, "--backend", "reference"), "gone.*name the folder by --data")
    assert nerfturbo("eval", run_folder, "--backend", "reference", "--data", scene).code == 0


def test_a_debug_variable_shows_the_traceback(nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_DEBUG", "1")
    result = nerfturbo("eval", "nowhere")
    assert result.code == 2 and "Traceback" in result.err and "error: nowhere" in result.err


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"train": {"steps": "many"}}, r"c\.json\.train\.steps: expected a whole number from 1 to .*, got 'many'"),
        ({"train": {"time_limit": "long"}}, r"train\.time_limit: expected a number > 0 .* or null, got 'long'"),
        ({"train": {"on_instability": "wait"}}, r"expected 'warn' or 'lower-lr' or 'stop', got 'wait'"),
        (
            {"field": {"kind": "voxels", "resolutions": 0.5}},
            r"field\.resolutions: expected a list, each a whole number from 2 to 1023, got 0\.5",
        ),
        ({"field": {"kind": "hash"}}, r"c\.json\.field\.kind: expected one of ngp, .*, got 'hash'"),
    ],
)
def test_values_in_a_config_file_are_named_in_words(nerfturbo: Nerfturbo, scene: Path, values: dict, says: str) -> None:
    Path("c.json").write_text(json.dumps({"version": 1, "config": values}))
    assert_refused(nerfturbo("train", scene, "--config", "c.json", "--output", "out"), says)


def test_a_degenerate_box() -> None:
    for high in ((1.0, 1.0, 0.0), (1.0, 1.0, float("nan")), (1.0, 1.0, float("inf"))):
        with pytest.raises(InputError, match="aabb: expected low < high on three finite axes"):
            Aabb((0.0, 0.0, 0.0), high)


def test_zero_rays_and_rays_that_miss_everything_are_ordinary() -> None:
    from nerfturbo import use_backend

    model = NerfModel(tiny_config(), SceneBounds.of(ball_scene()))
    away = torch.tensor([[0.0, 0.0, 1.0]])
    for n_rays in (0, 3):
        rays = Rays(torch.tensor([[0.0, 0.0, 9.0]]).expand(n_rays, 3), away.expand(n_rays, 3))
        with use_backend("reference"):
            out = model.render_rays(rays, torch.tensor([0.1, 0.2, 0.3]))
        assert torch.equal(out.rgb, torch.tensor([[0.1, 0.2, 0.3]]).expand(n_rays, 3))
        assert torch.equal(out.opacity, torch.zeros(n_rays))


def test_too_little_memory_is_no_traceback(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(trainer: Trainer) -> None:
        torch.empty(1 << 55)  # no machine has this much

    monkeypatch.setattr(Trainer, "advance", hungry)
    done = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 3, "--output", tmp_path / "run")
    assert_refused(done, "memory.*batch-samples")


def test_a_step_that_does_not_fit_the_gpu_is_not_called_impossible_to_record() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
    except RuntimeError as error:
        text = str(_not_captured(error))
    assert "out of memory" in text and "batch_samples" in text and ".item()" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train SCENE --steps 1 --output new", "training: expected what fits the 5 MB of free memory, got 28 MB"),
        ("train SCENE --steps 1 --output new --optim.ema-decay 0", "the 5 MB of free memory, got 21 MB"),  # no mean
        ("export mesh RUN new.ply --resolution 400", "--resolution: expected what fits the 5 MB of free memory"),
    ],
)
def test_work_that_needs_more_memory_than_is_free_is_refused(
    nerfturbo: Nerfturbo, scene: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    if "mesh" in words:
        pytest.importorskip("trimesh")
    monkeypatch.setattr("nerfturbo.data.pool_file.available_memory", lambda: 5_000_000)
    flags = [{"SCENE": str(scene), "RUN": str(run_folder)}.get(word, word) for word in words.split()]
    done = nerfturbo(*flags)
    assert done.code == 2 and says in done.err and not list(Path().glob("new*")), done.err


@pytest.mark.parametrize(
    ("words", "needs"), [("export points RUN new.ply --points 9000000", "243"), ("export web RUN new.html", "30")]
)
def test_exports_that_would_not_fit_the_disk_are_refused(
    nerfturbo: Nerfturbo, run_folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, needs: str
) -> None:
    usage = shutil.disk_usage(".")._replace(free=2_000_000)
    monkeypatch.setattr("nerfturbo.evaluation.run_folder.shutil.disk_usage", lambda folder: usage)
    done = nerfturbo(*(str(run_folder) if word == "RUN" else word for word in words.split()))
    assert done.code == 2 and f"No space left on device, 2 of {needs} MB" in done.err and "opening" not in done.err


def test_checkpoints_that_would_not_fit_the_disk_are_refused_before_training(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=2_000_000)
    monkeypatch.setattr("nerfturbo.evaluation.run_folder.shutil.disk_usage", lambda folder: usage)
    done = nerfturbo("train", scene, "--steps", 1, "--output", "new", "--keep", 1)
    assert done.code == 2 and "new: expected a place that can be written, got No space left" in done.err
    assert "2 of 54 MB" in done.err and not Path("new").exists()  # two checkpoints, each with the mean of the weights
    assert nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1, "--output", "new").code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["export", "mesh", "RUN", "out/mesh.glb"], "out/mesh.glb"),
        (["render", "RUN", "--output", "out/a.gif"], "out/a.gif"),
        (["inspect", "RUN", "--output", "out/a.png"], "out/a.png"),
        (["train", "SCENE", "--output", "out"], "out"),
        (["train", "SCENE"], "runs"),
        (["train", "--resume", "RUN", "--steps", "14"], "run"),
    ],
)
def test_a_full_disk_is_found_before_any_work(
    nerfturbo: Nerfturbo,
    run_folder: Path,
    scene: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    named: str,
) -> None:
    def full(**_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nerfturbo.evaluation.run_folder.tempfile.TemporaryFile", full)
    places = {"RUN": run_folder, "SCENE": scene}
    result = nerfturbo(*(places.get(word, word) for word in words))
    assert result.code == 2 and "No space left on device" in result.err and "Traceback" not in result.err
    assert f"{named}: expected a place that can be written" in result.err and "opening" not in result.err
