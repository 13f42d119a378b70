"""Which parameters are updated alike: hash tables, networks, and what has a learning rate of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..config import OptimConfig
from ..fields.hash_grid import HashGrid
from ..ops.adam import AdamRule


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters under one rule and one learning rate."""

    named: list[tuple[str, nn.Parameter]]
    rule: AdamRule
    rate: float  # the peak of the schedule
    is_table: bool = False  # read as a half copy in mixed precision


def own_rates(model: nn.Module) -> dict[str, float]:
    """Peak learning rates by parameter name, of modules that name them: `learning_rates = {"pose": 1e-3}`."""
    rates: dict[str, float] = {}
    for prefix, module in model.named_modules():
        own = getattr(module, "learning_rates", None)
        if isinstance(own, dict):
            rates |= {f"{prefix}.{name}" if prefix else name: float(rate) for name, rate in own.items()}
    return rates


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[ParameterGroup]:
    """All parameters that learn, group after group; weight decay is for networks alone."""
    betas, own = (config.beta1, config.beta2), own_rates(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    tables = [(name, parameter) for name, parameter in named if name.endswith("table") and name not in own]
    networks = [(name, parameter) for name, parameter in named if not name.endswith("table") and name not in own]
    groups = [
        ParameterGroup(networks, AdamRule(betas, config.eps, config.weight_decay), config.lr),
        ParameterGroup(tables, AdamRule(betas, config.eps, skip_untouched=config.skip_untouched), config.lr, True),
    ]
    for rate in sorted({own[name] for name, _ in named if name in own}):
        alike = [(name, parameter) for name, parameter in named if own.get(name) == rate]
        groups.append(ParameterGroup(alike, AdamRule(betas, config.eps), rate))
    return [group for group in groups if group.named]


def level_decays(model: nn.Module, tables: Sequence[nn.Parameter], weight: float) -> tuple[tuple[int, int, float], ...]:
    """First and last value, in the tables laid end to end, and decay of parts of equal decay: the gradient of `weight`
    times the mean square of each level is 2 weight / (values of the level) times the value; 0 for levels that hold a
    field's beginning (`HashGrid.kept_levels`)."""
    if weight == 0.0:
        return ()
    grids = {module.table: module for module in model.modules() if isinstance(module, HashGrid)}
    runs: list[tuple[int, float]] = []  # values of a run of levels, and the decay of each
    for table in tables:
        width, grid = table.numel() // table.shape[0], grids.get(table)
        levels = [table.numel()] if grid is None else [level.size * width for level in grid.layout.levels]
        kept = 0 if grid is None else grid.kept_levels
        for index, size in enumerate(levels):
            decay = 0.0 if index < kept else 2.0 * weight / size
            if runs and runs[-1][1] == decay:
                runs[-1] = (runs[-1][0] + size, decay)
            else:
                runs.append((size, decay))
    ends = itertools.accumulate(run for run, _ in runs)
    return tuple((end - run, end, decay) for end, (run, decay) in zip(ends, runs, strict=True))
