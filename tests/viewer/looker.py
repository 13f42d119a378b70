"""A person at the page without a browser: a websocket that speaks viser's own messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nerfturbo.viewer.page import LivePage

PATIENCE = 120.0  # only what fails takes so long


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE:.0f} s: {what}"
        time.sleep(0.05)


class Looker:
    """Connects, looks from `position` to the origin, and reads whatever comes."""

    def __init__(
        self, page: LivePage, position: Sequence[float] = (3.0, 0.0, 2.0), cookie: str = "", *, stays: bool = True
    ) -> None:
        import viser
        from websockets.sync.client import connect

        address, origin = f"ws://127.0.0.1:{page.port}/", f"http://127.0.0.1:{page.port}"
        protocol: Any = f"viser-v{viser.__version__}"
        headers = {"Cookie": cookie} if cookie else {}
        options: dict[str, Any] = {"max_size": None, "additional_headers": headers, "origin": origin}
        known = set(page._clients)
        self._socket = connect(address, subprotocols=[protocol], open_timeout=PATIENCE, **options)
        self.n_received = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.look_from(position)
        if not stays:
            return
        until(lambda: len(set(page._clients) - known) == 1, "the page to know the new client")
        (self.number,) = set(page._clients) - known
        self.client = page._clients[self.number]

    def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            for content in self._socket:
                self.n_received += len(content)
        except ConnectionClosed:
            pass

    def send(self, message: Any) -> None:
        import msgspec

        self._socket.send(msgspec.msgpack.encode(message.as_serializable_dict()))

    def look_from(self, position: Sequence[float]) -> None:
        import viser
        from viser import _messages as messages

        place = np.array(position, dtype=float)
        ahead = -place / np.linalg.norm(place)
        right = np.cross(ahead, (0.0, 0.0, 1.0))
        right /= np.linalg.norm(right)
        turn = viser.transforms.SO3.from_matrix(np.stack([right, np.cross(ahead, right), ahead], axis=1))
        wxyz, at = tuple(map(float, turn.wxyz)), tuple(map(float, place))
        size = {"image_height": 300, "image_width": 400, "near": 0.01, "far": 100.0, "fov": 0.7}
        towards = {"look_at": (0.0, 0.0, 0.0), "up_direction": (0.0, 0.0, 1.0)}
        self.send(messages.ViewerCameraMessage(wxyz=wxyz, position=at, **size, **towards))  # type: ignore[arg-type]

    def set(self, control: Any, value: Any) -> None:
        """Change a control, as its widget does."""
        from viser import _messages as messages

        self.send(messages.GuiUpdateMessage(control._impl.uuid, {"value": value}))

    def close(self) -> None:
        self._socket.close()
