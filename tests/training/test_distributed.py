"""Two processes do what one with twice the rays does; nobody hangs, nobody parts ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.errors import DistributedError, InputError
from nerfturbo.ops import GradientSink, use_backend
from nerfturbo.training import optim
from nerfturbo.training.checkpoint import latest_checkpoint
from nerfturbo.training.distributed import (
    BACKEND_VARIABLE,
    ProcessTeam,
    Team,
    choose_backend,
    is_launched,
    join_team,
    rank_device,
    split_evenly,
)
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene
from .workers import (
    HANG,
    MEAN_EVERY,
    alone,
    config_for,
    everything,
    free_port,
    meet_trouble,
    state_of,
    together,
    wait_for_one,
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return alone(everything, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder_of_two: Path) -> list[dict[str, Any]]:
    return together(2, everything, folder_of_two)


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((value.double() - second[name].double()).abs().max()) for name, value in first.items())


@pytest.mark.parametrize("split", ["double", "uneven", "idle", "parts"])
def test_in_float64_two_ranks_are_one_process_with_twice_the_rays(
    one: dict[str, Any], two: list[dict[str, Any]], split: str
) -> None:
    """Parameters and grid, for even parts, for a fifth and four fifths, for a rank that never has a sample, and for
    several batches a step; each of the three levels of the table travels by itself."""
    for rank in two:
        assert gap(one[split]["state"], rank[split]["state"]) < 1e-9
        assert rank[split]["counts"] == one[split]["counts"]
        assert rank[split]["rays"] == one[split]["rays"]
        assert rank[split]["losses"] == pytest.approx(one[split]["losses"], rel=1e-6)
        assert [len(pieces) for pieces in rank[split]["pieces"]] == [1, 3]  # networks, table
    assert one["double"]["losses"][-1] < 0.3 * one["double"]["losses"][0]  # it did train


def test_in_fp32_first_gradients_and_losses_agree(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    truth = one["single"]["moments"]
    for rank in two:
        assert (rank["single"]["moments"] - truth).norm() < 1e-5 * truth.norm()
        assert rank["single"]["losses"] == pytest.approx(one["single"]["losses"], rel=1e-5)
        assert rank["single"]["summary"].rays == one["single"]["summary"].rays


@pytest.mark.parametrize("run", ["single", "bf16", "fp16"])
def test_pieces_change_nothing(two: list[dict[str, Any]], run: str) -> None:
    """Three levels in three pieces, in two, and in one: the same to the bit."""
    for found in two:
        for name, n_pieces in (("two pieces", 2), ("one piece", 1)):
            other = found[f"{run}, {name}"]
            assert [len(pieces) for pieces in other["pieces"]] == [1, n_pieces]
            assert torch.equal(found[run]["moments"], other["moments"])
            assert gap(found[run]["state"], other["state"]) == 0.0


def test_a_table_gradient_of_one_rank_that_is_not_finite_skips_the_step_of_all(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["flag"]["skipped"] == [0, 0, 1, 0, 0]
    assert gap(two[0]["flag"]["state"], two[1]["flag"]["state"]) == 0.0


@pytest.fixture
def team_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """It really communicates, with itself."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    team = join_team()
    yield team
    team.close()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_piece_of_the_table_travels_while_the_next_is_computed(
    team_of_one: Team, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which the real step computes and sends: networks, then level after level, the finest first; and
    nothing is waited for before all are under way. The flag goes last, for the last level may raise it. Computed and
    sent like this, the gradients are those of a process alone."""
    monkeypatch.setattr(optim, "PIECE", 1)
    with use_backend(backend):
        alone, together = (Trainer(config_for(1), ball_scene(), team=team) for team in (Team(), team_of_one))
        alone.stepper.advance(0, 1)  # type: ignore[union-attr]
    table, (networks, features) = together.model.field.encoding.layout, together.optimizer.buffers
    names = {features.grads[level.offset * table.n_features :].data_ptr(): i for i, level in enumerate(table.levels)}
    names = {address: f"level {index}" for address, index in names.items()}
    names |= {networks.grads.data_ptr(): "networks", together.optimizer.found_inf.data_ptr(): "flag"}
    send, add, wait = torch.distributed.all_reduce, GradientSink.add, ProcessTeam._wait_or_give_up
    told: list[str] = []

    def noted_send(values: torch.Tensor, *args: Any, **options: Any) -> Any:
        told.append(f"send {names.get(values.data_ptr(), 'totals' if values.numel() == 5 else 'grid')}")
        return send(values, *args, **options)

    def noted_add(sink: GradientSink, rows: Any) -> None:
        def noted(first: int, last: int) -> None:
            levels = "-".join(str(level) for level in range(*table.levels_of(first, last)))
            told.append(f"compute level {levels}")
            rows(first, last)

        add(sink, noted if len(sink.buffers[0]) == table.n_entries else rows)

    monkeypatch.setattr(torch.distributed, "all_reduce", noted_send)
    monkeypatch.setattr(GradientSink, "add", noted_add)
    monkeypatch.setattr(ProcessTeam, "_wait_or_give_up", lambda team, work: (told.append("wait"), wait(team, work)))
    with use_backend(backend):
        together.stepper.advance(0, 1)  # type: ignore[union-attr]
    levels = [f"{verb} level {index}" for index in (2, 1, 0) for verb in ("compute", "send")]
    first = told.index("send totals")
    assert told[first:] == ["send totals", "wait", "send networks", *levels, "send flag", *["wait"] * 5]
    for own, other in zip(alone.optimizer.buffers, together.optimizer.buffers, strict=True):
        assert torch.equal(own.state.first, other.state.first) and own.state.first.any()


@pytest.mark.parametrize("run", ["double", "uneven", "single", "bf16", "fp16"])
def test_ranks_are_equal_to_the_bit(two: list[dict[str, Any]], run: str) -> None:
    assert gap(two[0][run]["state"], two[1][run]["state"]) == 0.0
    assert two[0][run]["losses"] == two[1][run]["losses"]


@pytest.mark.parametrize(("compression", "error"), [("bf16", 2**-8), ("fp16", 2**-10)])
def test_compressed_gradients_are_rounded_and_train_as_well(
    one: dict[str, Any], two: list[dict[str, Any]], compression: str, error: float
) -> None:
    found, truth = two[0][compression], one["single"]
    distance = float((found["moments"] - truth["moments"]).norm() / truth["moments"].norm())
    assert 1e-6 < distance < error
    assert found["losses"][-1] == pytest.approx(truth["losses"][-1], rel=0.05)


def test_lightning_with_two_processes_is_one_process_and_is_the_native_trainer(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    for rank in two:
        assert gap(one["lightning double"]["state"], rank["lightning double"]["state"]) < 1e-9
        assert rank["lightning single"]["losses"] == pytest.approx(one["single"]["losses"], rel=1e-5)
    assert one["lightning single"]["losses"] == pytest.approx(one["single"]["losses"], rel=1e-6)
    assert gap(two[0]["lightning single"]["state"], two[1]["lightning single"]["state"]) == 0.0


def test_lightning_finds_the_learning_rate_of_one_process(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """Gradients are summed once, by the step, not by DDP too."""
    for rank in two:
        assert rank["lightning rates"] == pytest.approx(one["lightning rates"], rel=1e-5)


def test_going_on_equals_never_having_stopped(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in (one, *two):
        assert gap(found["resumed"], found["single"]["state"]) == 0.0


def test_a_checkpoint_knows_no_world_size(
    one: dict[str, Any], two: list[dict[str, Any]], folder_of_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two ranks saved, one process with twice the rays goes on with, to the same end."""
    monkeypatch.setattr(optim, "EMA_EVERY", MEAN_EVERY)
    with use_backend("reference"):
        trainer = Trainer(config_for(1, steps=20), ball_scene())
        trainer.resume(latest_checkpoint(folder_of_two))
        assert trainer.step == 10
        trainer.fit()
    assert gap(state_of(trainer.model, trainer.optimizer), one["single"]["state"]) < 1e-5


def test_all_ranks_stop_when_one_wants_to(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert [found["stopped"] for found in (one, *two)] == [(3, "callback")] * 3


def test_all_ranks_follow_the_clock_of_the_first(two: list[dict[str, Any]]) -> None:
    (steps, state), (other_steps, other_state) = (rank["clock"] for rank in two)
    assert steps == other_steps and gap(state, other_state) == 0.0


def test_trouble_with_one_rank_is_an_error_that_names_it(tmp_path: Path) -> None:
    (found,) = together(2, meet_trouble, tmp_path, expected=[0])
    assert found["slow"] == 5 and found["seconds"] < 60.0
    assert any(re.fullmatch(r"rank 1 of 2 is slow: the others waited [23] s for it", told) for told in found["warned"])
    assert found["pixels"] == "rank 1 of 2 has another scene than rank 0"
    assert found["views"] == "rank 1 of 2 has another number or size of images than rank 0"
    assert found["config"] == "rank 1 of 2 has another config than rank 0"
    assert "rank 0 of 2 lost contact with rank 1 (" in found["killed"]
    assert "checkpoints are intact" in found["killed"] and "--resume" in found["killed"]


def test_a_rank_that_hangs_is_named_and_one_that_is_slow_or_busy_is_waited_for(tmp_path: Path) -> None:
    for rank, found in zip((0, 2), together(3, wait_for_one, tmp_path, expected=[0, 2]), strict=True):
        assert (found["slow"], found["busy"]) == (5, 5)
        assert f"rank {rank} of 3 lost contact with rank 1 (no answer for {HANG:.0f} s): killed, " in found["stopped"]
        assert HANG < found["stopped seconds"] < HANG + 15.0


@pytest.mark.parametrize("failed", [False, True])
def test_what_ends_when_the_patience_does_is_not_called_lost(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo throws its timeout, then the work ends, then somebody looks whether it is over."""

    class Late:
        waits = 0

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: object = None) -> None:
            self.waits += 1
            if failed or self.waits == 1:
                raise RuntimeError("Connection closed by peer" if self.waits > 1 else "Operation timed out!")

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: Late())
    monkeypatch.setattr("nerfturbo.training.distributed.SILENT_SECONDS", 0.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    team = join_team()
    try:
        with pytest.raises(DistributedError, match="Connection closed by peer") if failed else nullcontext():
            team.max_reduce(torch.zeros(1))
    finally:
        team.close()


@pytest.mark.parametrize("run", ["single", "lightning single"])
def test_every_rank_says_what_its_time_went_to(two: list[dict[str, Any]], run: str) -> None:
    """And all of them hold the whole table: the first writes it into the report."""
    first, second = (found[run]["summary"].ranks for found in two)
    assert first == second and len(first) == 2 and first[0] != first[1]
    for use in first:
        assert use["step_ms"] > 0.0 and use["data_ms"] > 0.0 and 0.0 < use["data_share"] <= 1.0


def test_shares_cover_the_batch_without_overlap() -> None:
    for n_rays in (0, 1, 7, 64):
        for world in (1, 2, 3, 8):
            shares = [split_evenly(5, rank, world, n_rays) for rank in range(world)]
            indices = [index for share in shares for index in range(share.first, share.first + share.count)]
            assert indices == list(range(n_rays))


def test_without_a_launcher_there_is_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched() and join_team().alone
    assert rank_device("cuda") == "cuda"
    assert Team().agree(True, (3.0,)) == (True, (3.0,))


def test_a_wrong_backend_and_an_unreachable_team_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "mpi")
    with pytest.raises(InputError, match=r"NERFTURBO_DIST_BACKEND: expected gloo or nccl, got 'mpi'"):
        choose_backend(torch.device("cpu"))
    monkeypatch.delenv(BACKEND_VARIABLE)
    monkeypatch.setenv("NERFTURBO_DIST_TIMEOUT", "1")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match=r"rank 1 of 2 could not join the others at 127\.0\.0\.1:9 over gloo"):
        join_team()
