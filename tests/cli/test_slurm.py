"""The SLURM scripts, run by stand-ins for `scontrol` and `srun` that do on one machine what those do on two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..tiny import TINY_FLAGS
from ..training.workers import free_port
from .test_torchrun import STEPS, assert_trained_as_one_process_would

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are written for bash")

SCONTROL = '[ "$1 $2 $3" = "show hostnames node[0-1]" ] && echo "$HEAD" && sleep 0.3 && echo other'
# As srun with one task per node: the same command on both, which differ by SLURM_NODEID; one that fails fails the job.
SRUN = """[ "$1" = --kill-on-bad-exit=1 ] && shift
SLURM_NODEID=1 $NODE1 "$@" > "$LOGS/1.out" 2> "$LOGS/1.err" & other=$!
SLURM_NODEID=0 $NODE0 "$@" > "$LOGS/0.out" 2> "$LOGS/0.err"; code=$?
wait "$other" || exit 1
exit $code
"""


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on a node: SLURM's variables, and its programs before all others on the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    start = f'exec "{sys.executable}" -m'
    texts = {"scontrol": SCONTROL, "srun": SRUN}
    texts |= {"torchrun": f'{start} torch.distributed.run "$@"', "nerfturbo": f'{start} nerfturbo "$@"'}
    for name, text in texts.items():
        path = programs / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    own = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "OMP_NUM_THREADS": "1"}
    own |= {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "LOGS": str(tmp_path),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    own |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return os.environ | own | {"RENDEZVOUS_PORT": str(free_port())}


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, list[list[str]]]]:
    """(address of the first, prefix of a command on each): two network namespaces and a cable between them, where
    that is allowed; else this machine twice."""
    names, cables = [f"nt{os.getpid()}a", f"nt{os.getpid()}b"], [f"v{os.getpid()}a", f"v{os.getpid()}b"]
    made = False
    if shutil.which("ip") and os.geteuid() == 0:
        commands = [f"netns add {name}" for name in names]
        commands += [f"link add {cables[0]} type veth peer name {cables[1]}"]
        for index, (name, cable) in enumerate(zip(names, cables, strict=True)):
            commands += [f"link set {cable} netns {name}", f"-n {name} addr add 10.77.0.{index + 1}/24 dev {cable}"]
            commands += [f"-n {name} link set {cable} up", f"-n {name} link set lo up"]
        made = all(subprocess.run(["ip", *words.split()], capture_output=True).returncode == 0 for words in commands)
    try:
        if made:
            prefixes = [
                ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={cable}", f"TP_SOCKET_IFNAME={cable}"]
                + [f"PET_LOCAL_ADDR=10.77.0.{index + 1}"]  # torchrun's --local-addr
                for index, (name, cable) in enumerate(zip(names, cables, strict=True))
            ]
            yield "10.77.0.1", prefixes
        else:
            yield "127.0.0.1", [[], []]
    finally:
        for name in names if shutil.which("ip") else []:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_one_training_over_two_nodes(scene: Path, tmp_path: Path, node: dict[str, str]) -> None:
    """Without a shared network stack where namespaces are allowed."""
    run = tmp_path / "run"
    flags = [*TINY_FLAGS, "--steps", STEPS, "--output", run, "--json"]
    command = ["bash", ROOT / "scripts" / "slurm_train.sh", scene, *flags]
    with two_machines() as (address, prefixes):
        node |= {"HEAD": address} | {f"NODE{index}": " ".join(prefix) for index, prefix in enumerate(prefixes)}
        done = subprocess.run([str(word) for word in command], env=node, capture_output=True, text=True, timeout=240)
    files = [tmp_path / f"{index}.{kind}" for kind in ("out", "err") for index in range(2)]
    logs = [file.read_text() if file.exists() else "" for file in files]
    assert done.returncode == 0, (done.stderr, *logs)
    written = [text for text in logs[:2] if text.strip()]
    assert len(written) == 1 and json.loads(written[0])["steps"] == STEPS  # one of them speaks
    assert any("2 processes train together" in text for text in logs[2:])
    assert_trained_as_one_process_would(scene, run)


def test_a_task_of_an_array_takes_its_scenes(scene: Path, tmp_path: Path, node: dict[str, str]) -> None:
    scenes, out = tmp_path / "scenes.txt", tmp_path / "out"
    scenes.write_text(f"{tmp_path / 'missing'}\n{scene} --steps 3\n")
    (out / "ball").mkdir(parents=True)
    (out / "ball" / "metrics.json").write_text('{"psnr": 20.0}')  # the second task's scene is finished
    node |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    command = ["bash", ROOT / "scripts" / "slurm_batch.sh", scenes, out, *TINY_FLAGS, "--eval-views", "1"]
    done = subprocess.run([str(word) for word in command], env=node, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "ball: finished before" in done.stderr and "missing" not in done.stderr
    assert "1 of 2 scenes done, mean PSNR 20.00 dB" in done.stdout
