"""A hub on the loopback device: enough of the Hugging Face HTTP interface for `datasets` to load JSON-lines files."""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

COMMIT = "a" * 40


def dataset_files(configs: Mapping[str, Mapping[str, list[dict[str, object]]]]) -> dict[str, bytes]:
    """Lay out `{config: {split: rows}}` as the files of a dataset repository."""
    files, card = {}, ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = f"{config}/{split}.jsonl"
            card += [f"  - split: {split}", f"    path: {path}"]
            files[path] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files["README.md"] = "\n".join([*card, "---", ""]).encode()
    return files


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: Mapping[str, Mapping[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        for id, files in self.repositories.items():
            if path.startswith(f"datasets/{id}/resolve/"):
                name = path.removeprefix(f"datasets/{id}/resolve/").partition("/")[2]
                if name in files:
                    return self._send(200, files[name], with_body)
            elif path.startswith(f"api/datasets/{id}"):
                return self._send(200, json.dumps(self._describe(id, files, path)).encode(), with_body)
        return self._send(404, b'{"error": "not found"}', with_body)

    def _describe(self, id: str, files: Mapping[str, bytes], path: str) -> object:
        _, is_tree, below = path.partition(f"/tree/{COMMIT}")
        if not is_tree:
            return {"id": id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        folder = PurePosixPath(below.strip("/"))
        entries: dict[str, object] = {}
        for name, content in files.items():
            file = PurePosixPath(name)
            if file.parent == folder:
                entries[name] = {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
            elif file.parent.parent == folder:
                entries[str(file.parent)] = {"type": "directory", "path": str(file.parent), "size": 0, "oid": COMMIT}
        return list(entries.values())

    def _send(self, status: int, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("ETag", f'"{_digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class LoopbackHub:
    """Serves dataset repositories while the `with` block lasts; `url` is its HF_ENDPOINT."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        handler = type("Handler", (_Handler,), {"repositories": repositories})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
