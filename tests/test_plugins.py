"""Finding parts: built-in names, entry points and dotted paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.errors import PluginError
from retrain.plugins import REGISTRIES, Registry, import_path, is_dotted_path, make_importable

BUILTINS = {"join": "os.path:join", "broken": "os.path:no_such_thing"}
REGISTRY = Registry("sample", "sample part", BUILTINS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for modules; the import path and what was imported are put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(name: str, *search_paths: str) -> str:
    with pytest.raises(PluginError) as caught:
        REGISTRY.load(name, search_paths)
    return str(caught.value)


def install(folder: Path, value: str) -> None:
    """Lay out a package's metadata as an installer would."""
    metadata = folder / "sample_parts-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sample-parts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[retrain.sample]\nextra = {value}\njoin = sample_parts:other\n")
    make_importable([str(folder)])


def test_a_builtin_is_loaded_by_its_name() -> None:
    import os.path

    assert REGISTRY.load("join") is os.path.join


def test_a_dotted_path_is_loaded_from_a_search_path(folder: Path) -> None:
    (folder / "my_sample_part.py").write_text("answer = 42\n")
    assert REGISTRY.load("my_sample_part.answer", [str(folder)]) == 42
    assert REGISTRY.load("my_sample_part:answer", [str(folder)]) == 42


def test_a_search_path_comes_before_installed_packages_and_in_order(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "my_sample_part.py").write_text(f"answer = {name!r}\n")
    assert REGISTRY.load("my_sample_part.answer", [str(folder / "one"), str(folder / "two")]) == "one"


def test_search_paths_are_put_on_the_import_path_once(folder: Path) -> None:
    make_importable([str(folder), str(folder)])
    make_importable([str(folder)])
    assert sys.path.count(str(folder.resolve())) == 1


def test_search_paths_come_first_and_in_order_wherever_they_were(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "my_sample_part.py").write_text(f"answer = {name!r}\n")
    sys.path.append(str(folder / "one"))
    assert REGISTRY.load("my_sample_part.answer", [str(folder / "one"), str(folder / "two")]) == "one"


def test_an_installed_part_is_found_by_its_entry_point(folder: Path) -> None:
    (folder / "sample_parts.py").write_text("part = 'installed'\n")
    install(folder, "sample_parts:part")
    assert REGISTRY.names() == ["join", "broken", "extra"]
    assert REGISTRY.explain_unknown("extra") == ""
    assert REGISTRY.load("extra") == "installed"


def test_a_package_that_is_installed_meanwhile_is_found(folder: Path) -> None:
    make_importable([str(folder)])
    assert REGISTRY.names() == ["join", "broken"]
    install(folder, "sample_parts:part")
    assert REGISTRY.names() == ["join", "broken", "extra"]


def test_a_builtin_wins_over_an_entry_point_of_the_same_name(folder: Path) -> None:
    import os.path

    install(folder, "sample_parts:part")
    assert REGISTRY.load("join") is os.path.join


def test_an_installed_part_that_fails_to_import_is_named(folder: Path) -> None:
    (folder / "sample_parts.py").write_text("raise RuntimeError('boom')\n")
    install(folder, "sample_parts:part")
    assert "sample plugin 'extra' (sample_parts:part) failed to load: RuntimeError('boom')" in refusal("extra")


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert refusal("joni") == "'joni' is not a known sample part. Did you mean 'join'?"
    assert "Known: join, broken, or a dotted path." in refusal("qqqqqqq")
    assert REGISTRY.explain_unknown("joni") == "'joni' is not a known sample part. Did you mean 'join'?"


def test_a_missing_module_is_distinguished_from_one_that_needs_another(folder: Path) -> None:
    assert "there is no module 'no_such_module'" in refusal("no_such_module.part")
    assert "there is no module 'no_such.deeper'" in refusal("no_such.deeper.part")
    (folder / "needy.py").write_text("import no_such_dependency\n")
    assert "its module needs 'no_such_dependency', which is not installed" in refusal("needy.part", str(folder))
    (folder / "tools").mkdir()
    (folder / "tools" / "needy.py").write_text("import beside\n")
    (folder / "tools" / "beside.py").touch()
    hint = "needs 'beside', which is not installed. beside.py is beside it.  Try: from .beside import …, or [plugins]"
    assert hint in refusal("tools.needy.part", str(folder))


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('boom')", "1 / 0", "def (", "raise SystemExit(3)", "import retrain.no_such_module"]
)
def test_a_module_that_fails_while_imported_is_named(folder: Path, body: str) -> None:
    (folder / "my_broken_part.py").write_text(body)
    assert "my_broken_part" in refusal("my_broken_part.part", str(folder))


def test_a_missing_attribute_gets_a_suggestion(folder: Path) -> None:
    (folder / "my_sample_part.py").write_text(
        "import json as nop\nfrom os.path import join as part\nfrom retrain.advantages.method import TransformSpec\n"
        "def my_score(): ...\nMINE = TransformSpec('mine')\nLIMITS = 3\n"
    )
    assert refusal("my_sample_part.my_scroe", str(folder)).endswith("has no 'my_scroe'. Did you mean 'my_score'?")
    assert refusal("my_sample_part.MIEN", str(folder)).endswith("Did you mean 'MINE'?")
    for name in ("nope", "parts", "LIMIT"):
        assert refusal(f"my_sample_part.{name}", str(folder)).endswith(f"has no {name!r}.")
    (folder / "random.py").write_text("def score(response, reference): ...\n")
    assert refusal("random.score", str(folder)).endswith("It is a module of Python.  Try: another name for your file")
    with pytest.raises(PluginError, match="has no 'no_such_thing'"):
        import_path("os.path:no_such_thing", "sample")


def test_an_attribute_inside_a_class_is_reached_with_a_colon(folder: Path) -> None:
    (folder / "my_sample_part.py").write_text("class Reward:\n    best = 1\n")
    assert REGISTRY.load("my_sample_part:Reward.best", [str(folder)]) == 1
    assert "has no 'Reward.worst'" in refusal("my_sample_part:Reward.worst", str(folder))


@pytest.mark.parametrize("name", ["a.b", "a:b", "a.b.c", "a.b:c", "é.b", "a:b.c"])
def test_a_dotted_path_is_recognized(name: str) -> None:
    assert is_dotted_path(name)


@pytest.mark.parametrize(
    "name", ["", "a", ".", "a.", ".a", "a..b", "a b.c", "a/b.c", "1.2", "a:b:c", "a:", ":a", "a.b\n"]
)
def test_other_text_is_not_a_dotted_path(name: str) -> None:
    assert not is_dotted_path(name)


def test_every_registry_goes_by_its_kind_and_describes_itself() -> None:
    for kind, registry in REGISTRIES.items():
        assert registry.kind == kind
        assert registry.group == f"retrain.{kind}"
        assert registry.what
        assert all(":" in path and is_dotted_path(path) for path in registry.builtins.values())
