"""Pictures that stay in host memory or in a file: the same batches as on the device, read there or fetched ahead."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.data import batches
from nerfturbo.data.batches import HostPixels, PixelSampler, Prefetcher, place_pixels
from nerfturbo.data.cameras import CameraModel
from nerfturbo.data.images import ImagePool, load_images, save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import PixelMask, pack_words
from nerfturbo.training import Trainer

from ..tiny import ball_scene, tiny_config
from .test_batches import mixed_scene
from .test_lens_table import scene_of


def masked(scene: Scene) -> Scene:
    flags = torch.rand(scene.images.n_pixels, generator=torch.Generator().manual_seed(1)) < 0.6
    return replace(scene, images=replace(scene.images, mask=PixelMask.of_words(pack_words(flags))))


@pytest.fixture
def _unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU cannot be made to read host memory."""
    monkeypatch.setattr(batches, "map_pixels", lambda pixels, device: None)


SCENES = pytest.mark.parametrize("scene", [mixed_scene(), masked(mixed_scene())], ids=["plain", "masked"])
DRAWS = ((0, 50), (1, 50), (2, 200), (3, 20), (9, 30), (10, 0), (11, 7))  # grows, shrinks, jumps


@SCENES
def test_pixels_in_host_memory_are_read_where_they_lie(scene: Scene) -> None:
    device, host = (PixelSampler(scene, "cpu", 3, pixels=place) for place in ("device", "host"))
    assert host.on_host and not device.on_host and "host memory, read from there" in host.note
    assert host.scene.images.pixels.data_ptr() == scene.images.pixels.data_ptr()  # no copy
    for step, n in DRAWS:
        here, there = device.draw(step, n), host.draw(step, n)
        for one, two in ((here.rgba, there.rgba), (here.rays.directions, there.rays.directions)):
            assert torch.equal(one, two)
    host.feed(0, [(0, 64)])  # nothing to bring
    number = torch.tensor(5)  # as a recorded step has it
    assert torch.equal(host.draw(number, 40).rgba, device.draw(5, 40).rgba)


@SCENES
@pytest.mark.usefixtures("_unmapped")
def test_fetched_batches_equal_device_batches(scene: Scene) -> None:
    device, host = PixelSampler(scene, "cpu", 3), PixelSampler(scene, "cpu", 3, pixels="host")
    for step, n in DRAWS:
        here, there = device.draw(step, n), host.draw(step, n)
        assert torch.equal(here.rgba, there.rgba)
        assert torch.allclose(here.rays.directions, there.rays.directions, atol=1e-6)
    part = host.draw(12, 10, first=5)
    assert torch.equal(part.rgba, device.draw(12, 15).rgba[5:])


class Runtime:
    """Of CUDA, what maps memory."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.known = code, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.known += [] if self.code else [address]
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.known.remove(address)
        return 0


def test_memory_is_registered_as_long_as_somebody_reads_it() -> None:
    pixels, runtime = mixed_scene().images.pixels, Runtime()
    held = batches._Registered(pixels, runtime)
    seen = held.__cuda_array_interface__
    assert runtime.known == [pixels.data_ptr()] == [seen["data"][0]] and seen["shape"] == tuple(pixels.shape)
    del held
    gc.collect()
    assert runtime.known == []
    with pytest.raises(RuntimeError, match="cudaHostRegister: error 1"):
        batches._Registered(pixels, Runtime(1))
    gc.collect()  # what failed is not given back


@pytest.mark.usefixtures("_unmapped")
def test_a_fed_step_reads_the_buffer() -> None:
    """What a recorded step does: the number of the step is on the device, the colours come by `feed`."""
    scene = mixed_scene()
    device, host = PixelSampler(scene, "cpu", 3), PixelSampler(scene, "cpu", 3, pixels="host")
    number = torch.zeros((), dtype=torch.int64)
    for step in (4, 5, 6, 20, 21):
        host.feed(step, [(10, 40), (100, 24)])  # two batches of one rank
        number.fill_(step)
        for first, count in ((10, 40), (100, 24), (20, 5)):
            expected = device.draw(step, count, first=first)
            assert torch.equal(host.draw(number, count, first=first).rgba, expected.rgba)
    with pytest.raises(InputError, match="rays among"):
        host.draw(number, 40, first=0)
    host.feed(30, [(12, 20)])  # fewer rays than before: the old buffer is not read
    assert torch.equal(host.draw(number.fill_(30), 20, first=12).rgba, device.draw(30, 20, first=12).rgba)
    device.feed(0, [(0, 64)])  # nothing to bring


def test_the_next_step_is_fetched_ahead_in_another_thread() -> None:
    scene = mixed_scene()
    seen: list[tuple[int, bool]] = []

    class Watched(HostPixels):
        def fetch(self, step: int, n_rays: int, first: int = 0) -> torch.Tensor:
            seen.append((step, threading.current_thread() is threading.main_thread()))
            return super().fetch(step, n_rays, first)

    prefetcher = Prefetcher(Watched(scene.images, None, 0))
    for step in range(4):
        prefetcher.get(step, 10)
    assert [step for step, here in seen if here] == [0] and all((step, False) in seen for step in (1, 2, 3))


def test_an_error_in_the_thread_arrives_here() -> None:
    class Broken(HostPixels):
        def fetch(self, step: int, n_rays: int, first: int = 0) -> torch.Tensor:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher = Prefetcher(Broken(mixed_scene().images, None, 0))
        prefetcher._ahead = (0, prefetcher._thread.submit(prefetcher._fetch, 0, 4))
        prefetcher.get(0, 4)


@pytest.mark.usefixtures("_unmapped")
def test_samplers_are_freed_with_their_threads() -> None:
    sampler = PixelSampler(mixed_scene(), "cpu", 0, pixels="host")
    sampler.draw(0, 10)
    sampler.feed(0, [(0, 10)])
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    assert gone() is None


def test_training_is_the_same_from_device_host_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path / "cache"))
    scene = ball_scene()
    paths = [tmp_path / f"{index}.png" for index in range(len(scene))]
    for index, path in enumerate(paths):
        save_image(path, scene.images.image_bytes(index))
    mapped = replace(scene, images=load_images(paths, LoadOptions(cache="disk")))
    assert mapped.images.file is not None
    config = tiny_config(steps=6)
    on_host = replace(config, data=replace(config.data, pixels="host"))
    losses: list[list[float]] = []
    for chosen, pictures in ((config, scene), (on_host, scene), (config, mapped)):
        with use_backend("reference"):
            trainer = Trainer(chosen, pictures)
            assert trainer.pixels.on_host == (chosen is on_host or pictures is mapped)
            losses.append([])
            trainer.callbacks.append(lambda trainer, record, values=losses[-1]: values.append(record.loss))
            trainer.fit()
    assert losses[0] == losses[1] and losses[0] == pytest.approx(losses[2], abs=1e-5) and len(losses[0]) == 6


def test_a_run_from_host_memory_resumes_as_one_from_the_device(tmp_path: Path) -> None:
    config = tiny_config(steps=6)
    on_host = replace(config, data=replace(config.data, pixels="host"))
    with use_backend("reference"):
        whole = Trainer(config, ball_scene())
        whole.fit()
        first = Trainer(on_host, ball_scene(), callbacks=[lambda t, record: t.stop() if record.step == 3 else None])
        first.fit()
        resumed = Trainer(on_host, ball_scene())
        resumed.resume(first.save(tmp_path))
        resumed.fit()
    for one, two in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_where_pixels_stay_is_decided_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, gpu = mixed_scene(), torch.device("cuda")
    monkeypatch.setattr(batches.torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    assert place_pixels(scene, gpu) == (False, "0.00 GiB of pixels move to the GPU, which has 1.0 GiB free")
    monkeypatch.setattr(batches.torch.cuda, "mem_get_info", lambda device: (300, 1 << 30))
    on_host, why = place_pixels(scene, gpu)
    assert on_host and "more than half" in why and "read from there" in why
    assert place_pixels(scene, gpu, "device")[0] is False and place_pixels(scene, gpu, "host")[0] is True
    with pytest.raises(InputError, match="pixels: expected one of auto, device, host"):
        place_pixels(scene, gpu, "disk")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["pinhole", "opencv"])
def test_a_gpu_reads_the_same_bytes_from_host_memory(model: CameraModel) -> None:
    scene = scene_of(model)
    device, host, other = (PixelSampler(scene, "cuda", 3, pixels=place) for place in ("device", "host", "host"))
    assert host.scene.images.pixels.is_cuda
    assert host.scene.images.pixels.data_ptr() == scene.images.pixels.data_ptr() == other.scene.images.pixels.data_ptr()
    for step in (0, 1, torch.tensor(7, device="cuda")):
        one, two = device.draw(step, 4097), host.draw(step, 4097)
        assert torch.equal(one.rgba, two.rgba) and torch.equal(one.rays.directions, two.rays.directions)
    del host
    gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(other.draw(2, 100).rgba, device.draw(2, 100).rgba)  # registered while one of them lives
    del other
    gc.collect()
    assert not scene.images.pixels.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_trains_from_host_memory_as_from_its_own(accumulate: int) -> None:
    scene = ball_scene()
    config = tiny_config(steps=40)
    config = replace(config, train=replace(config.train, accumulate=accumulate))
    losses = []
    for place in ("device", "host"):
        trainer = Trainer(replace(config, data=replace(config.data, pixels=place)), scene, device="cuda")
        trainer.callbacks.append(lambda trainer, record, values=losses: values.append(record.loss))
        trainer.fit()
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], rel=1e-3)
    assert isinstance(scene.images, ImagePool)
