"""Digests of rewards, plugins and what they import."""

from __future__ import annotations

import importlib
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from retrain.checks.code_digest import code_digests
from retrain.config import load_config
from retrain.data import is_same_digest


@pytest.fixture(autouse=True)
def _in_a_folder_with_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(response, reference): ...\n")
    Path("package").mkdir()
    Path("package/grading.py").write_text("def score(response, reference): ...\n")


def test_digests_change_with_the_module_and_its_package_and_not_with_their_place(tmp_path: Path) -> None:
    def digests(**reward: object) -> dict[str, str]:
        return code_digests(load_config(None, {f"reward.{key}": value for key, value in reward.items()}))

    custom, plugin = {"type": "custom", "custom_module": "package.grading"}, {"terms": [{"type": "mine.score"}]}
    Path("package/__init__.py").write_text("")
    before = digests(**custom)
    assert list(before) == ["package.grading"] and list(digests(**plugin)) == ["mine"]
    Path("package/helper.py").write_text("LIMIT = 1\n")
    assert digests(**custom) != before
    kept = digests(**custom)
    Path("elsewhere").mkdir()
    Path("package").rename("elsewhere/package")
    sys.path.insert(0, str(Path("elsewhere").resolve()))
    try:
        assert digests(**custom) == kept
    finally:
        sys.path.pop(0)


def test_the_digest_of_a_reward_changes_with_modules_that_it_imports() -> None:
    folder = Path("project")
    options = {"reward.type": "custom", "reward.custom_module": "grading", "plugins.search_paths": [str(folder)]}
    config = load_config(None, options)
    files = {
        "grading.py": "import torch, helpers\ndef score(response, reference):\n    from lib import rules\n",
        "helpers.py": "from package.deep import one, two\n",
        "lib/rules.py": "LIMIT = 1\n",  # a namespace package
        "package/__init__.py": "",
        "package/deep/__init__.py": "from . import one\nfrom ..near import LIMIT\n",
        "package/deep/one.py": "import grading, helpers  # a circle\n",
        "package/near.py": "LIMIT = 1\n",
        "package/other.py": "LIMIT = 1\n",  # not imported
        "torch.py": "LIMIT = 1\n",  # before the installed one
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = code_digests(config)
    assert code_digests(config) == before
    changed = set()
    for name, text in files.items():
        (folder / name).write_text(f"{text}# edited\n")
        if code_digests(config) != before:
            changed.add(name)
        (folder / name).write_text(text)
    assert changed == files.keys() - {"package/other.py"}
    # Folders of earlier versions have a digest of the module alone.
    assert is_same_digest(before["grading"].split("~")[0], before["grading"]) and "~" in before["grading"]


def test_folders_without_init_files_that_cannot_be_read_or_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "grading.py": "from common.utils.text import clean\nfrom common import data\n",
        "common/__init__.py": "",
        "common/utils/text.py": "LIMIT = 1\n",
        "common/data/rows.py": "LIMIT = 1\n",
        "src/rewards/exact.py": "def score(response, reference): ...\n",
        "package/__init__.py": "",
        "package/.venv/lib/site-packages/torch.py": "LIMIT = 1\n",
        "package/.ipynb_checkpoints/grading-checkpoint.py": "LIMIT = 1\n",
        "package/env/lib/python3.12/site-packages/torch.py": "LIMIT = 1\n",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("package/.#grading.py").symlink_to("user@host.1234")  # as Emacs makes them
    Path("package/gone.py").symlink_to("nowhere.py")
    Path("package/folder.py").mkdir()
    monkeypatch.syspath_prepend(Path.cwd())

    def digest(module: str) -> str:
        return code_digests(load_config(None, {"reward.type": "custom", "reward.custom_module": module}))[module]

    before = {module: digest(module) for module in ("grading", "src.rewards.exact", "package.grading")}
    for name, module in (("common/utils/text.py", "grading"), ("src/rewards/exact.py", "src.rewards.exact")):
        Path(name).write_text(f"{files[name]}# edited\n")
        assert digest(module) != before[module]
    for name in list(files)[-3:]:
        Path(name).write_text("LIMIT = 2  # edited\n")
    assert digest("package.grading") == before["package.grading"]


@pytest.mark.slow
def test_imports_are_followed_within_seconds_in_a_large_folder() -> None:
    for number in range(600):
        Path(f"part{number}.py").write_text(
            f"import part{(number + 1) % 600}, part{(number * 7) % 600}\n" + "x = 1\n" * 500
        )
    Path("helper.py").write_text("import part0\n")
    Path("broken.py").write_text("def (\n")
    Path("grading.py").write_text("import broken, helper, part1\ndef score(response, reference): return 1.0\n")
    options = {"reward.type": "custom", "reward.custom_module": "grading", "plugins.search_paths": ["."]}
    config = load_config(None, options)
    started = time.perf_counter()
    before = code_digests(config)
    assert time.perf_counter() - started < 10.0
    Path("helper.py").write_text("import part0  # edited\n")
    assert code_digests(config) != before


def test_the_digest_of_a_plugin_is_that_of_the_code_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, {"algorithm.advantage_mode": "edited_later.advantage"})
    source = Path("edited_later.py")
    source.write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(Path.cwd())
    before = code_digests(config)
    source.write_text("LIMIT = 2  # not imported yet\n")
    imported = code_digests(config)
    assert list(before) == ["edited_later"] and imported != before
    importlib.import_module("edited_later")
    assert code_digests(config) == imported
    # Another run of the same process, as in a campaign with share_model.
    source.write_text("LIMIT = 3  # after it was imported\n")
    assert code_digests(config) == imported
    monkeypatch.delitem(sys.modules, "edited_later")
    assert code_digests(config) != imported


def test_a_plugin_that_an_entry_point_names_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine-1.dist-info").mkdir()
    Path("mine-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    Path("mine-1.dist-info/entry_points.txt").write_text("[retrain.reward]\nunit_tests = package.grading:score\n")
    monkeypatch.syspath_prepend(Path.cwd())
    config = load_config(None, {"reward.type": "unit_tests"})
    before = code_digests(config, of_scoring=True)
    Path("package/grading.py").write_text("def score(response, reference): return 1.0\n")
    after = code_digests(config, of_scoring=True)
    assert list(before) == list(after) == ["package.grading"] and before != after


def test_a_package_that_an_import_hook_finds_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in editable mode.
    class Hook:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, "src/hooked/__init__.py") if name == "hooked" else None

    Path("src/hooked").mkdir(parents=True)
    for name in ("__init__", "helper"):
        Path(f"src/hooked/{name}.py").touch()
    Path("src/hooked/rewards.py").write_text("from hooked.helper import BONUS\ndef score(response, reference): ...\n")
    config = load_config(None, {"reward.type": "hooked.rewards.score"})
    assert code_digests(config) == {}
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    before = code_digests(config)
    Path("src/hooked/helper.py").write_text("BONUS = 5.0\n")
    assert list(before) == ["hooked.rewards"] and code_digests(config) not in ({}, before)


def test_parts_that_only_an_import_hook_finds_have_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "spread.part": "a/__init__.py",
        "spread.part.rew": "a/rew.py",
        "two": "b/__init__.py",
        "two.rew": "c/rew.py",
    }

    class Hook:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
            if name.startswith("cannot"):
                raise ImportError(name)
            return spec_from_file_location(name, places[name]) if name in places else None

    for place in places.values():
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).write_text("import cannot.this, spread.part\ndef score(response, reference): ...\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    for module, edited in (
        ("spread.part.rew", "a/rew.py"),
        ("spread.part.rew", "a/__init__.py"),
        ("two.rew", "c/rew.py"),
    ):
        config = load_config(None, {"reward.type": f"{module}.score"})
        before = code_digests(config)
        Path(edited).write_text("def score(response, reference): return 1.0\n")
        assert list(before) == [module] and code_digests(config) not in ({}, before)
        Path(edited).write_text("import cannot.this, spread.part\ndef score(response, reference): ...\n")


def test_the_module_of_an_environment_id_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_env.py").write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(Path.cwd())
    config = load_config(None, {"environment.provider": "verifiers", "environment.id": "me/my-env@1.0"})
    before = code_digests(config)
    assert list(before) == ["my_env"] and code_digests(config, of_scoring=True) == before
    Path("my_env.py").write_text("LIMIT = 2  # edited\n")
    assert code_digests(config) != before
    assert code_digests(load_config(None, {"environment.provider": "builtin", "environment.id": "me/my-env"})) == {}
