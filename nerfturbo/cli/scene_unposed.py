"""`nerfturbo scene info` of photos or a video that have no poses yet: what they are, and what to do next."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from ..data.video_frames import VideoFacts


def describe_unposed(given: str, *, plot: bool) -> dict[str, Any] | None:
    """Of photos or a video whose poses are not known yet; None for all other scenes."""
    from ..data.scene import UNPOSED, is_builtin, recognise

    source = Path(given).expanduser()
    found = None if is_builtin(given) else recognise(source)
    if found is None or found.name != UNPOSED:
        return None
    from ..data.images import image_size
    from ..data.photos import find_photos, is_video
    from ..data.unposed import poses_folder

    folder = poses_folder(source)
    if (folder / "sparse" / "0").is_dir():
        return None
    command = shlex.join(["nerfturbo", "process", str(source), str(folder)])
    if plot:
        raise InputError("--plot", "a scene with poses", "pictures without", f"find them first: {command}")
    name = {"name": source.resolve().name, "source": given, "format": found.name, "poses": None}
    presets = {"preset": None, "presets": _presets(), "next": command}
    if not is_video(source):
        photos = find_photos(source)
        return {**name, "pictures": len(photos), "sizes": sorted({image_size(path) for path in photos}), **presets}
    facts, unknown = _video_facts(source)
    sizes = [] if facts is None or facts.size is None else [facts.size]
    video = {"video": None if facts is None else asdict(facts) | {"taken": _taken(facts)}, "unknown_because": unknown}
    return {**name, "pictures": 0, "sizes": sizes, **video, **presets}


def _video_facts(video: Path) -> tuple[VideoFacts | None, str | None]:
    """What the video's file says; None and the reason where nothing here reads videos."""
    from ..data.video_frames import open_decoder

    try:
        decoder = open_decoder()
    except InputError as error:
        return None, str(error)
    return decoder.facts(video), None


def _taken(facts: VideoFacts) -> int | None:
    """How many frames `process` takes unless told."""
    from ..data.video_frames import frame_count

    return None if facts.frames is None else frame_count(facts.frames, facts.seconds or 0.0)


def _presets() -> list[str]:
    """What `train` takes once the poses show whether the scene has an end: where it has one, and where not."""
    from ..data.fitting import UNBOUNDED_PRESETS
    from .settings import starting_config

    bounded = starting_config(()).preset
    return [bounded, UNBOUNDED_PRESETS.get(bounded, bounded)]


def print_unposed(found: dict[str, Any]) -> None:
    """What it is, the command to go on with, and the presets that may come."""
    print(f"{found['name']}: {found['format']}, without poses; {_what(found)}")
    if found.get("unknown_because"):
        print(f"  warning  {found['unknown_because']}")
    print(f"  next  {found['next']}")
    train = f"`nerfturbo train {shlex.quote(found['source'])}`"
    print(f"        finds the poses, once, by COLMAP; {train} does that first by itself")
    bounded, unbounded = found["presets"]
    print(f"  preset  {bounded}, or {unbounded} where the poses show a scene without an end")


def _what(found: dict[str, Any]) -> str:
    sizes = ", ".join("{} x {}".format(*size) for size in found["sizes"][:4])
    if "video" not in found:
        return f"{found['pictures']} photos, {sizes}" + (", ..." if len(found["sizes"]) > 4 else "")
    facts = found["video"]
    if facts is None:
        return "a video"
    parts = [] if facts["frames"] is None else [f"{facts['frames']} frames"]
    parts += [sizes] if sizes else []
    parts += [] if facts["fps"] is None else [f"{facts['fps']:g} fps"]
    parts += [] if facts["seconds"] is None else [f"{facts['seconds']:.1f} s"]
    taken = "" if facts["taken"] is None else f"; `process` takes the sharpest {facts['taken']} of them"
    return "a video: " + ", ".join(parts) + taken
