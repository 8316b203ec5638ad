"""A hub that answers every generate call with the same tokens, as fast as HTTP allows, and lets none through while it is shut."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer

GATE_TIMEOUT_S = 60.0


class TokenServer:
    """`num_asked` and `num_answered` count the turns of each session, which is an episode's trajectory id."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        ids = tokenizer.encode("0<|im_end|>", add_special_tokens=False).ids
        self._logprobs = [[-1.0, token_id, None] for token_id in ids]
        self._lock = threading.Lock()
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_asked: Counter[str] = Counter()
        self.num_answered: Counter[str] = Counter()
        self.version = 0
        """The policy version that samples."""
        self.port = 0

    @contextmanager
    def serving(self) -> Iterator["TokenServer"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.is_open.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self) -> bytes:
        """SGLang's."""
        spans = [{"version": str(self.version), "start": 0, "end": len(self._logprobs)}]
        meta_info = {
            "output_token_logprobs": self._logprobs,
            "weight_versions": spans,
            "finish_reason": {"type": "stop"},
        }
        return json.dumps({"meta_info": meta_info}).encode()

    def num_waiting(self) -> int:
        """Calls that were asked and not answered."""
        with self._lock:
            return self.num_asked.total() - self.num_answered.total()

    def _count(self, counter: Counter[str], session_id: str) -> None:
        with self._lock:
            counter[session_id] += 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                session_id = self.headers["X-Session-Id"]
                hub._count(hub.num_asked, session_id)
                hub.is_open.wait(GATE_TIMEOUT_S)
                body = hub.answer()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                hub._count(hub.num_answered, session_id)

            def log_message(self, *_):
                pass

            def handle(self):
                with suppress(ConnectionError):
                    super().handle()

        return Handler
