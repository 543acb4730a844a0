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
    assert run(["explain", "--resume", "logs", "--max-steps", "2"]) == 0
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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["."], ["."]),
        (["lib"], ["lib"]),
        (["lib", "."], ["lib", "."]),
        (["gone"], None),
        (["../elsewhere", "../elsewhere/gone"], None),
    ],
)
def test_folders_are_looked_for_where_the_rest_of_the_project_is(
    names: list[str], expected: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder inside may have the name of the project, or hold modules with the same names."""
    for folder in ("proj", "lib", "logs/adapter"):
        (tmp_path / "elsewhere" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    old = tmp_path / "proj"
    paths = {"plugins.search_paths": [os.path.normpath(old / name) for name in names]}
    config = load_config(None, paths | {"backend.adapter_path": str(old / "logs" / "adapter")})
    Path("logs/config.toml").write_text(dump_config(config))
    found = find_moved_inputs(Path("logs/config.toml"))
    assert found == ({} if expected is None else {"plugins.search_paths": expected})


def test_what_was_outside_of_the_project_is_not_looked_for_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "rows.jsonl").touch()
    (tmp_path / "elsewhere" / "adapters").mkdir()
    (tmp_path / "elsewhere" / "logs").mkdir()
    inside, outside = str(tmp_path / "proj"), "/nowhere/lib"
    paths = {"plugins.search_paths": [inside, outside], "data.source": "jsonl", "data.path": "/gone.jsonl"}
    paths |= {"model.model": "/nowhere/model", "eval.path": f"{inside}/rows.jsonl"}
    paths |= {"backend.adapter_path": f"{inside}/adapters"}
    Path("logs/config.toml").write_text(dump_config(load_config(None, paths)))
    found = find_moved_inputs(Path("logs/config.toml"))
    expected = {"plugins.search_paths": [".", outside], "eval.path": "rows.jsonl", "backend.adapter_path": "adapters"}
    assert found == expected
