"""A real HTTP server with canned answers, in place of the hub, the agents or an engine."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Service:
    """`received` holds (method and path, decoded body) of every request."""

    url: str
    received: list[tuple[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    """The header of every request."""


@contextmanager
def json_service(answers: Mapping[str, tuple[int, Any]]) -> Iterator[Service]:
    """`answers`: "GET /path" → status and body; bytes are sent as they are."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            request = f"{self.command} {self.path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            service.authorizations.append(self.headers.get("Authorization"))
            service.received.append((request, json.loads(body) if body else None))
            status, value = answers.get(request, (404, {"detail": f"nothing is at {request}"}))
            encoded = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - the base class's names

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service = Service(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
