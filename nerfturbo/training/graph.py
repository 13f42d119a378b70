"""Training on a GPU: the whole step as one CUDA graph.

The step that runs eagerly is recorded once and replayed: pixels, rays, marching, field, compositing, loss, backward,
optimizer, loss scale and counters. Shapes are fixed by a sample capacity; what changes from step to step (the step, the
number of rays, the learning rate, the loss scale) lives in device tensors. The grid's update is a graph of its own.
The host only queues replays: it reads a ring of results one chunk behind, so that the device never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..data.batches import PixelSampler
from ..errors import BackendError
from ..ops.step_state import COLUMNS, RayBudget, StepState
from ..rendering.model import NerfModel
from .optim import Optimizer
from .step import StepRecord, run_step

WARMUP_STEPS = 3  # let kernels compile and allocations settle before recording
RING = 256  # steps the ring remembers


class DeviceStep:
    """Drives training on a GPU by replaying graphs; the counterpart of `TrainingStep`.

    Without `capture` it runs the same functions with the same shapes one kernel at a time: slower, and what the
    recorded step must equal.
    """

    def __init__(self, model: NerfModel, sampler: PixelSampler, optimizer: Optimizer, *, capture: bool = True) -> None:
        self.model, self.sampler, self.optimizer, self.capture = model, sampler, optimizer, capture
        train = model.config.train
        self.budget = RayBudget(train.batch_samples, train.batch_samples * train.marched_per_trained, train.max_rays)
        self.state = StepState.create(step=0, n_active=train.initial_rays, length=RING, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._run_step: Callable[[], None] | None = None
        self._update_grid: dict[bool, Callable[[], None]] = {}
        self._stream = torch.cuda.Stream(model.device)
        self._host_ring = torch.zeros(2, RING, len(COLUMNS), pin_memory=True)
        self._host_totals = torch.zeros(2, 2, dtype=torch.int64, pin_memory=True)
        self._events = [torch.cuda.Event(), torch.cuda.Event()]
        self._chunk = 0
        self._seen = (0, 0)  # rays and samples already reported
        self._checked = 0  # steps whose non-finite flags were already reported

    @property
    def n_rays(self) -> int:
        return int(self.state.n_active)

    @n_rays.setter
    def n_rays(self, value: int) -> None:
        self.state.n_active.fill_(value)

    def prepare(self) -> None:
        """Compile every kernel and record all graphs, leaving the training state as it was.

        The recorded functions first run for real. While they do, the non-finite flag is up, so that the optimizer
        changes nothing; counters and grid are put back afterwards.
        """
        if self._run_step is not None:
            return
        state, optimizer, grid = self.state, self.optimizer, self.model.grid
        kept = [state.step, state.n_active, state.totals, state.ring, grid.thickness, grid.bits, grid.mean]
        kept += [optimizer.scale, optimizer.good_steps, optimizer.skipped, optimizer.step_count]
        kept += optimizer.averages
        saved = [tensor.clone() for tensor in kept]
        with torch.cuda.stream(self._stream):
            for all_cells in (True, False):
                self._grid_function(all_cells)()
            for _ in range(WARMUP_STEPS):
                optimizer.found_inf.fill_(1.0)
                self._body()
            for all_cells in (True, False):
                self._update_grid[all_cells] = self._recorded(self._grid_function(all_cells))
            self._run_step = self._recorded(self._body)
            for tensor, value in zip(kept, saved, strict=True):
                tensor.copy_(value)
            optimizer.found_inf.zero_()
        self._stream.synchronize()

    def set_learning_rate(self, value: float) -> None:
        with torch.cuda.stream(self._stream):  # in line with the replays, not beside them
            self.optimizer.set_learning_rate(value)

    def advance(self, step: int, limit: int) -> StepRecord:
        """Queue steps up to the next grid update, and report the chunk before (the first time: this one)."""
        self.prepare()
        assert self._run_step is not None
        grid = self.model.grid.config
        n_steps = min(limit, grid.update_every - step % grid.update_every)
        with torch.cuda.stream(self._stream):
            if self._chunk == 0:
                self.state.step.fill_(step)
                self._checked = step
            if grid.enabled and step % grid.update_every == 0:
                self._update_grid[step < grid.warmup_steps]()
            for _ in range(n_steps):
                self._run_step()
            slot = self._chunk % 2
            self._host_ring[slot].copy_(self.state.ring, non_blocking=True)
            self._host_totals[slot].copy_(self.state.totals, non_blocking=True)
            self._events[slot].record(self._stream)
        record = self._report(step, n_steps)
        self._chunk += 1
        return record

    def _body(self) -> None:
        run_step(self.model, self.sampler, self.optimizer, self.state, self.budget)

    def _grid_function(self, all_cells: bool) -> Callable[[], None]:
        def update() -> None:
            self.model.grid.update(self.state.step, self.model.field.density, all_cells=all_cells)

        return update

    def _recorded(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function as a replay of its recording, or itself where nothing is captured."""
        if not self.capture:
            return function
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
        except RuntimeError as error:
            raise BackendError(
                f"the training step cannot be captured as a CUDA graph ({error}); a field must not read values back to "
                "the host (.item(), nonzero, boolean masks) while it runs; set train.capture to False to run it eagerly"
            ) from error
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
        return StepRecord(
            step=step + n_steps,
            loss=row["loss"],
            mse=row["mse"],
            n_rays=int(row["n_rays"]),
            n_samples=int(row["n_samples"]),
            n_marched=int(row["n_marched"]),
            total_rays=new_rays,
            total_samples=new_samples,
            skipped=int(skipped),
            loss_scale=row["loss_scale"],
        )

    def finish(self) -> None:
        """Wait for everything queued."""
        self._stream.synchronize()
