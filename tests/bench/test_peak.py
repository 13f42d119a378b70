"""Peak memory of a piece of work is its own, not that of what ran before it in the process."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.bench.memory import peak_memory

MB = 1 << 20


@pytest.mark.gpu
def test_what_was_there_before_does_not_count():
    before = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    with peak_memory(torch.device("cuda")) as peak:
        own = torch.empty(32 * MB, dtype=torch.uint8, device="cuda")
        del own
    assert before.nbytes == 64 * MB and peak.n_bytes == 32 * MB
