"""A server on this machine that answers every request by a function of the test."""

from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class Handler(BaseHTTPRequestHandler):
    """A request; `Server.answer` gets it."""

    server: "Server"

    def do_GET(self) -> None:
        self.server.requests.append({"path": unquote(self.path), **dict(self.headers)})
        with suppress(BrokenPipeError, ConnectionResetError):  # the client has seen enough
            self.server.answer(self)

    def send_head(self, status: int = 200, **headers: str) -> None:
        """Send the status and headers; "_" in a name stands for "-"."""
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()

    def send(self, body: bytes) -> None:
        """Send a whole answer."""
        self.send_head(Content_Length=str(len(body)))
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Keeps the path and the headers of each request in `requests`."""

    daemon_threads = False  # so that closing it waits for its handlers

    def __init__(self, answer: Callable[[Handler], object]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests = answer, []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
