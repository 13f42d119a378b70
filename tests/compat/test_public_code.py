"""scripts/public_code.py: a stranger's training script runs over our packages, is timed, stopped and left as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = """
import sys
from pathlib import Path

import nerfacc
import tinycudann as tcnn
import torch

from parts.rays import some_rays

assert nerfacc.__name__.startswith("nerfturbo.") and tcnn.__name__.startswith("nerfturbo.")
assert Path("data.txt").read_text() == "links lead to data" and sys.argv[1:] == ["--lr", "0.01"]
device = torch.device("cuda:0")
grid = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 8, "base_resolution": 4}
mlp = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
field = tcnn.NetworkWithInputEncoding(3, 4, grid, mlp).cuda()
estimator = nerfacc.OccGridEstimator([0, 0, 0, 1, 1, 1], resolution=8).to('cuda')
estimator.binaries.fill_(True)
optimizer = torch.optim.Adam(field.parameters(), lr=float(sys.argv[2]))
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=False)
for step in range(10000):
    origins, directions = some_rays()
    rays, starts, ends = estimator.sampling(origins, directions, render_step_size=0.05)

    def rgb_sigma(t0, t1, indices):
        out = field(origins[indices] + directions[indices] * (0.5 * (t0 + t1))[:, None])
        return out[:, :3].sigmoid(), out[:, 3].exp()

    rgb, *_ = nerfacc.rendering(starts, ends, rays, n_rays=len(origins), rgb_sigma_fn=rgb_sigma)
    loss = ((rgb - 0.4) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()
    torch.cuda.synchronize()
"""
SHORT = """
import nerfacc
import torch

value = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.Adam([value])
for _ in range(5):
    value.square().backward()
    optimizer.step()
nerfacc.no_such_name
"""
RAYS = """
import torch


def some_rays():
    origins = torch.cat([torch.rand(64, 2), torch.full((64, 1), -0.5)], dim=1)
    return origins.cuda(), torch.tensor([0.0, 0.0, 1.0]).expand(64, 3)
"""


def ran(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "scripts" / "public_code.py"), str(checkout), "code/train.py"]
    command += ["--device", "cpu", "--warm-up", "2", *flags, "--", "--lr", "0.01"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NERFTURBO_BACKEND": "reference"}  # nothing to compile
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code" / "parts").mkdir(parents=True)
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    (tmp_path / "code" / "parts" / "rays.py").write_text(RAYS)
    (tmp_path / "data.txt").write_text("links lead to data")
    return tmp_path


def test_a_training_script_runs_is_timed_and_stopped(checkout: Path) -> None:
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    done = ran(checkout, "--steps", "30")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["steps"] == 30 and row["steps_per_second"] > 0 and row["script"] == "code/train.py"
    first, last = row["loss"]
    assert 0.0 < last < 0.8 * first < 1.0
    assert before == {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}


def test_a_script_that_fails_or_ends_early_is_no_success(checkout: Path) -> None:
    script = checkout / "code" / "train.py"
    script.write_text(SHORT)
    failed = ran(checkout, "--steps", "30")
    assert failed.returncode == 1 and "no_such_name" in failed.stderr and "ended after 5 of 32 steps" in failed.stderr
    script.unlink()
    missing = ran(checkout, "--steps", "30")
    assert missing.returncode == 2 and "SCRIPT: expected a file of" in missing.stderr
