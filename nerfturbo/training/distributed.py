"""Several processes train one model: who takes which rays, and what they tell each other. Every rank holds the whole
model, draws its own part of one global batch and sums its gradients with the others': then k ranks with n rays each do
what one process with k n rays does: loss and number of rays are those of all ranks, grid cells are divided, and the
non-finite flag is shared. Gradients live in a few flat buffers and travel in a few pieces, those of a table beside its
backward. `Team` is one process alone and says nothing to anybody; `ProcessTeam` speaks through torch.distributed."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import DistributedError, refuse

Compression = Literal["none", "bf16", "fp16"]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
BACKEND_VARIABLE = "NERFTURBO_DIST_BACKEND"
TIMEOUT_VARIABLE = "NERFTURBO_DIST_TIMEOUT"
TIMEOUT_SECONDS = 1800.0  # rank 0 alone saves and renders previews, the others wait for it meanwhile
SLOW_SECONDS = 10.0  # that ranks wait for one of them without a word
SILENT_SECONDS = 5.0  # after which a rank that does not say that it lost contact is the one that was lost
HANG_SECONDS = 60.0  # that ranks wait for one between steps, where none is excused
_LOG = logging.getLogger(__name__)


class RayShare(NamedTuple):
    """Rays first ... first + count - 1 of a step's batch."""

    first: int
    count: int


# (step, rank, world, rays of the whole batch) -> this rank's share; shares must not overlap
RaySplit = Callable[[int, int, int, int], RayShare]
Wait = Callable[[], None]
GradientPiece = tuple[Sequence[Callable[[], None]], Tensor]  # what is to be run first, and some of the gradients


def split_evenly(step: int, rank: int, world: int, n_rays: int) -> RayShare:
    """Consecutive parts whose sizes differ by at most one.

    >>> [split_evenly(0, rank, 3, 10) for rank in range(3)]
    [RayShare(first=0, count=3), RayShare(first=3, count=3), RayShare(first=6, count=4)]
    """
    first, last = n_rays * rank // world, n_rays * (rank + 1) // world
    return RayShare(first, last - first)


class Team:
    """One process alone. Its methods do nothing: a single process pays nothing for the others it might have had."""

    rank: int = 0
    world: int = 1
    alone: bool = True
    in_graph: bool = True  # whether a CUDA graph can hold the collectives

    def start_sum(self, values: Tensor) -> Wait:
        """Begin to sum over all ranks, in place; the result may be read after the returned function was called."""
        return lambda: None

    def max_reduce(self, values: Tensor) -> None:
        """The maximum over all ranks, in place."""

    def reduce_gradients(self, pieces: Sequence[GradientPiece], weight: Tensor, found_inf: Tensor) -> None:
        """Replace gradients by the sum over ranks of weight * gradient, each piece while what comes before the next is
        run; a non-finite flag of one is one of all. Weights add up to 1: where no message overflows, no sum does."""

    def agree(self, stop: bool, values: Sequence[float] = ()) -> tuple[bool, Sequence[float]]:
        """Whether anyone wants to stop, and the values (>= 0) of rank 0: its clock alone drives the schedule, say."""
        return stop, values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Make every rank's tensors those of rank 0, in place."""

    def check_same(self, what: str, number: float, within: float = 0.0) -> None:
        """Refuse, on all ranks, to go on where a number >= 0 differs, by more than this part of it, from rank 0's."""

    def excuse(self, more: int) -> None:
        """So many more ranks, or fewer, are busy alone and may keep the others waiting."""

    def close(self) -> None:
        """Leave the team."""


class ProcessTeam(Team):
    """The default process group of torch.distributed, with world size 1 too (which then really communicates)."""

    alone = False

    def __init__(self, device: torch.device | str = "cpu", *, compression: Compression = "none") -> None:
        import torch.distributed as dist

        refuse(compression not in ("none", *_HALF), "compression", "none, bf16 or fp16", repr(compression))
        self._dist: Any = dist
        self.device = torch.device(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.in_graph = dist.get_backend() == "nccl"
        self._half = _HALF.get(compression)
        self._messages: dict[tuple[int, int], Tensor] = {}
        self._agreed, self._in_steps = time.monotonic(), False
        self._store: Any = dist.distributed_c10d._get_default_store()

    def start_sum(self, values: Tensor) -> Wait:
        with self._explained():
            work = self._dist.all_reduce(values, async_op=True)
        return lambda: self._finish(lambda: [work])

    def max_reduce(self, values: Tensor) -> None:
        self._finish(lambda: [self._dist.all_reduce(values, op=self._dist.ReduceOp.MAX, async_op=True)])

    @torch.no_grad()
    def reduce_gradients(self, pieces: Sequence[GradientPiece], weight: Tensor, found_inf: Tensor) -> None:
        sent = []
        for runs, grad in pieces:
            for run in runs:
                run()
            message = self._message(grad, weight)
            sent.append((grad, message, self.start_sum(message)))
        self.max_reduce(found_inf)  # the last of them may have raised it
        for grad, message, wait in sent:
            wait()
            if message is grad:
                continue
            grad.copy_(message)
            if self._half == torch.float16:  # a sum past 65504 is a non-finite step, for tables too
                found_inf.copy_(torch.where(torch.isfinite(message).all(), found_inf, torch.ones_like(found_inf)))

    def _message(self, grad: Tensor, weight: Tensor) -> Tensor:
        """What goes over the wire: the weighted gradient itself, or its half copy in a buffer that is kept."""
        if self._half is None or grad.element_size() == 2:
            return grad.mul_(weight.to(grad.dtype))
        key = (grad.data_ptr(), grad.numel())
        if (buffer := self._messages.get(key)) is None:
            buffer = self._messages[key] = torch.empty_like(grad, dtype=self._half)
        return buffer.copy_(grad * weight.to(grad.dtype))

    def agree(self, stop: bool, values: Sequence[float] = ()) -> tuple[bool, Sequence[float]]:
        own = [float(stop), *(values if self.rank == 0 else [0.0] * len(values))]
        (stopped, *first), seconds = self._told(time.monotonic() - self._agreed, own)
        self._agreed, self._in_steps = time.monotonic(), True
        if max(seconds) - min(seconds) > SLOW_SECONDS and self.rank == 0:
            slow, waited = seconds.index(max(seconds)), max(seconds) - min(seconds)
            _LOG.warning("rank %d of %d is slow: the others waited %.0f s for it", slow, self.world, waited)
        return stopped > 0.0, first

    def check_same(self, what: str, number: float, within: float = 0.0) -> None:
        self._in_steps = False  # before the first, one rank may load or compile for minutes
        first, *others = self._told(number)[1]
        if other := [str(rank) for rank, own in enumerate(others, 1) if abs(own - first) > within * first]:
            raise DistributedError(f"rank {', '.join(other)} of {self.world} has another {what} than rank 0")

    def _told(self, own: float, most: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """The largest of all ranks for each number of `most`, and the `own` number of each rank; none below 0."""
        mine = [*most, *(own if rank == self.rank else 0.0 for rank in range(self.world))]
        shared = torch.tensor(mine, dtype=torch.float64, device=self.device if self.in_graph else "cpu")
        self.max_reduce(shared)
        return shared.tolist()[: len(most)], shared.tolist()[len(most) :]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        self._finish(lambda: [self._dist.broadcast(tensor, src=0, async_op=True) for tensor in tensors])

    def excuse(self, more: int) -> None:
        if more:
            with self._explained():
                self._store.add("nerfturbo_excused", more)

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _finish(self, start: Callable[[], Sequence[Any]]) -> None:
        with self._explained():
            for work in start():
                work.wait() if self.in_graph else self._wait_or_give_up(work)  # with NCCL only the stream waits

    def _wait_or_give_up(self, work: Any) -> None:
        until = time.monotonic() + HANG_SECONDS
        while True:
            try:
                return work.wait(timedelta(seconds=2.0))
            except RuntimeError:
                if work.is_completed():  # failed, which raises again, or ended just now; else it is not over yet
                    return work.wait()
            if not self._in_steps or self._store.add("nerfturbo_excused", 0) > 0:
                until = time.monotonic() + HANG_SECONDS
            if time.monotonic() > until or self._store.add("nerfturbo_lost", 0) > 0:  # where one gives up, all do
                raise RuntimeError(f"no answer for {HANG_SECONDS:.0f} s")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A lost connection as an error that says what happened and what to do."""
        try:
            yield
        except RuntimeError as error:
            text, lost = str(error).strip().splitlines(), self._silent()
            raise DistributedError(
                f"rank {self.rank} of {self.world} lost contact with {lost} ({text[0] if text else error}): killed, "
                "failed or hanging, and its own message says why; checkpoints are intact: "
                "go on from the last one with --resume, or let torchrun restart by itself with --max-restarts"
            ) from error

    def _silent(self) -> str:
        """Who is gone: ranks that do not say themselves, within seconds, that they have lost others."""
        others, until = [rank for rank in range(self.world) if rank != self.rank], time.monotonic() + SILENT_SECONDS
        with contextlib.suppress(RuntimeError):  # the store goes with rank 0
            self._store.set(f"nerfturbo_lost_{self.rank}", "1")
            self._store.add("nerfturbo_lost", 1)
            while others and time.monotonic() < until:
                others = [rank for rank in others if not self._store.check([f"nerfturbo_lost_{rank}"])]
                time.sleep(0.1)
            return f"rank {', '.join(map(str, others))}" if others else "the others, which lost each other"
        return f"rank {', '.join(map(str, others))}" if 0 not in others else "rank 0, where ranks meet,"


def is_launched() -> bool:
    """Whether torchrun (or whatever sets its variables) started this process as one of a team."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launched_rank() -> int:
    return int(os.environ["RANK"]) if is_launched() else 0


def rank_device(device: str) -> str:
    """The device of this rank: GPUs are dealt out by local rank, and shared where there are fewer than ranks."""
    if not is_launched() or device != "cuda":
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"


def choose_backend(device: torch.device) -> str:
    """nccl for ranks with a GPU each, gloo on CPUs and for ranks that share a GPU, which NCCL refuses."""
    if (chosen := os.environ.get(BACKEND_VARIABLE)) is not None:
        refuse(chosen not in ("gloo", "nccl"), BACKEND_VARIABLE, "gloo or nccl", repr(chosen))
        return chosen
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if device.type == "cuda" and local_ranks <= torch.cuda.device_count() else "gloo"


def join_team(device: torch.device | str = "cpu", *, compression: Compression = "none") -> Team:
    """The team this process was launched into: `Team()` without a launcher, else a connected `ProcessTeam`."""
    if not is_launched():
        return Team()
    import torch.distributed as dist

    device = torch.device(rank_device(str(device)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        limit = timedelta(seconds=float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT_SECONDS)))
        backend = choose_backend(device)
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=limit))  # pyright: ignore[reportPrivateImportUsage]
            # A restarted job may meet in the store of the one before, where addresses of the dead still lie.
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"restart_{count}", store)  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise DistributedError(
                f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the others at {where} over "
                f"{backend} ({str(error).strip().splitlines()[0]}); is that address reachable from this machine?"
            ) from error
    return ProcessTeam(device, compression=compression)
