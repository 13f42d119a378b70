"""Training on a GPU: the whole step as one CUDA graph. The step that runs eagerly is recorded once and replayed. Shapes
are fixed by a sample capacity; what changes from step to step lives in device tensors. The grid's update is a graph of
its own. The host only queues replays: it reads a ring of results one chunk behind, so that the device never waits for
it. In a team the collectives are recorded inside the step where the backend allows it (NCCL); elsewhere (gloo) the step
and the grid's update are several graphs each, and the host runs the collectives between them."""

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..data.batches import PixelSampler
from ..errors import BackendError
from ..fields.field import offers
from ..ops._dispatch import compile_only
from ..ops.adam import COLUMNS, StepState
from ..rendering.model import NerfModel
from .distributed import GradientPiece, Team, Wait
from .loss import Stages, StepResult, first_rays, ray_budget, update_grid
from .optim import EMA_EVERY, Optimizer
from .step import StepRecord, set_rest, start_totals, step_gradients, step_update, totals_of

WARMUP_STEPS = 1  # lets kernels load and libraries take their memory before recording
LOG = logging.getLogger("nerfturbo")
RING = 256  # steps the ring remembers
QUEUED = 16  # steps at once, at most: learning rate, progress and the clock are looked at between, and must not lag


class DeviceStep:
    """Drives training on a GPU by replaying graphs; without `capture` the same functions run one kernel at a time."""

    def __init__(
        self,
        model: NerfModel,
        pixels: PixelSampler,
        optimizer: Optimizer,
        *,
        capture: bool = True,
        stages: Stages | None = None,
        team: Team | None = None,
    ) -> None:
        self.model, self.pixels, self.optimizer, self.capture = model, pixels, optimizer, capture
        self.stages, self.team = stages or Stages(), team or Team()
        self.budget = ray_budget(model)
        self.state = StepState.create(step=0, n_active=first_rays(model), length=RING, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._run_step: Callable[[], None] | None = None
        self._run_resting: Callable[[], None] | None = None  # the same where the sampler does not learn
        self._update_grid: dict[bool, Callable[[], None]] = {}
        self._update_averages: Callable[[], None] = self._average
        self._compiled = False
        # Only what reads nothing back and asks no other process can run with its launches left out: our own stages.
        own = getattr(model.field, "captures_ahead", False) and self.stages == Stages()
        self.compile_ahead = capture and own and self.team.alone
        self._stream = torch.cuda.Stream(model.device)
        self._host_ring = torch.zeros(2, RING, len(COLUMNS), device="cpu", pin_memory=True)
        self._host_totals = torch.zeros(2, 2, dtype=torch.int64, device="cpu", pin_memory=True)
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._chunk = 0
        self._seen = (0, 0)  # rays and samples already reported
        self._checked = 0  # steps whose non-finite flags were already reported

    @property
    def n_rays(self) -> int:
        """Rays of the next step, of all ranks together; every rank draws the same number."""
        return int(self.state.n_active) * self.team.world

    @n_rays.setter
    def n_rays(self, value: int) -> None:
        self.state.n_active.fill_(max(1, min(-(-value // self.team.world), self.budget.max_rays)))

    def prepare(self) -> None:
        """Compile every kernel and record all graphs, leaving the training state as it was. The recorded functions
        first run for real. While they do, the non-finite flag is up, so that the optimizer changes nothing; counters
        and grid are put back afterwards."""
        if self._run_step is not None:
            return
        self.compile()
        try:
            self._record()
        except NotCapturedError as error:
            if not self.capture:
                raise
            LOG.warning("the training step is not captured as a CUDA graph: %s; it runs eagerly", error)
            self.capture = False
            self.forget()
            torch.cuda.synchronize(self.model.device)
            # A capture that failed leaves torch's random generator as if it still went on; one that succeeds ends it.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device=self.model.device)
            self._record()

    def _record(self) -> None:
        self.optimizer.attach_gradients()
        with self._untouched():
            self._run_all(WARMUP_STEPS)
            for all_cells in (True, False):
                self._update_grid[all_cells] = self._recorded_grid(all_cells)
            if self.optimizer.averages:
                self._update_averages = self._recorded(self._average)
            self._run_step = self._recorded_step()
            if offers(self.model.sampler, "learns"):
                with self._rest():
                    self._run_resting = self._recorded_step()

    def compile(self) -> None:
        """Compile the kernels, all at once, leaving the training state as it was."""
        if self._compiled or not self.compile_ahead:
            return
        with self._untouched(), compile_only(self.model.device) as compiling:
            if compiling:
                self._run_all(1)
        self._compiled = True

    def _run_all(self, n_steps: int) -> None:
        self.pixels.feed(int(self.state.step), self._shares())
        for all_cells in (True, False):
            self._grid_function(all_cells)()
        for _ in range(n_steps):
            self.optimizer.found_inf.fill_(1.0)
            self._body()
        if offers(self.model.sampler, "learns"):
            self.optimizer.found_inf.fill_(1.0)
            with self._rest():
                self._body()
        self._average()

    @contextmanager
    def _rest(self) -> Iterator[None]:
        set_rest(self.model, self.optimizer, True)
        try:
            yield
        finally:
            set_rest(self.model, self.optimizer, False)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Inside, functions run on the stream of the training; afterwards its state is what it was."""
        state, optimizer, grid = self.state, self.optimizer, self.model.grid
        kept = [state.step, state.n_active, state.totals, state.ring, grid.thickness, grid.bits, grid.mean]
        kept += [optimizer.scale, optimizer.good_steps, optimizer.skipped, optimizer.step_count, optimizer.found_inf]
        kept += optimizer.averages
        learner = self.model.sampler
        kept += list(learner.buffers()) if isinstance(learner, torch.nn.Module) else []  # of a contracted grid
        self._stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(self._stream):
            saved = [tensor.clone() for tensor in kept]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            with torch.cuda.stream(self._stream):
                for tensor, value in zip(kept, saved, strict=True):
                    tensor.copy_(value)
            self._stream.synchronize()

    def set_pixels(self, pixels: PixelSampler) -> None:
        """Train on other images from now on: what was recorded reads the old ones and is recorded anew."""
        again = self._run_step is not None
        self.forget()
        self.pixels = pixels
        if again:
            self.prepare()

    def forget(self) -> None:
        """Drop what was recorded, which holds the addresses of tensors that change; `prepare` records anew."""
        self.finish()
        self.optimizer.held.release()  # of a recording that failed
        self.budget = ray_budget(self.model)
        self.state.n_active.clamp_(max=self.budget.max_rays)
        self._run_step = self._run_resting = None
        self._update_grid.clear()
        self._update_averages = self._average
        self._pool = torch.cuda.graph_pool_handle()  # the memory of the old graphs is free again

    def restart(self, n_rays: int) -> None:
        """Begin again from a checkpoint, with so many rays: nothing was counted or reported yet."""
        self.finish()
        self.n_rays = n_rays
        self.state.totals.zero_()
        self._chunk, self._seen = 0, (0, 0)

    def set_learning_rate(self, value: float) -> None:
        with torch.cuda.stream(self._stream):  # in line with the replays, not beside them
            self.optimizer.set_learning_rate(value)

    def set_progress(self, share: float) -> None:
        with torch.cuda.stream(self._stream):
            self.model.set_progress(share)

    def advance(self, step: int, limit: int) -> StepRecord:
        """Queue up to 16 steps, none past the next grid update; report the chunk before (the first time: this one)."""
        self.prepare()
        assert self._run_step is not None
        grid = self.model.grid.config
        n_steps = min(limit, QUEUED, grid.update_every - step % grid.update_every)
        shares = self._shares()
        if self.optimizer.averages:
            n_steps = min(n_steps, EMA_EVERY - step % EMA_EVERY)
        # Whatever a callback did to the weights on its own stream comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(self._stream):
            if self._chunk == 0:
                self.state.step.fill_(step)
                self._checked = step
            if grid.enabled and step % grid.update_every == 0:
                self._update_grid[step < self.model.grid.warmup_steps]()
            for number in range(step, step + n_steps):
                self.pixels.feed(number, shares)
                if self._run_resting is None or self.model.sampler.learns(number):
                    self._run_step()
                else:
                    with self._rest():  # for what is not recorded
                        self._run_resting()
            if self.optimizer.averages_due(step + n_steps):
                self._update_averages()
            slot = self._chunk % 2
            self._host_ring[slot].copy_(self.state.ring, non_blocking=True)
            self._host_totals[slot].copy_(self.state.totals, non_blocking=True)
            self._events[slot].record(self._stream)
        record = self._report(step, n_steps)
        self._chunk += 1
        return record

    def _shares(self) -> list[tuple[int, int]]:
        """First ray and number of rays of each batch that this rank draws in a step."""
        all_rays = self.budget.max_rays * self.team.world
        share = self.stages.split(0, self.team.rank, self.team.world, all_rays)
        return [(share.first + part * all_rays, share.count) for part in range(self.model.config.train.accumulate)]

    def _average(self) -> None:
        self.optimizer.update_averages(self.optimizer.step_count)

    def _body(self) -> None:
        if self.team.alone:
            self._update(self._gradients())
        else:
            started: list[tuple[Tensor, Wait]] = []
            result = self._gradients(lambda seen: started.append(start_totals(seen, self.team)))
            self._update(self._exchange(result, *started[0], self.optimizer.exchanged()))

    def _gradients(self, seen: Callable[[StepResult], None] | None = None) -> StepResult:
        parts = (self.model, self.pixels, self.optimizer, self.state, self.budget)
        return step_gradients(*parts, stages=self.stages, team=self.team, seen=seen)

    def _exchange(self, result: StepResult, sums: Tensor, wait: Wait, pieces: Sequence[GradientPiece]) -> StepResult:
        wait()
        totals, weight = totals_of(sums, result)
        self.team.reduce_gradients(pieces, weight, self.optimizer.found_inf)
        return totals

    def _update(self, totals: StepResult) -> None:
        parts = self.team.world * self.model.config.train.accumulate
        step_update(totals, self.optimizer, self.state, self.budget, parts=parts)

    def _recorded_step(self) -> Callable[[], None]:
        """The step as one replay, or as several with the collectives between them and beside those of tables."""
        if self.team.in_graph or not self.capture:
            return self._recorded(self._body)
        made: list[tuple[StepResult, list[GradientPiece]]] = []
        first = self._recorded(lambda: made.append((self._gradients(), self.optimizer.exchanged())))
        result, held = made.pop()
        pieces = [([self._recorded(run) for run in runs], grad) for runs, grad in held]
        dtypes = (torch.float32, torch.float32, torch.int32, torch.int32, torch.int32)
        seen = StepResult(*(torch.zeros((), dtype=dtype, device=self.model.device) for dtype in dtypes))
        second = self._recorded(lambda: self._update(seen))

        def run() -> None:
            first()
            totals = self._exchange(result, *start_totals(result, self.team), pieces)
            for kept, value in zip(vars(seen).values(), vars(totals).values(), strict=True):
                kept.copy_(value)
            second()

        return run

    def _recorded_grid(self, all_cells: bool) -> Callable[[], None]:
        if self.team.in_graph or not self.capture:
            return self._recorded(self._grid_function(all_cells))
        learns = offers(self.model.sampler, "update")
        if self.stages.update_grid is not update_grid or learns:  # where it communicates only its author knows
            return self._grid_function(all_cells)
        grid, team = self.model.grid, self.team
        made: list[tuple[Tensor, Tensor]] = []

        def refresh() -> None:
            cells = grid.cells_to_refresh(self.state.step, all_cells=all_cells)
            density = self.model.field.density
            made.append((cells, grid.fresh_part(self.state.step, density, cells, rank=team.rank, world=team.world)))

        first = self._recorded(refresh)
        cells, fresh = made[-1]
        second = self._recorded(lambda: grid.take_over(cells, fresh, guard=all_cells))

        def run() -> None:
            first()
            team.max_reduce(fresh)
            second()

        return run

    def _grid_function(self, all_cells: bool) -> Callable[[], None]:
        return lambda: self.stages.update_grid(self.model, self.state.step, all_cells=all_cells, team=self.team)

    def _recorded(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function as a replay of its recording, or itself where nothing is captured."""
        if not self.capture:
            return function
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (NCCL's watchdog, a page that renders) may go on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:
            raise _not_captured(error) from error
        return graph.replay

    def _report(self, step: int, n_steps: int) -> StepRecord:
        """Wait for the chunk before this one, so that one chunk is always queued behind the one that runs."""
        slot = self._chunk % 2 if self._chunk == 0 else (self._chunk - 1) % 2
        self._events[slot].synchronize()
        last = (step + n_steps - 1) if self._chunk == 0 else step - 1
        row = dict(zip(COLUMNS, self._host_ring[slot, last % RING].tolist(), strict=True))
        rays, samples = self._host_totals[slot].tolist()
        new_rays, new_samples = rays - self._seen[0], samples - self._seen[1]
        self._seen = (rays, samples)
        flags = self._host_ring[slot, :, COLUMNS.index("found_inf")].tolist()
        skipped = sum(flags[number % RING] for number in range(max(self._checked, last + 1 - RING, 0), last + 1))
        self._checked = last + 1
        seen = {name: int(row[name]) for name in ("n_rays", "n_samples", "n_marched")}
        seen |= {"total_rays": new_rays, "total_samples": new_samples, "skipped": int(skipped)}
        return StepRecord(step + n_steps, row["loss"], row["mse"], **seen, loss_scale=row["loss_scale"])

    def newest(self) -> tuple[float, float]:
        """Loss and squared error of the last step that was queued; waits for it."""
        self.finish()
        row = self.state.ring[(int(self.state.step) - 1) % RING].tolist()
        return row[COLUMNS.index("loss")], row[COLUMNS.index("mse")]

    def finish(self) -> None:
        """Wait for everything queued."""
        self._stream.synchronize()


class NotCapturedError(BackendError):
    """Something in the step cannot be captured, such as reading a value back to the host."""


def _not_captured(error: BaseException) -> BackendError:
    """Tells the first line of the error that began it, and the line of code outside torch that met it."""
    while error.__context__ is not None:  # ending a broken capture raises again
        error = error.__context__
    torch_folder = f"{os.sep}torch{os.sep}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if torch_folder not in frame.filename]
    where = f", in {Path(frames[-1].filename).name} line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    cause = (str(error).splitlines() or [type(error).__name__])[0] + where
    if "out of memory" in cause:
        return BackendError(
            f"out of memory while the training step is recorded ({cause}); lower train.batch_samples, "
            "`nerfturbo tune` finds the largest that fits"
        )
    hint = "a field must not read values back to the host (.item(), nonzero, boolean masks)"
    return NotCapturedError(f"{cause} ({hint})")
