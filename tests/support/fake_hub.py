"""A model hub on loopback: one repository, as huggingface_hub asks for it."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves the files of a folder as `repo`; counts what was downloaded. Use as a context manager."""

    def __init__(self, repo: str, folder: Path) -> None:
        self.repo, self.folder = repo, folder
        self.downloads: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def answer(self, request: BaseHTTPRequestHandler, *, has_body: bool) -> None:
        path = request.path.split("?")[0]
        names = sorted(file.name for file in self.folder.iterdir())
        if path in (f"/api/models/{self.repo}/revision/{revision}" for revision in ("main", COMMIT)):
            facts = {"id": self.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._send(request, json.dumps(facts).encode(), {"Content-Type": "application/json"}, has_body)
        elif path in (f"/api/models/{self.repo}/tree/{revision}" for revision in ("main", COMMIT)):
            tree = [_describe(self.folder / name) for name in names]
            self._send(request, json.dumps(tree).encode(), {"Content-Type": "application/json"}, has_body)
        elif path.startswith(f"/{self.repo}/resolve/") and (name := path.rsplit("/", 1)[1]) in names:
            body = (self.folder / name).read_bytes()
            if has_body:
                self.downloads.append(name)
            tag = hashlib.sha256(body).hexdigest()
            self._send(request, body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, has_body)
        else:
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()

    def _send(self, request: BaseHTTPRequestHandler, body: bytes, headers: dict[str, str], has_body: bool) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        if has_body:
            request.wfile.write(body)


def _describe(file: Path) -> dict[str, object]:
    oid = hashlib.sha1(file.name.encode()).hexdigest()
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid}
