"""The memory-mapped pool: the same pixels, found again, made anew when a picture changes, and little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from nerfturbo.data import pool_file
from nerfturbo.data.images import ImagePool, load_images
from nerfturbo.data.options import LoadOptions
from nerfturbo.errors import InputError

from .test_images import random_image

ON_DISK = LoadOptions(cache="disk")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pools"


def write_pictures(folder: Path, n: int = 3, channels: int = 3) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{index}.png" for index in range(n)]
    for index, path in enumerate(paths):
        Image.fromarray(random_image(20 + index, 30, channels, index).numpy()).save(path)
    return paths


@pytest.mark.parametrize("channels", [3, 4])
def test_disk_and_memory_hold_the_same(
    tmp_path: Path, channels: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_pictures(tmp_path / "a", channels=channels)
    plain = load_images(paths, LoadOptions(2))
    mapped = load_images(paths, LoadOptions(2, cache="disk"))
    assert mapped.file is not None and plain.file is None
    assert torch.equal(mapped.pixels, plain.pixels) and torch.equal(mapped.offsets, plain.offsets)
    indices = torch.randint(0, plain.n_pixels, (500,), generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(pool_file, "RESIDENT_BYTES", 256)
    for pool in (plain, mapped):
        assert torch.equal(pool.gather(indices), plain.pixels[indices])
    assert mapped.gather(indices[:0]).shape == (0, channels)
    assert [path.suffix for path in cache.iterdir()] == [".u8"]
    mapped.pixels[0] = 7  # a private page: the file stays as it is
    assert torch.equal(load_images(paths, LoadOptions(2, cache="disk")).pixels, plain.pixels)


def test_found_again_without_decoding_and_made_anew_when_a_picture_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_pictures(tmp_path / "a")
    reported: list[tuple[int, int]] = []
    options = LoadOptions(cache="disk", on_progress=lambda done, total: reported.append((done, total)))
    first = load_images(paths, options)
    assert reported == [(1, 3), (2, 3), (3, 3)]
    load_images(paths, options)
    assert len(reported) == 3  # nothing was decoded
    Image.fromarray(random_image(21, 30, 3, 99).numpy()).save(paths[1])
    os.utime(paths[1], ns=(1, 1))
    changed = load_images(paths, options)
    assert len(reported) == 6
    assert torch.equal(changed.image_bytes(0), first.image_bytes(0))
    assert torch.equal(changed.image_bytes(1), random_image(21, 30, 3, 99))


def test_auto_takes_the_disk_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_pictures(tmp_path / "a")
    assert load_images(paths).file is None
    monkeypatch.setattr(pool_file, "available_memory", lambda: 3000)
    assert load_images(paths).file is not None
    with pytest.raises(InputError, match=r"images: expected what fits the 0 MB of free memory, got .*cache=disk"):
        load_images(paths, LoadOptions(cache="memory"))
    with pytest.raises(InputError, match="cache: expected one of auto, memory, disk"):
        LoadOptions(cache="ram")  # type: ignore[arg-type]


def test_free_memory_is_known_here() -> None:
    free = pool_file.available_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_broken_picture_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    paths = write_pictures(tmp_path / "a", 4)
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"2\.png"):
        load_images(paths, ON_DISK)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_images(write_pictures(tmp_path / "a", 4), LoadOptions(cache="disk", on_progress=interrupt))
    assert list(cache.iterdir()) == []


def test_a_truncated_pool_is_made_anew(tmp_path: Path, cache: Path) -> None:
    paths = write_pictures(tmp_path / "a")
    good = load_images(paths, ON_DISK).pixels.clone()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(load_images(paths, ON_DISK).pixels, good)


def test_old_pools_make_room(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = pool_file.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pool_file, "DISK_SHARE", 14_000 / usage.total)  # two pools of about 5.7 kB, not three
    for name in ("a", "b", "c"):
        load_images(write_pictures(tmp_path / name), ON_DISK)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(pool_file.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(InputError, match="free for the pool"):
        load_images(write_pictures(tmp_path / "d"), ON_DISK)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="NERFTURBO_CACHE"):
        load_images(write_pictures(tmp_path / "a"), ON_DISK)


def test_progress_of_a_pool_in_memory(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_images(
        write_pictures(tmp_path / "a", 5), LoadOptions(on_progress=lambda done, total: seen.append((done, total)))
    )
    assert seen == [(k, 5) for k in range(1, 6)]


def test_pools_on_other_devices_know_no_file(tmp_path: Path) -> None:
    pool = load_images(write_pictures(tmp_path / "a"), ON_DISK)
    assert pool.to("cpu").file is pool.file
    assert isinstance(pool.select([0]), ImagePool) and pool.select([0]).file is None


MEMORY_PROBE = """
import json, sys
from pathlib import Path
import torch
from nerfturbo.data.images import load_images
from nerfturbo.data.options import LoadOptions
import nerfturbo.data.pool_file as pool_file
from PIL import Image, JpegImagePlugin, PngImagePlugin

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

paths = sorted(Path(sys.argv[1]).glob("*.jpg"))
load_images(paths[:1], LoadOptions(16))  # imports of decoders are not growth
pool_file.RESIDENT_BYTES = 8 << 20
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS")
pool = load_images(paths, LoadOptions(cache=sys.argv[2]))
loaded = status("VmHWM")
draw, total = torch.Generator().manual_seed(0), 0
for _ in range(10):
    index = torch.randint(0, pool.n_pixels, (2000,), generator=draw)
    total += int(pool.gather(index).sum())
for index in range(len(paths)):
    total += int(pool.image_bytes(index).sum())
print(json.dumps({"pool": pool.pixels.nbytes, "load": loaded - before, "peak": status("VmHWM") - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
@pytest.mark.parametrize("cache_kind", ["memory", "disk"])
def test_memory_growth(tmp_path: Path, cache_kind: str) -> None:
    """In memory at most 1.3 times the pool and a little at any moment; mapped, far less than the pool."""
    picture = torch.nn.functional.interpolate(torch.rand(1, 3, 24, 32), (1200, 1600))[0].permute(1, 2, 0)
    (tmp_path / "a").mkdir()
    Image.fromarray((picture * 255).byte().numpy()).save(tmp_path / "a" / "0.jpg", quality=80)
    for index in range(1, 24):
        shutil.copy(tmp_path / "a" / "0.jpg", tmp_path / "a" / f"{index}.jpg")
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(tmp_path / "a"), cache_kind], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["pool"] == 24 * 1200 * 1600 * 3
    if cache_kind == "memory":
        assert found["pool"] <= found["load"] <= 1.3 * found["pool"] + 60e6, found
    else:
        assert found["peak"] <= 100e6 < found["pool"], found
