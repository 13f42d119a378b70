"""The viewer's public port: it checks the first request of each connection and forwards those that are allowed. A
request needs the right token, where one is asked for, and an Origin that is the page itself, so that no other web page
in the same browser can speak to it. viser itself listens on the loopback only."""

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import socket
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from ..errors import InputError

MAX_HEAD = 16 * 1024  # bytes of a request before its body
HEAD_SECONDS = 10.0
COOKIE = "nerfturbo"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("::1", "localhost") or host.startswith("127.")


def check_address(host: str, port: int) -> None:
    """Refuse, before any work is done, an address that cannot be listened on."""
    _listen(host, port).close()


def _listen(host: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        busy = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "choose another --port; 0 takes any that is free" if busy else "give --host an address of this machine"
        raise InputError(f"{host}:{port}", "an address to listen on", error.strerror or str(error), hint) from None
    return opened


class AuthProxy:
    """Listens on host and port and passes allowed connections on to a port of the loopback."""

    def __init__(self, host: str, port: int, target_port: int, *, token: str | None = None) -> None:
        self.host, self.token, self._target = host, token, target_port
        self._socket = _listen(host, port)
        self._socket.listen()  # from now on connections wait, even if the thread is not there yet
        self.port = int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="viewer auth proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._socket, limit=MAX_HEAD))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.sleep(0.05))
            self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
        except asyncio.LimitOverrunError:
            return await _answer(writer, 431)
        except TimeoutError:
            return await _answer(writer, 408)
        except (asyncio.IncompleteReadError, OSError):
            return await _close(writer)
        if (answer := check_request(head, self.token)) is not None:
            return await _answer(writer, answer)
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            return await _answer(writer, 502)
        onward_writer.write(head)
        with contextlib.suppress(asyncio.CancelledError):  # by `close`
            await asyncio.gather(_pump(reader, onward_writer), _pump(onward_reader, writer))


def check_request(head: bytes, token: str | None) -> int | bytes | None:
    """None lets a request pass; a number refuses it; bytes are the whole answer (the token becomes a cookie)."""
    try:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        fields = [line.split(":", 1) for line in lines if line]
        headers = {name.strip().lower(): value.strip() for name, value in fields}
        parts, origin, host = urlsplit(target), headers.get("origin"), headers.get("host", "")
        same, name = origin is None or urlsplit(origin).netloc == host, urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return 400
    if method not in ("GET", "HEAD") or not target.startswith("/"):
        return 400
    if not same:
        return 403
    if token is None:  # an address in numbers, or this machine's name: another page's may be made to lead here
        with contextlib.suppress(ValueError):
            return None if name == "localhost" or ipaddress.ip_address(name) else 403
        return 403
    given = parse_qs(parts.query).get("token", [""])[0]
    if given and hmac.compare_digest(given.encode(), token.encode()):
        cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"
        return f"HTTP/1.1 303 See Other\r\nLocation: /\r\nSet-Cookie: {cookie}\r\nContent-Length: 0\r\n\r\n".encode()
    cookies = SimpleCookie()
    with contextlib.suppress(CookieError):
        cookies.load(headers.get("cookie", ""))
    kept = cookies[COOKIE].value if COOKIE in cookies else ""
    return None if hmac.compare_digest(kept.encode(), token.encode()) else 403


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.CancelledError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    await _close(writer)


async def _answer(writer: asyncio.StreamWriter, answer: bytes | int) -> None:
    if isinstance(answer, int):
        text = "This page asks for its token: open the address that the command printed." if answer == 403 else ""
        head = f"HTTP/1.1 {answer} {HTTPStatus(answer).phrase}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        answer = f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode()
    with contextlib.suppress(OSError):
        writer.write(answer)
        await writer.drain()
    await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.CancelledError):
        writer.close()
        await writer.wait_closed()
