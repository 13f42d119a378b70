"""Photos or a video to a scene folder with poses, in four stages: pictures, features, matches, poses.

    OUTPUT/images/        upright images
    OUTPUT/sparse/0/      cameras, poses and points, as COLMAP writes them
    OUTPUT/process.json   what was chosen, which stages are done, the verdict
    OUTPUT/work/          what lies between the stages, and COLMAP's own words in colmap.log

A stage writes beside its place and is renamed at its end: what exists is whole. A stage whose inputs have not changed
is not repeated; matching, the longest, goes on where it stopped.

Photos and videos as scenes are loaded from such a folder in the cache (NERFTURBO_CACHE, else the platform's), under
colmap/. Nothing is written beside the photos.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...errors import InputError, refuse
from ...files import cache_folder, remove, remove_abandoned, replacing, write_atomically
from ...presets import ProcessConfig
from ..formats.colmap import load_colmap
from ..images import image_size
from ..json_checks import natural, read_json
from ..options import DEFAULTS, LoadOptions
from ..scene import UNPOSED, Scene, SceneFormat, Split
from ..speed import pose_seconds
from . import video
from .photos import Photo, copy_photos, find_photos, is_video, photo_sizes, require_photos
from .sfm import OVERLAP, PAIRS, Extraction, Matcher, Tool, Verdict, judge, largest_model, model_jumps, open_tool, query

STATE_FILE = "process.json"
EXHAUSTIVE_PHOTOS = 120  # 7,140 pairs; beyond, the order of names says who is near whom
EXHAUSTIVE_FRAMES = 40
RICH_LENS_PICTURES = 20  # of one camera: enough to find eight numbers of a lens instead of four
FEATURES_CPU, FEATURES_GPU = 4096, 8192
ENOUGH = 0.9  # of the frames must have a place where neighbours alone decide
_STAGES = ("pictures", "features", "matches", "poses")
_VERSION = 1
BEGIN = 1 << 17  # bytes of a file that tell it from others of its size
MIXED_SHARE = 0.5  # of photos have a size of their own where a folder holds figures, not a capture


class Report(Protocol):
    """Who hears about progress."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, fraction: float) -> None: ...


def process(source: Path, output: Path, settings: ProcessConfig | None = None, *, report: Report) -> Verdict:
    """Find the poses of photos or of a video's frames and write a scene folder; what is done already is kept. Interrupt
    it at any time and call it again. Raises InputError where the images do not fit together at all."""
    settings = settings or ProcessConfig()
    for name, smallest in {"frames": 2, "max_size": 100, "max_features": 100}.items():
        value = getattr(settings, name)
        refuse(value is not None and value < smallest, "--" + name.replace("_", "-"), f"at least {smallest}", value)
    inputs = _inputs(source)
    work = _Work(output, source)
    tool = open_tool(settings.tool)
    with work.locked():
        try:
            return _Process(source, inputs, settings, tool, work, report).run()
        except InputError:
            if work.is_new and not work.state["stages"]:  # nothing in the folder was there before, or is finished
                shutil.rmtree(output, ignore_errors=True)  # its lock is open: not every system lets go of that
            raise


def is_current(source: Path, output: Path) -> bool:
    """Whether the output is finished, and made of what the source holds now."""
    try:
        state = read_json(output / STATE_FILE)
    except InputError:
        return False
    done = state.get("stages", {}).get("poses") is not None and (output / "sparse" / "0").is_dir()
    return done and state.get("input") == fingerprint(_inputs(source))


class _Work:
    """The output folder and what is known about its stages."""

    def __init__(self, output: Path, source: Path) -> None:
        self.output, self.folder = output, output / "work"
        self.images, self.sparse, self.log = output / "images", output / "sparse", self.folder / "colmap.log"
        self.is_new = not output.exists()
        if output.resolve() == source.resolve():
            raise InputError(str(output), "a folder beside the photos, or inside", "the folder of the photos itself")
        self.state: dict[str, Any] = {"version": _VERSION, "stages": {}}
        if (output / STATE_FILE).is_file():
            found = read_json(output / STATE_FILE)
            if found.get("version") == _VERSION and isinstance(found.get("stages"), dict):
                self.state = found
        elif output.exists() and (not output.is_dir() or any(output.iterdir())):
            hint = "choose another name"
            raise InputError(str(output), "a new or empty folder, or one that `process` made", "another", hint)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes at once would spoil each other's files."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            hint = "choose another output folder, or another cache by NERFTURBO_CACHE"
            raise InputError(str(self.output), "a place that can be written", str(error.strerror), hint) from None
        with lock:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    hint = "wait for it, or end it"
                    raise InputError(str(self.output), "a folder of our own", "another process at it", hint) from None
            yield

    def is_done(self, stage: str, key: str) -> bool:
        result = {"pictures": self.images, "poses": self.sparse / "0"}.get(stage, self.folder / f"{stage}.db")
        return self.state["stages"].get(stage, {}).get("key") == key and result.exists()

    def save(self, **values: Any) -> None:
        self.state |= values
        write_atomically(self.output / STATE_FILE, json.dumps(self.state, indent=1) + "\n")

    def forget_from(self, stage: str) -> None:
        """This stage and those after it are not valid any more. A result stays until the next, if its images do."""
        for later in _STAGES[_STAGES.index(stage) :]:
            self.state["stages"].pop(later, None)
        self.state.pop("verdict", None)
        self.save()
        if stage == "pictures":
            remove(self.sparse)


@dataclass(frozen=True)
class _Process:
    """The four stages in their order."""

    source: Path
    inputs: list[Path]
    settings: ProcessConfig
    tool: Tool
    work: _Work
    report: Report

    @property
    def from_video(self) -> bool:
        return is_video(self.source)

    def run(self) -> Verdict:
        remove_abandoned(self.work.output)
        content = fingerprint(self.inputs)
        self.work.save(source=str(self.source.resolve()), input=content)
        key = _key("pictures", content, self.settings.frames)
        self._stage("pictures", key, self._pictures)
        photos = [Photo(n, (w, h), c) for n, (w, h), c in self.work.state["stages"]["pictures"]["photos"]]
        extraction, matcher = self._choices(photos)
        features = _key("features", key, asdict(extraction) | {"images": ""})
        matches = _key("matches", features, matcher)
        poses = _key("poses", matches)
        if not self.work.is_done("poses", poses):  # what lies between may be gone
            self._stage("features", features, lambda: self._features(extraction))
            self._stage("matches", matches, lambda: self._matches(matcher, len(photos), features))
        self._stage("poses", poses, self._poses)
        verdict = judge(self.work.sparse / "0", self.work.folder, [photo.name for photo in photos], matcher)
        self.work.save(verdict=asdict(verdict))
        return verdict

    def _stage(self, name: str, key: str, run: Callable[[], dict[str, Any]]) -> None:
        title = f"{_STAGES.index(name) + 1}/4 {name.replace('pictures', 'images')}"
        if self.work.is_done(name, key):
            self.report.note(f"{title}: done before")
            return
        self.work.forget_from(name)
        self.report.phase(title)
        start = time.monotonic()
        values = run()
        seconds = time.monotonic() - start
        self.work.state["stages"][name] = {"key": key, **values, "seconds": round(seconds, 1)}
        self.work.save()
        self.report.note(f"{title}: {values['said']} ({seconds:.0f} s)")

    def _choices(self, photos: list[Photo]) -> tuple[Extraction, Matcher]:
        """Camera, matcher and sizes, each with the reason it was chosen for."""
        settings, n = self.settings, len(photos)
        one_camera = self.from_video or len({(photo.size, photo.camera) for photo in photos}) == 1
        model, why = settings.camera_model, "chosen by hand"
        if model == "auto":
            model = "OPENCV" if one_camera and n >= RICH_LENS_PICTURES else "SIMPLE_RADIAL"
            shared = "one camera for all" if one_camera else "a camera for each size and EXIF focal length"
            why = f"{n} images, {shared}"
        matcher, reason = settings.matcher, "chosen by hand"
        if matcher == "auto":
            few = EXHAUSTIVE_FRAMES if self.from_video else EXHAUSTIVE_PHOTOS
            matcher = "exhaustive" if n <= few else "sequential"
            order = "frames of a video" if self.from_video else "photos, taken for a walk in the order of their names"
            reason = f"all {n * (n - 1) // 2} pairs of {n} images" if matcher == "exhaustive" else f"{n} {order}"
        features = settings.max_features or (FEATURES_GPU if self.tool.uses_gpu else FEATURES_CPU)
        notes = [f"camera model {model}: {why}", f"matcher {matcher}: {reason}"]
        where = f"at up to {features} points of images of at most {settings.max_size} pixels"
        notes.append(f"{self.tool.name}; features {where}")
        if not self.tool.uses_gpu:
            pairs = n * (n - 1) // 2 if matcher == "exhaustive" else 2 * OVERLAP * n
            notes.append(f"poses will take about {max(1.0, pose_seconds(n, pairs) / 60.0):.0f} min on this CPU")
        for note in notes:
            self.report.note(note)
        self.work.state["choices"] = notes
        return Extraction(self.work.images, model, one_camera, settings.max_size, features), matcher

    def _pictures(self) -> dict[str, Any]:
        with replacing(self.work.images) as part:
            if self.from_video:
                sharpness, seconds = video.look_through(self.source, lambda done: self.report.update(0.6 * done))
                count = self.settings.frames or video.frame_count(len(sharpness), seconds)
                names = video.write_frames(self.source, video.choose_frames(sharpness, count), part)
                photos = [Photo(name, image_size(part / name), "") for name in names]
                said = f"the sharpest frame of each of {count} windows, from {len(sharpness)} in {seconds:.1f} s"
            else:
                photos = copy_photos(self.inputs, part, self.report.note, self.report.update)
                sizes = sorted({photo.size for photo in photos}, reverse=True)
                said = f"{len(photos)} photos, " + ", ".join(f"{w} x {h}" for w, h in sizes[:4])
            refuse(len(photos) < 2, str(self.source), "at least 2 images", len(photos))
        return {"photos": [(photo.name, photo.size, photo.camera) for photo in photos], "said": said}

    def _features(self, extraction: Extraction) -> dict[str, Any]:
        part = self.work.folder / "features.part.db"
        _remove_database(part)
        self.tool.extract(part, extraction, self.work.log, self.report.update)
        counts = query(part, "SELECT rows FROM keypoints")
        os.replace(part, self.work.folder / "features.db")
        mean = sum(row[0] for row in counts) / max(1, len(counts))
        return {"said": f"{mean:.0f} features an image, several at some points"}

    def _matches(self, matcher: Matcher, n: int, features: str) -> dict[str, Any]:
        """Goes on with the pairs an earlier attempt left, if its database is whole and has the same features."""
        database, mark = self.work.folder / "matches.db", self.work.folder / "matches.of"
        kept = []
        if database.is_file() and mark.is_file() and mark.read_text(encoding="utf-8") == features:
            with contextlib.suppress(sqlite3.DatabaseError):  # damaged
                whole = query(database, "PRAGMA quick_check")[:1] == [("ok",)]
                kept = query(database, "SELECT COUNT(*) FROM two_view_geometries") if whole else []
        if not kept:
            mark.unlink(missing_ok=True)
            _remove_database(database)
            shutil.copyfile(self.work.folder / "features.db", database)
            mark.write_text(features, encoding="utf-8")
        elif kept[0][0]:
            self.report.note(f"3/4 matches: going on after {kept[0][0]} pairs that were compared before")
        self.tool.match(database, matcher, n, self.work.log, self.report.update)
        pairs = query(database, "SELECT rows FROM two_view_geometries")
        return {"said": f"{sum(row[0] >= 15 for row in pairs)} of {len(pairs)} pairs see the same things"}

    def _poses(self) -> dict[str, Any]:
        best, sizes = self._map(self.work.folder / "matches.db", "models.part")
        if self.from_video and (jumps := model_jumps(best)):
            best, sizes = self._without_jumps(best, sizes, jumps)
        with replacing(self.work.sparse) as sparse:
            shutil.copytree(best, sparse / "0")
        for name in ("models.part", "neighbours.part"):
            remove(self.work.folder / name)
        said = f"{sizes[0]} images placed"
        if len(sizes) > 1:
            others = ", ".join(map(str, sizes[1:]))
            said += f", the largest of {len(sizes)} models that do not join (the others: {others} images)"
        return {"said": said, "models": sizes}

    def _map(self, database: Path, name: str) -> tuple[Path, list[int]]:
        """The largest model of these matches, and how many images each has."""
        part = self.work.folder / name
        remove(part)
        part.mkdir()
        self.tool.map(database, self.work.images, part, self.work.log, self.report.update)
        return largest_model(part, str(self.source))

    def _without_jumps(self, best: Path, sizes: list[int], jumps: tuple[str, ...]) -> tuple[Path, list[int]]:
        """Frames placed once more by what neighbours share alone; that model, if it has as many frames and no jump. A
        thing that looks the same from two sides matches between frames that are far apart, and only between those."""
        for jump in jumps:
            self.report.note(jump)
        self.report.phase("4/4 poses, from neighbouring frames alone")
        database = self.work.folder / "neighbours.db"
        _remove_database(database)
        shutil.copyfile(self.work.folder / "matches.db", database)
        keep_neighbours(database, OVERLAP)
        again, counts = best, [0]
        with contextlib.suppress(InputError):  # too few matches are left
            again, counts = self._map(database, "neighbours.part")
        _remove_database(database)
        if counts[0] >= ENOUGH * sizes[0] and not model_jumps(again):
            self.report.note("4/4 poses: from neighbouring frames alone the walk is smooth")
            return again, counts
        kept = "4/4 poses: kept as they were, for neighbours alone place"
        self.report.note(f"{kept} {counts[0]} frames, or jump as well")
        return best, sizes


def keep_neighbours(database: Path, most: int) -> None:
    """Forget the matches of pictures more than `most` apart in the order of their names."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        images = connection.execute("SELECT image_id, name FROM images").fetchall()
        order = {number: index for index, (number, _) in enumerate(sorted(images, key=lambda one: natural(one[1])))}
        for table in ("two_view_geometries", "matches"):
            pairs = [pair for (pair,) in connection.execute(f"SELECT pair_id FROM {table}").fetchall()]
            far = [pair for pair in pairs if abs(order[pair % PAIRS] - order[pair // PAIRS]) > most]
            connection.executemany(f"DELETE FROM {table} WHERE pair_id = ?", [(pair,) for pair in far])


def _inputs(source: Path) -> list[Path]:
    return [source] if is_video(source) else require_photos(source)


def fingerprint(inputs: list[Path]) -> str:
    """Of what files hold, by their sizes and beginnings: a copy has the same poses."""

    def begin(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(BEGIN)).hexdigest()

    name = "" if len(inputs) == 1 else None
    return _key(*((path.name if name is None else name, path.stat().st_size, begin(path)) for path in sorted(inputs)))


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _remove_database(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


class MissingPosesError(InputError):
    """Photos or a video that no one has found the poses of yet."""


def is_unposed(source: Path) -> bool:
    """Whether this is a video file or a folder with photos in it; formats with poses must have been ruled out."""
    return is_video(source) or bool(find_photos(source))


def poses_folder(source: Path) -> Path:
    """Where the scene made of these photos is, or will be: in the cache, where the same photos may be already."""
    source = source.resolve()
    try:
        cache = cache_folder() / "colmap"
    except RuntimeError:  # no home folder
        hint = "name a folder by the environment variable NERFTURBO_CACHE"
        raise InputError(str(source), "a cache folder for its poses", "no home folder", hint) from None
    own = cache / f"{source.stem}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}"
    if (own / STATE_FILE).is_file():
        return own
    same = (file.parent for file in sorted(cache.glob(f"*/{STATE_FILE}")) if is_current(source, file.parent))
    return next(same, own)


def check_capture(source: Path) -> None:
    """Refuse, before minutes of COLMAP, a folder of figures: hardly two images of the same size."""
    sizes = [] if is_video(source) else photo_sizes(find_photos(source))
    if len(sizes) > 2 and len(set(sizes)) > MIXED_SHARE * len(sizes):
        got = f"{len(sizes)} images of {len(set(sizes))} different sizes"
        hint = "move the photos into a folder of their own; if these are photos of one scene: "
        hint += shlex.join(["nerfturbo", "process", str(source), "FOLDER"])
        raise InputError(str(source), "photos of one scene", got, hint)


def has_poses(source: Path) -> bool:
    """Whether the poses of what the source holds now are known."""
    return is_current(source, poses_folder(source))


def load_unposed(source: Path, split: Split = "train", options: LoadOptions = DEFAULTS) -> Scene:
    """One split of photos or a video whose poses were found before; `Scene.source` stays the photos themselves."""
    folder = poses_folder(source)
    command = shlex.join(["nerfturbo", "process", str(source), str(folder)])
    if not (folder / "sparse" / "0").is_dir():
        hint = f"`nerfturbo train` finds them, and so does: {command}"
        raise MissingPosesError(str(source), "images with poses", "images without", hint)
    scene = load_colmap(folder, split, options)
    notes = (f"poses found by COLMAP, kept in {folder}",)
    if not is_current(source, folder):
        notes += (f"warning: the images have changed since; renew it with: {command}",)
    name = source.resolve().stem if is_video(source) else source.resolve().name
    return replace(scene, name=name, source=str(source), notes=notes + scene.notes)


FORMAT = SceneFormat(name=UNPOSED, looked_for="JPEG, PNG or WebP files", recognise=is_unposed, load=load_unposed)
