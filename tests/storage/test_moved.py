"""Runs whose project was moved: their config.toml names files of the old place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from retrain.analysis.measure import require_same_model
from retrain.analysis.runs import find_runs
from retrain.builtin import resolve_model
from retrain.cli import run
from retrain.config import dump_config, load_config
from retrain.storage.inputs import RunInputs
from retrain.storage.moved import find_moved_inputs

PROJECT = """
[backend]
devices = "cpu"
adapter_path = "logs/adapter"
[model]
model = "models/mine"
[data]
source = "jsonl"
path = "data/rows.jsonl"
[training]
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 8
[reward]
type = "custom"
custom_module = "rewards_of_the_moved"
[logging]
log_dir = "logs"
"""


def write_rows(path: Path, *prompts: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))


def test_a_run_of_a_moved_project_is_resumed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "rewards_of_the_moved.py").write_text("def score(response, reference):\n    return len(response) % 2\n")
    write_rows(old / "data" / "rows.jsonl", "1+1=", "3-1=")
    (old / "t.toml").write_text(PROJECT)
    shutil.copytree(resolve_model("builtin:tiny"), old / "models" / "mine")
    monkeypatch.chdir(old)
    assert run(["t.toml"]) == 0
    assert find_moved_inputs(Path("logs/config.toml")) == {}
    old.rename(new)
    monkeypatch.chdir(new)
    capsys.readouterr()
    assert run(["explain", "logs/config.toml", "--resume", "logs", "--max-steps", "2"]) == 0
    assert run(["--resume", "logs", "--max-steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert err.count('note: [data] path is now "data/rows.jsonl": what logs/config.toml names is gone') == 2
    assert err.count('note: [model] model is now "models/mine": what logs/config.toml names is gone') == 2
    assert err.count('note: [plugins] search_paths is now ["."]: what logs/config.toml names is gone') == 2
    assert "Done: 2 steps" in out and "changed" not in out
    assert find_moved_inputs(Path("logs/config.toml")) == {}, "the new place is stored"
    # A comparison with a run that has not been resumed here; it is the model of both.
    kept = Path(shutil.copytree("logs", "earlier"))
    text = (kept / "config.toml").read_text().replace(str(new / "models"), str(old / "models"))
    (kept / "config.toml").write_text(text.replace("seed = ", "seed = 1 # "))
    shutil.rmtree(kept / "checkpoints")  # they know the seed
    state = json.loads((kept / "trainer_state.json").read_text())
    state["models"] = {str(old / "models" / "mine"): files for files in state["models"].values()}
    (kept / "trainer_state.json").write_text(json.dumps(state))
    require_same_model(find_runs([Path("logs"), kept]))
    # Another model or file of that name is not what the run was trained on.
    third = tmp_path / "third"
    new.rename(third)
    monkeypatch.chdir(third)
    write_rows(third / "data" / "rows.jsonl", "4+4=", "1+1=")
    assert run(["--resume", "logs", "--max-steps", "3"]) == 2
    assert "[data] path: " in capsys.readouterr().err
    write_rows(third / "data" / "rows.jsonl", "1+1=", "3-1=")
    settings = third / "models" / "mine" / "generation_config.json"
    settings.write_text(settings.read_text().replace("{", '{"_": 1,', 1))
    assert run(["--resume", "logs", "--max-steps", "3"]) == 2
    assert "[model] model: " in capsys.readouterr().err


def write_run(project: Path, **options: object) -> Path:
    """A run's folder in the working directory, as one that was started in `project` would have it."""
    Path("logs").mkdir(exist_ok=True)
    Path("logs/trainer_state.json").write_text(json.dumps({"project": str(project)}))
    options = {"logging.log_dir": "logs"} | {name.replace("__", "."): value for name, value in options.items()}
    Path("logs/config.toml").write_text(dump_config(load_config(None, options)))
    return Path("logs/config.toml")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["."], ["."]),
        (["lib"], ["lib"]),
        (["lib", "."], ["lib", "."]),
        (["gone"], ["gone"]),
        (["../elsewhere", "../elsewhere/gone"], None),
    ],
)
def test_search_paths_inside_of_a_moved_project_follow_it(
    names: list[str], expected: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder inside may have the name of the project, as a package often has."""
    for folder in ("proj", "lib"):
        (tmp_path / "elsewhere" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    old = tmp_path / "proj"
    folders = [os.path.normpath(old / name) for name in names]
    # An adapter in the run's folder follows it by itself.
    config_file = write_run(old, plugins__search_paths=folders, backend__adapter_path=str(old / "logs" / "adapter"))
    assert find_moved_inputs(config_file) == ({} if expected is None else {"plugins.search_paths": expected})


def test_what_was_outside_of_the_project_is_not_looked_for_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("rows.jsonl").touch()
    Path("proj").mkdir()
    old, outside = tmp_path / "proj", "/nowhere/proj"
    paths = {"data__source": "jsonl", "data__path": "/nowhere/rows.jsonl", "model__model": f"{outside}/model"}
    paths |= {"eval__path": f"{old}/rows.jsonl", "backend__adapter_path": f"{old}/adapters"}
    config_file = write_run(old, plugins__search_paths=[str(old), outside], **paths)
    moved = {"plugins.search_paths": [".", outside], "eval.path": "rows.jsonl", "backend.adapter_path": "adapters"}
    assert find_moved_inputs(config_file) == moved


def test_nothing_follows_a_project_that_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter or file that was deleted or renamed there is not looked for elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("best").mkdir()
    Path("rows.jsonl").touch()
    paths = {"data__source": "jsonl", "data__path": str(tmp_path / "old" / "rows.jsonl")}
    config_file = write_run(tmp_path, backend__adapter_path=str(tmp_path / "out" / "best"), **paths)
    assert find_moved_inputs(config_file) == {}


def test_a_resume_from_elsewhere_keeps_the_folder_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = RunInputs("", {}, {})
    assert inputs.project == str(tmp_path)
    monkeypatch.chdir("/")
    for recorded, expected in ((str(tmp_path), str(tmp_path)), (str(tmp_path / "gone"), "/"), (None, "/")):
        resumed, earlier = RunInputs("", {}, {}), {"project": recorded} if recorded else {}
        resumed.add_earlier({"progress": {"step": 1}} | earlier)
        assert resumed.project == expected
