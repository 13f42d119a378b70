"""The live page: viser behind the gate, one painter per client, and what the controls ask for.

Callbacks of the page run in viser's threads and only leave a note. Everything that touches the model happens in `tick`,
which the thread that trains (or, for a saved run, the command's own) calls as often as it likes.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import secrets
import threading
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..evaluation.camera_path import rotations
from ..rendering.model import NerfModel
from .gate import Gate, is_loopback
from .painter import Painter, TimeShare, View
from .panel import Panel, SceneFacts

if TYPE_CHECKING:
    import viser

REST_SECONDS = 0.3  # a camera rests, and its picture is refined, this long after its last message
IDLE_PART = 0.4  # of the page's share of the time, for pictures that refine or renew what is seen already
JPEG_QUALITY = 85
PANEL_SECONDS = 1.5  # between renewals of numbers, curves and cells, at least
PANEL_PART = 0.02  # of the time that they may take


@dataclass
class _Client:
    handle: viser.ClientHandle
    painter: Painter
    view: View | None = None
    moved: float = 0.0
    fresh: bool = False  # a new view that the painter has not been told of
    moving: bool = False


@dataclass
class Wishes:
    """What the page's buttons ask of training."""

    paused: bool = False
    save: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        with self.lock:
            asked, self.save = self.save, False
        return asked


class LivePage:
    """Serves the page until `close`; `url` is where to open it."""

    def __init__(self, facts: SceneFacts, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        try:
            import viser
        except ImportError:
            raise InputError(
                "viser", "installed, for the live page", "not found", "pip install 'nerfturbo[viewer]'"
            ) from None
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
        # Who closes the page may do so while a picture is painted for it; nothing is wrong then.
        warnings.filterwarnings("ignore", message="Queued a .* on a closed connection")
        with contextlib.redirect_stdout(io.StringIO()):
            self._server = viser.ViserServer(host="127.0.0.1", port=0, label="nerfturbo", verbose=False)
        try:
            self._gate = Gate(host, port, self._server.get_port(), token=token)
        except InputError:
            self._stop_server()
            raise
        atexit.register(self.close)  # before viser's own farewell
        self.wishes = Wishes()
        self.frames_sent = 0
        self._ndc = facts.train.cameras.ndc
        self._lock = threading.Lock()
        self._clients: dict[int, _Client] = {}
        # Pictures of new views do not wait for what was spent on refining old ones: a camera is followed at once.
        self._shares, self._panel_share = {True: TimeShare(), False: TimeShare()}, TimeShare()
        self._panel = Panel(self._server, facts, self.wishes, self._look_again)
        self._server.on_client_connect(self._connect)
        self._server.on_client_disconnect(self._disconnect)

    @property
    def url(self) -> str:
        shown = "localhost" if is_loopback(self._gate.host) or self._gate.host in ("0.0.0.0", "::") else self._gate.host
        query = "" if self._gate.token is None else f"?token={self._gate.token}"
        return f"http://{shown}:{self._gate.port}/{query}"

    @property
    def port(self) -> int:
        return self._gate.port

    def close(self) -> None:
        atexit.unregister(self.close)
        self._gate.close()
        self._stop_server()

    def _stop_server(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it says goodbye on stdout, which is for results
            self._server.stop()
            time.sleep(0.5)

    def _connect(self, handle: viser.ClientHandle) -> None:
        client = _Client(handle, Painter(ndc=self._ndc))
        with self._lock:
            self._clients[handle.client_id] = client
        self._move(client)
        handle.camera.on_update(lambda _: self._move(client))

    def _disconnect(self, handle: viser.ClientHandle) -> None:
        with self._lock:
            self._clients.pop(handle.client_id, None)

    def _move(self, client: _Client) -> None:
        """The client's camera as it is now; numbers that make no camera are ignored."""
        camera = client.handle.camera
        pose = pose_of(np.asarray(camera.wxyz, dtype=float), np.asarray(camera.position, dtype=float))
        angle, aspect = float(camera.fov), float(camera.aspect)
        if pose is None or not 0.01 < angle < 3.1 or not 0.1 < aspect < 10.0:
            return
        view = self._panel.dress(View(pose, angle, aspect))
        with self._lock:
            client.view, client.moved, client.fresh, client.moving = view, time.monotonic(), True, True

    def _look_again(self) -> None:
        """A control changed what pictures show."""
        with self._lock:
            for client in self._clients.values():
                if client.view is not None:
                    client.view, client.fresh = self._panel.dress(client.view), True

    def tick(self, model: NerfModel, step: int, *, training: bool, records: list[dict[str, Any]] | None = None) -> bool:
        """Paint at most one picture, if one is due; returns whether anything was done.

        While training, pictures of new views take at most the share of the time that the panel says, and those that
        refine them a part of it.
        """
        now = time.monotonic()
        if self._panel_share.ready(now) and self._clients:
            self._panel.renew(model, step, records or [])
            done = time.monotonic()
            self._panel_share.spent(done - now, PANEL_PART, done, least=PANEL_SECONDS)
        client = self._next_client(step)
        if client is None:
            return False
        is_new = client.painter.is_new
        moving = not is_new and now - client.moved < REST_SECONDS  # it will be elsewhere before this view is finer
        if moving or (training and not self._shares[is_new].ready(now)):
            return False
        client.painter.largest = self._panel.largest
        begun = time.monotonic()
        picture = client.painter.paint(model, step, training=training)
        if picture is not None:
            with contextlib.suppress(Exception):  # a client that has just gone must not end training
                client.handle.scene.set_background_image(picture.numpy(), format="jpeg", jpeg_quality=JPEG_QUALITY)
                self.frames_sent += 1
        if training:
            done, part = time.monotonic(), 1.0 if is_new else IDLE_PART
            self._shares[is_new].spent(done - begun, part * self._panel.share, done)
        return True

    def _next_client(self, step: int) -> _Client | None:
        """Of the clients that wait for a picture: one that sees nothing of its view yet, whose camera moved last."""
        with self._lock:
            for client in self._clients.values():
                if client.fresh and client.view is not None:
                    client.painter.look(client.view, moving=client.moving)
                    client.fresh = client.moving = False
            waiting = [client for client in self._clients.values() if client.painter.wants(step)]
            return max(waiting, key=lambda client: (client.painter.is_new, client.moved), default=None)

    @property
    def n_clients(self) -> int:
        return len(self._clients)

    def serve(self, model: NerfModel, step: int) -> None:
        """Paint a saved run until interrupted."""
        while True:
            if not self.tick(model, step, training=False):
                time.sleep(0.01)


def pose_of(wxyz: np.ndarray, position: np.ndarray) -> Tensor | None:
    """(3, 4) with our axes from viser's quaternion (OpenCV axes) and position; None where they are not a pose."""
    numbers = np.concatenate([wxyz, position])
    if numbers.shape != (7,) or not np.isfinite(numbers).all() or np.abs(position).max() > 1e6:
        return None
    length = float(np.linalg.norm(wxyz))
    if length < 1e-6:
        return None
    turn = rotations(torch.as_tensor(wxyz / length, dtype=torch.float64)[None])[0]
    turn = turn * torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    return torch.cat([turn, torch.as_tensor(position, dtype=torch.float64)[:, None]], dim=1).float()
