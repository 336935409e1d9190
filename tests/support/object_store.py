"""An S3 server on this machine (moto's), in a process of its own, that can be told to fail, to wait or to be away."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from ckptrain.checkpoint.object_files import ObjectPath

KEY, SECRET = "key-that-nobody-may-see", "secret-that-nobody-may-see"
ANSWERS = {
    403: b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    503: b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
}
RESET = -1
CONTROL = "/_control"


@attrs.define
class Fault:
    """What becomes of requests; `request` is a pattern for METHOD PATH?QUERY."""

    request: str
    status: int = 0
    """The answer in place of the server's; 0 lets the request through, after the wait; RESET drops the connection."""
    wait_s: float = 0.0
    count: int = 1_000_000
    """How many requests it is for."""
    done: bool = False
    """Whether the server does what it is asked before its answer is lost."""


class Faulty:
    """The server with faults in front of it, as a WSGI application."""

    def __init__(self, server: Callable[..., Iterable[bytes]]) -> None:
        self._server = server
        self._faults: list[Fault] = []
        self._seen: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request."""
        if environ["PATH_INFO"] == CONTROL:
            return self._control(environ, respond)
        query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{query}"
        with self._lock:
            self._seen.append(request)
            fault = next((fault for fault in self._faults if fault.count and re.search(fault.request, request)), None)
            if fault is not None:
                fault.count -= 1
        if fault is not None:
            time.sleep(fault.wait_s)
            if fault.done:
                list(self._server(environ, lambda *_: lambda _: None))
            elif fault.status > 0:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if fault.status == RESET:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                return []
            if fault.status:
                respond(f"{fault.status} Fault", [("Content-Type", "application/xml")])
                return [ANSWERS[fault.status]]
        return self._server(environ, respond)

    def _control(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            if body:
                self._faults = [Fault(**fault) for fault in json.loads(body)]
            seen, self._seen = self._seen, [] if body else self._seen
        respond("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(seen).encode()]


class ObjectStore:
    """The server as a test sees it."""

    def __init__(self, log: Path) -> None:
        self.log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdout=subprocess.PIPE, stderr=self.log, start_new_session=True
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()

    def faults(self, *faults: Fault) -> None:
        """Have these faults from now on, in place of those before; what has been seen is forgotten."""
        self._ask(json.dumps([attrs.asdict(fault) for fault in faults]).encode())

    def seen(self, pattern: str = "") -> list[str]:
        """Return the requests since the faults were set."""
        return [request for request in json.loads(self._ask(None)) if re.search(pattern, request)]

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self.log.close()

    def _ask(self, body: bytes | None) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(self.endpoint + CONTROL, data=body)) as answer:
            found: bytes = answer.read()
        return found


def objects(url: str) -> dict[str, bytes]:
    """Return all objects of a run."""
    run = ObjectPath.parse(url)
    return {name: (run / name).read() or b"" for name in run.list_below()}


def data_object(url: str, step: int) -> ObjectPath:
    """Return the adapter's data of a step."""
    [name] = [name for name in objects(url) if f"step-{step:08d}/" in name and name.endswith("adapter/__0_0.distcp")]
    return ObjectPath(f"{url}/{name}")


def flip(place: ObjectPath) -> None:
    """Change a bit; the size stays."""
    data = bytearray(place.read() or b"")
    data[len(data) // 2] ^= 1
    place.write(bytes(data))


def cut(place: ObjectPath) -> None:
    """Lose the second half."""
    data = place.read() or b""
    place.write(data[: len(data) // 2])


def serve() -> None:
    """Serve until killed, and say on which port."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, Faulty(DomainDispatcherApplication(create_backend_app)), threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    serve()
