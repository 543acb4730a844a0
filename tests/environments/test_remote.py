"""Environments in their own process: what comes of a rollout that hangs, crashes or leaks, and of its neighbours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import slow
from pausing import linux_only, pause

from retrain.config.schema import Environment as Section
from retrain.environments import build_environment
from retrain.environments.remote import RemoteEnvironment
from retrain.environments.runner import EnvironmentRunner
from retrain.errors import ConfigError, PluginError, RolloutError
from retrain.types import Example, Group, Sampling
from tests.environments.table import TextEngine, play, player

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])
LIMIT_S = 3.0


@contextmanager
def remote(log: Callable[[str], None] = lambda _: None, **section: Any) -> Iterator[RemoteEnvironment]:
    environment = RemoteEnvironment(Section(**section), [HERE], log)
    try:
        yield environment
    finally:
        environment.end()


@contextmanager
def cases(when: str, log: Callable[[str], None] = lambda _: None, **args: Any) -> Iterator[EnvironmentRunner]:
    args = {"when": when, **args}
    with remote(log, provider="remote_cases.Cases", args=args, timeout_s=LIMIT_S) as environment:
        own = player(environment, log, timeout_s=LIMIT_S)
        try:
            yield own
        finally:
            own.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sample(
    own: EnvironmentRunner, engine: TextEngine | None = None, examples: Sequence[Example] | None = None
) -> list[Group]:
    chosen = examples if examples is not None else own.environment.examples("train")[:4]
    return own.sample_and_score(engine or TextEngine(lambda _: "2"), chosen, Sampling(max_tokens=64, n=1)).groups


def outcomes(groups: Sequence[Group]) -> list[str]:
    return [score.outcome for group in groups for score in group.scores_G]


@pytest.mark.parametrize("id", ["calculator", *slow("guess-number", "arithmetic")])
def test_a_rollout_is_the_same_here_and_there(id: str) -> None:
    section = {"provider": "builtin", "id": id}
    answers = {"guess-number": r"\boxed{5}", "calculator": '{"name": "calculate", "arguments": {"expression": "2*3"}}'}

    def answer(prompt: str) -> str:
        return answers.get(id, r"\boxed{4}")

    here = play(build_environment(Section(**section), (), lambda _: None), answer)
    with remote(**section) as environment:
        there = play(environment, answer)
    for one, other in zip(here, there, strict=True):
        assert (one.example.prompt, one.example.reference) == (other.example.prompt, other.example.reference)
        assert one.scores_G == other.scores_G
        for mine, its in zip(one.completions_G, other.completions_G, strict=True):
            assert np.array_equal(mine.token_ids_T, its.token_ids_T) and mine.transcript == its.transcript


def test_endless_examples_are_drawn_there_by_the_same_seed() -> None:
    here: Any = build_environment(Section(provider="builtin", id="arithmetic"), (), lambda _: None).examples("train")
    with remote(provider="builtin", id="arithmetic") as environment:
        there: Any = environment.examples("train")
        for seed in (0, 7):
            mine, its = here.reseed(seed), there.reseed(seed)
            assert [example.prompt for example in mine[:5]] == [example.prompt for example in its[:5]]
            assert mine[9].prompt == its[9].prompt
        with pytest.raises(IndexError):
            there[-1]


@pytest.mark.parametrize("when", ["sleep", *slow("regex in a thread", "regex")])
def test_a_rollout_that_blocks_the_event_loop_is_a_timeout_and_the_others_continue(when: str) -> None:
    logged: list[str] = []
    with cases(when, logged.append) as own:
        began = time.monotonic()
        groups = sample(own)
        assert outcomes(groups) == ["timeout", "right", "right", "right"]
        assert time.monotonic() - began < LIMIT_S + 20
        (score,) = groups[0].scores_G
        assert score.detail.startswith(f"no result after {LIMIT_S:g} s: its process did not respond and was killed")
        assert "remote_cases.py" in score.detail and "worker.py" not in score.detail
        assert "Restarting environment 'remote_cases.Cases': its process did not respond" in logged
        assert sum(line.startswith("loading with") for line in logged) == 1
        # The next step has a process again.
        assert outcomes(sample(own, examples=own.environment.examples("train")[1:4])) == ["right"] * 3


@linux_only
@pytest.mark.parametrize("allowed", [1, 0])
def test_a_process_that_is_killed_while_the_model_samples_is_started_again(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    monkeypatch.setattr("retrain.environments.remote._DEATHS", allowed)
    logged: list[str] = []
    killed: list[int] = []

    def answer(prompt: str) -> str:
        process = own.environment._process  # type: ignore[attr-defined]
        if not killed:
            # One that still ran would be blamed.
            while process._liveness.running():
                time.sleep(0.01)
            killed.extend(children_of(process._guarded.process.pid))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            while process.is_alive:
                time.sleep(0.01)
        return "2"

    with cases("nothing", logged.append) as own:
        if not allowed:
            with pytest.raises(RolloutError, match="its process died: Killed"):
                sample(own, TextEngine(answer))
        else:
            assert outcomes(sample(own, TextEngine(answer))) == ["right"] * 4
    assert any("its process died: Killed" in line for line in logged)


@pytest.mark.parametrize("when", ["late sleep", *slow("late death")])
def test_a_rollout_that_blocks_the_process_of_lazy_examples_is_one_failure(when: str) -> None:
    # As in an evaluation; the others are complete when the last rollout begins to block.
    with cases(when) as own:
        groups = sample(own, examples=own.environment.examples("train")[::-1])
        assert outcomes(groups)[:3] == ["right"] * 3 and groups[3].scores_G[0].failed


def test_a_restarted_environment_uses_the_code_of_the_first(tmp_path: Path) -> None:
    source = """
import os
from retrain.environments import Outcome
from retrain.types import Example

class Mine:
    def __init__(self, section, log): ...
    def examples(self, split): return [Example(f"{n}?", "", id=str(n)) for n in range(2)]
    async def rollout(self, example, chat):
        await chat.ask(str(example.prompt))
        if example.id == "0":
            os._exit(5)
        return Outcome(0.5)
"""
    (tmp_path / "edited_env.py").write_text(source)
    environment = RemoteEnvironment(Section(provider="edited_env.Mine"), [str(tmp_path)], lambda _: None)
    try:
        (tmp_path / "edited_env.py").write_text(source.replace("0.5", "123.0"))
        own = player(environment, lambda _: None)
        groups = sample(own, examples=list(environment.examples("train")))
        assert groups[0].scores_G[0].failed and groups[1].scores_G[0].value == 0.5
        own.close()
    finally:
        environment.end()


def test_an_environment_that_always_hangs_stops_the_run_after_a_few_rollouts() -> None:
    with cases("sleep") as own:
        began = time.monotonic()
        with pytest.raises(
            RolloutError, match=r"3 of 16 rollouts so far .*it hung 3 times in a row, and no rollout got further"
        ):
            sample(own, examples=[own.environment.examples("train")[0]] * 16)
        assert time.monotonic() - began < 3 * (LIMIT_S + 5)


@pytest.mark.slow
def test_rollouts_of_one_problem_that_hang_do_not_stop_the_others() -> None:
    with cases("sleep") as own:
        bad, good, *_ = own.environment.examples("train")[:4]
        groups = sample(own, examples=[bad] * 4 + [good] * 5)
        assert outcomes(groups) == ["timeout"] * 4 + ["right"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("places", [(0, 5), (0, 3), (0, 1)])
def test_two_problems_of_six_that_hang_do_not_stop_the_others(places: tuple[int, int]) -> None:
    with cases("sleep") as own:
        bad, good, *_ = own.environment.examples("train")[:4]
        hangs = [at // 2 in places for at in range(12)]
        groups = sample(own, examples=[bad if hang else good for hang in hangs])
        assert outcomes(groups) == ["timeout" if hang else "right" for hang in hangs]


@pytest.mark.parametrize(
    ("when", "detail"),
    [
        ("segfault", "its process died: Segmentation fault"),
        *slow(("die", "its process exited with status 5")),
        ("exit", "SystemExit: 3"),
        ("object", "the environment sent a message that is not plain data: Object of type object"),
    ],
)
def test_a_rollout_that_ends_its_process_is_an_error_of_its_own(when: str, detail: str) -> None:
    with cases(when) as own:
        groups = sample(own)
    assert outcomes(groups) == ["error", "right", "right", "right"]
    assert groups[0].scores_G[0].detail.startswith(detail)


def test_an_exception_shows_where_it_was_raised_without_our_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    with cases("leak") as own:
        groups = sample(own)
    summary, *trace = groups[0].scores_G[0].detail.splitlines()
    assert summary == trace[-1] == "RuntimeError: could not reach https://***@host.example"
    assert trace[0] == "Traceback (most recent call last):"
    frames = [line for line in trace if line.startswith("  File ")]
    assert all("remote_cases.py" in frame for frame in frames) and frames[-1].endswith("in _misbehave")


def test_an_exception_in_the_constructor_shows_where_it_was_raised() -> None:
    with pytest.raises(PluginError) as raised, remote(provider="remote_cases.Broken"):
        pass
    message, *trace = str(raised.value).splitlines()
    named = (
        "environment provider 'remote_cases.Broken' raised KeyError('path') when it was built (remote_cases.py, line "
    )
    assert message.startswith(named)
    assert 'remote_cases.py", line' in trace[1] and trace[-1] == "KeyError: 'path'"


def test_a_rollout_that_only_waits_is_cancelled_and_its_process_lives_on() -> None:
    logged: list[str] = []
    with cases("never", logged.append) as own:
        groups = sample(own)
    assert outcomes(groups) == ["timeout", "right", "right", "right"]
    assert "of the environment's own time" in groups[0].scores_G[0].detail
    assert not [line for line in logged if line.startswith("Restarting")]


@pytest.mark.slow
def test_turns_taken_before_a_restart_are_not_sampled_again() -> None:
    engine = TextEngine(lambda _: "2")
    with cases("regex") as own:
        groups = sample(own, engine)
    assert outcomes(groups) == ["timeout", "right", "right", "right"]
    # Four first turns, and a second one of the three that were not to blame.
    assert sum(engine.sizes) == 7
    assert [len(group.completions_G[0].transcript) for group in groups[1:]] == [4, 4, 4]


@pytest.mark.slow
def test_a_rollout_that_does_not_repeat_itself_after_a_restart_is_an_error() -> None:
    examples = 2
    with cases("whim") as own, pytest.raises(Exception, match="failed for 2 of 2 rollouts") as caught:
        sample(own, examples=own.environment.examples("train")[:examples])
    assert caught.type.__name__ == "RolloutError"


@pytest.mark.slow
def test_an_example_that_cannot_be_had_ends_the_wait_for_it() -> None:
    with cases("example") as own:
        examples = own.environment.examples("train")
        assert outcomes(sample(own, examples=examples[:2])) == ["right", "right"]
        began = time.monotonic()
        with pytest.raises(PluginError, match=r"returned no examples: its process did not respond for 3 s"):
            examples[20]
        assert time.monotonic() - began < LIMIT_S + 10


@linux_only
def test_a_pause_of_the_whole_run_is_no_timeout() -> None:
    logged: list[str] = []
    with cases("work", logged.append) as own, pause(LIMIT_S + 2.0, after_s=0.5):
        assert outcomes(sample(own)) == ["right"] * 4
    assert not [line for line in logged if "Restarting" in line]


def test_errors_keep_their_kind() -> None:
    with (
        pytest.raises(ConfigError, match="cannot take these args"),
        remote(provider="builtin", id="guess-number", args={"tpo": 3}),
    ):
        pass
    with pytest.raises(PluginError, match="no module 'absent'"), remote(provider="absent.Thing"):
        pass
    with remote(provider="builtin", id="guess-number") as environment:
        environment.end()
        with pytest.raises(Exception, match="the environment has ended"):
            environment.examples("train")


def test_what_an_environment_prints_and_raises_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_KEY", "opensesame99")
    logged: list[str] = []
    with cases("leak", logged.append) as own:
        groups = sample(own)
    assert "the key is ***" in logged
    assert not [line for line in logged if "opensesame99" in line]
    assert groups[0].scores_G[0].outcome == "error"


def has_process(command: str) -> bool:
    return command in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()


def appears(command: str) -> bool:
    """A started process has its name only after exec, which a busy machine delays."""
    return any(has_process(command) or time.sleep(0.05) for _ in range(200))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a guard adopt orphans")
def test_what_an_environment_started_ends_with_it() -> None:
    with cases("daemon") as own:
        sample(own)
        assert appears("sleep 605")
    assert not has_process("sleep 605")


TOML = """
[backend]
devices = "cpu"
adapter_path = "adapter"
[model]
model = "builtin:tiny"
lora_rank = 8
[training]
max_steps = 3
batch_size = 2
group_size = 2
max_tokens = 8
[environment]
provider = "remote_cases.Cases"
args = {{ when = "{when}" }}
timeout_s = 500
[plugins]
search_paths = ["{here}"]
[logging]
log_dir = "logs"
"""


@pytest.mark.parametrize("when", ["build", pytest.param("regex", marks=pytest.mark.slow)])
def test_a_run_whose_environment_holds_the_gil_can_be_stopped(tmp_path: Path, when: str) -> None:
    (tmp_path / "run.toml").write_text(TOML.format(when=when, here=HERE))
    with subprocess.Popen(
        [sys.executable, "-m", "retrain", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        while (line := run.stdout.readline()) != "about to hang\n":
            assert line
        time.sleep(1.0)
        run.send_signal(signal.SIGTERM)
        began = time.monotonic()
        run.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert not [line for line in _commands() if "retrain.environments.worker" in line and str(tmp_path) in line]


def _commands() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
