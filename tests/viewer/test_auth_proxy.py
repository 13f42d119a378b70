"""The auth proxy: which requests pass, and that no malformed one brings it down."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from nerfturbo.errors import InputError
from nerfturbo.viewer.auth_proxy import MAX_HEAD, AuthProxy, check_request, is_loopback

TOKEN = "a-long-token"


def head(target: str = "/", *lines: str, method: str = "GET", host: str = "localhost:7007") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def test_without_a_token_only_foreign_origins_and_nonsense_are_refused() -> None:
    assert check_request(head(), None) is None
    assert check_request(head("/", "Origin: http://localhost:7007", "Upgrade: websocket"), None) is None
    assert check_request(head("/", "Origin: http://evil.example", "Upgrade: websocket"), None) == 403
    assert check_request(head("/", "Origin: null"), None) == 403
    for wrong in (b"\r\n\r\n", b"GET\r\n\r\n", head(method="POST"), head("http://other/"), head("/", "no colon here")):
        assert check_request(wrong, None) == 400


def test_without_a_token_no_other_name_leads_here() -> None:
    """A page of another name that is made to resolve to this machine has an Origin that is its Host."""
    evil = "evil.example:7007"
    assert check_request(head("/", f"Origin: http://{evil}", host=evil), None) == 403
    assert check_request(head(host=evil), None) == 403
    assert check_request(head("/", "Origin: http://["), None) == 400
    for host in ("127.0.0.1:7007", "[::1]:7007", "192.168.1.5:80", "localhost"):
        assert check_request(head("/", f"Origin: http://{host}", host=host), None) is None


def test_a_token_becomes_a_cookie_and_nothing_else_opens() -> None:
    answer = check_request(head(f"/?token={TOKEN}"), TOKEN)
    assert isinstance(answer, bytes) and answer.startswith(b"HTTP/1.1 303") and b"HttpOnly; SameSite=Strict" in answer
    assert check_request(head("/", f"Cookie: other=1; nerfturbo={TOKEN}"), TOKEN) is None
    for target, cookie in (("/", ""), ("/?token=", ""), ("/?token=a", ""), ("/", "nerfturbo=x"), ("/", "\xff=;;=")):
        assert check_request(head(target, f"Cookie: {cookie}"), TOKEN) == 403


def test_which_addresses_are_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.5", "::", "example.org")))


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that answers every connection with one line."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def get(port: int, path: str = "/", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_connections_pass_and_bad_ones_leave_it_standing(echo: int) -> None:
    proxy = AuthProxy("127.0.0.1", 0, echo, token=TOKEN)
    try:
        assert get(proxy.port)[0] == 403 and get(proxy.port, "/?token=wrong")[0] == 403
        assert get(proxy.port, f"/?token={TOKEN}")[0] == 303
        assert get(proxy.port, Cookie=f"nerfturbo={TOKEN}") == (200, b"ok")
        for garbage in (b"\x00" * 64 + b"\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * (2 * MAX_HEAD), b""):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert not connection.recv(100).startswith(b"HTTP/1.1 200")
        assert get(proxy.port, Cookie=f"nerfturbo={TOKEN}") == (200, b"ok")
    finally:
        proxy.close()
    with pytest.raises(OSError):
        get(proxy.port)


def test_a_port_that_is_taken_is_named(echo: int) -> None:
    with pytest.raises(InputError, match=f"127.0.0.1:{echo}: expected an address.*another --port"):
        AuthProxy("127.0.0.1", echo, echo)
