"""Pictures that stay in host memory or in a file: the same batches as on the device, fetched ahead by a thread."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.data import batches
from nerfturbo.data.batches import DeviceFeed, HostPixels, PixelSampler, Prefetcher, place_pixels
from nerfturbo.data.images import ImagePool, load_images, save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import PixelMask, pack_words
from nerfturbo.training import Trainer

from ..tiny import ball_scene, tiny_config
from .test_batches import mixed_scene


def masked(scene: Scene) -> Scene:
    flags = torch.rand(scene.images.n_pixels, generator=torch.Generator().manual_seed(1)) < 0.6
    return replace(scene, images=replace(scene.images, mask=PixelMask.of_words(pack_words(flags))))


@pytest.mark.parametrize("scene", [mixed_scene(), masked(mixed_scene())], ids=["plain", "masked"])
def test_host_batches_equal_device_batches(scene: Scene) -> None:
    device, host = PixelSampler(scene, "cpu", 3), PixelSampler(scene, "cpu", 3, pixels="host")
    assert host.on_host and not device.on_host and "host memory" in host.note
    for step, n in ((0, 50), (1, 50), (2, 200), (3, 20), (9, 30), (10, 0), (11, 7)):  # grows, shrinks, jumps
        here, there = device.draw(step, n), host.draw(step, n)
        assert torch.equal(here.rgba, there.rgba)
        assert torch.allclose(here.rays.directions, there.rays.directions, atol=1e-6)
    part = host.draw(12, 10, first=5)
    assert torch.equal(part.rgba, device.draw(12, 15).rgba[5:])


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
    assert prefetcher.hits == 3
    assert (0, True) in seen and all((step, False) in seen for step in (1, 2, 3))


def test_an_error_in_the_thread_arrives_here() -> None:
    class Broken(HostPixels):
        def fetch(self, step: int, n_rays: int, first: int = 0) -> torch.Tensor:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        DeviceFeed(Broken(mixed_scene().images, None, 0), ((0, 4),), torch.device("cpu")).load(0)


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
    losses = []
    for chosen, pictures in ((config, scene), (on_host, scene), (config, mapped)):
        with use_backend("reference"):
            trainer = Trainer(chosen, pictures)
            assert trainer.pixels.on_host == (chosen is on_host or pictures is mapped)
            trainer.callbacks.append(lambda trainer, record, values=losses: values.append(record.loss))
            trainer.fit()
    assert losses[:6] == pytest.approx(losses[6:12], abs=1e-5) and losses[6:12] == losses[12:]


def test_where_pixels_stay_is_decided_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, gpu = mixed_scene(), torch.device("cuda")
    monkeypatch.setattr(batches.torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    assert place_pixels(scene, gpu) == (False, "0.00 GiB of pixels move to the GPU, which has 1.0 GiB free")
    monkeypatch.setattr(batches.torch.cuda, "mem_get_info", lambda device: (300, 1 << 30))
    on_host, why = place_pixels(scene, gpu)
    assert on_host and "more than half" in why and "fetched ahead" in why
    assert place_pixels(scene, gpu, "device")[0] is False and place_pixels(scene, gpu, "host")[0] is True
    with pytest.raises(InputError, match="pixels: expected one of auto, device, host"):
        place_pixels(scene, gpu, "disk")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_trains_from_host_memory_as_from_its_own() -> None:
    scene = ball_scene()
    config = tiny_config(steps=40)
    losses = []
    for place in ("device", "host"):
        trainer = Trainer(replace(config, data=replace(config.data, pixels=place)), scene, device="cuda")
        trainer.callbacks.append(lambda trainer, record, values=losses: values.append(record.loss))
        trainer.fit()
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], rel=1e-3)
    assert isinstance(scene.images, ImagePool)
