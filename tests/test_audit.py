"""`make audit` against a database of this test: the true one cannot be reached from everywhere."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

VULNERABILITY = {
    "id": "PYSEC-0000-1",
    "modified": "2026-01-01T00:00:00Z",
    "summary": "a vulnerability of this test",
    "affected": [
        {"package": {"name": "redis", "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}]}
    ],
}


@pytest.fixture
def serve_database():
    servers = []

    def serve(vulnerable: str) -> str:
        class Database(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = {"vulns": [VULNERABILITY]} if asked["package"]["name"] == vulnerable else {}
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Database)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1/query"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def audit(repository, database: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHON": sys.executable, "HEADRACE_OSV_URL": database}
    return subprocess.run([repository / ".ci/audit"], env=environment, capture_output=True, text=True, check=False, timeout=110)


def test_a_known_vulnerability_fails_and_is_named(repository, serve_database):
    done = audit(repository, serve_database("redis"))
    assert done.returncode == 1, done.stderr
    assert VULNERABILITY["id"] in done.stdout
    assert all(f"deploy/requirements/{name}.txt" in done.stdout for name in ("env-agents", "inference-hub", "trainer"))


def test_what_has_none_passes(repository, serve_database):
    done = audit(repository, serve_database("a package that nothing needs"))
    assert (done.returncode, "NOT AUDITED" in done.stdout) == (0, False), done.stderr
    assert "No known vulnerabilities found" in done.stderr


def test_where_nobody_answers_it_says_so_and_goes_on(repository, unused_tcp_port):
    done = audit(repository, f"http://127.0.0.1:{unused_tcp_port}/v1/query")
    assert (done.returncode, "NOT AUDITED" in done.stdout) == (0, True)
