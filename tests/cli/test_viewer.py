"""`train --viewer` and `view`: the page is served, and what cannot be served is refused before anything is written."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo


def test_training_with_a_page_ends_as_without(nerfturbo: Nerfturbo, scene: Path) -> None:
    flags = [*TINY_FLAGS, "--steps", "3", "--viewer", "--viewer-port", "0", "--output", "run", "--json"]
    result = nerfturbo("train", scene, *flags)
    assert result.code == 0 and result.json["steps"] == 3
    assert re.search(r"viewer: http://localhost:\d+/\s", result.err)


def test_a_port_that_is_taken_is_refused_first(nerfturbo: Nerfturbo, scene: Path, run_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = nerfturbo("train", scene, *TINY_FLAGS, "--viewer", "--viewer-port", port, "--output", "run")
        assert result.code == 2 and f"127.0.0.1:{port}" in result.err and not Path("run").exists()
        assert nerfturbo("view", run_folder, "--port", port).code == 2
    assert nerfturbo("view", run_folder, "--port", 70000).code == 2


def test_view_serves_a_run_and_a_wider_address_asks_for_a_token(run_folder: Path) -> None:
    viser = pytest.importorskip("viser")
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    command = [sys.executable, "-m", "nerfturbo", "view", str(run_folder), "--port", "0", "--backend", "reference"]
    with subprocess.Popen([*command, "--host", "0.0.0.0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"http://([^/]+):(\d+)/\?token=(\S+)", process.stdout.readline())
            assert found is not None
            host, port, token = found.group(1), int(found.group(2)), found.group(3)
            assert len(token) >= 24 and host != "localhost", "other machines have a localhost of their own"
            for path, cookie, status in (
                ("/", "", 403),
                (f"/?token={token}", "", 303),
                ("/", f"nerfturbo={token}", 200),
                ("/index.html", "", 403),
                ("/index.html", f"nerfturbo={token}", 200),
                ("/..%2f..%2fpyproject.toml", f"nerfturbo={token}", 404),
                ("/../../etc/passwd", f"nerfturbo={token}", 404),
            ):
                connection = http.client.HTTPConnection(host, port, timeout=30)
                connection.request("GET", path, headers={"Cookie": cookie})
                got = connection.getresponse().status
                assert got == status or (status == 404 and 400 <= got < 500), (path, got)
            for cookie, opens in (("", False), ("nerfturbo=x", False), (f"nerfturbo={token}", True)):
                headers, protocol = {"Cookie": cookie}, f"viser-v{viser.__version__}"
                try:
                    with connect(f"ws://{host}:{port}/", additional_headers=headers, subprotocols=[protocol]) as opened:
                        assert opens and len(opened.recv(timeout=30)) > 0
                except InvalidStatus as error:
                    assert not opens and error.response.status_code == 403
        finally:
            process.terminate()
            assert process.wait(timeout=30) in (0, 130)


@pytest.mark.parametrize("flags", [["--viewer-port", "-1"], ["--viewer-host", "256.1.1.1"]])
def test_an_impossible_address(nerfturbo: Nerfturbo, scene: Path, flags: list[str]) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--viewer", *flags, "--output", "run")
    assert result.code == 2 and not Path("run").exists()
