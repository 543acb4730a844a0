"""Adapters from a Tinker service onto this machine; a service that lists strange files is not obeyed."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from retrain.backends.tinker import download
from retrain.backends.tinker.download import fetch_adapter, plan_files
from retrain.cli import run
from retrain.errors import BackendError, ConfigError
from retrain.storage.publishing import RECORD

from .tinker_server import KEY, TinkerServer, Trainee

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SAVED = "tinker://run-0/weights/last"


@pytest.fixture(autouse=True, scope="module")
def leaks_show_here() -> Iterator[None]:
    """The SDK leaves connections open; they are to be found now, so that no other file's tests are blamed for them."""
    yield
    gc.collect()


@pytest.fixture
def server(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerServer]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with TinkerServer(tmp_path / "exports", str(tiny)) as made:
        monkeypatch.setenv("TINKER_BASE_URL", made.url)
        trainee = Trainee(str(tiny), 4, 0)
        for number, tensor in enumerate(trainee.policy.adapter_state().values()):
            tensor.fill_(0.01 * number)
        made.states[SAVED] = trainee.state()
        yield made


def test_an_adapter_arrives_in_peft_layout_and_loads(server: TinkerServer, tiny: Path, tmp_path: Path) -> None:
    folder = fetch_adapter(SAVED, tmp_path / "here")
    assert folder == tmp_path / "here" / "run-0_weights_last"
    tensors = list(load_file(folder / "adapter_model.safetensors").values())
    assert torch.equal(
        torch.cat([t.flatten() for t in tensors]).sort().values,
        torch.cat([t.flatten() for t in server.states[SAVED].adapter.values()]).sort().values,
    )
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
    # What was exported for the download is gone again, on the service and beside the result.
    assert list(server.states) == [SAVED]
    assert list((tmp_path / "here").iterdir()) == [folder]


@pytest.mark.slow
def test_a_second_download_replaces_the_first(server: TinkerServer, tmp_path: Path) -> None:
    folder = fetch_adapter(SAVED, tmp_path)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_text("stale")
    (folder / "notes.txt").write_text("mine")
    assert fetch_adapter(SAVED, tmp_path) == folder
    assert (folder / "adapter_model.safetensors").read_bytes() == weights
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_export_is_downloaded_as_it_is(server: TinkerServer, tmp_path: Path) -> None:
    folder = server.folder / "run-7" / "mine"
    Trainee(server.base_model, 4, 0).policy.save_adapter(folder)
    there = fetch_adapter("tinker://run-7/external_weights/mine", tmp_path / "here")
    assert {path.name for path in there.iterdir()} == {path.name for path in folder.iterdir()} | {RECORD}
    assert "save_weights_external" not in server.paths()


@pytest.mark.parametrize("path", ["tinker://run-0", "run-0/weights/last", "tinker://run/other/x", "/tmp/adapter", ""])
def test_what_is_no_path_of_an_adapter_is_wrong_input(server: TinkerServer, tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="is not a path of a saved adapter"):
        fetch_adapter(path, tmp_path)


def test_weights_for_sampling_are_rejected_with_the_reason(server: TinkerServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not hand out"):
        fetch_adapter("tinker://run-0/sampler_weights/last", tmp_path)


def test_a_state_that_is_not_there_is_reported(server: TinkerServer, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="there is no tinker://run-0/weights/other"):
        fetch_adapter("tinker://run-0/weights/other", tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../escaped", "a/../../escaped", "/tmp/escaped", "a\\..\\..\\escaped", "", ".", "..", "a/\0b"],
)
def test_a_file_that_would_land_outside_its_folder_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(BackendError, match="outside its folder"):
        plan_files({"adapter_config.json": "https://there/x", name: "https://there/y"}, tmp_path / "here")


def test_a_link_on_the_way_out_is_seen(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "sub").symlink_to(tmp_path)
    with pytest.raises(BackendError, match="outside its folder"):
        plan_files({"sub/escaped": "https://there/x"}, tmp_path / "here")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://there/x", "there/x"])
def test_only_http_addresses_are_followed(tmp_path: Path, url: str) -> None:
    with pytest.raises(BackendError, match="not http"):
        plan_files({"adapter_config.json": url}, tmp_path)


def test_no_files_and_endless_files_are_rejected(tmp_path: Path) -> None:
    for count in (0, download.MAX_FILES + 1):
        with pytest.raises(BackendError, match="listed"):
            plan_files({f"{n}.bin": "https://there/x" for n in range(count)}, tmp_path)


def test_names_inside_folders_are_fine(tmp_path: Path) -> None:
    assert plan_files({"a/b.json": "https://there/x"}, tmp_path) == {"a/b.json": tmp_path / "a" / "b.json"}


def test_a_listing_that_tries_to_escape_leaves_nothing(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listing(self: TinkerServer, method: str, parts: list[str]) -> Any:
        expires = datetime.datetime.now(datetime.UTC).isoformat()
        return {"urls": {"../../evil": f"{self.url}/files/x"}, "expires": expires}

    monkeypatch.setattr(TinkerServer, "answer_checkpoint", listing)
    with pytest.raises(BackendError, match="outside its folder"):
        fetch_adapter("tinker://run-7/external_weights/mine", tmp_path / "here")
    assert not (tmp_path / "here").exists() or not list((tmp_path / "here").iterdir())


def test_more_than_an_adapter_can_be_is_rejected(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    with pytest.raises(BackendError, match="larger than"):
        fetch_adapter(SAVED, tmp_path / "here")
    assert not list((tmp_path / "here").iterdir())


def test_what_is_no_adapter_is_rejected(server: TinkerServer, tmp_path: Path) -> None:
    folder = server.folder / "run-7" / "mine"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("nothing here")
    with pytest.raises(BackendError, match=r"lacks adapter_config\.json and adapter_model.safetensors"):
        fetch_adapter("tinker://run-7/external_weights/mine", tmp_path / "here")


def test_a_squeeze_file_takes_a_path_on_the_service(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    file = tmp_path / "squeeze.toml"
    tables = f'[model]\nbase_url = "{server.url}"\n[squeeze]\nadapter_path = "{SAVED}"\n'
    file.write_text(f'{tables}compress_to = 1\noutput_path = "{tmp_path / "small"}"\n')
    assert run(["explain", str(file)]) == 0
    assert f"{SAVED} (to be downloaded)" in capsys.readouterr().out
    assert run([str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"{SAVED}: " in printed and "rank 4" in printed and "Mean Var%" in printed
    small = load_file(tmp_path / "small" / "adapter_model.safetensors")
    assert {min(tensor.shape) for tensor in small.values()} == {1}
    assert list(server.states) == [SAVED], "nothing of the download is left on the service"


def test_a_squeeze_of_what_the_service_does_not_have_ends_with_a_sentence(
    server: TinkerServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "squeeze.toml"
    file.write_text('[squeeze]\nadapter_path = "tinker://run-0/weights/other"\n')
    assert run([str(file)]) == 1
    assert "there is no tinker://run-0/weights/other" in capsys.readouterr().err
