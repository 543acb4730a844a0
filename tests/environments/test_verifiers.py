"""The bridge to verifiers 0.4 and later, with environments of its own API played by a scripted model."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from retrain.config import build_config
from retrain.config.schema import Environment
from retrain.data import digest_of, is_same_digest
from retrain.environments import build_environment, load_split
from retrain.environments.remote import RemoteEnvironment
from retrain.environments.runner import RolloutScore
from retrain.environments.tasks import EnvironmentTasks
from retrain.environments.verifiers.modules import module_name
from retrain.errors import ConfigError, PluginError, RetrainError, RolloutError
from retrain.tracking.console import Console
from retrain.types import Group
from tests.environments.table import TextEngine, play

PACKAGES = str(Path(__file__).parent / "packages" / "v1")
TRIED = [("primeintellect/gsm8k", "gsm8k"), ("a/Some-Name@1.2.0", "some_name"), ("plain", "plain"), ("x@2", "x")]

pytestmark = pytest.mark.skipif(version("verifiers") < "0.4", reason="this API came with verifiers 0.4")


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environments of this folder, importable here and in tool servers that verifiers starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PACKAGES, os.environ.get("PYTHONPATH", "")]))
    before = list(sys.path)
    yield
    sys.path[:] = before


def build(id: str, logged: list[str] | None = None, **options: Any) -> Any:
    section = Environment(provider="verifiers", id=id, **options)
    return build_environment(section, [PACKAGES], (logged if logged is not None else []).append)


def scores(groups: list[Group]) -> list[float]:
    return [score.value for group in groups for score in group.scores_G]


@pytest.mark.parametrize(("id", "module"), TRIED)
def test_an_id_names_a_module(id: str, module: str) -> None:
    assert module_name(id) == module


@pytest.mark.parametrize("id", ["a/b/c", "../x", "name with blanks", "@1", "a/", "https://x.y/z"])
def test_what_is_no_id_is_rejected(id: str) -> None:
    with pytest.raises(ConfigError, match="is not an environment id"):
        module_name(id)


@pytest.mark.slow
def test_all_data_of_a_task_is_part_of_the_digest_and_the_same_when_loaded_again() -> None:
    section = Environment(provider="verifiers", id="primeintellect/wordle")
    loaded = [list(load_split(build("primeintellect/wordle"), section, "train")[:3]) for _ in range(2)]
    assert len({digest_of(examples) for examples in loaded}) == 1
    edited = [replace(example, meta={**example.meta, "answer": "other"}) for example in loaded[0]]
    assert loaded[0][0].meta["answer"] and not is_same_digest(digest_of(edited), digest_of(loaded[0]))


@pytest.mark.slow
def test_a_multi_turn_environment_runs_its_own_loop() -> None:
    tries = iter(["\\boxed{99}"] * 4 + ["\\boxed{6}"] * 4)
    engine = TextEngine(lambda _: next(tries))
    groups = play(build("primeintellect/wordle", max_turns=2), engine, n=2, count=2)
    assert engine.sizes == [4, 4]
    assert {group.example.reference for group in groups} >= {"6"}
    for group in groups:
        for completion, score in zip(group.completions_G, group.scores_G, strict=True):
            assert isinstance(score, RolloutScore)
            assert score.value == float(group.example.reference == "6")
            assert (score.turns, score.forks) == (2, 0)
            assert score.truncated is (score.value == 0.0)
            assert score.metrics == {"won": score.value, "turns_taken": 2.0}
            assert [message["role"] for message in completion.transcript] == ["user", "assistant"] * 2
            assert completion.sampled_T is not None and not completion.sampled_T.all()


@pytest.mark.slow
def test_a_context_that_is_full_ends_the_rollout_and_it_is_scored() -> None:
    groups = play(build("wordle"), lambda _: "1+1=2. " * 3 + "\\boxed{99}", n=2, count=1, context=80)
    for score in groups[0].scores_G:
        assert isinstance(score, RolloutScore)
        assert (score.value, score.truncated) == (0.0, True)
        assert 1 <= score.turns < 12


def add_by_tool(prompt: str) -> str:
    """What a model says that knows the tool of `adder`."""
    last = prompt.rpartition("<|user|>")[2]
    asked = re.match(r"(\d+) and (\d+)", last)
    if asked is None:
        return str(re.findall(r"\d+", last)[0])
    first, second = asked.groups()
    return f'<tool_call>{{"name": "add", "arguments": {{"first": {first}, "second": {second}}}}}</tool_call>'


@pytest.mark.slow
def test_servers_of_tools_find_modules_in_search_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    section = Environment(provider="verifiers", id="adder")
    environment = RemoteEnvironment(section, [PACKAGES], lambda _: None)
    try:
        groups = play(environment, add_by_tool, n=1, count=1, max_tokens=200, timeout_s=60)
        assert scores(groups) == [1.0]
    finally:
        environment.end()


# verifiers calls tenacity with a parameter that tenacity has renamed.
@pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")
@pytest.mark.slow
def test_tools_reach_the_model_and_are_run_by_the_environment() -> None:
    groups = play(build("me/adder"), add_by_tool, n=2, count=2, max_tokens=200, timeout_s=60)
    assert scores(groups) == [1.0] * 4
    assert [message["role"] for message in groups[0].completions_G[0].transcript] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("when", "detail"),
    [
        ("setup", "no board"),
        ("scoring", "no rule"),
        ("nan", "a reward of nan"),
        ("never ends", "no result after 3 s"),
    ],
)
def test_a_rollout_that_fails_says_where(when: str, detail: str) -> None:
    with pytest.raises(RolloutError, match=f"failed for 2 of 2 rollouts .*{detail}"):
        play(build("troubled", args={"when": when}), lambda _: "2", n=2, count=1, timeout_s=3.0)


@pytest.mark.parametrize(
    ("id", "args", "error", "message"),
    [
        (
            "nowhere/to_be_found",
            {},
            ConfigError,
            "is not installed: there is no module 'to_be_found'.*prime env install",
        ),
        ("to_be_found", {}, ConfigError, 'not installed.*id = "owner/to_be_found"'),
        ("no_exports", {}, PluginError, "defines no `__all__`"),
        ("old-style", {}, ConfigError, r'before 0.4.*pip install "verifiers>=0.1.14,<0.4"'),
        ("needy", {}, PluginError, "needs 'a_package_that_is_not_installed', which is not installed"),
        ("troubled", {"wen": "x"}, ConfigError, "has 'wen', which the environment does not take.  Did you mean 'when'"),
        ("troubled", {"rows": "many"}, ConfigError, r"args\.rows is 'many': Input should be a valid integer"),
        ("only_test", {}, ConfigError, "no rows to train on: its split can only be 'test' or 'validation'.*wordle"),
        ("only_test", {"split": "train"}, ConfigError, r"args\.split is 'train'"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_the_reason(
    id: str, args: dict[str, Any], error: type[RetrainError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        build(id, args=args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"when": "load"}, "could not load its rows: OSError: disk gone"),
        ({"when": "empty prompt"}, "has an empty prompt at row 1"),
        ({"when": "image"}, "more than text in its prompt at row 0"),
        ({"rows": 0}, "no rows to train on: its training split is empty.*primeintellect/gsm8k"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_rejected(args: dict[str, Any], message: str) -> None:
    section = Environment(provider="verifiers", id="troubled", args=args)
    with pytest.raises(RetrainError, match=message):
        load_split(build("troubled", args=args), section, "train")


@pytest.mark.slow
def test_an_environment_without_splits_has_nothing_to_evaluate_on() -> None:
    config = build_config(
        {
            "environment": {"provider": "verifiers", "id": "wordle"},
            "plugins": {"search_paths": [PACKAGES]},
            "eval": {"every": 5},
        },
        {},
        "run.toml",
    )
    with pytest.raises(ConfigError, match="has no rows to evaluate on"):
        EnvironmentTasks(config, Console())


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty search path for commands."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put_command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(("command", "shown"), [("prime", "prime"), ("uv", "uv tool run prime")])
def test_a_missing_environment_is_installed_by_the_prime_cli(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    made = bin_folder / "site"
    made.mkdir()
    monkeypatch.syspath_prepend(str(made))
    source = Path(PACKAGES, "troubled.py")
    name = f"fetched_by_{command}"
    put_command(bin_folder, command, f'echo "$@" > {bin_folder}/called\n/bin/cp {source} {made}/{name}.py')
    logged: list[str] = []
    environment = build(f"owner/{name}@1.0", logged, auto_install=True)
    assert f"Running: {shown} env install owner/{name}@1.0" in logged
    assert (bin_folder / "called").read_text().endswith(f"env install owner/{name}@1.0\n")
    assert len(environment.examples("train")) == 2


def test_an_install_that_fails_is_quoted(bin_folder: Path) -> None:
    put_command(bin_folder, "prime", "echo not found on the hub >&2; exit 4")
    with pytest.raises(ConfigError, match="prime env install a/b failed with exit code 4: not found on the hub"):
        build("a/b", auto_install=True)
    # As through uv, whose progress comes on the other stream.
    put_command(bin_folder, "prime", "echo Installed 49 packages >&2; echo ConnectError: no address; exit 1")
    with pytest.raises(ConfigError, match="exit code 1: Installed 49 packages; ConnectError: no address"):
        build("a/b", auto_install=True)


def test_an_install_that_brings_no_module_is_an_error(bin_folder: Path) -> None:
    put_command(bin_folder, "prime", "exit 0")
    with pytest.raises(ConfigError, match="there is still no module 'b'"):
        build("a/b", auto_install=True)


def test_without_an_owner_nothing_is_installed(bin_folder: Path) -> None:
    put_command(bin_folder, "prime", f"touch {bin_folder}/called")
    with pytest.raises(ConfigError, match="has no owner, so it cannot be installed"):
        build("requests_of_ours", auto_install=True)
    assert not (bin_folder / "called").exists()


def test_without_the_prime_cli_the_error_says_how_to_install_it(bin_folder: Path) -> None:
    with pytest.raises(ConfigError, match="auto_install = true needs the Prime CLI"):
        build("a/b", auto_install=True)
