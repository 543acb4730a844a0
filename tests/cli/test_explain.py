"""`retrain explain`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import plan_runs
from retrain.cli import run
from retrain.config import load_config
from retrain.config.reference import starter
from retrain.modeling.files import find_model
from retrain.storage.checkpoint import Checkpoints
from retrain.storage.logs import FILES


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def _explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = run(["explain", *arguments, "--json"])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (1 if data["blockers"] else 0), "as doctor exits"
    return data


def _write(text: str, name: str = "retrain.toml") -> None:
    Path(name).write_text(text, encoding="utf-8")


def _write_model(folder: Path) -> None:
    """A model of one block as far as its files tell: 2 × 8 × 4 embedding, 4 × 4 layer, a norm."""
    shapes = {
        "model.embed_tokens.weight": [8, 4],
        "model.layers.0.self_attn.q_proj.weight": [4, 4],
        "model.layers.0.mlp.up_proj.weight": [6, 4],
        "model.norm.weight": [4],
        "lm_head.weight": [8, 4],
    }
    header = json.dumps(
        {"__metadata__": {}}
        | {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    ).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 4,
        "vocab_size": 8,
        "intermediate_size": 6,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_training_run_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("quickstart"))
    data = _explain(capsys)
    assert (data["kind"], data["condition"], data["file"]) == ("train", "maxrl+gtpo_sepa", "retrain.toml")
    assert data["step"] == {"prompts": 4, "completions": 32, "turns": 1, "max_tokens": 32 * 1024}
    assert data["engine"] == {"name": "pytorch", "url": None, "backend": "local", "devices": "auto"}
    assert {"path": "training.max_steps", "value": 20, "default": 500} in data["changed"]
    assert data["blockers"] == []
    assert "logs/train/metrics.jsonl" in data["files"]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_that_is_not_there_is_noted(
    has_gpu: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.checks.processes.has_gpu", lambda: has_gpu)
    _write('model = { model = "builtin:tiny" }\ndata = { source = "arithmetic" }\ntraining = { max_tokens = 64 }\n')
    for devices, names_gpu in (("cpu", False), ("auto", False), ("gpu:0", True), ("gpu:0,gpu:1", True)):
        notes = _explain(capsys, "--devices", devices)["notes"]
        assert any("needs a GPU, and here is none" in note for note in notes) is (names_gpu and not has_gpu)


def test_every_log_of_a_run_is_among_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("demo"))
    files = _explain(capsys, "--eval-every", "5", "--debug")["files"]
    assert {f"logs/demo/{name}" for name in FILES} <= set(files)
    assert {"logs/demo/checkpoints/step_.../", "logs/demo/adapter/"} <= set(files)


def test_the_keys_of_the_json_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("demo"))
    data = _explain(capsys)
    assert run(["explain", "--help"]) == 0
    text = capsys.readouterr().out
    for key, value in data.items():
        assert key in text
        for inner in value if isinstance(value, dict) else {}:
            assert inner in text


def test_the_assumed_length_of_prompts_is_shown_with_the_flag_that_changes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write(starter("demo"))
    assert run(["explain"]) == 0
    assert "256 tokens are assumed; for others: retrain plan --prompt-tokens N" in capsys.readouterr().out


@pytest.mark.slow
def test_nobody_reads_the_output(tmp_path: Path) -> None:
    _write(starter("quickstart"))
    command = f'"{sys.executable}" -m retrain explain retrain.toml >&-'
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_flags_of_training_count(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("quickstart"))
    data = _explain(capsys, "--lr", "1e-4", "--batch-size", "2")
    assert {"path": "training.lr", "value": 1e-4, "default": 4e-5} in data["changed"]
    assert data["step"]["completions"] == 16


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("", "train.jsonl has no rows."),
        ('{"question": "1 + 1"}\n', "line 1"),
        ('{"question": "1 + 1", "answer": "2"}', ""),
    ],
)
def test_rows_that_cannot_be_used_are_blockers(capsys: pytest.CaptureFixture[str], rows: str, problem: str) -> None:
    _write(starter("quickstart"))
    Path("train.jsonl").write_text(rows)
    flags = ("--data-source", "jsonl", "--data-path", "train.jsonl", "--eval-every", "0")
    blockers = _explain(capsys, *flags)["blockers"]
    assert [problem in text for text in blockers] == ([True] if problem else [])


def test_turns_and_back_pressure_are_not_hidden_in_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("quickstart"))
    flags = ["--environment.provider", "builtin", "--environment-id", "guess-number", "--backpressure-enabled"]
    data = _explain(capsys, *flags)
    assert (data["step"]["turns"], data["step"]["max_tokens"]) == (None, 32 * 1024)
    assert data["notes"][-2:] == [
        "[backpressure] changes the batch size, from 1 to 64 prompts; memory, tokens and time are those of "
        "batch_size = 4",
        "the environment may take several turns; memory and prompt tokens are those of the first turn",
    ]
    run(["explain", *flags])
    assert "at most 32,768 sampled per step and turn" in capsys.readouterr().out
    assert _explain(capsys, *flags, "--environment.max_turns", "3")["step"]["max_tokens"] == 3 * 32 * 1024


def test_nothing_that_equals_its_default_is_called_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    _write("[campaign]\n[reward]\nterms = []\n[training]\nlr = 4e-5\n")
    assert _explain(capsys)["changed"] == []


def test_a_seed_that_the_run_draws_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 16\n')
    assert run(["explain"]) == 0
    assert re.search(r"^seed +drawn at the start$", capsys.readouterr().out, re.MULTILINE)
    assert run(["explain", "--seed", "3"]) == 0
    assert "drawn at the start" not in capsys.readouterr().out
    assert _explain(capsys)["draws_seed"] and not _explain(capsys, "--seed", "3")["draws_seed"]
    _write(starter("campaign"))
    assert not _explain(capsys)["draws_seed"], "its runs have those of the campaign"


def test_conditions_are_explained_with_their_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 100000\n'
        "[campaign]\nseeds = [1]\n"
        "[[campaign.conditions]]\nbatch_size = 8\ngroup_size = 4\nmax_tokens = 16\n"
        "[[campaign.conditions]]\nbatch_size = 2\ngroup_size = 32\nmax_tokens = 16\n"
    )
    data = _explain(capsys)
    assert data["blockers"] == [], "no run has the length of [training]"
    assert [one["step"]["completions"] for one in data["conditions"]] == [32, 64]
    assert data["step"]["completions"] == 64
    assert run(["explain"]) == 0
    text = capsys.readouterr().out
    assert "2 conditions; what follows is maxrl+gtpo_sepa_batch_size=2_group_size=32_max_tokens=16" in text
    assert "32 of 8 prompts, at most 512 tokens" in text and "64 of 2 prompts, at most 1,024 tokens" in text


def test_a_condition_that_cannot_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
        "[campaign]\nseeds = [1]\n"
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[[campaign.conditions]]\nmax_tokens = 100000\n'
    )
    assert run(["explain", "--json"]) == 1
    (blocker,) = json.loads(capsys.readouterr().out)["blockers"]
    assert blocker.startswith("maxrl+gtpo_sepa_max_tokens=100000: [training] max_tokens = 100000 and a prompt")


def test_a_campaign_shows_every_condition_with_every_seed(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("campaign"))
    data = _explain(capsys, "--campaign.seeds", "[1, 2]")
    assert len(data["runs"]) == 10
    assert data["runs"][0] == {"name": "grpo+none_s1", "condition": "grpo+none", "seed": 1}
    assert data["runs"][-1]["name"] == "maxrl+gtpo_sepa_s2"
    assert data["runs_at_once"] == 1
    assert run(["explain", "--campaign.seeds", "[1, 2]"]) == 0
    assert "maxrl+gtpo_hicra_s2" in capsys.readouterr().out


def test_what_stays_off_is_noted_for_each_condition(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("campaign"))
    assert _explain(capsys)["notes"] == []
    note = "SEPA stays off: it begins after [sepa] delay_steps = 50, and this run has 20 steps."
    assert _explain(capsys, "--campaign-max-steps", "20")["notes"] == [f"maxrl+gtpo_sepa: {note}"]
    _write(starter("quickstart"))
    assert run(["explain", "--max-steps", "20", "--optimizer-warmup-steps", "20"]) == 0
    printed = capsys.readouterr().out
    warmup = "[optimizer] warmup_steps = 20 is not below 20 steps: the learning rate never reaches lr."
    assert f"note: {note}" in printed and f"note: {warmup}" in printed
    assert run(["explain", "--max-steps", "20", "--optimizer-warmup-steps", "0.99"]) == 0
    assert "note: [optimizer] warmup_steps = 0.99 is all of 20 steps: the learning rate" in capsys.readouterr().out


def test_conditions_with_one_label_are_distinguished_by_what_they_override(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        '[campaign]\nseeds = [1]\nparallel = true\n[[campaign.conditions]]\nadvantage_mode = "grpo"\nlr = 1e-4\n'
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\nlr = 1e-5\n'
    )
    data = _explain(capsys)
    assert len({one["name"] for one in data["runs"]}) == 2
    assert data["runs_at_once"] == 2
    shared = _explain(capsys, "--no-parallel", "--share-model")
    assert (shared["runs_at_once"], shared["take_turns"]) == (2, True)
    assert any(file.endswith("/shared.log") for file in shared["files"])


def test_a_condition_that_could_not_run_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[campaign]\n[[campaign.conditions]]\nadvantage_mode = "grppo"\n')
    assert run(["explain"]) == 2
    assert "grppo" in capsys.readouterr().err


def test_a_squeeze_names_its_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[squeeze]\nadapter_path = "nowhere"\noutput_path = "small"\n')
    data = _explain(capsys)
    assert data["adapter"]["exists"] is False
    assert data["files"] == ["small/"]
    assert data["model"] is None
    assert run(["explain"]) == 0
    out, err = capsys.readouterr()
    assert "nowhere (MISSING)" in out and "GPU" not in out + err, "[backend] devices is not used"


def test_a_local_model_is_measured_from_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_model(tmp_path / "model")
    _write('[model]\nmodel = "./model"\nlora_rank = 2\n[backend]\ndevices = "cpu"\n')
    data = _explain(capsys, "--batch-size", "1", "--group-size", "2", "--max-tokens", "10")
    assert data["model"]["found"] == "folder"
    assert data["model"]["parameters"] == 32 + 16 + 24 + 4 + 32
    assert data["model"]["trainable"] == 2 * (4 + 4) + 2 * (6 + 4)
    # Keys and values of one layer, one head of two numbers, for 2 completions with room for 384 tokens (a prompt of
    # 256, 10 drawn, in blocks of 128), in 32 bits. On a CPU nothing of it is left while training.
    memory = data["memory"]
    assert memory["kv_cache_bytes"] == 2 * 1 * 1 * 2 * 2 * 384 * 4
    assert memory["weights_bytes"] == 4 * 108
    parts = [value for key, value in memory.items() if key.endswith("_bytes") and key != "total_bytes"]
    assert memory["total_bytes"] == sum(parts) - memory["kv_cache_bytes"]
    assert memory["frees_cache"] is True
    assert run(["explain"]) == 0
    assert "the KV cache is freed before training" in " ".join(capsys.readouterr().out.split())


def test_a_model_in_the_hub_cache_is_found_without_a_network(tmp_path: Path) -> None:
    _write_model(tmp_path / "hub" / "models--some--thing" / "snapshots" / "abc")
    assert find_model("some/thing").found == "cache"
    assert find_model("some/other").found == "download"
    assert find_model("./other").found == "missing"


def test_what_cannot_be_known_is_reported_as_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[model]\nmodel = "somebody/mystery"\n')
    data = _explain(capsys)
    assert data["model"]["parameters"] is None
    assert set(data["memory"].values()) == {None}
    assert data["time"]["run_seconds"] is None
    assert run(["explain"]) == 0
    assert "unknown" in capsys.readouterr().out


def test_a_size_read_from_a_name_is_called_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[model]\nmodel = "Qwen/Qwen3-4B-Instruct-2507"\n')
    model = _explain(capsys)["model"]
    assert model["parameters"] == 4_000_000_000
    assert "guess" in model["parameters_from"]


def test_time_is_taken_from_measured_steps_of_the_same_size(capsys: pytest.CaptureFixture[str]) -> None:
    _write("[training]\nmax_steps = 100\nbatch_size = 2\ngroup_size = 4\n")
    assert (
        _explain(capsys)["time"]["from"]
        == "no step of this kind and size has been measured in logs/train/metrics.jsonl"
    )
    Path("logs/train").mkdir(parents=True)
    steps = [
        {"step": 0, "batch_size": 2, "group_size": 4, "step_time_s": 1.0},
        {"step": 1, "batch_size": 2, "group_size": 4, "step_time_s": 3.0},
        {"step": 2, "batch_size": 8, "group_size": 4, "step_time_s": 50.0},
    ]
    _write("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 3, "ba', "logs/train/metrics.jsonl")
    _write("[training]\nlr = 1e-3\nbatch_size = 2\ngroup_size = 4\n", "logs/train/config.toml")
    assert _explain(capsys)["time"]["run_seconds"] == 200.0


def test_time_includes_measured_evaluations_and_needs_the_number_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    config = "[training]\nmax_steps = 10\nbatch_size = 2\ngroup_size = 4\n[eval]\nevery = 5\n"
    _write(config)
    Path("logs/train").mkdir(parents=True)
    _write(config, "logs/train/config.toml")
    step = {"step": 0, "condition": "grpo+none", "batch_size": 2, "group_size": 4, "step_time_s": 9.0}
    _write(json.dumps(step | {"eval_time_s": 7.0}) + "\n", "logs/train/metrics.jsonl")
    time = _explain(capsys)["time"]
    assert (time["step_seconds"], time["evaluation_seconds"], time["evaluations"]) == (2.0, 7.0, 3)
    assert time["run_seconds"] == 10 * 2.0 + 3 * 7.0
    assert run(["explain", "--eval-samples", "3"]) == 0
    assert "20 s per run without evaluations" in " ".join(capsys.readouterr().out.split())
    assert run(["explain", "--epochs", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "unknown: epochs count passes" in text and "2.0 s per step, from" in text


@pytest.mark.parametrize(
    "other",
    [
        '[model]\nmodel = "builtin:tiny"\n',
        "[model]\nlora_rank = 8\n",
        '[backend]\ndevices = "cpu"\n',
        '[backend]\nbackend = "tinker"\n',
        '[inference]\nengine = "vllm"\n',
        "[training]\nmax_tokens = 64\n",
        '[data]\nsource = "gsm8k"\n',
        "this is not TOML",
        None,
    ],
)
def test_steps_of_another_model_engine_device_or_length_are_not_used(
    other: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _write("")
    Path("logs/train").mkdir(parents=True)
    _write('{"step": 0, "batch_size": 8, "group_size": 16, "step_time_s": 1.0}\n', "logs/train/metrics.jsonl")
    _write("", "logs/train/config.toml")
    assert _explain(capsys)["time"]["step_seconds"] == 1.0
    if other is None:
        Path("logs/train/config.toml").unlink()
    else:
        _write(other, "logs/train/config.toml")
    assert _explain(capsys)["time"]["step_seconds"] is None


def test_a_campaign_that_is_resumed_with_its_file_is_looked_for_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
    _write(f'{settings}[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n')
    config = load_config(Path("retrain.toml"))
    folder = Path("mine").absolute()
    (one,) = plan_runs(config, folder, "retrain.toml")
    one.folder.mkdir(parents=True)
    Manifest(folder).begin(config, [one])
    _write('{"step": 0, "batch_size": 8, "group_size": 16, "step_time_s": 2.0}\n', f"{one.folder}/metrics.jsonl")
    _write(settings, f"{one.folder}/config.toml")
    data = _explain(capsys, "retrain.toml", "--resume", "mine/")
    assert "mine/manifest.json" in data["files"] and not any("campaign_" in name for name in data["files"])
    assert (data["time"]["step_seconds"], data["time"]["from"]) == (2.0, "the median of 1 step in mine/runs")
    note = "steps and times are those of the whole campaign, including those that are done: retrain status"
    assert note in data["notes"]
    assert run(["plan", "retrain.toml", "--resume", "mine", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["step"]["seconds"] == 2.0 and note in planned["notes"]
    (blocker,) = _explain(capsys, "retrain.toml", "--resume", "mine", "--campaign.seeds", "[2]")["blockers"]
    assert "holds another campaign" in blocker


def test_a_step_that_needs_more_than_the_machine_has_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _write('[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n')
    assert not any("this machine has" in note for note in _explain(capsys)["notes"])
    monkeypatch.setattr("retrain.cli.estimate.machine_memory", lambda: 1_000_000)
    (note,) = (note for note in _explain(capsys)["notes"] if "this machine has" in note)
    assert note.startswith("a step needs about ") and note.endswith(" of memory, and this machine has 1.0 MB")
    assert run(["plan", "retrain.toml"]) == 0
    assert f"note: {note}" in capsys.readouterr().out


def test_a_run_that_is_resumed_elsewhere_is_timed_by_its_own_steps(capsys: pytest.CaptureFixture[str]) -> None:
    settings = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nseed = 1\nmax_tokens = 16\n'
    _write(settings)
    Checkpoints(Path("mine"), 1, print).save(0, {"log_sizes": {}}, lambda folder: None)
    _write(settings, "mine/config.toml")
    _write('{"step": 0, "batch_size": 8, "group_size": 16, "step_time_s": 2.0}\n', "mine/metrics.jsonl")
    data = _explain(capsys, "retrain.toml", "--resume", "mine")
    assert data["blockers"] == [] and "logs/train/metrics.jsonl" in data["files"]
    assert (data["time"]["step_seconds"], data["time"]["from"]) == (2.0, "the median of 1 step in mine/metrics.jsonl")


def test_a_service_samples_and_trains_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[backend]\nbackend = "tinker"\n[model]\nbase_url = "http://there:1"\n')
    engine = _explain(capsys)["engine"]
    assert engine == {"name": "tinker", "url": "http://there:1", "backend": "tinker", "devices": "the service"}


@pytest.mark.parametrize(
    ("key", "value"), [("attention_kernel", "tk"), ("attention_kernel", "cutlass"), ("dtype", "fp4")]
)
def test_a_choice_that_nothing_here_honours_is_reported_as_blocking(
    capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    _write(f'[inference]\n{key} = "{value}"\n')
    wanted = f'[inference] {key} = "{value}" is not supported by the pytorch engine: '
    assert any(line.startswith(wanted) for line in _explain(capsys)["blockers"])
    assert run(["retrain.toml"]) == 2
    assert wanted in capsys.readouterr().err


def test_a_wrong_file_is_explained_as_training_would(capsys: pytest.CaptureFixture[str]) -> None:
    _write("[training]\nlr = -1\n")
    assert run(["explain"]) == 2
    assert "[training] lr must be > 0" in capsys.readouterr().err


def test_json_stays_json_when_there_is_a_dotenv(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("demo"))
    _write("SOME_UNUSED_VARIABLE_OF_A_TEST=1\n", ".env")
    _explain(capsys)
    assert run(["explain"]) == 0


def test_it_loads_no_torch() -> None:
    _write(starter("demo"))
    code = "import sys; from retrain.cli import run; run(['explain']); print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "False"


def test_a_student_is_named_and_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        '[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 32\n[algorithm]\nadvantage_mode = "grpo"\n'
        '[teaching]\nenabled = true\nstudent_model = "./student"\n'
    )
    data = _explain(capsys)
    assert data["problems"].endswith("answered by the student ./student")
    (blocker,) = data["blockers"]
    assert blocker.startswith('[teaching] student_model = "./student": no such folder.')
    _write_model(Path("student"))
    assert _explain(capsys)["blockers"] == []
    _write('[algorithm]\nadvantage_mode = "grpo"\n[teaching]\nenabled = true\n')
    assert _explain(capsys)["problems"].endswith("answered by the base model with the adapter off")


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_strict_makes_unused_options_errors(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unused.toml").write_text('[reward]\ntype = "match"\ncustom_module = "mine"\n')
    assert run([command, str(tmp_path / "unused.toml"), "--strict"]) == 2
    assert "[reward] custom_module is not used" in capsys.readouterr().err


def test_memory_of_a_service_is_not_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[backend]\nbackend = "tinker"\n')
    run(["explain"])
    output = capsys.readouterr().out
    assert "managed by tinker" in output
    assert "KV cache" not in output and "micro-batches" not in output


@pytest.mark.parametrize(("backend", "what", "count"), [("tinker", "its tokenizer", 0), ("local", "it", 1)])
def test_a_service_has_the_weights_and_keeps_the_adapter(
    backend: str, what: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[backend]\nbackend = "{backend}"\n[model]\nmodel = "some/thing"\n'
    for more in ("", '[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n'):
        _write(text + more)
        assert sum("adapter" in file for file in _explain(capsys)["files"]) == count
        run(["explain"])
        assert (
            f"some/thing (not on this machine; {what} will be downloaded (`retrain doctor` tries it))"
            in capsys.readouterr().out
        )


def test_sepa_that_stays_off_is_noted_for_epochs_of_a_known_number_of_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write(
        '[model]\nmodel = "builtin:tiny"\n[data]\nsource = "arithmetic"\n'
        "[training]\nepochs = 2\nmax_examples = 8\nbatch_size = 4\nmax_tokens = 16\n"
    )
    assert (
        "SEPA stays off: it begins after [sepa] delay_steps = 50, and this run has 4 steps."
        in _explain(capsys)["notes"]
    )


def test_the_student_of_teaching_is_not_in_the_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[model]\nmodel = "builtin:tiny"\n[data]\nsource = "arithmetic"\n[teaching]\nenabled = true\n')
    note = "[teaching] adds a student, whose memory and tokens are not included"
    assert note in _explain(capsys)["notes"]
    assert run(["plan"]) == 0 and note in capsys.readouterr().out


def test_dates_in_a_table_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[environment]\nprovider = "builtin"\nid = "calculator"\n[environment.args]\nsince = 2026-01-01\n')
    assert "2026-01-01" in json.dumps(_explain(capsys))
    run(["explain"])
    assert "2026-01-01" in capsys.readouterr().out
