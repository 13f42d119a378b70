"""How long things take on this machine, before they begin: figures of one machine, scaled by a measurement of this."""

import functools
import statistics
import timeit

REFERENCE = 32e9  # multiplications and additions a second of the machine (two cores) that these were measured on:
RAYS_A_SECOND = 10_000.0  # of training photos, by the presets for CPUs
PHOTO_SECONDS, PAIR_SECONDS = 13.0, 1.5  # of COLMAP without a GPU: features and pose of a photo, matches of a pair
COMPILE_SECONDS = 80.0  # of the CPU kernels, once
SIDE = 1024  # of the matrices that are multiplied


@functools.cache
def machine_speed() -> float:
    """How many times as fast as the reference this machine multiplies matrices, the median of five."""
    import torch

    matrix = torch.ones(SIDE, SIDE)
    seconds = statistics.median(timeit.repeat(lambda: torch.matmul(matrix, matrix), number=1, repeat=5))
    return 2.0 * SIDE**3 / max(seconds, 1e-9) / REFERENCE


def pose_seconds(n_photos: int, n_pairs: int) -> float:
    """What COLMAP will take about on this CPU."""
    return (n_photos * PHOTO_SECONDS + n_pairs * PAIR_SECONDS) / machine_speed()
