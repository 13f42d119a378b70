"""Peak memory of a piece of work is its own, not that of what ran before it in the process."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.bench.tune import peak_memory, try_batch
from nerfturbo.ops import use_backend

from ..tiny import ball_scene, tiny_config

MB = 1 << 20


@pytest.mark.gpu
def test_what_was_there_before_does_not_count():
    before = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    with peak_memory(torch.device("cuda")) as peak:
        own = torch.empty(32 * MB, dtype=torch.uint8, device="cuda")
        del own
    assert before.nbytes == 64 * MB and peak.n_bytes == 32 * MB


def test_the_memory_of_a_batch_on_a_cpu_does_not_depend_on_what_was_tried_before():
    options = {"device": torch.device("cpu"), "budget": 1 << 40}
    with use_backend("cpu"):
        sizes = (1024, 1 << 15, 1024, 1 << 14, 1 << 15)
        found = [try_batch(tiny_config(), ball_scene(), n, **options).n_bytes for n in sizes]
    assert found[2] == pytest.approx(found[0], rel=1e-3) and found[4] == pytest.approx(found[1], rel=1e-3)
    assert found[0] < found[3] < found[1]
    assert 10 * MB < found[1] < 100 * MB
