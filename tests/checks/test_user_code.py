"""Custom rewards and plugins, checked without importing them."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from retrain.checks.user_code import find_missing_plugins, find_reward_issues
from retrain.cli import run, trial
from retrain.config import load_config
from retrain.errors import PluginError
from retrain.plugins import suggest_module
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
    Path("regular").mkdir()
    Path("regular/__init__.py").touch()
    Path("regular/grading.py").write_text(SOURCE)


@pytest.mark.parametrize("function", ["score", "graded", "Length", "Length.score", "bound", "partial", "maths"])
@pytest.mark.parametrize("module", ["mine", "package.grading"])
def test_whatever_a_module_defines_may_be_the_reward(module: str, function: str) -> None:
    assert issues(module, function) == []


@pytest.mark.parametrize("module", ["a\0b", "a*", "a b.c"])
def test_what_cannot_be_a_module_is_not_looked_for(module: str) -> None:
    assert issues(module, "score")[0].endswith('Try: the name of a module, such as "my_rewards" for my_rewards.py')


@pytest.mark.parametrize("module", ["star", "broken", "pickle", "sys"])
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
    assert str(Path.cwd()) in issue and "put nowhere.py here, or add its folder to" in issue


def test_a_module_beside_the_folders_that_are_searched_is_named() -> None:
    Path("beside.py").write_text("def score(response, reference):\n    return 1.0\n")
    Path("elsewhere").mkdir()
    own = {"reward.type": "custom", "reward.custom_module": "beside", "model.model": "builtin:tiny"}
    config = load_config(None, own | {"plugins.search_paths": ["elsewhere"], "data.source": "arithmetic"})
    (issue,) = map(str, find_reward_issues(config))
    assert f"there is no such module (looked in {Path('elsewhere').absolute()})." in issue
    assert issue.endswith('It is in the working directory.  Try: [plugins] search_paths = ["elsewhere", "."]')


@pytest.mark.slow  # in a process that loads a model, too
def test_the_process_that_tries_a_reward_does_not_search_the_working_directory() -> None:
    Path("beside.py").write_text("def score(response, reference):\n    return 1.0\n")
    Path("elsewhere").mkdir()
    own = {"reward.type": "custom", "reward.custom_module": "beside", "model.model": "builtin:tiny"}
    config = load_config(None, own | {"plugins.search_paths": ["elsewhere"], "data.source": "arithmetic"})
    with trial.start_trials(config) as wait:
        (problem,) = [each.problem for each in wait() if each.where == "[reward]"]
    assert "there is no such module" in problem


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"algorithm.advantage_mode": "min.adv"},
            """[algorithm] advantage_mode = "min.adv": there is no module 'min' (""",
        ),
        ({"reward.type": "nowhere:Reward"}, """[reward] type = "nowhere:Reward": there is no module 'nowhere' ("""),
        (
            {"reward.terms": [{"type": "no.Reward"}]},
            """[reward] terms[0].type = "no.Reward": there is no module 'no' (""",
        ),
        ({"environment.provider": "nowhere.Env"}, """[environment] provider = "nowhere.Env": there is no module"""),
        (
            {"environment.provider": "verifiers", "environment.id": "me/nowhere"},
            "[environment] id = 'me/nowhere' is not installed: there is no module 'nowhere'.",
        ),
        ({"environment.provider": "verifiers", "environment.id": "me/nowhere", "environment.auto_install": True}, ""),
        ({"environment.provider": "verifiers", "environment.id": "harbor"}, ""),
        (
            {"environment.provider": "builtin", "environment.id": "guess_number"},
            '[environment] id = "guess_number" is not a built-in environment.',
        ),
        (
            {"algorithm.advantage_mode": "regular.gradin:score"},
            """[algorithm] advantage_mode = "regular.gradin:score": there is no module 'regular.gradin' (""",
        ),
        (
            {"algorithm.advantage_mode": "mine.inner:score"},
            """[algorithm] advantage_mode = "mine.inner:score": there is""",
        ),
        ({"algorithm.advantage_mode": "regular.grading:score"}, ""),
        ({"algorithm.advantage_mode": "os.path:join"}, ""),
        ({"eval.source": "nowhere.Rows", "eval.every": 0}, ""),
        ({"eval.source": "nowhere.Rows", "eval.every": 2}, '[eval] source = "nowhere.Rows": there is no module'),
        ({"planning.detector": "nowhere.Detector", "algorithm.transform_mode": "gtpo"}, ""),
        (
            {"planning.detector": "nowhere.Detector", "algorithm.transform_mode": "gtpo_sepa"},
            '[planning] detector = "nowhere.Detector": there is no module',
        ),
        ({"environment.provider": "package.grading", "reward.type": "nowhere.Reward"}, ""),
        ({"algorithm.advantage_mode": "mine.score"}, ""),
        ({"algorithm.algorithm_mode": "mine.score", "algorithm.advantage_mode": "nowhere.adv"}, ""),
    ],
)
def test_a_plugin_whose_module_is_missing_is_reported(options: dict[str, object], expected: str) -> None:
    found = [f"{issue.where} {issue.text}" for issue in find_missing_plugins(load_config(None, options))]
    assert len(found) == bool(expected) and all(text.startswith(expected) for text in found)


def test_a_module_that_a_package_lacks_is_answered_with_those_that_it_has() -> None:
    assert issues("regular.gradin", "score")[0].endswith("Did you mean 'regular.grading'?")
    # Without an __init__.py, too.
    assert issues("package.gradin", "score")[0].endswith("Did you mean 'package.grading'?")
    assert issues("package.elsewhere", "score")[0].endswith("The package package has no elsewhere.")
    assert issues("regular.other", "score")[0].endswith("The package regular has no other.")
    assert issues("mine.inner", "score")[0].endswith("The module mine has no inner.")
    assert issues("regular", "score")[0].endswith("It defines no function.")
    assert issues("regula", "score")[0].endswith("Did you mean 'regular'?")
    assert suggest_module("regular/grading.py") == 'Try: "regular.grading"'
    Path("source").mkdir()
    Path("regular").rename("source/regular")
    assert suggest_module("source/regular/grading.py:score") == (
        'Try: "regular.grading:score", and [plugins] search_paths = ["source"]'
    )


def test_a_module_in_a_folder_of_the_working_directory_is_answered_with_its_package() -> None:
    Path("other_grading.py").touch()
    assert issues("grading", "score")[0].endswith("Did you mean 'package.grading'?")


def test_a_module_in_a_zip_file_is_left_to_its_import() -> None:
    with ZipFile("parts.zip", "w") as parts:
        parts.writestr("zipped.py", SOURCE)
    options = {"reward.type": "custom", "reward.custom_module": "zipped", "plugins.search_paths": ["parts.zip"]}
    config = load_config(None, options)
    assert [*find_reward_issues(config), *find_missing_plugins(config)] == []


def test_explain_reports_a_missing_plugin_as_the_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    Path("retrain.toml").write_text('[backend]\ndevices = "cpu"\n[environment]\nprovider = "min.Env"\n')
    given = ["--model", "builtin:tiny", "--max-tokens", "8"]
    for command, code in (["explain"], 1), ([], 2):
        assert run([*command, *given]) == code
        out, err = capsys.readouterr()
        assert '[environment] provider = "min.Env": there is no module' in out + err
        assert "Did you mean 'mine'?" in out + err


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


def test_a_function_that_takes_the_reference_first_is_refused() -> None:
    # Called by position, it would compare the two the wrong way round.
    def reward(reference: str, response: str) -> float:
        return float(reference in response)

    def sound(response: str, reference: str) -> float:
        return float(reference in response)

    with pytest.raises(PluginError, match="takes the reference first, and is called with the response first"):
        named_extras(reward)
    assert named_extras(sound) == ()


def test_the_command_line_reports_it_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "retrain.trainer", None)
    Path("retrain.toml").write_text(
        '[reward]\ntype = "custom"\ncustom_module = "nowhere"\n[backend]\ndevices = "cpu"\n'
    )
    assert run(["--model", "builtin:tiny", "--max-tokens", "8", "--data.source", "arithmetic"]) == 2
    assert "there is no such module" in capsys.readouterr().err
