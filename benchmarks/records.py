"""Results on disk: one reader for what `nerfturbo.bench.record` writes and for the files that several runs made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KEYS = ("what", "command", "commit", "machine", "protocol", "seed", "values")


def read_record(path: Path | str) -> dict[str, Any]:
    """Every key of a record, and `note`: commands and commits as lists, one for each run that the file holds; what an
    older file does not say is empty, and what it keeps beside the keys are its values."""
    content = json.loads(Path(path).read_text())
    device = {"gpu": content["device"]} if "device" in content else {}
    own = {key: value for key, value in content.items() if key not in (*KEYS, "note", "device")}
    found = {"protocol": "", "seed": None, "machine": device, "note": "", "values": own, "command": [], "commit": []}
    found |= {key: content[key] for key in (*KEYS, "note") if content.get(key) is not None}
    for key in ("command", "commit"):
        found[key] = [found[key]] if isinstance(found[key], str) else found[key]
    return found
