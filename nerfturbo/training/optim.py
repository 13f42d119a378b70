"""The optimizer's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..config import OptimConfig


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, object]]:
    """Networks with weight decay, hash tables without: decay would erase entries that are seldom touched."""
    tables = [p for name, p in model.named_parameters() if name.endswith("table")]
    networks = [p for name, p in model.named_parameters() if not name.endswith("table")]
    groups = [{"params": networks, "weight_decay": config.weight_decay}, {"params": tables, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Adam, one kernel per parameter."""
    return torch.optim.Adam(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Linear warm-up over the first steps, then held, then exponential decay to the final fraction.

    `progress` in [0, 1] is the share of the run that is over, by steps or by the clock.

    >>> config = OptimConfig(lr=1.0, warmup_steps=10, hold_fraction=0.5, final_lr_fraction=0.01)
    >>> [round(learning_rate(config, s, p), 3) for s, p in ((0, 0.0), (10, 0.1), (500, 0.75), (999, 1.0))]
    [0.1, 1.0, 0.1, 0.01]
    """
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    decay = max(0.0, progress - config.hold_fraction) / max(1e-9, 1.0 - config.hold_fraction)
    return config.lr * warmup * math.exp(math.log(config.final_lr_fraction) * min(1.0, decay))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
