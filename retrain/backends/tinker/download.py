"""Download an adapter from a `tinker://` path, in PEFT format.

The service returns file names and signed URLs. Names outside the folder, too much data and truncated files are
rejected, and nothing is left behind.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import httpx

from retrain.backends.tinker import require_sdk
from retrain.errors import BackendError, ConfigError
from retrain.storage.publishing import publish_folder

if TYPE_CHECKING:
    from retrain.backends.tinker.service import Service

# Far more than LoRA of the largest rank on the largest model of the service.
MAX_BYTES = 64 << 30
MAX_FILES = 1000
# The service deletes the export after this time, in case we do not.
_EXPORT_SECONDS = 3600
NEEDED = ("adapter_config.json", "adapter_model.safetensors")


def fetch_adapter(tinker_path: str, folder: Path, base_url: str = "") -> Path:
    """Download the adapter at `tinker_path` into a new folder below `folder`, and return it."""
    require_sdk(f"the adapter {tinker_path}")
    from tinker import ParsedCheckpointTinkerPath  # noqa: PLC0415  (an optional extra)

    from retrain.backends.tinker.service import Service  # noqa: PLC0415  (imports that extra)

    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    except ValueError as error:
        raise ConfigError(
            f"{tinker_path!r} is not a path of a saved adapter.  Try: tinker://<run>/weights/<name>"
        ) from error
    if parsed.checkpoint_type == "sampler":
        raise ConfigError(
            f"{tinker_path} holds weights for sampling, which the service does not hand out.  "
            "Try: a path of the form tinker://<run>/weights/<name>, as in trainer_state.json"
        )
    target = folder / tinker_path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    service = Service(base_url, lambda line: None)
    if parsed.checkpoint_type == "external":
        return _download_export(service, tinker_path, target)
    try:
        client = service.call(
            lambda: service.client.create_training_client_from_state(tinker_path), f"loading {tinker_path}"
        )
        name = f"retrain-{secrets.token_hex(4)}"
        export = service.wait(client.save_weights_external(name, ttl_seconds=_EXPORT_SECONDS), "exporting").path
        try:
            return _download_export(service, export, target)
        finally:
            _delete(service, export)
    finally:
        service.close("success")


def _download_export(service: Service, export: str, target: Path) -> Path:
    """Download the files of an export, then publish the folder atomically."""
    import tinker  # noqa: PLC0415  (an optional extra)

    rest = tinker.RestClient(base_url=service.url)
    urls = service.call(
        lambda: rest.get_external_weights_urls(export).result(), f"asking for the files of {export}"
    ).urls

    def fill(draft: Path) -> None:
        left = MAX_BYTES
        for name, place in plan_files(urls, draft).items():
            left -= _download_file(urls[name], place, left)
        missing = [name for name in NEEDED if not (draft / name).is_file()]
        if missing:
            raise BackendError(f"{export} is not an adapter in PEFT layout: it lacks {' and '.join(missing)}.")

    try:
        publish_folder(target, fill)
    except OSError as error:
        raise BackendError(f"{export} could not be written to {target}: {error}.") from error
    return target


def plan_files(urls: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """The local path of each file, inside `folder`."""
    if not 0 < len(urls) <= MAX_FILES:
        raise BackendError(f"the service listed {len(urls)} files, where 1 to {MAX_FILES} are expected.")
    places: dict[str, Path] = {}
    for name, url in urls.items():
        parts = PurePosixPath(name).parts
        unsafe = name.startswith("/") or "\\" in name or "\0" in name or not parts or ".." in parts
        if unsafe or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise BackendError(
                f"the service listed a file {name!r}, which would be written outside its folder; rejected."
            )
        if not url.startswith(("https://", "http://")):
            raise BackendError(f"the service gave {name!r} an address that is not http; rejected.")
        places[name] = folder / name
    return places


def _download_file(url: str, place: Path, most: int) -> int:
    """Stream one file; returns its size. The URL is signed, so messages do not show it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    try:
        with httpx.stream("GET", url, timeout=60.0, follow_redirects=True) as response, place.open("xb") as file:
            if response.status_code != 200:
                raise BackendError(f"{place.name} could not be downloaded: status {response.status_code}.")
            expected = int(response.headers.get("content-length") or 0)
            for piece in response.iter_bytes():
                size += len(piece)
                if size > most:
                    raise BackendError(f"{place.name} makes the adapter larger than {MAX_BYTES >> 30} GiB; rejected.")
                file.write(piece)
    except httpx.HTTPError as error:
        raise BackendError(f"{place.name} could not be downloaded: {type(error).__name__}.") from error
    if expected and size != expected and "content-encoding" not in response.headers:
        raise BackendError(f"{place.name} ended early: {size} of {expected} bytes came.")
    return size


def _delete(service: Service, export: str) -> None:
    """Delete the export if possible; otherwise it expires."""
    import tinker  # noqa: PLC0415  (an optional extra)

    rest = tinker.RestClient(base_url=service.url)
    try:
        rest.delete_checkpoint_from_tinker_path(export).result(timeout=60)
    except (tinker.TinkerError, TimeoutError, ValueError):
        return
