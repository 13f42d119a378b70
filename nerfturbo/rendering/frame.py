"""Frame after frame of one size: on a GPU a whole frame is one recorded CUDA graph, steered by sixteen numbers. The
graph makes the rays of a part of the picture from the camera, runs a fixed number of rounds (`image.py`) and finishes
the pixels; nothing is read back inside. How many rounds a frame needs is learned from the first one. The one number
read after a replay says whether rays are left; if so, a second graph runs further rounds until none is."""

import torch
from torch import Tensor

from ..data.cameras import PIXEL_RADIUS
from ..fields.field import Field
from ..ops._checks import check_device, check_shape, refuse
from ..ops._dispatch import resolve
from ..ops.frame import FinishedRays, LiveRays, finish_rays
from ..ops.pixels import camera_rays
from ..sampling.grid import GridSampler, MarchSettings, OccupancyGrid, as_sampler
from ..types import Rays
from .image import Evaluator, RenderedImage, begin, in_parts, make_round, render_budget, rows_at_once, strip_order

MORE = 4  # rounds of the second graph; even, so that it ends on the side of the queue on which it began
PATIENCE = 2  # replays of the second graph in one frame after which the first is recorded anew, with more rounds


class FrameRenderer:
    """Pictures of width x height pixels of one field, for cameras without distortion. Weights, hash table and occupancy
    bits are read where they lie, so a frame shows the field as it is at that moment; who replaces those tensors (moves
    the model, say) makes a new renderer. On a GPU a table without a half copy is read as halves, which training on a
    GPU does too. Fields without a recordable evaluator, and CPUs, do without a graph."""

    def __init__(
        self,
        field: Field,
        grid: OccupancyGrid | GridSampler,
        *,
        width: int,
        height: int,
        settings: MarchSettings | None = None,
        background: Tensor | None = None,
        max_memory: int | None = None,
    ) -> None:
        refuse(width < 1 or height < 1, "width and height", "at least 1", f"{width} and {height}")
        if background is not None:
            check_shape("background", background, ("channels",))
            check_device(background=background, bits=as_sampler(grid).grid.bits)
        self._field, self._sampler = field, as_sampler(grid, settings)
        self.width, self.height, self.device = width, height, self._sampler.grid.bits.device
        self._background, self._half = background, self.device.type == "cuda"
        budget = render_budget(field, self.device, max_memory)
        self._samples, self._band = budget.samples, rows_at_once(height, width, budget.rays)
        self._order = strip_order(self._band, width, self.device)
        self._camera, self._time = torch.zeros(16, device=self.device), None
        self._recorded: _Recorded | None = None

    @property
    def rounds(self) -> int | None:
        """Rounds of the recorded frame; None where nothing is recorded."""
        return None if self._recorded is None else self._recorded.rounds

    @torch.no_grad()
    def render(
        self, camera_to_world: Tensor, focal: Tensor, center: Tensor, *, time: float | None = None
    ) -> RenderedImage:
        """The picture of a pinhole camera: pose (3, 4), focal lengths (2,) and principal point (2,) in pixels."""
        check_shape("camera_to_world", camera_to_world, (3, 4))
        check_shape("focal", focal, (2,))
        check_shape("center", center, (2,))
        camera = torch.cat([part.detach().float().cpu().reshape(-1) for part in (camera_to_world, focal, center)])
        self._time = time

        def render(first: int, rows: int) -> FinishedRays:
            part = (value[: rows * self.width] for value in self._part(camera, first))
            return FinishedRays(*(value.clone() if rows == self.height else value for value in part))  # a picture lasts

        return in_parts(render, self.height, self.width, self._band)

    def _part(self, camera: Tensor, first: int) -> FinishedRays:
        """Rows of the picture from `first` on, by a higher principal point. The result lasts until the next part."""
        shifted = camera.clone()
        shifted[15] -= first
        self._camera.copy_(shifted)
        if self._recorded is None:
            return self._run_eagerly()
        out, rounds = self._recorded.replay()
        if rounds > self._recorded.rounds + PATIENCE * MORE:
            out = FinishedRays(*(value.clone() for value in out))
            self._recorded = _Recorded(self, rounds)
        return out

    def begin(self) -> tuple[Evaluator, LiveRays]:
        """The rays of the current part, at their beginning."""
        origins, directions = camera_rays(self._camera, width=self.width, height=self._band)
        times = None if self._time is None else torch.full_like(origins[:, 0], self._time)
        radii = None
        if hasattr(self._field, "set_footprint"):  # as `Cameras.rays` gives them, from the numbers on the device
            forward, focal = -self._camera[:12].view(3, 4)[:, 2], self._camera[12:14]
            radii = (directions * forward).sum(-1) * (PIXEL_RADIUS / focal.prod().sqrt())
        rays = Rays(origins, directions, times, pixel_radii=radii)
        return begin(self._field, rays, self._sampler, self._order, half=self._half)

    def run(self, evaluate: Evaluator, live: LiveRays, rounds: int) -> LiveRays:
        one = make_round(evaluate, self._sampler, self._samples)
        for _ in range(rounds):
            live = one(live)
        return live

    def finish(self, live: LiveRays) -> FinishedRays:
        return finish_rays(live, self._background)

    def _run_eagerly(self) -> FinishedRays:
        """Without a graph; afterwards, where there can be one, it is known how many rounds it needs."""
        evaluate, live = self.begin()
        rounds = 0
        while int(live.n_live):
            live = self.run(evaluate, live, 1)
            rounds += 1
        out = self.finish(live)
        if resolve(self._camera) == "triton" and evaluate.recordable:
            del evaluate, live  # their memory is needed for recording
            self._recorded = _Recorded(self, rounds)
        return out


class _Recorded:
    """The graphs of one part of a picture, and the memory they work in."""

    def __init__(self, renderer: FrameRenderer, rounds: int) -> None:
        self.rounds = max(1, rounds)
        pool = torch.cuda.graph_pool_handle()
        self._first, self._more = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(renderer.device)
        with torch.cuda.graph(self._first, pool=pool, capture_error_mode="thread_local"):
            evaluate, live = renderer.begin()
            live = renderer.run(evaluate, live, self.rounds)
            self._out = renderer.finish(live)
        with torch.cuda.graph(self._more, pool=pool, capture_error_mode="thread_local"):
            self._out_more = renderer.finish(renderer.run(evaluate, live, MORE))
        self._evaluate, self._live = evaluate, live  # the second graph goes on in their memory
        self._left = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=True)

    def _count_left(self) -> int:
        self._left.copy_(self._live.n_live, non_blocking=True)
        torch.cuda.current_stream(self._live.counts.device).synchronize()
        return int(self._left)

    def replay(self) -> tuple[FinishedRays, int]:
        """The finished part, in memory that the next replay overwrites, and how many rounds it took."""
        self._first.replay()
        out, rounds = self._out, self.rounds
        while self._count_left():
            self._more.replay()
            out, rounds = self._out_more, rounds + MORE
        return out, rounds
