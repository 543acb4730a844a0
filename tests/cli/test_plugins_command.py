"""`retrain plugins`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.plugins import REGISTRIES
from retrain.runtime.packages import requirements


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path with one reward that works, one that does not, and one named like a built-in."""
    info = tmp_path / "strange_rewards-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-rewards\nVersion: 1.2\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[retrain.reward]\nshort = strange_rewards:score\nmatch = strange_rewards:score\n"
        "lost = strange_rewards:nothing\ngone = no_such_module_here:score\n",
        encoding="utf-8",
    )
    (tmp_path / "strange_rewards.py").write_text("def score(response, reference):\n    return 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "strange_rewards", raising=False)


def test_built_ins_are_listed_under_their_option_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "advantage  [algorithm] advantage_mode" in lines
    for kind, registry in REGISTRIES.items():
        for name in registry.builtins:
            states = [line.split()[2] for line in lines if line.split()[:2] == [kind, name]]
            assert states in (["ok"], ["missing"]), (kind, name)


def test_a_part_whose_package_is_not_installed_is_missing_and_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str, requirement: str) -> tuple[str, str]:
        return ("", "not installed") if name in ("tinker", "sentence-transformers") else ("1.0", "")

    monkeypatch.setattr("retrain.cli.plugins.check_package", check)
    assert run(["plugins", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    states = {(kind, part["name"]): part for kind in data for part in data[kind]["parts"]}
    assert states["backend", "tinker"]["status"] == states["planning", "semantic"]["status"] == "missing"
    assert "pip install" in states["backend", "tinker"]["reason"] and "tinker" in states["backend", "tinker"]["reason"]
    assert states["backend", "local"]["status"] == states["reward", "match"]["status"] == "ok"


def test_packages_that_built_in_parts_need_are_declared_requirements() -> None:
    parts = [registry.facts(name) for registry in REGISTRIES.values() for name in registry.parts]
    needed = {package for part in parts for package in part.packages}
    assert len(needed) > 5 and needed <= set(requirements())


def test_the_options_that_name_a_part_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["data"]["options"] == ["[data] source", "[eval] source"]


@pytest.mark.usefixtures("installed_package")
def test_entry_points_are_listed_with_their_package_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["reward"]["parts"]
    found = {part["name"]: part for part in parts if part["source"] == "strange-rewards 1.2"}
    assert found["short"]["status"] == "ok"
    assert found["short"]["target"] == "strange_rewards:score"
    assert found["match"]["status"] == "shadowed"
    assert found["lost"]["status"] == "broken"
    assert "nothing" in found["lost"]["reason"]
    assert "no_such_module_here" in found["gone"]["reason"]


@pytest.mark.usefixtures("installed_package")
def test_a_broken_entry_point_is_a_line_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins"]) == 0
    output = capsys.readouterr()
    (line,) = [line for line in output.out.splitlines() if " lost " in line]
    assert "broken" in line
    assert "Traceback" not in output.out + output.err
