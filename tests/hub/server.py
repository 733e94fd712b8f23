"""A stand-in for the Hugging Face hub on loopback: what `huggingface_hub`, `transformers` and
`datasets` ask for.

It serves the files below `root/models/OWNER/NAME` and `root/datasets/OWNER/NAME`; `HF_ENDPOINT`
names it.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub(ThreadingHTTPServer):
    """Serves a directory as the hub would.

    Attributes:
        refusals: (status, X-Error-Code) of the answers to all requests for a repository, such as
            (401, "GatedRepo").
        breaks: for the name of a file, after how many bytes the next answers break off, one number
            per answer.
        ranges: first byte of every request for the content of a file, with its name.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refusals: dict[str, tuple[int, str]] = {}
        self.breaks: dict[str, list[int]] = {}
        self.ranges: list[tuple[str, int]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a command asks this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


@contextmanager
def serve(root: Path) -> Iterator[StandInHub]:
    """Run a stand-in hub in a thread."""
    with StandInHub(root) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandInHub

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_POST(self) -> None:
        """Answer `paths-info`."""
        form = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        kind, repo, _ = self._parse()
        paths = json.loads(form)["paths"] if form.startswith("{") else parse_qs(form)["paths"]
        folder = self.server.root / kind / repo
        self._json([_entry(folder, folder / path) for path in paths if (folder / path).exists()])

    def _parse(self) -> tuple[str, str, list[str]]:
        """Return models or datasets, OWNER/NAME, and the other parts of the path."""
        parts = self.path.partition("?")[0].strip("/").split("/")
        parts = parts[1:] if parts[0] == "api" else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        return kind, "/".join(parts[:2]), parts[2:]

    def _answer(self, *, with_content: bool) -> None:
        kind, repo, rest = self._parse()
        folder = self.server.root / kind / repo
        if repo in self.server.refusals:
            return self._refuse(*self.server.refusals[repo])
        if not folder.is_dir():
            return self._refuse(404, "RepoNotFound")
        if rest[:1] == ["resolve"]:
            return self._file(folder / "/".join(rest[2:]), with_content)
        if rest[:1] == ["tree"]:
            base = folder / "/".join(rest[2:])
            if not base.is_dir():
                return self._refuse(404, "EntryNotFound")
            paths = sorted(
                base.rglob("*") if "recursive=true" in self.path.lower() else base.iterdir()
            )
            return self._json([_entry(folder, path) for path in paths])
        siblings = [
            {"rfilename": str(file.relative_to(folder))}
            for file in folder.rglob("*")
            if file.is_file()
        ]
        return self._json({"id": repo, "sha": COMMIT, "tags": [], "siblings": siblings})

    def _file(self, path: Path, with_content: bool) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Linked-Etag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_content:
            self._send(path, content, start)
        return None

    def _send(self, path: Path, content: bytes, start: int) -> None:
        self.server.ranges.append((path.name, start))
        if self.server.breaks.get(path.name):
            self.wfile.write(content[start : start + self.server.breaks[path.name].pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(content[start:])

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    if path.is_dir():
        return {"type": "directory", "path": str(path.relative_to(folder)), "oid": "0"}
    oid = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "type": "file",
        "path": str(path.relative_to(folder)),
        "size": path.stat().st_size,
        "oid": oid,
    }
