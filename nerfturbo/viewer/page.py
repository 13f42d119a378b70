"""The viewer's page: viser behind the auth proxy, a painter and a panel per client, and the callback of training.
viser's threads only leave notes. Everything that touches the model happens in `tick`, which the training thread (or,
for a saved run, the command's own) calls as often as it likes."""

import atexit
import contextlib
import io
import logging
import secrets
import socket
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, InputError
from ..rendering.model import NerfModel
from ..training.callbacks import MetricsLog
from ..training.step import StepRecord
from ..training.trainer import Trainer
from .auth_proxy import AuthProxy, is_loopback
from .painter import TimeShare, View, pose_of
from .panel import Client, Panel, PathEditor, SceneFacts, field_of_view, occupied_cells

if TYPE_CHECKING:
    import viser

LOG = logging.getLogger("nerfturbo")
REST_SECONDS = 0.3  # a camera rests, and its picture is refined, this long after its last message
IDLE_PART = 0.4  # of the page's share of the time, for pictures that refine or renew what is seen already
JPEG_QUALITY = 85
PANEL_SECONDS = 1.5  # between renewals of numbers, curves and cells, at least
PANEL_PART = 0.02  # of the time that they may take


class LivePage:
    """Serves the page until `close`; `url` is where to open it."""

    def __init__(self, facts: SceneFacts, *, host: str = "127.0.0.1", port: int = 0) -> None:
        import viser

        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        # A page may be closed while its picture is painted.
        warnings.filterwarnings("ignore", message="Queued a .* on a closed connection")
        with contextlib.redirect_stdout(io.StringIO()):
            self._server = viser.ViserServer(host="127.0.0.1", port=0, label="nerfturbo", verbose=False)
        try:
            self._proxy = AuthProxy(host, port, self._server.get_port(), token=token)
        except InputError:
            self._stop_server()
            raise
        self.frames_sent = 0
        # New views do not wait for what refining old ones has spent: a camera is followed at once.
        self._shares, self._panel_share, self._film_share = [TimeShare(), TimeShare()], TimeShare(), TimeShare()
        self.panel = Panel(self._server, facts)
        self._editor, self._clients = PathEditor(self._server, self.panel), self.panel.clients
        atexit.register(self.close)  # before viser's own farewell
        self._server.on_client_connect(self._connect)
        self._server.on_client_disconnect(self._disconnect)

    @property
    def url(self) -> str:
        """The page's address, with its token; one that other machines reach where it listens on all of them."""
        host, token = self._proxy.host, self._proxy.token
        shown = "localhost" if is_loopback(host) else _own_address(host) if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        return f"http://{shown}:{self.port}/" + ("" if token is None else f"?token={token}")

    @property
    def port(self) -> int:
        return self._proxy.port

    def close(self) -> None:
        atexit.unregister(self.close)
        self._editor.close()
        self._proxy.close()
        self._stop_server()

    def _stop_server(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it says goodbye on stdout, which is for results
            self._server.stop()
            time.sleep(0.5)

    def _connect(self, handle: "viser.ClientHandle") -> None:
        client = Client(handle, self.panel)
        self._clients[handle.client_id] = client
        if handle.client_id not in self._server.get_clients():  # gone before this thread came to list it
            self._disconnect(handle)
        cameras = self.panel.facts.test.cameras
        client.widen(field_of_view(cameras, 0), float(cameras.size[0, 0] / cameras.size[0, 1]))
        self._move(client)
        handle.camera.on_update(lambda _: self._move(client))

    def _disconnect(self, handle: "viser.ClientHandle") -> None:
        self._clients.pop(handle.client_id, None)

    def _move(self, client: Client) -> None:
        """The client's camera as it is now; numbers that make no camera are ignored."""
        camera = client.handle.camera
        pose, angle, aspect = pose_of(camera.wxyz, camera.position), float(camera.fov), float(camera.aspect)
        if pose is not None and 0.01 < angle < 3.1 and 0.1 < aspect < 10.0:
            client.look(View(pose, angle, aspect))
            client.left(pose[:, 3])

    def tick(self, model: NerfModel, step: int, *, training: bool, records: list[dict[str, Any]] | None = None) -> bool:
        """Paint at most one picture, or frame of a video, if one is due; returns whether one was. While training, new
        views take at most the panel's share of the time, and so do videos; refinements take a part of that."""
        now = time.monotonic()
        if self._panel_share.ready(now) and self._clients:
            self._renew(model, step, records or [])
            done = time.monotonic()
            self._panel_share.spent(done - now, PANEL_PART, done, least=PANEL_SECONDS)
        client = self._next_client(step)
        is_new = client is not None and client.painter.is_new
        moving = client is not None and not is_new and now - client.moved < REST_SECONDS  # soon it will be elsewhere
        if client is None or moving or (training and not self._shares[is_new].ready(now)):
            if moving or (training and not self._film_share.ready(now)) or not self._editor.advance(model, step):
                return False
            done = time.monotonic()
            self._film_share.spent(done - now, self.panel.share, done)
            return True
        client.painter.largest, begun = int(client.quality.value), time.monotonic()
        picture = client.painter.paint(model, step, training=training)
        with contextlib.suppress(Exception):  # a client that has just gone must not end training
            client.handle.scene.set_background_image(picture.numpy(), format="jpeg", jpeg_quality=JPEG_QUALITY)
            client.note.content = client.painter.note
            self.frames_sent += 1
        if training:
            done, part = time.monotonic(), 1.0 if is_new else IDLE_PART
            self._shares[is_new].spent(done - begun, part * self.panel.share, done)
        return True

    def _renew(self, model: NerfModel, step: int, records: list[dict[str, Any]]) -> None:
        """Numbers, curves and occupied cells."""
        self.panel.renew(step, records)
        if curious := [client for client in list(self._clients.values()) if client.cells_on.value]:
            points, size = occupied_cells(model)
            for client in curious:
                with contextlib.suppress(Exception):  # as above
                    client.handle.scene.add_point_cloud("/cells", points, (40, 170, 120), point_size=size)

    def _next_client(self, step: int) -> Client | None:
        """Of the waiting clients, first those that see nothing of their view yet, then the one that moved last."""
        clients = list(self._clients.values())
        for client in clients:
            with client.lock:
                if client.fresh and client.view is not None:
                    client.painter.look(client.view, moving=client.moving)
                    client.fresh = client.moving = False
        waiting = [client for client in clients if client.painter.wants(step)]
        return max(waiting, key=lambda client: (client.painter.is_new, client.moved), default=None)

    def serve(self, model: NerfModel, step: int, records: list[dict[str, Any]]) -> None:
        """Paint a saved run, with what was logged of it, until interrupted."""
        while True:
            if not self.tick(model, step, training=False, records=records):
                time.sleep(0.01)


def _own_address(host: str) -> str:
    """The address of this machine that others reach: the one it would send from. No packet is sent to find it."""
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((elsewhere, 9))
        return str(probe.getsockname()[0])
    return socket.gethostname()  # without a network there is no other machine


class ViewedTraining:
    """The callback: paints between steps, pauses and saves. No error of the page ends training."""

    def __init__(self, page: LivePage, log: MetricsLog, checkpoints: Path) -> None:
        self.page, self._log, self._checkpoints, self._broken = page, log, checkpoints, False

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        if self._broken:
            return
        try:
            self._tick(trainer, training=True)
            if self.page.panel.paused:
                self._wait(trainer)
        except CheckpointError as error:
            self.page.panel.said.content = f"could not be saved: {error}"
            LOG.warning("%s; training goes on", error)
        except Exception as error:
            self._broken = True
            LOG.warning("the live page stopped (%s: %s); training goes on", type(error).__name__, error)

    def _tick(self, trainer: Trainer, *, training: bool) -> bool:
        if self.page.panel.save.is_set():
            self.page.panel.save.clear()
            with trainer.clock_stopped():
                path = trainer.save(self._checkpoints)
            self.page.panel.said.content = f"saved `{path.name}`"
            LOG.info("saved %s, as the live page asked", path)
        return self.page.tick(trainer.model, trainer.step, training=training, records=self._log.records)

    def _wait(self, trainer: Trainer) -> None:
        """Until the page says to go on, or Ctrl-C; the clock of training stands still."""
        LOG.info("paused by the live page at step %d", trainer.step)
        with trainer.clock_stopped():
            while self.page.panel.paused and not trainer.should_stop:
                if not self._tick(trainer, training=False):
                    time.sleep(0.01)
        LOG.info("training goes on")
