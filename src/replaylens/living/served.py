"""The page served on this machine: Python's own server on the loopback, for one browser that knows a secret address.

A request is refused unless it names this host, comes from this page, and carries the token of the address. The first browser
that opens the page gets a cookie, and from then on the address alone opens nothing: another browser is refused.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections import deque
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import as_instance, as_int
from replaylens.living.saved import page
from replaylens.living.state import LivingTree

MAX_BODY = 1 << 20
"""bytes of a message"""
WAIT = 15.0
"""seconds that a request for events waits"""
KEPT = 4096
"""events that a page may be behind"""
LOOK_AGAIN = 0.5
"""seconds between two looks at whether Python has changed the branches"""


class ServedPage:
    """A page of an explorer on this machine, until `close`. `print` it for its address."""

    def __init__(self, explorer: LivingTree, *, port: int = 0, host: str = "127.0.0.1") -> None:
        self.explorer = explorer
        self.token, self._secret = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self._opened = False
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._count, self._news, self.ended = 0, threading.Condition(), False
        host = as_instance("host", host, str, "the name or address of this machine")
        try:
            self._server = _Server((host, as_int("port", port, 0, 65535)), self)
        except OSError as error:
            raise BadRequest(f"Cannot serve at {host}:{port}: {error.strerror or error}. Give another port.") from error
        at = self._server.server_address[1]
        self.hosts = {f"{name}:{at}" for name in ({host} if host != "127.0.0.1" else {host, "localhost"})}
        self.address = f"http://{host}:{at}/{self.token}/"
        self._unlisten = explorer.listen(self._hear)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ServedPage({self.address})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. The branches stay as they are."""
        if not self.ended:
            self.ended = True
            self._unlisten()
            with self._news:
                self._news.notify_all()
            self._server.shutdown()
            self._server.server_close()

    def wait(self) -> None:
        """Until the server is closed, such as by Ctrl-C."""
        self._thread.join()

    # ---- requests -----------------------------------------------------------------------------------------------

    def first(self) -> bool:
        """Whether this is the first browser; the next ones are not."""
        with self._news:
            first, self._opened = not self._opened, True
            return first

    def owns(self, cookie: str) -> bool:
        """Whether a browser has the cookie of the first one."""
        try:
            found = SimpleCookie(cookie).get(self.name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._secret.encode())

    @property
    def name(self) -> str:
        """Of the cookie: servers on other ports of this machine have their own."""
        return f"replaylens_{self.token[:8].replace('-', 'a')}"

    @property
    def cookie(self) -> str:
        return f"{self.name}={self._secret}; HttpOnly; SameSite=Strict; Path=/{self.token}/"

    def page(self) -> str:
        return page(
            f"Tree: {self.explorer.model or self.explorer.root.id}", "\nreplaylensExplore.served();\n", connects="'self'"
        )

    def events(self, after: int) -> dict[str, Any]:
        """The events after a number, as soon as there is one; -1: the number of the latest."""
        if after < 0:
            return {"after": self._count, "events": []}
        waited = 0.0
        while waited < WAIT and not self.ended:
            self.explorer.refresh()
            with self._news:
                found = [(number, event) for number, event in self._events if number > after]
                if found:
                    return {"after": found[-1][0], "events": [event for _, event in found]}
                self._news.wait(LOOK_AGAIN)
            waited += LOOK_AGAIN
        return {"after": after, "events": []}

    def _hear(self, event: dict[str, Any]) -> None:
        with self._news:
            self._count += 1
            self._events.append((self._count, event))
            self._news.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, address: tuple[str, int], served: ServedPage) -> None:
        self.served = served
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """One request. Says nothing about itself to whoever may not ask."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def version_string(self) -> str:
        return "replaylens"

    def log_message(self, *_: Any) -> None:
        """Addresses hold the token: they are not written anywhere."""

    def do_GET(self) -> None:
        served = self.server.served
        if served.ended:  # a connection may outlive the server
            return self._refuse(503)
        if not self._from_here():
            return self._refuse(403)
        if self._path() != "":
            return self._refuse(404)
        known = served.owns(self.headers.get("Cookie", ""))
        if not known and not served.first():
            return self._refuse(403)
        self._send(200, served.page().encode(), "text/html; charset=utf-8", () if known else (("Set-Cookie", served.cookie),))

    def do_POST(self) -> None:
        served, path = self.server.served, self._path()
        if served.ended:
            return self._refuse(503)
        length = self.headers.get("Content-Length", "")
        own = self._from_here() and path in ("ask", "events") and served.owns(self.headers.get("Cookie", ""))
        if not own or self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return self._refuse(403)
        if not length.isdecimal() or int(length) > MAX_BODY:
            return self._refuse(413)
        try:
            message = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return self._refuse(400)
        if path == "events":
            after = message.get("after") if isinstance(message, dict) else None
            if not isinstance(after, int):
                return self._refuse(400)
            return self._json(served.events(after))
        self._json(served.explorer.handle(message))

    def _from_here(self) -> bool:
        """Whether the request names this host, carries the token, and comes from no other site."""
        hosts, origin = self.server.served.hosts, self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        told = [part for part in self.path.split("/")[1:2] if part]
        token = bool(told) and hmac.compare_digest(told[0].encode(), self.server.served.token.encode())
        here = self.headers.get("Host") in hosts and (origin is None or origin in {f"http://{host}" for host in hosts})
        return token and here and site in ("none", "same-origin")

    def _path(self) -> str | None:
        """What comes after the token; None: the address is another."""
        parts = self.path.split("/")
        return parts[2] if len(parts) == 3 else None

    def _json(self, content: dict[str, Any]) -> None:
        self._send(200, json.dumps(content, ensure_ascii=False).encode(errors="replace"), "application/json; charset=utf-8")

    def _refuse(self, code: int) -> None:
        self.close_connection = True
        self._send(code, b"Refused.\n", "text/plain; charset=utf-8")

    def _send(self, code: int, body: bytes, kind: str, more: tuple[tuple[str, str], ...] = ()) -> None:
        own = (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"))
        safe = (("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"), ("X-Frame-Options", "DENY"))
        try:
            self.send_response(code)
            for name, value in (*own, *safe, ("Cross-Origin-Resource-Policy", "same-origin"), *more):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
