"""Whole images: front-to-back rounds give the pixels of `render_rays`, on any budget, grid, field and device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.config import GridConfig, NgpConfig, VanillaConfig
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.fields import InstantNGP, VanillaNeRF
from nerfturbo.fields.field import Field
from nerfturbo.ops import use_backend
from nerfturbo.rendering import MarchSettings, RenderedImage, render_image, render_rays
from nerfturbo.rendering.frame import FrameRenderer
from nerfturbo.rendering.image import part_memory, render_budget, rendering_within, rows_at_once, strip_order
from nerfturbo.sampling import OccupancyGrid
from nerfturbo.types import Aabb, Rays

from .test_render import Ball

BOX = Aabb.cube(1.0)
WIDTH, HEIGHT = 13, 9
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_grid(fraction: float = 0.3, *, levels: int = 1, resolution: int = 16, device: str = "cpu") -> OccupancyGrid:
    grid = OccupancyGrid(BOX, GridConfig(resolution=resolution, levels=levels), step_size=0.05)
    draw = torch.Generator().manual_seed(1)
    grid.set_occupied(torch.rand(grid.n_cells, generator=draw) < fraction)
    return grid.to(device)


def make_field(device: str = "cpu", *, levels: int = 1) -> InstantNGP:
    """Random, but with densities of all sizes; on a GPU with a half copy of the table, as after training."""
    config = NgpConfig(n_levels=4, log2_entries=10, max_resolution=32, width=16)
    field = InstantNGP(BOX.scaled(2.0 ** (levels - 1)), config)
    with torch.no_grad():
        field.encoding.table.normal_(generator=torch.Generator().manual_seed(3))
        field.density_net.weights[1][0] *= 4.0
    field = field.to(device)
    if device == "cuda":
        field.encoding.half = field.encoding.table.detach().half()
    return field


def make_camera(width: int = WIDTH, height: int = HEIGHT) -> Cameras:
    poses = look_at(torch.tensor([[2.1, -1.7, 1.3]]), torch.tensor([0.1, 0.0, 0.1]))
    return Cameras.pinhole(poses, width=width, height=height, field_of_view_x=0.9)


def check(image: RenderedImage, field: Field, rays: Rays, grid: OccupancyGrid, **options) -> None:
    """Against `render_rays`; the few rays whose cells are decided by another rounding may differ on a GPU."""
    want = render_rays(field, rays, grid, **options)
    pairs = ((image.rgb, want.rgb.clamp(0.0, 1.0)), (image.opacity, want.opacity), (image.depth, want.depth))
    for got, wanted in pairs:
        far = (got.reshape(wanted.shape) - wanted).abs() > (1e-4 if got.device.type == "cpu" else 5e-3)
        assert int(far.sum()) <= (0 if got.device.type == "cpu" else 2 + far.numel() // 100)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_memory", [1, 1 << 22, None])
def test_the_budget_does_not_show(max_memory: int | None, device: str):
    rays = make_camera(50, 40).image_rays(0).to(device)
    background = torch.tensor([0.1, 0.9, 0.4], device=device)
    field, grid = make_field(device), make_grid(1.1, device=device)
    image = render_image(field, grid, rays, height=40, width=50, background=background, max_memory=max_memory)
    assert image.rgb.shape == (40, 50, 3) and image.depth.shape == (40, 50)
    check(image, field, rays, grid, background=background)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fraction", "levels", "cone_angle"), [(0.0, 1, 0.0), (0.05, 1, 0.0), (0.3, 3, 0.02)])
def test_grids_and_steps(fraction: float, levels: int, cone_angle: float, device: str):
    grid, field = make_grid(fraction, levels=levels, device=device), make_field(device, levels=levels)
    settings = MarchSettings(near_plane=0.1, far_plane=9.0, cone_angle=cone_angle)
    rays = make_camera().image_rays(0).to(device)
    background = torch.rand(len(rays), 3, device=device)
    image = render_image(field, grid, rays, height=HEIGHT, width=WIDTH, settings=settings, background=background)
    check(image, field, rays, grid, settings=settings, background=background)
    if fraction == 0.0:
        assert torch.equal(image.rgb.view(-1, 3), background) and not image.opacity.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha_thre", [0.0, 1e-2])
def test_any_field(alpha_thre: float, device: str):
    class Times:
        """Reads times and cameras, gives five channels."""

        def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
            assert times is not None
            return 8.0 * (positions * 4.0).sin().abs().prod(-1) * (0.5 + times)

        def __call__(self, positions, directions, times=None, camera_indices=None):
            assert times is not None and camera_indices is not None
            base = positions.sin().sum(-1) + camera_indices + directions.sum(-1)
            return torch.stack([(base * k).sin() * 0.5 + 0.5 for k in range(1, 6)], -1), self.density(positions, times)

    plain = make_camera().image_rays(0).to(device)
    rays = replace(plain, times=torch.linspace(0, 1, len(plain), device=device))
    grid, settings = make_grid(device=device), MarchSettings(alpha_thre=alpha_thre)
    grid.mean.fill_(0.5)
    image = render_image(Times(), grid, rays, height=HEIGHT, width=WIDTH, settings=settings)
    assert image.rgb.shape == (HEIGHT, WIDTH, 5)
    check(image, Times(), rays, grid, settings=settings)


@pytest.mark.parametrize("device", DEVICES)
def test_vanilla_network(device: str):
    field = VanillaNeRF(BOX, VanillaConfig(width=16, depth=2)).to(device)
    rays, grid = make_camera().image_rays(0).to(device), make_grid(device=device)
    check(render_image(field, grid, rays, height=HEIGHT, width=WIDTH), field, rays, grid)


def test_kernels_give_the_same_picture(kernel_device: torch.device):
    device = str(kernel_device)
    rays, background = make_camera(7, 5).image_rays(0).to(device), torch.ones(3, device=device)
    grid, field = make_grid(device=device), make_field(device)
    settings = MarchSettings(render_step_size=0.15)
    with use_backend("triton"):
        image = render_image(field, grid, rays, height=5, width=7, settings=settings, background=background)
    with use_backend("reference"):
        want = render_image(field, grid, rays, height=5, width=7, settings=settings, background=background)
    far = (image.rgb - want.rgb).abs().amax(-1) > 2e-3
    assert int(far.sum()) <= 1, f"{int(far.sum())} of 35 pixels differ"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_memory", [1, None])
def test_frames_follow_the_camera(max_memory: int | None, device: str):
    width, height = 60, 51  # several parts, the last one smaller
    grid, field = make_grid(device=device), make_field(device)
    background = torch.tensor([0.3, 0.6, 0.1], device=device)
    frames = FrameRenderer(field, grid, width=width, height=height, background=background, max_memory=max_memory)
    away = look_at(torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([6.0, 0.0, 0.1]))[0]
    images = []
    for turn in range(4):
        cameras = make_camera(width, height)
        pose = cameras.camera_to_world[0] if turn else away  # the first frame sees nothing: later ones need more rounds
        image = frames.render(pose, cameras.focal[0], cameras.center[0])
        images.append(image.rgb)
        rays = replace(cameras, camera_to_world=pose[None]).image_rays(0).to(device)
        check(image, field, rays, grid, background=background)
    assert torch.equal(images[0], background.expand(height, width, 3)) and not torch.equal(images[0], images[1])
    assert torch.allclose(images[1], images[3], atol=1e-5)
    with torch.no_grad():
        grid.set_occupied(torch.zeros(grid.n_cells, dtype=torch.bool, device=device))
    image = frames.render(pose, cameras.focal[0], cameras.center[0])
    assert not image.opacity.any(), "a frame shows the grid as it is now"


def test_frames_of_any_field_and_time():
    class Growing(Ball):
        def __call__(self, positions, directions, times=None, camera_indices=None):
            rgb, density = super().__call__(positions, directions)
            return rgb, density * times

    cameras, grid = make_camera(), make_grid(1.1)
    frames = FrameRenderer(Growing(), grid, width=WIDTH, height=HEIGHT)
    early, late = (
        frames.render(cameras.camera_to_world[0], cameras.focal[0], cameras.center[0], time=time) for time in (0.0, 1.0)
    )
    assert not early.opacity.any() and late.opacity.max() > 0.5 and frames.rounds is None


def test_a_field_is_not_asked_about_nothing():
    class Picky(Ball):
        def __call__(self, positions, directions, times=None, camera_indices=None):
            assert positions.shape[0] > 0
            return super().__call__(positions, directions)

    rays = make_camera().image_rays(0)
    assert not render_image(Picky(), make_grid(0.0), rays, height=HEIGHT, width=WIDTH).opacity.any()


def test_a_picture_without_pixels():
    rays = Rays(torch.zeros(0, 3), torch.zeros(0, 3))
    assert render_image(Ball(), make_grid(), rays, height=0, width=5).rgb.shape == (0, 5, 3)


def test_wrong_arguments_are_named():
    rays = make_camera(2, 2).image_rays(0)
    with pytest.raises(InputError, match="max_memory: expected a number of bytes > 0, got 0"):
        render_image(Ball(), make_grid(), rays, height=2, width=2, max_memory=0)
    with pytest.raises(InputError, match=r"rays: expected height \* width = 6 rays, got 4"):
        render_image(Ball(), make_grid(), rays, height=2, width=3)
    with pytest.raises(InputError, match="width and height: expected at least 1, got 0 and 3"):
        FrameRenderer(Ball(), make_grid(), width=0, height=3)


@pytest.mark.parametrize(("height", "width", "rays"), [(800, 800, 10**6), (4320, 7680, 10**6), (9, 13, 30), (5, 99, 7)])
def test_parts_cover_the_picture_within_the_budget(height: int, width: int, rays: int):
    band = rows_at_once(height, width, rays)
    assert 1 <= band <= height and (band * width <= rays or band == 1)
    assert sorted(strip_order(band, width, torch.device("cpu")).tolist()) == list(range(band * width))


def test_memory_may_be_given_for_all_pictures():
    field, device = make_field(), torch.device("cpu")
    plain, small = render_budget(field, device), render_budget(field, device, 1 << 22)
    with rendering_within(1 << 22):
        assert render_budget(field, device) == small != plain
        assert part_memory(device) == part_memory(torch.device("cuda")) == 1 << 22
        assert render_budget(field, device, 1 << 26) == plain, "what a call says itself counts"
        with rendering_within(None):
            assert render_budget(field, device) == plain
    assert render_budget(field, device) == plain
    with pytest.raises(InputError, match="max_memory: expected a number of bytes > 0, got 0"), rendering_within(0):
        pass


def test_memory_follows_the_budget():
    field, device = make_field(), torch.device("cuda")
    small, large = (render_budget(field, device, memory) for memory in (1 << 24, 1 << 28))
    assert small.rays < large.rays and small.samples < large.samples
    assert render_budget(Ball(), device, 1 << 28).samples < large.samples  # wide layers of unknown fields need room


@pytest.mark.gpu
def test_full_precision_on_a_gpu():
    """Without a half copy: the picture in fp32, frames from halves."""
    field, grid, cameras = make_field("cuda"), make_grid(device="cuda"), make_camera()
    half = FrameRenderer(field, grid, width=WIDTH, height=HEIGHT)
    field.encoding.half = None
    rays = cameras.image_rays(0).to("cuda")
    check(render_image(field, grid, rays, height=HEIGHT, width=WIDTH), field, rays, grid)
    frames = FrameRenderer(field, grid, width=WIDTH, height=HEIGHT)
    camera = (cameras.camera_to_world[0], cameras.focal[0], cameras.center[0])
    field.encoding.half = field.encoding.table.detach().half()
    want = half.render(*camera)
    field.encoding.half = None
    assert torch.allclose(frames.render(*camera).rgb, want.rgb, atol=1e-5) and frames.rounds is not None


@pytest.mark.gpu
def test_an_8k_frame_stays_within_the_budget():
    grid, field = make_grid(1.1, device="cuda"), make_field("cuda")
    cameras, budget = make_camera(7680, 4320), 1 << 28
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    frames = FrameRenderer(field, grid, width=7680, height=4320, max_memory=budget)
    image = frames.render(cameras.camera_to_world[0], cameras.focal[0], cameras.center[0])
    picture = sum(value.numel() * 4 for value in (image.rgb, image.opacity, image.depth))
    assert torch.cuda.max_memory_allocated() - before < picture + 3 * budget
