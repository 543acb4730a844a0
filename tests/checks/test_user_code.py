"""Custom rewards, checked without importing them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from retrain.checks.user_code import code_digests, find_reward_issues
from retrain.cli import run
from retrain.config import load_config
from retrain.errors import PluginError
from retrain.rewards.custom import named_extras

SOURCE = '''
"""Rewards."""
import math as maths
from functools import partial

def score(response, reference): ...
async def graded(response, reference, meta): ...
class Length:
    def score(self, response, reference): ...
bound = partial(score)
def of_trl(completions, **kwargs): ...
def of_trl_with_prompts(prompts, completions, answer, **kwargs): ...
def of_trl_by_name(*, completions, **kwargs): ...
'''


def issues(module: str, function: str) -> list[str]:
    options = {"reward.type": "custom", "reward.custom_module": module, "reward.custom_function": function}
    return [f"{issue.where} {issue.text} {issue.hint}" for issue in find_reward_issues(load_config(None, options))]


@pytest.fixture(autouse=True)
def _in_a_folder_with_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE)
    Path("star.py").write_text("from mine import *\n")
    Path("broken.py").write_text("def score(:\n")
    Path("package").mkdir()
    Path("package/grading.py").write_text(SOURCE)


@pytest.mark.parametrize("function", ["score", "graded", "Length", "Length.score", "bound", "partial", "maths"])
@pytest.mark.parametrize("module", ["mine", "package.grading"])
def test_whatever_a_module_defines_may_be_the_reward(module: str, function: str) -> None:
    assert issues(module, function) == []


@pytest.mark.parametrize("module", ["star", "broken", "pickle", "sys", "package.elsewhere"])
def test_what_only_an_import_can_tell_is_left_to_it(module: str) -> None:
    assert issues(module, "loads") == []


def test_a_function_of_one_argument_is_reported_with_its_signature() -> None:
    Path("short.py").write_text("def one(response):\n    return 1.0\n\ndef any(*given):\n    return 1.0\n")
    (issue,) = issues("short", "one")
    expected = '[reward] custom_function = "one" does not take a response and a reference.'
    assert issue.split() == [*expected.split(), *["Try:", "def", "one(response,", "reference)"]]
    assert issues("short", "any") == []


def test_a_missing_module_is_reported_with_the_folder() -> None:
    (issue,) = issues("nowhere.rewards", "score")
    assert issue.startswith('[reward] custom_module = "nowhere.rewards": there is no such module')
    assert str(Path.cwd()) in issue and "put nowhere.py into this folder" in issue


def test_a_misspelt_module_is_answered_with_the_file() -> None:
    Path("my_rewards.py").touch()
    (issue,) = issues("my_reward", "score")
    assert issue.endswith("Did you mean 'my_rewards'?")


def test_a_missing_function_is_reported_with_the_closest() -> None:
    (issue,) = issues("mine", "scores")
    assert issue == "[reward] custom_function = \"scores\": mine.py has no such function. Did you mean 'score'?"


@pytest.mark.parametrize("function", ["of_trl", "of_trl_with_prompts", "of_trl_by_name"])
def test_a_reward_function_of_trl_is_explained(function: str) -> None:
    (issue,) = issues("mine", function)
    assert "takes a list of completions, like TRL's reward functions" in issue
    assert f"Try: def {function}(response, reference)" in issue and "retrain grpo" in issue


def test_a_worker_rejects_a_function_of_trl_that_comes_from_elsewhere() -> None:
    def reward(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
        return []

    with pytest.raises(PluginError, match="takes a list of completions"):
        named_extras(reward)


def test_the_command_line_reports_it_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "retrain.trainer", None)
    Path("retrain.toml").write_text(
        '[reward]\ntype = "custom"\ncustom_module = "nowhere"\n[backend]\ndevices = "cpu"\n'
    )
    assert run(["--model", "builtin:tiny", "--max-tokens", "8", "--data.source", "arithmetic"]) == 2
    assert "there is no such module" in capsys.readouterr().err


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


def test_the_module_of_an_environment_id_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my_env.py").write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(Path.cwd())
    config = load_config(None, {"environment.provider": "verifiers", "environment.id": "me/my-env@1.0"})
    before = code_digests(config)
    assert list(before) == ["my_env"] and code_digests(config, of_scoring=True) == before
    Path("my_env.py").write_text("LIMIT = 2  # edited\n")
    assert code_digests(config) != before
    assert code_digests(load_config(None, {"environment.provider": "builtin", "environment.id": "me/my-env"})) == {}
