"""The HTTP server of the page: on the loopback address, for whoever has its token.

Part of the room serve. Requests of a browser come in and are handed to the Workbench.

Other pages in the same browser can send requests to this address too, and a name of theirs may be
made to point here. So a request must name this address as its Host, come from this page if it says
where it comes from (Origin), and carry the token that is part of the address which the user was
given. The token stands behind a # and so is not sent with the page's own address. The page may load
nothing but what comes from here; a report opens without any rights of the page.
"""

from __future__ import annotations

import hmac
import json
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from apportion.checked import brief
from apportion.plan import Plan
from apportion.serve.page_requests import read_json, read_search
from apportion.serve.workbench import Workbench

LOOPBACK = "127.0.0.1"
TEMPLATES = Path(__file__).parent / "templates"
FILES = {
    "/": ("serve.html", "text/html; charset=utf-8"),
    "/serve.js": ("serve.js", "text/javascript; charset=utf-8"),
    "/serve.css": ("serve.css", "text/css; charset=utf-8"),
}
MOST_REQUEST = 1 << 16
MOST_PLAN = 64 << 20  # bytes of a plan that is opened
PATIENCE = 30.0  # seconds for a request to arrive
CONTENT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REPORT_CONTENT = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:"
)
TOKEN = "X-Apportion-Token"


class PageServer(ThreadingHTTPServer):
    """The server with what is open. `reports` are pages that were asked for, each to be opened
    once, by an address that nobody can guess."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, port: int, token: str = "") -> None:
        super().__init__((LOOPBACK, port), PageHandler)
        self.token = token or secrets.token_urlsafe(24)
        self.bench = Workbench()
        self.reports: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/#{self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news."""

    def server_close(self) -> None:
        super().server_close()
        self.bench.close()


class PageHandler(BaseHTTPRequestHandler):
    """One connection."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "apportion"
    sys_version = ""
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_POST(self) -> None:
        self._handle(self._post)

    def _handle(self, answer: Callable[[str], None]) -> None:
        path = urlsplit(self.path).path
        try:
            if not self._is_for_us():
                self._fail(403, "this server answers only its own page on this machine")
            elif path.startswith("/api/") and not self._has_token():
                self._fail(403, "the token is missing or wrong: open the address as it was printed")
            else:
                answer(path)
        except ValueError as error:
            self._fail(400, brief(str(error), 500))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # the page goes on, whatever one request does
            print(f"apportion serve: {type(error).__name__}: {brief(str(error), 300)}",
                  file=sys.stderr)  # fmt: skip
            self._fail(500, f"this did not work: {type(error).__name__}: {brief(str(error), 200)}")

    # Who may ask

    def _is_for_us(self) -> bool:
        port = self.server.server_port
        hosts = (f"{LOOPBACK}:{port}", f"localhost:{port}")
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        return host in hosts and (origin is None or origin == f"http://{host}")

    def _has_token(self) -> bool:
        given = self.headers.get(TOKEN, "")
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    # What is asked

    def _get(self, path: str) -> None:
        bench = self.server.bench
        if path in FILES:
            name, kind = FILES[path]
            self._send(200, (TEMPLATES / name).read_bytes(), kind)
        elif path.startswith("/report/"):
            found = self.server.reports.pop(path.removeprefix("/report/"), None)
            if found is None:
                self._fail(404, "this report was opened already; ask for it again")
            else:
                self._send(200, found, "text/html; charset=utf-8", REPORT_CONTENT)
        elif path == "/api/choices":
            self._answer(bench.choices())
        elif path == "/api/state":
            self._answer(bench.state())
        else:
            number, what = _plan_path(path)
            if what == "ops":
                self._answer(bench.ops(number))
            elif what == "plan":
                self._send(200, bench.download(number), "application/json")
            elif what.startswith("changes/"):
                self._answer(bench.changes(number, _number(what.removeprefix("changes/"))))
            else:
                self._fail(404, f"there is nothing at {brief(path)}")

    def _post(self, path: str) -> None:
        bench = self.server.bench
        if path == "/api/plans":
            name = brief(unquote(self.headers.get("X-Name", "")) or "opened", 80)
            self._answer({"id": bench.upload(name, self._body(MOST_PLAN))})
            return
        data = read_json(self._body(MOST_REQUEST))
        if path == "/api/searches":
            self._answer({"id": bench.search(read_search(data))})
        elif path.startswith("/api/searches/") and path.endswith("/stop"):
            bench.stop(_number(path.removeprefix("/api/searches/").removesuffix("/stop")))
            self._answer({})
        else:
            self._answer(self._plan_request(*_plan_path(path), data))

    def _plan_request(self, number: int, what: str, data: dict[str, Any]) -> dict[str, Any]:
        bench = self.server.bench
        if what == "try":
            return bench.try_change(number, data)
        if what == "keep":
            return bench.keep_change(number, data)
        if what == "pin":
            return bench.pin(number, data)
        if what == "settle":
            bench.settle(number)
            return {}
        if what == "search":
            return {"id": bench.search_again(number, data)}
        if what == "close":
            bench.close_plan(number)
            return {}
        if what == "report":
            key, reports = secrets.token_urlsafe(24), self.server.reports
            reports[key] = bench.report(number)
            while len(reports) > 4:
                reports.pop(next(iter(reports)))
            return {"path": f"/report/{key}"}
        raise ValueError(f"a plan cannot be asked for {brief(what)!r}")

    def _body(self, most: int) -> bytes:
        """The body of a request."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 12:
            self.close_connection = True
            raise ValueError("the request does not say how long it is")
        if int(length) > most:
            self.close_connection = True
            raise ValueError(f"the request has {int(length):,} bytes; {most:,} are the most")
        return self.rfile.read(int(length))

    # Answers

    def _answer(self, data: dict[str, Any]) -> None:
        self._send(200, json.dumps(data).encode(), "application/json")

    def _fail(self, status: int, sentence: str) -> None:
        self.close_connection = True
        self._send(status, json.dumps({"error": sentence}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str, content: str = CONTENT) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", content)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the tab is closed
            self.close_connection = True


def _plan_path(path: str) -> tuple[int, str]:
    """The plan that a path is about, and what is asked of it."""
    head, _, rest = path.removeprefix("/api/plans/").partition("/")
    if not path.startswith("/api/plans/"):
        raise ValueError(f"there is nothing at {brief(path)}")
    return _number(head), rest


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{brief(text)!r} is no number")
    return int(text)


def serve(port: int, plans: dict[str, Plan], tell: Callable[[str], None]) -> None:
    """Serves the page until an interrupt or SIGTERM; `tell` is told its address. Raises OSError if
    the port is taken."""
    server = PageServer(port)
    try:
        for name, plan in plans.items():
            server.bench.open(name, plan)
        tell(server.address)
        previous = signal.signal(signal.SIGTERM, lambda *_: _shut_down(server))
        try:
            server.serve_forever(poll_interval=0.2)
        finally:
            signal.signal(signal.SIGTERM, previous)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def _shut_down(server: PageServer) -> None:
    threading.Thread(target=server.shutdown, daemon=True).start()
