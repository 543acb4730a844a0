"""What `retrain doctor` tries out, in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from retrain.cli import doctor, run, trial, trial_prompts
from retrain.config import TrainConfig, build_config, dump_config, load_config
from retrain.errors import ConfigError, RetrainError
from retrain.plugins import SERVER_ENGINES
from retrain.storage.publishing import is_alive

HERE = {
    "backend.devices": "cpu",
    "model.model": "builtin:tiny",
    "data.source": "arithmetic",
    "training.max_tokens": 32,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def try_out(config: TrainConfig) -> list[trial.Trial]:
    with trial.start_trials(config) as wait:
        return wait()


def outcomes(**options: Any) -> dict[str, tuple[str, str]]:
    """The result of each trial except the tokenizer, which has its own test."""
    config = load_config(None, HERE | {key.replace("__", "."): value for key, value in options.items()})
    found = {}
    for where, attempt in trial._trials(config):
        if "tokenizer" not in where:
            try:
                result = attempt(config)
                found[where] = (result.text if isinstance(result, trial.Doubt) else result, "")
            except Exception as error:
                found[where] = ("", str(error))
    return found


class Healthy(BaseHTTPRequestHandler):
    models: object = {"data": [{"id": "tiny"}]}

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/health", "/v1/models") else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(self.models if self.path == "/v1/models" else {}).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_prompts_of_a_file_are_measured(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "why " * 300, "answer": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    detail, problem = outcomes(data__source="jsonl", data__path=str(path))["[data], prompts"]
    assert not detail and "do not fit the model's context of 256" in problem and "max_prompt_tokens" in problem
    cut = outcomes(data__source="jsonl", data__path=str(path), training__max_prompt_tokens=64)["[data], prompts"]
    assert cut[0].startswith("of 2 prompts, 1 cut to [training] max_prompt_tokens = 64, from the left.") and not cut[1]
    # The whole prompt would not fit, so the advice is not to keep it whole.
    assert "Try: shorter prompts, or a model with a longer context" in cut[0]
    path.write_text(json.dumps(rows[0] | {"prompt": "why " * 20}))
    short = outcomes(data__source="jsonl", data__path=str(path), training__max_prompt_tokens=16)["[data], prompts"]
    assert short[0].endswith("Try: max_prompt_tokens = 0, or shorter prompts")
    path.write_text(json.dumps(rows[0]))
    detail, problem = outcomes(data__source="jsonl", data__path=str(path))["[data], prompts"]
    assert "of 256 tokens" in detail and not problem


def test_the_prompts_of_each_file_are_measured_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "why " * 300, "answer": "2"}))
    held_out = {"eval__every": 1, "eval__source": "jsonl", "eval__path": str(path)}
    found = outcomes(data__source="arithmetic", **held_out)
    assert "tokens in [eval] do not fit the model's context of 256" in found["[eval], prompts"][1]
    assert "[data], prompts" not in found
    found = outcomes(data__source="jsonl", data__path=str(path), eval__every=1, eval__source="arithmetic")
    assert "tokens in [data] do not fit" in found["[data], prompts"][1] and "[eval], prompts" not in found


def test_generated_prompts_are_measured_where_little_room_is_left() -> None:
    assert "[data], prompts" not in outcomes(data__source="arithmetic", training__max_tokens=128)
    detail, problem = outcomes(data__source="arithmetic", training__max_tokens=250)["[data], prompts"]
    assert not detail and problem.endswith("do not fit the model's context of 256.  Try: max_tokens = 243")
    prompt = {"data__system_prompt": "1+2-3 " * 60}
    assert "tokens in [data] do not fit" in outcomes(data__source="arithmetic", **prompt)["[data], prompts"][1]


def test_the_templates_of_teaching_count_in_the_context() -> None:
    options = {"teaching__enabled": True, "teaching__max_probe_tokens": 10, "algorithm__advantage_mode": "grpo"}
    for max_tokens, fits in ((150, False), (40, True)):
        detail, problem = outcomes(training__max_tokens=max_tokens, **options)["[data], prompts"]
        assert bool(detail) == fits
        assert ("the teacher reads up to" in problem and "do not fit its context of 256" in problem) != fits


def test_prompts_of_teaching_that_are_cut_are_a_warning() -> None:
    options = {"teaching__enabled": True, "teaching__max_probe_tokens": 10, "algorithm__advantage_mode": "grpo"}
    detail, problem = outcomes(training__max_prompt_tokens=24, **options)["[data], prompts"]
    assert "the teacher reads up to" in detail and "max_prompt_tokens = 24 keeps only the last ones" in detail
    assert "Try: a larger max_prompt_tokens, a shorter template, or shorter questions" in detail and not problem


def test_held_out_rows_that_are_also_trained_on_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rows.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    files = {"data.source": "jsonl", "data.path": "rows.jsonl", "eval.every": 1, "eval.path": "held_out.jsonl"}
    found = trial._try_prompts(load_config(None, HERE | files), "[eval]")
    assert isinstance(found, trial.Doubt) and "; 1 of 1 are also in [data].  Try: set [eval] path" in found.text
    cut = trial._try_prompts(load_config(None, HERE | files | {"training.max_prompt_tokens": 4}), "[eval]")
    assert isinstance(cut, trial.Doubt) and "1 cut to" in cut.text and "; 1 of 1 are also in [data]." in cut.text
    result = trial.Trial("[eval], prompts", found.text, is_warning=True)
    monkeypatch.setattr(doctor, "start_trials", lambda config: nullcontext(lambda: [result]))
    monkeypatch.setattr(doctor, "probe_torch", lambda: {"cuda": None, "available": False, "gpus": []})
    (tmp_path / "run.toml").write_text(dump_config(load_config(None, HERE)))
    assert run(["doctor", "run.toml", "--json"]) == 0
    (check,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "[eval], prompts"]
    assert check["status"] == "warning" and check["fix"].startswith("set [eval] path")


def test_a_file_that_cannot_be_loaded_is_left_to_the_check_of_files(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_text(json.dumps({"prompt": "1 + 1?"}))
    good.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    for training, held_out, table in ((bad, good, "[data]"), (good, bad, "[eval]")):
        found = outcomes(data__source="jsonl", data__path=str(training), eval__every=1, eval__path=str(held_out))
        blank = {where for where, result in found.items() if result == ("", "")}
        assert blank == {f"{table}, prompts"} and len(found) == 2
        assert not any(problem for _, problem in found.values())


def test_a_plain_configuration_has_only_its_tokenizer_to_try() -> None:
    assert outcomes() == {}
    assert [where for where, _ in trial._trials(load_config(None, HERE))] == ["[model] model, tokenizer"]


@pytest.mark.parametrize("engine", sorted(SERVER_ENGINES))
def test_a_server_is_asked(engine: str, server: str) -> None:
    there = outcomes(inference__engine=engine, inference__url=server)
    assert there == {"[inference] engine": (f"{server} responded", "")}
    away = outcomes(inference__engine=engine, inference__url="http://127.0.0.1:1")["[inference] engine"][1]
    assert f"no {engine} server responds at http://127.0.0.1:1: " in away and "Try: " in away
    assert outcomes(inference__engine=engine)["[inference] engine"][1]


def test_a_server_of_another_kind_or_model_is_missing(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(self: Healthy) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"tokens": [1, 2, 3]}')

    monkeypatch.setattr(Healthy, "do_POST", tokenize, raising=False)
    options = {"inference__engine": "vllm", "inference__url": server}
    assert "has a different tokenizer than" in outcomes(**options)["[inference] engine"][1]
    for other in ("a page", {"data": None}, {"data": ["tiny"]}):
        monkeypatch.setattr(Healthy, "models", other)
        problem = outcomes(**options)["[inference] engine"][1]
        assert "is not a vllm server: /v1/models returned something else than a list of models." in problem


def test_a_judge_is_asked_whether_it_is_there(server: str) -> None:
    there = outcomes(reward__type="judge", reward__judge_base_url=f"{server}/v1")
    assert there == {"[reward] judge_base_url": (f"{server}/v1 responded", "")}
    away = outcomes(reward__type="judge", reward__judge_base_url="http://127.0.0.1:1/v1")
    assert "no judge responds at http://127.0.0.1:1/v1: " in away["[reward] judge_base_url"][1]


@pytest.mark.parametrize(
    ("status", "is_there"), [(403, True), (404, True), (405, True), (500, True), (501, True), (503, False)]
)
def test_a_judge_that_only_answers_requests_of_a_run_is_there(
    server: str, monkeypatch: pytest.MonkeyPatch, status: int, is_there: bool
) -> None:
    monkeypatch.setattr(Healthy, "do_GET", lambda self: self.send_error(status))
    _, problem = outcomes(reward__type="judge", reward__judge_base_url=server)["[reward] judge_base_url"]
    assert problem == "" if is_there else f"it returned {status}." in problem


def test_a_judge_that_refuses_the_key_is_missing(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def do_GET(self: Healthy) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer sk-right" else 401)
        self.end_headers()

    monkeypatch.setattr(Healthy, "do_GET", do_GET)
    for key, expected in (("sk-right", ""), ("sk-wrong", "it returned 401."), ("", "it returned 401.")):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        _, problem = outcomes(reward__type="judge", reward__judge_base_url=server)["[reward] judge_base_url"]
        assert expected in problem and bool(problem) is bool(expected) and "sk-" not in problem


def test_a_server_to_start_needs_its_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    found = outcomes(inference__engine="vllm", inference__launch=True)
    assert "no vllm command in this environment" in found["[inference] launch"][1]


def test_plug_ins_are_imported_and_looked_at(folder: Path) -> None:
    (folder / "tried_parts.py").write_text(
        "from retrain.types import Example\n"
        "class Source:\n    def __init__(self, section): pass\n    def load(self): return [Example('1+1=', 2)]\n"
        "class Absent(Source):\n    def load(self): return open('corpus.txt').read()\n"
        "def score(response, reference): return 1.0\ndef advantage(rewards): return rewards\nnothing = 5\n"
    )
    sound = outcomes(
        algorithm__advantage_mode="tried_parts.advantage",
        data__source="tried_parts.Source",
        reward__type="custom",
        reward__custom_module="tried_parts",
    )
    assert {where: problem for where, (_, problem) in sound.items()} == {
        "[algorithm]": "",
        "[data] source": "",
        "[reward]": "",
    }
    assert sound["[data] source"][0] == "tried_parts.Source loaded: 1 example"
    absent = outcomes(data__source="tried_parts.Absent")["[data] source"]
    assert "raised FileNotFoundError" in absent[1] and "in load" in absent[1]
    broken = outcomes(
        algorithm__transform_mode="tried_parts.nothing",
        data__source="tried_parts.nothing",
        reward__type="custom",
        reward__custom_module="no_such_module_here",
    )
    assert "is int, not a TransformSpec" in broken["[algorithm]"][1]
    assert "must be a class that takes the [data] table" in broken["[data] source"][1]
    assert "no_such_module_here" in broken["[reward]"][1]


def test_losses_and_detectors_are_made(folder: Path) -> None:
    (folder / "tried_raising.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "tried_detector.py").write_text(
        "class Detector:\n    @classmethod\n    def from_config(cls): return cls()\n    def detect(self, texts): pass\n"
    )
    broken = outcomes(loss__type="tried_raising.Loss", planning__detector="tried_detector.Detector")
    assert "no licence" in broken["[loss] type"][1]
    assert "in from_config" in broken["[planning] detector"][1]


def test_an_environment_is_made(folder: Path) -> None:
    made = outcomes(environment__provider="builtin", environment__id="guess-number")
    assert made == {
        "[environment] provider": ("guess-number loaded: 9 examples; prompts take up to 7 of 256 tokens", "")
    }
    assert outcomes(environment__provider="builtin", environment__id="nonsense")["[environment] provider"][1]


ENVIRONMENT = """
import asyncio, os, sys, time
from retrain.environments import Outcome
from retrain.types import Example

class Sound:
    def __init__(self, section, log): pass
    def examples(self, split): return [Example(f"{n}+1=?", str(n + 1), id=str(n)) for n in range(9)]
    async def rollout(self, example, chat):
        await chat.ask(example.prompt)
        return Outcome(0.0)

class NoTest(Sound):
    def examples(self, split): return super().examples(split) if split == "train" else []

class Raising(Sound):
    def examples(self, split): return super().examples(split) if split == "train" else {}["no such split"]

class NoTrain(Sound):
    def examples(self, split): return []

class WrongType(Sound):
    def examples(self, split): return ["1+1=?"]

class Long(Sound):
    def examples(self, split): return [Example("1+1=?", "2", id="1"), Example("1+1=?" * 300, "2", id="2")]

class Tools(Sound):
    async def rollout(self, example, chat):
        try:
            await chat.ask(example.prompt, tools=[{"type": "function", "function": {"name": "f" * 300}}])
        except Exception as error:
            raise SystemExit("not the environment's business")

class Wide(Sound):
    async def rollout(self, example, chat): return await chat.ask("1+1=?" * 46)

class Parts(Sound):
    def examples(self, split):
        parts = [{"type": "text", "text": "1+1="}, {"type": "text", "text": "?" + "1+1=?" * 45}]
        return [Example(({"role": "user", "content": parts},), "2", id="1")]
    async def rollout(self, example, chat): return await chat.ask(example.prompt)

class Waiting(Sound):
    async def rollout(self, example, chat): await asyncio.sleep(2)

class Blocking(Sound):
    async def rollout(self, example, chat): await asyncio.to_thread(time.sleep, 2)

class Crashing(Sound):
    async def rollout(self, example, chat): os._exit(3)

class Exiting(Sound):
    async def rollout(self, example, chat): sys.exit(3)

class Failing(Sound):
    async def rollout(self, example, chat): raise RuntimeError

class Silent(Sound):
    async def rollout(self, example, chat): return Outcome(1.0)

class Unawaited(Sound):
    async def rollout(self, example, chat): return Outcome(len(chat.ask(example.prompt).text))
"""


@pytest.mark.parametrize(
    ("name", "evaluates", "detail", "problem"),
    [
        ("Sound", 0, "tried_env.Sound loaded: 9 examples", ""),
        ("Sound", 1, "tried_env.Sound loaded: 9 examples, 4 held out", ""),
        ("NoTest", 0, "tried_env.NoTest loaded: 9 examples", ""),
        ("NoTest", 1, "", "has no rows to evaluate on ([eval] split = 'test').  Try: [eval] every = 0."),
        ("Raising", 1, "", "no such split"),
        ("NoTrain", 0, "", "has no rows to train on.  Try: return at least one Example"),
        ("WrongType", 0, "", "returned str instead of a retrain.types.Example (example 0)"),
        ("Tools", 0, "", "the first turn has 4"),
        ("Wide", 0, "of 256 tokens, which leaves less than [training] max_tokens = 32.  Try: max_tokens = ", ""),
        ("Waiting", 0, "9 examples", ""),
        ("Blocking", 0, "9 examples", ""),
        ("Crashing", 0, "9 examples; a rollout ended its process with status 3 before its first turn", ""),
        ("Exiting", 0, "9 examples; a rollout failed before its first turn: SystemExit: 3", ""),
        ("Failing", 0, "9 examples; a rollout failed before its first turn: RuntimeError", ""),
        ("Silent", 0, "9 examples; a rollout ended without calling the model.  Try: reply = await chat.ask(", ""),
        ("Unawaited", 0, "9 examples; a rollout failed before its first turn: AttributeError: 'coroutine'", ""),
        ("Long", 0, "2 examples; a prompt has 1502 tokens, and the context length is 256.  Try: [training] max_pr", ""),
    ],
)
def test_the_examples_of_an_environment_are_those_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, evaluates: int, detail: str, problem: str
) -> None:
    (folder / "tried_env.py").write_text(ENVIRONMENT)
    monkeypatch.setattr(trial_prompts, "FIRST_TURN_S", 0.1)
    evaluation = {"eval__every": evaluates, "eval__max_examples": 4}
    found = outcomes(environment__provider=f"tried_env.{name}", **evaluation)["[environment] provider"]
    assert detail in found[0] and problem in found[1] and (bool(found[0]), bool(found[1])) != (True, True)


def test_a_prompt_in_parts_is_measured_as_the_run_reads_it(folder: Path) -> None:
    (folder / "tried_env.py").write_text(ENVIRONMENT)
    wide, parts = (
        outcomes(environment__provider=f"tried_env.{name}")["[environment] provider"][0].partition("; ")[2]
        for name in ("Wide", "Parts")
    )
    assert parts == wide != ""


def test_an_environment_is_tried_last_and_long_prompts_may_be_cut(folder: Path) -> None:
    (folder / "tried_env.py").write_text(ENVIRONMENT)
    environment = {"environment.provider": "tried_env.Long"}
    config = load_config(None, HERE | environment)
    assert [where for where, _ in trial._trials(config)] == ["[model] model, tokenizer", "[environment] provider"]
    assert isinstance(trial._try_environment(config), trial.Doubt)
    cut = {"environment.provider": "tried_env.Tools", "training.max_prompt_tokens": 128}
    found = trial._try_environment(load_config(None, HERE | cut))
    assert isinstance(found, trial.Doubt) and "max_prompt_tokens = 128 cuts off its beginning, tools" in found.text
    config = load_config(None, HERE | environment | {"training.max_prompt_tokens": 128})
    assert trial._try_environment(config) == "tried_env.Long loaded: 2 examples"


@pytest.mark.slow
def test_the_process_says_how_each_trial_went(folder: Path) -> None:
    (folder / "tried_loudly.py").write_text("print('trial: hello')\ndef score(response, reference): return 1.0\n")
    options = {"reward.type": "custom", "reward.custom_module": "tried_loudly"}
    reward, tokenizer = try_out(load_config(None, HERE | options))
    assert (reward.where, reward.problem) == ("[reward]", "")
    assert tokenizer == trial.Trial("[model] model, tokenizer", "builtin:tiny: 486 tokens")


def test_a_module_that_ends_the_process_or_never_ends_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = "def score(response, reference):\n    return 1.0\n"
    (folder / "tried_ending.py").write_text(f"import os\nos._exit(3)\n{scores}")
    (folder / "tried_sleeping.py").write_text(f"import time\ntime.sleep(600)\n{scores}")
    ended, _ = try_out(load_config(None, HERE | {"loss.type": "tried_ending.Loss"}))
    assert (ended.where, ended.problem) == ("[loss] type", "the trial process exited with code 3")
    # Rewards have a process of their own.
    options = {"reward.type": "custom", "reward.custom_module": "tried_ending"}
    reward, _ = try_out(load_config(None, HERE | options))
    assert reward.where == "[reward]" and "the reward process exited with status 3" in reward.problem
    monkeypatch.setattr(trial, "TRIAL_S", 3.0)
    slow, untried = try_out(load_config(None, HERE | options | {"reward.custom_module": "tried_sleeping"}))
    assert (slow.is_warning, slow.problem) == (True, "")
    assert untried == trial.Trial("[model] model, tokenizer", "unknown: not tried after that", is_warning=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_doctor_is_stopped(number: int, folder: Path) -> None:
    (folder / "tried_sleeping.py").write_text(
        "import os, subprocess, sys, time\n"
        "waiting = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "children = [os.getpid(), subprocess.Popen(waiting, start_new_session=True).pid]\n"
        "open('started', 'w').write(' '.join(map(str, children)))\ntime.sleep(600)\n"
    )
    (folder / "run.toml").write_text(dump_config(load_config(None, HERE | {"loss.type": "tried_sleeping.Loss"})))
    examined = subprocess.Popen([sys.executable, "-m", "retrain", "doctor", "run.toml"])
    while not (folder / "started").exists() or " " not in (folder / "started").read_text():
        time.sleep(0.05)
    stopped = time.monotonic()
    examined.send_signal(number)
    assert examined.wait() != 0
    pids = (folder / "started").read_text().split()
    while any(is_alive(int(pid)) for pid in pids):
        time.sleep(0.05)
    assert time.monotonic() - stopped < 20  # a second on an idle machine; the trials may take 60


def test_problems_of_the_hub_are_looked_for_in_the_cache_when_it_is_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "is_offline", lambda: False)
    assert outcomes(data__source="gsm8k")["[data] source"] == ("gsm8k comes from the Hub, which is reachable", "")
    monkeypatch.setattr(trial, "is_offline", lambda: True)
    monkeypatch.setattr("retrain.data.gsm8k.load_rows", _absent)
    assert outcomes(data__source="gsm8k")["[data] source"] == ("", "not in the cache")


def _absent(*_: Any) -> Any:
    raise ConfigError("not in the cache")


def test_a_model_that_is_not_there_is_left_to_the_check_of_models(folder: Path) -> None:
    config = load_config(None, HERE | {"model.model": "./nothere"})
    assert [where for where, _ in trial._trials(config)] == []


@pytest.mark.slow
def test_characters_that_pythonioencoding_lacks_reach_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    tokenizer, *_ = try_out(load_config(None, HERE | {"data.system_prompt": "Réponds en français."}))
    assert not tokenizer.problem and "tokens" in tokenizer.detail


def test_the_plugins_of_every_condition_are_tried() -> None:
    conditions = [{"advantage_mode": "grpo"}, {"advantage_mode": "nothere.advantage"}, {"loss.type": "nothere.Loss"}]
    campaign = {"seeds": [1], "max_steps": 1, "conditions": conditions}
    config = build_config({"campaign": campaign}, HERE, "campaign.toml")
    assert [where for where, _ in trial._trials(config)] == ["[algorithm]", "[loss] type", "[model] model, tokenizer"]
    with pytest.raises(RetrainError, match="nothere"):
        next(trial._trials(config))[1](config)
