"""Mixed precision: what auto means, the helper's laws, the guard, and training in each precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nerfturbo import MixedPrecision
from nerfturbo.config import Config, VanillaConfig, VoxelConfig
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.adam import ScaleRule
from nerfturbo.training import Trainer
from nerfturbo.training.loss import Stages, draw_batch, render_and_compare
from nerfturbo.training.precision import resolve_precision
from nerfturbo.training.stability import (
    FALLS,
    IN_A_ROW,
    WINDOW,
    ScaleWatch,
    StabilityGuard,
    UnstableError,
    first_bad_tensor,
)
from nerfturbo.training.step import StepRecord

from ..tiny import ball_scene, tiny_config


def test_auto_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_precision("auto", "cpu") == "fp32" and resolve_precision("auto", "mps") == "fp32"
    for capability, expected in (((6, 1), "fp32"), ((7, 0), "fp16"), ((9, 0), "fp16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert resolve_precision("auto", "cuda") == expected
    assert [resolve_precision(name, "cpu") for name in ("fp32", "fp16", "bf16")] == ["fp32", "fp16", "bf16"]
    with pytest.raises(InputError, match="precision: expected one of"):
        resolve_precision("fp8", "cpu")


# The helper, for models and loops of one's own.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 1)
        for parameter in self.parameters():
            parameter.data.uniform_(-0.4, 0.4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def batch(index: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(index))
    return x, (x[:, :1] * x[:, 1:2]).tanh()


def made(precision: str, **values: object) -> tuple[Net, MixedPrecision]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, MixedPrecision(model, optimizer, precision=precision, **values)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_helper_trains_in_each_precision_as_fp32_does(precision: str) -> None:
    model, amp = made(precision)
    losses = []
    for index in range(60):
        x, y = batch(index)
        with amp.autocast():
            out = model(x)
        assert out.dtype == {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        loss = (out.float() - y).square().mean()
        assert not amp.step(loss).skipped
        assert all(parameter.grad is None for parameter in model.parameters())
        losses.append(float(loss))
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    assert (amp.steps_made, amp.steps_skipped) == (60, 0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_unscaled_gradient_does_not_depend_on_the_scale() -> None:
    x, y = batch(0)
    norms = []
    for scale in (1.0, 256.0, 16384.0):
        model, amp = made("fp16")
        amp._scale.fill_(scale)
        with amp.autocast():
            loss = (model(x).float() - y).square().mean()
        norms.append(amp.step(loss).gradient_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=2e-3)


def test_a_bad_step_is_skipped_named_and_does_not_move_the_schedule() -> None:
    model, amp = made("fp16", rule=ScaleRule(lowest=128.0, growth_interval=3))
    amp.scheduler = torch.optim.lr_scheduler.StepLR(amp.optimizer, step_size=1, gamma=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    x, y = batch(0)
    handle = model.second.weight.register_hook(lambda grad: grad * float("inf"))
    for expected in (512.0, 256.0, 128.0, 128.0, 128.0):  # never under the floor
        report = amp.step((model(x) - y).square().mean())
        assert report.skipped and report.bad_tensor == "second.weight" and amp.loss_scale == expected
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    assert amp.optimizer.param_groups[0]["lr"] == 1e-2
    handle.remove()
    for expected in (128.0, 128.0, 256.0):  # three good steps in a row: it grows
        assert not amp.step((model(x) - y).square().mean()).skipped and amp.loss_scale == expected
    assert (amp.steps_made, amp.steps_skipped) == (3, 5)
    assert amp.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**3)
    assert amp.step((model(x) - y).square().mean() * float("nan")).bad_tensor == "loss"


def test_clipping_and_accumulation_act_on_unscaled_gradients() -> None:
    x, y = batch(0)
    results = []
    for precision in ("fp32", "fp16"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp = MixedPrecision(model, optimizer, precision=precision, clip_norm=1e-2)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for half in (slice(0, 32), slice(32, 64)):
            amp.backward((model(x[half]) - y[half]).square().mean() / 2)
        assert amp.step().gradient_norm > 1e-2
        moved = [(one - two).flatten() for one, two in zip(before, model.parameters(), strict=True)]
        results.append(torch.cat(moved).detach())
        assert float(results[-1].norm()) == pytest.approx(1e-2, rel=1e-3)
    assert torch.allclose(*results, atol=1e-6)


def test_clipping_is_that_of_torch_for_the_smallest_gradients_too() -> None:
    for size in (1e-6, 1e-3, 1.0):
        value, own = nn.Parameter(torch.zeros(3)), nn.Linear(3, 1, bias=False)
        value.grad = torch.tensor([3.0, 4.0, 0.0]) * size
        torch.nn.utils.clip_grad_norm_([value], 1e-6)
        amp = MixedPrecision(own, torch.optim.SGD(own.parameters(), lr=1.0), precision="fp32", clip_norm=1e-6)
        nn.init.zeros_(own.weight)
        amp.step(own(torch.tensor([3.0, 4.0, 0.0])).sum() * size)
        torch.testing.assert_close(-own.weight.detach()[0], value.grad, rtol=1e-5, atol=0.0)


def test_the_helper_keeps_its_state_and_refuses_half_masters() -> None:
    _, amp = made("fp16")
    amp._scale.fill_(2048.0)
    amp._good.fill_(17.0)
    _, other = made("fp16")
    other.load_state_dict(amp.state_dict())
    assert other.loss_scale == 2048.0 and other.state_dict() == amp.state_dict()
    with pytest.raises(InputError, match=r"parameter weight: expected torch\.float32, it is the master"):
        model = nn.Linear(2, 2).half()
        MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(InputError, match="clip_norm"):
        made("fp32", clip_norm=-1.0)


def test_the_helper_unscales_all_that_the_optimizer_steps() -> None:
    x, y = batch(0)
    moved = []
    for precision in ("fp32", "fp16"):
        model, extra = Net(), nn.Parameter(torch.zeros(1))
        model.first.requires_grad_(False)
        optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra], "lr": 2.0}], lr=1.0)
        amp = MixedPrecision(model, optimizer, precision=precision)
        amp.step((model(x) + extra - y).square().mean())
        model.first.requires_grad_(True)  # unfrozen on the way
        report = amp.step((model(x) + extra - y).square().mean())
        moved.append(torch.cat([extra.detach(), *(p.detach().flatten() for p in model.parameters())]))
        assert not report.skipped
    assert torch.allclose(*moved, atol=1e-4)
    assert report.gradient_norm > 0.0


def test_only_what_is_stepped_counts_and_others_are_named_by_group() -> None:
    x, y = batch(0)
    model, extra = Net(), nn.Parameter(torch.zeros(1))
    amp = MixedPrecision(model, torch.optim.SGD([*model.second.parameters(), extra], lr=1e-3), precision="fp16")
    norms = [amp.step((model(x) + extra - y).square().mean()).gradient_norm for _ in range(4)]
    assert norms == pytest.approx([norms[0]] * 4, rel=0.1)  # what nobody steps or zeroes does not add up in it
    extra.register_hook(lambda grad: grad * float("nan"))
    assert amp.step((model(x) + extra - y).square().mean()).bad_tensor == "param_groups[0][2]"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_helper_takes_sparse_gradients(precision: str) -> None:
    ways = []
    for sparse in (False, True):
        table = nn.Embedding.from_pretrained(torch.ones(8, 3), freeze=False, sparse=sparse)
        amp = MixedPrecision(table, torch.optim.SGD(table.parameters(), lr=1.0), precision=precision, clip_norm=0.5)
        norm = amp.step(table(torch.tensor([1, 1, 5])).square().sum()).gradient_norm
        ways.append((norm, table.weight.detach().clone()))
        amp.step(table(torch.tensor([2])).sum() * float("nan"))
        assert amp.steps_skipped == 1 and torch.isfinite(table.weight).all()
    assert ways[0][0] == pytest.approx(ways[1][0]) and torch.allclose(ways[0][1], ways[1][1])


def test_a_loss_that_is_not_finite_leaves_no_finite_gradient() -> None:
    x, y = batch(0)
    model, amp = made("fp32")
    amp.backward((model(x) - y).square().mean() + float("inf"))  # a constant: its own gradient would be finite
    assert all(torch.isnan(p.grad).all() for p in model.parameters() if p.grad is not None)  # so other ranks skip too
    amp.backward((model(x) - y).square().mean())
    assert amp.step().bad_tensor == "loss"
    assert amp.step((model(x) - y).square().mean()).bad_tensor is None


def test_the_helper_refuses_what_it_cannot_drive() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InputError, match=r"optimizer: .* got list; one optimizer with several parameter groups"):
        MixedPrecision(model, [optimizer])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"optimizer: .* got LBFGS"):
        MixedPrecision(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(InputError, match=r"scheduler: .* got ReduceLROnPlateau"):
        MixedPrecision(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"state: .* got no good_steps"):
        MixedPrecision(model, optimizer).load_state_dict({"scale": 1.0})
    for values in ({"backoff": 2.0}, {"growth": 0.5}, {"growth_interval": 0}, {"lowest": 0.0}, {"highest": 1.0}):
        with pytest.raises(InputError, match=next(iter(values))):
            ScaleRule(**values)


@pytest.mark.parametrize(("saved", "loaded", "scale"), [("fp16", "fp32", 1.0), ("fp32", "fp16", 1024.0)])
def test_a_state_of_another_precision_brings_no_scale_along(saved: str, loaded: str, scale: float) -> None:
    x, y = batch(0)
    _, first = made(saved)
    model, amp = made(loaded)
    expected = amp.step((model(x) - y).square().mean()).gradient_norm
    model, amp = made(loaded)
    amp.load_state_dict(first.state_dict())
    assert amp.loss_scale == scale
    assert amp.step((model(x) - y).square().mean()).gradient_norm == pytest.approx(expected)


# The built-in trainer.


def training(precision: str, kind: str = "ngp", **train: object) -> Trainer:
    config = tiny_config(steps=40)
    if kind == "vanilla":
        unpruned = replace(config.sampler, prune=False)
        config = replace(config, field=VanillaConfig(width=32, depth=2), sampler=unpruned)
    config = replace(config, train=replace(config.train, precision=precision, **train))
    return Trainer(config, ball_scene())


@pytest.mark.parametrize(("kind", "steps"), [("ngp", 24), ("vanilla", 4)])
def test_every_precision_trains_as_fp32_does(kind: str, steps: int) -> None:
    last = {}
    with use_backend("reference"):
        for precision in ("fp32", "fp16", "bf16"):
            losses: list[float] = []
            made = training(precision, kind)
            made.callbacks.append(lambda _, record, into=losses: into.append(record.mse))
            made.callbacks.append(lambda trainer, record: trainer.stop() if record.step == steps else None)
            made.fit()
            last[precision] = sum(losses[-4:]) / 4
            assert (made.optimizer.loss_scale is not None) == (precision == "fp16")
            assert all(buffer.values.dtype == torch.float32 for buffer in made.optimizer.buffers)
    assert last["fp16"] == pytest.approx(last["fp32"], rel=0.05)
    assert last["bf16"] == pytest.approx(last["fp32"], rel=0.15)


def poisoned(made: Trainer, at: range, what: str = "gradient") -> Trainer:
    step = made.optimizer.step

    def poison() -> None:
        if made.step in at:
            made.optimizer.buffers[0].grads[0] = float("nan")
        step()

    made.optimizer.step = poison  # type: ignore[method-assign]
    return made


def guarded(made: Trainer, precision: str) -> list[str]:
    said: list[str] = []
    made.guard = StabilityGuard(precision)
    made.guard.report = lambda _, text: said.append(text)
    return said


def test_a_falling_scale_brings_advice_and_lower_lr_acts_on_it() -> None:
    with use_backend("reference"):
        made = poisoned(training("fp16", on_instability="lower-lr"), range(10, 16))
        said = guarded(made, "fp16")
        made.fit()
    assert made.skipped == 6 and made.lr_factor == 0.5
    text = next(text for text in said if "keeps falling" in text)
    assert "--optim.clip-norm" in text and "the learning rate is halved" in text
    assert made.learning_rate == pytest.approx(0.5 * training("fp16").optimizer.config.lr, rel=0.98)


@pytest.mark.parametrize(("precision", "named"), [("fp32", True), ("fp16", False)])
def test_one_skipped_step_is_named_unless_its_scale_is_still_sought(precision: str, named: bool) -> None:
    with use_backend("reference"):
        made = poisoned(training(precision), range(10, 11))
        said = guarded(made, precision)
        made.fit()
    assert made.skipped == 1 and ["first bad tensor" in text for text in said] == [True] * named


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_never_becomes_finite_again_stops_with_a_name(precision: str) -> None:
    with use_backend("reference"):
        made = poisoned(training(precision), range(5, 1000))
        made.model.field.color_net.weights[0].data[0, 0] = float("nan")
        guarded(made, precision)
        with pytest.raises(UnstableError, match=r"steps in a row were not finite.*parameter field\.color_net"):
            made.fit()
    assert made.step < 40 and torch.isfinite(made.model.grid.thickness).all()


def test_a_run_whose_last_steps_are_not_finite_has_not_succeeded() -> None:
    with use_backend("reference"):
        with pytest.raises(UnstableError, match="6 of 40 steps were not finite"):
            poisoned(training("fp32"), range(34, 40)).fit()
        with pytest.raises(UnstableError, match=f"{FALLS} of 40 steps were not finite"):
            poisoned(training("fp32"), range(40 - FALLS, 40)).fit()
        made = poisoned(training("fp32"), range(1))
        made.reconfigure(replace(made.config, train=replace(made.config.train, steps=1)))
        with pytest.raises(UnstableError, match="1 of 1 steps were not finite"):
            made.fit()
        made = poisoned(training("fp32"), range(30, 33))
        summary = made.fit()
        made.reconfigure(replace(made.config, train=replace(made.config.train, steps=41)))
        with pytest.raises(UnstableError, match="1 of 1 steps were not finite"):  # of this run, not of all
            poisoned(made, range(40, 41)).fit()
    assert (summary.steps, summary.skipped) == (40, 3)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_table_gradient_from_a_term_of_one_s_own_is_checked(precision: str) -> None:
    """Tables with half copies are not looked at by `step`: their backward does that, and such a term goes past it."""

    def with_term(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, mse = render_and_compare(*args)
        table = args[0].field.encoding.table
        return loss + (float("inf") if made.step == 2 else 0.0) * table.sum(), mse

    config = training(precision).config
    made = Trainer(config, ball_scene(), stages=Stages(compare=with_term))
    with use_backend("reference"):
        summary = made.fit()
    assert summary.skipped == 1 and torch.isfinite(made.model.field.encoding.table).all()


def test_the_first_bad_tensor_is_found_in_the_order_of_the_step() -> None:
    drawn: list[int] = []

    def draw(pixels: Any, step: Any, share: Any) -> Any:
        drawn.append(int(step))
        return draw_batch(pixels, step, share)

    with use_backend("reference"):
        made = Trainer(training("fp32").config, ball_scene(), stages=Stages(draw=draw))
        made.fit()
        assert first_bad_tensor(made).startswith("none any more")
        assert drawn[-2:] == [39, 39]  # the last step's work again
        assert all(float(buffer.grads.abs().sum()) == 0.0 for buffer in made.optimizer.buffers)
        made.model.field.encoding.table.data[0, 0] = float("inf")
        assert first_bad_tensor(made) == "parameter field.encoding.table"


def test_a_bad_gradient_is_named_where_a_loop_of_others_has_dropped_it() -> None:
    def bad_slope(model: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, mse = render_and_compare(model, *rest)
        return loss + (model.field.density_net.weights[0].sum() * 0.0).abs().sqrt(), mse

    with use_backend("reference"):
        made = Trainer(tiny_config(steps=2), ball_scene(), stages=Stages(compare=bad_slope))
        made.model.zero_grad(set_to_none=True)
        assert first_bad_tensor(made) == "gradient of field.density_net.weights.0"
        assert all(not buffer.grads.any() for buffer in made.optimizer.buffers)


def test_a_warning_is_logged_and_reported_with_its_trainer(caplog: pytest.LogCaptureFixture) -> None:
    guard, said = StabilityGuard("fp16"), []
    guard.report, guard._named = lambda *words: said.append(words), True
    trainer: Any = SimpleNamespace(config=tiny_config(), lr_factor=1.0)
    guard(trainer, StepRecord(10, 1.0, 1.0, 1, 1, 1, 1, 1, skipped=FALLS, loss_scale=64.0))
    ((first, text),) = said
    assert first is trainer and text.startswith("step 10: the loss scale keeps falling, it is 64")
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.parametrize(("later", "advised"), [(WINDOW, True), (WINDOW + 1, False)])
def test_a_fall_counts_as_long_as_the_window_is(later: int, advised: bool) -> None:
    watch = ScaleWatch("fp16")
    assert watch.see(10, FALLS - 1, 1024.0) is None
    assert (watch.see(10 + later, 1, 1024.0) is not None) is advised


def test_the_first_bad_steps_count_from_none() -> None:
    watch = ScaleWatch("fp32")
    advice = watch.see(IN_A_ROW - 1, IN_A_ROW - 1, 1.0)
    assert watch.in_a_row == IN_A_ROW - 1 and (advice is None or not advice.hopeless)
    assert watch.see(IN_A_ROW, 1, 1.0).hopeless  # type: ignore[union-attr]


def test_the_watch_counts_rows_and_windows_over_chunks_of_steps() -> None:
    watch = ScaleWatch("fp16")
    assert watch.see(16, 2, 1024.0) is None and watch.see(32, 0, 1024.0) is None
    advice = watch.see(48, 3, 128.0)
    assert advice is not None and not advice.hopeless and "it is 128" in advice.text
    assert watch.see(64, 16, 128.0).hopeless is False  # type: ignore[union-attr]
    advice = watch.see(80, 16, 128.0)
    assert watch.in_a_row == 32 >= IN_A_ROW and advice is not None and advice.hopeless
    calm = ScaleWatch("fp16")
    for step in range(1, 400):  # the ordinary search for the scale: a fall now and then, growth in between
        assert calm.see(step, step % 100 == 0, 2048.0 if step % 100 else 1024.0) is None


@pytest.mark.parametrize(("saved", "resumed", "scale"), [("fp16", "fp32", 1.0), ("fp32", "fp16", 1024.0)])
def test_a_run_goes_on_in_another_precision_with_gradients_of_the_same_size(
    saved: str, resumed: str, scale: float, tmp_path: Path
) -> None:
    moments = {}
    with use_backend("reference"):
        first = training(saved, accumulate=2)
        first.config = replace(first.config, train=replace(first.config.train, steps=6))
        first.fit()
        checkpoint = first.save(tmp_path)
        for precision in (saved, resumed):
            for clip in (0.0, 1.0):
                made = training(precision, accumulate=2)
                made.optimizer.config = replace(made.optimizer.config, clip_norm=clip)
                made.resume(checkpoint)
                record = made.advance()
                assert precision == saved or record.loss_scale == scale
                moments[precision, clip] = [float(buffer.state.first.norm()) for buffer in made.optimizer.buffers]
    for clip in (0.0, 1.0):
        assert moments[resumed, clip] == pytest.approx(moments[saved, clip], rel=1e-2)


def test_a_config_with_a_precision_comes_back_from_json() -> None:
    from nerfturbo.config import from_dict, to_dict

    config = Config()
    config = replace(config, train=replace(config.train, precision="bf16"), field=VoxelConfig((8, 16), (0.5,)))
    assert from_dict(Config, to_dict(config)) == config
    assert from_dict(Config, {"train": {"rays_per_pixel": 1}}) == Config()  # a value that went, as nobody chose it
    with pytest.raises(InputError, match=r"config.train.rays_per_pixel: expected one of accumulate"):
        from_dict(Config, {"train": {"rays_per_pixel": 4}})
    assert from_dict(Config, {"train": {"draw": "error", "steps": 7}}).train.steps == 7  # what it trained is a field
    with pytest.raises(InputError, match=r"config.train.draw: expected one of accumulate"):
        from_dict(Config, {"train": {"draw": "best"}})
    with pytest.raises(InputError, match=r"field\.subdivide_at"):
        from_dict(Config, {"field": {"kind": "voxels", "resolutions": [8, 16], "subdivide_at": ["half"]}})
    with pytest.raises(InputError, match=r"train\.precision"):
        from_dict(Config, {"train": {"precision": "fp8"}})
