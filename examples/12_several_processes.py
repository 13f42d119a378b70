"""Several processes train one field

Every process holds the whole model and draws its own rays of one global batch; gradients are added up. So k processes
do what one does with k times the rays. Here the processes are started by torch itself and talk over gloo. On several
GPUs or machines, start the same code by torchrun, which sets the same variables (see docs/distributed.md):

    torchrun --nproc-per-node 4 examples/12_several_processes.py
"""

import argparse
import os
import socket
from dataclasses import replace

import torch
import torch.multiprocessing as mp

import nerfturbo as nt
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.training.distributed import is_launched, join_team, rank_device


def train(steps: int, n_rays: int, resolution: int) -> list[float]:
    """What every process runs; alone it is an ordinary training."""
    device = rank_device("cuda" if torch.cuda.is_available() else "cpu")
    team = join_team(device)  # this process alone, where nobody launched it
    config = nt.preset("auto", device)
    fixed = {"max_rays": n_rays, "batch_samples": 1024 * n_rays}
    config = replace(config, train=replace(config.train, steps=steps, precision="fp32", **fixed))
    scene, losses = builtin_scene("toybox", resolution=resolution, n_views=20), []
    trainer = nt.Trainer(config, scene, device=device, team=team)
    trainer.callbacks.append(lambda trainer, record: losses.append(record.loss))
    trainer.fit()
    team.close()
    return losses


def process(rank: int, world: int, port: int, found, *work: int) -> None:
    """One of the processes, with the variables that torchrun would set."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    found.put((rank, train(*work)))


def main(world: int = 2, steps: int = 40, n_rays: int = 256, resolution: int = 64) -> float:
    """Train with one process, then with `world` that share the same rays; the largest difference of their losses."""
    alone = train(steps, n_rays, resolution)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(process, args=(world, port, found, steps, n_rays // world, resolution), nprocs=world)
    together = dict(found.get() for _ in range(world))
    difference = max(abs(one - other) / one for one, other in zip(alone, together[0], strict=True))
    print(f"one process with {n_rays} rays: loss {alone[0]:.5f}, after {steps} steps {alone[-1]:.5f}")
    print(f"{world} processes with {n_rays // world} each: {together[0][0]:.5f}, {together[0][-1]:.5f}")
    print(f"largest relative difference {difference:.1e}; the processes agree: {together[0] == together[world - 1]}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rays", type=int, default=256, help="of all processes together")
    options = parser.parse_args()
    if is_launched():
        print(f"rank {os.environ['RANK']}: last loss {train(options.steps, options.rays, 64)[-1]:.5f}")
    else:
        main(options.world, options.steps, options.rays)
