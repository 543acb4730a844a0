"""`retrain doctor`."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.builtin import resolve_model
from retrain.campaign.manifest import Manifest
from retrain.campaign.plan import plan_runs
from retrain.checks.keys import missing_keys
from retrain.cli import doctor, run
from retrain.cli.trial import Trial, start_trials
from retrain.config import load_config
from retrain.config.reference import starter
from retrain.runtime import packages
from retrain.storage.checkpoint import Checkpoints
from retrain.storage.folder import lock_folder
from retrain.storage.publishing import publish_folder
from tests.cases import slow

_NO_GPU: dict[str, Any] = {"cuda": None, "available": False, "gpus": []}
_KEYS = (
    "HF_TOKEN", "WANDB_API_KEY", "TINKER_API_KEY", "OPENAI_API_KEY", "INFERENCE_API_KEY",
    "WANDB_MODE", "HF_HUB_OFFLINE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_plain_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for key in _KEYS:
        monkeypatch.delenv(key, raising=False)
    # Importing torch takes seconds; one test asks the real one.
    monkeypatch.setattr(doctor, "probe_torch", lambda: _NO_GPU)
    # So does trying things out, which has tests of its own below.
    monkeypatch.setattr(doctor, "start_trials", lambda config: nullcontext(list))
    _set_free_disk_space(monkeypatch, 100 * 10**9)
    monkeypatch.setattr(doctor, "hub_answers", lambda: True)


def _examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = run(["doctor", *arguments, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is (code == 0)
    return code, {check["name"]: check for check in data["checks"]}


def _write(text: str) -> None:
    Path("retrain.toml").write_text(text, encoding="utf-8")


def _set_free_disk_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def _hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    real = packages.version

    def version(name: str) -> str:
        if name == hidden:
            raise packages.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(packages, "version", version)


def test_without_a_configuration_only_the_installation_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["torch"]["status"] == "ok"
    assert "model" not in checks


def test_the_packages_of_every_extra_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide_package(monkeypatch, "gguf")
    _, checks = _examine(capsys)
    extras = {name for name, found in packages.requirements().items() if found.extra not in ("", "dev", "docs")}
    assert extras and extras <= checks.keys()
    assert checks["gguf"]["status"] == "unused"
    assert checks["gguf"]["detail"] == "not installed; for retrain import-gguf"
    assert "gguf]" in checks["gguf"]["fix"]


def test_a_cpu_configuration_on_a_machine_without_gpu_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[backend]\ndevices = "cpu"\n')
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["[logging] log_dir"]["status"] == "ok"
    assert checks["model"]["status"] == "warning"
    assert "download" in checks["model"]["detail"]


def test_a_nearly_full_disk_is_a_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _set_free_disk_space(monkeypatch, 2 * 10**9)
    _write('[backend]\ndevices = "cpu"\n')
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["[logging] log_dir"]["status"] == "warning"
    assert "2.0 GB free" in checks["[logging] log_dir"]["detail"]


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


@pytest.mark.usefixtures("no_driver")
def test_a_gpu_that_is_not_there_is_missing_and_the_fix_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("quickstart"))
    code, checks = _examine(capsys, "--devices", "gpu:0")
    assert code == 1
    assert "--devices cpu" in checks["gpu:0"]["fix"]
    assert _examine(capsys, "--devices", "cpu")[0] == 0
    assert _examine(capsys)[0] == 0, "what the starter file says: auto"


def test_gpu_memory_is_shown_and_a_second_gpu_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"cuda": "12.8", "available": True, "gpus": [["H200", 139e9, 141e9]]}
    monkeypatch.setattr(doctor, "probe_torch", lambda: state)
    _write('[backend]\ndevices = "gpu:0,gpu:1"\n')
    code, checks = _examine(capsys)
    assert code == 1
    assert checks["gpu:0"]["detail"] == "H200, 139.0 of 141.0 GB free"
    assert checks["gpu:1"]["status"] == "missing"


def test_a_missing_package_comes_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide_package(monkeypatch, "sentence-transformers")
    _write('[backend]\ndevices = "cpu"\n[planning]\ndetector = "semantic"\n')
    code, checks = _examine(capsys)
    assert code == 1
    assert checks["sentence-transformers"]["fix"].endswith('[semantic]"')


def test_a_package_that_is_not_needed_is_not_missed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide_package(monkeypatch, "sentence-transformers")
    _write('[backend]\ndevices = "cpu"\n')
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["sentence-transformers"]["status"] == "unused"


def test_a_package_that_is_too_old_is_missing() -> None:
    assert packages.check_package("click", "click>=999")[1].endswith(">=999 is required")
    assert packages.check_package("click", "click>=8")[1] == ""


def test_keys_are_asked_for_where_needed_and_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _write('[backend]\ndevices = "cpu"\n[logging]\nwandb_project = "p"\n')
    code, checks = _examine(capsys)
    assert code == 1
    assert checks["WANDB_API_KEY"]["status"] == "missing"
    assert "wandb login" in checks["WANDB_API_KEY"]["fix"]
    monkeypatch.setenv("WANDB_API_KEY", "do-not-print-me")
    assert run(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "do-not-print-me" not in output
    (line,) = [line for line in output.splitlines() if "WANDB_API_KEY" in line]
    assert line.split() == ["ok", "WANDB_API_KEY", "set"]


def test_a_key_from_dotenv_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Set and removed again, so that monkeypatch takes away what loading .env puts there.
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.delenv("WANDB_API_KEY")
    Path(".env").write_text("WANDB_API_KEY=secret-of-a-file\n", encoding="utf-8")
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["WANDB_API_KEY"]["detail"] == "set"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('[inference]\nattention_kernel = "tk"\n', "[inference] attention_kernel"),
        ('[data]\nsource = "jsonl"\npath = "absent.jsonl"\n', "[data] path"),
        ('[model]\nmodel = "./absent"\n', "model"),
        (
            '[algorithm]\nadvantage_mode = "grpo"\n[teaching]\nenabled = true\nstudent_model = "a/b/student"\n',
            "student",
        ),
        ('[resume]\nfrom = "absent"\n', "[resume] from"),
        ('[squeeze]\nadapter_path = "absent"\n', "[squeeze] adapter_path"),
        ('[logging]\nlog_dir = "retrain.toml/logs"\n', "[logging] log_dir"),
    ],
)
def test_what_a_configuration_names_and_is_not_there_is_missing(
    text: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(text)
    code, checks = _examine(capsys, "--devices", "cpu")
    assert code == 1
    assert checks[name]["status"] == "missing"
    assert checks[name]["fix"]


def test_a_missing_adapter_is_reported_once_and_nothing_else_is_to_be_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write('[squeeze]\nadapter_path = "absent"\n')
    _, checks = _examine(capsys)
    assert [name for name, check in checks.items() if check["status"] == "missing"] == ["[squeeze] adapter_path"]
    assert not [name for name, check in checks.items() if check["status"] == "unused" and check["fix"]]


def test_what_was_tried_and_failed_is_missing_and_what_took_too_long_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [
        Trial("[reward]", "mine was imported"),
        Trial("[inference] engine", "", "no server answers.  Try: vllm serve"),
        Trial("[environment] provider", "not known", is_warning=True),
    ]
    monkeypatch.setattr(doctor, "start_trials", lambda config: nullcontext(lambda: trials))
    _write(starter("demo"))
    code, checks = _examine(capsys)
    assert code == 1
    assert [checks[trial.where]["status"] for trial in trials] == ["ok", "missing", "warning"]
    assert (checks["[inference] engine"]["detail"], checks["[inference] engine"]["fix"]) == (
        "no server answers.",
        "vllm serve",
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_in_errors_of_plugins_are_hidden(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "opensesame99")
    trials = [
        Trial("[data] source", "", "login failed with opensesame99  Try: login opensesame99"),
        Trial("[reward]", "", "no server at postgres://u:passw0rd@h/"),
    ]
    monkeypatch.setattr(doctor, "start_trials", lambda config: nullcontext(lambda: trials))
    _write(starter("demo"))
    assert run(["doctor", *(["--json"] if as_json else [])]) == 1
    printed = capsys.readouterr().out
    assert "login failed with ***" in printed and "postgres://***@h/" in printed
    assert "opensesame99" not in printed and "passw0rd" not in printed


def test_answers_that_the_model_has_no_room_for_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("demo"))
    assert _examine(capsys)[0] == 0
    code, checks = _examine(capsys, "--max-tokens", "256")
    assert code == 1
    assert "context of 256" in checks["[training] max_tokens"]["detail"]


def test_overlapped_steps_that_are_not_possible_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("demo"))
    code, checks = _examine(capsys, "--overlap", "true", "--devices", "cpu")
    assert code == 1
    assert "the engine returns the completions of a step together" in checks["[training] overlap"]["detail"]


def test_a_model_of_a_hub_that_cannot_be_reached_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "hub_answers", lambda: False)
    _write('[backend]\ndevices = "cpu"\n')
    assert "cannot be reached" in _examine(capsys)[1]["model"]["detail"]


def test_offline_a_model_that_is_not_cached_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _write('[backend]\ndevices = "cpu"\n')
    assert _examine(capsys)[1]["model"]["status"] == "missing"


def test_gpus_that_are_hidden_by_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._fix_gpu({"cuda": "13.0", "available": False, "gpus": []}).startswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("no_driver")
def test_the_plain_report_ends_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _write(starter("quickstart"))
    assert run(["doctor", "--devices", "gpu:0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 missing."
    assert any(line.startswith("missing  gpu:0") and "--devices cpu" in line for line in lines)


def test_a_wrong_file_is_an_input_error(capsys: pytest.CaptureFixture[str]) -> None:
    _write("[training]\nmax_stepz = 3\n")
    assert run(["doctor"]) == 2
    assert "max_steps" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_torch_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    state = doctor.probe_torch()
    assert set(state) == {"cuda", "available", "gpus"}


@pytest.mark.parametrize(
    ("rows", "status", "detail"),
    [
        ('{"prompt": "1+1", "answer": "2"}\n', "ok", "1 example"),
        ('{"prompt": "1+1"}\n', "missing", "answer"),
        ("not JSON\n", "missing", "is not JSON"),
    ],
)
def test_a_file_of_problems_is_read_as_the_run_would(
    rows: str, status: str, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(rows, encoding="utf-8")
    _write('[data]\nsource = "jsonl"\npath = "rows.jsonl"\n[model]\nmodel = "builtin:tiny"\n')
    _, checks = _examine(capsys, "--devices", "cpu")
    assert checks["[data] path"]["status"] == status and detail in checks["[data] path"]["detail"]


@pytest.mark.parametrize("table", ["data", *slow("eval")])
@pytest.mark.slow
def test_an_invalid_row_is_reported_once_for_its_file(
    table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "start_trials", start_trials)
    row = '{"prompt": "1+1", "answer": "2"}\n'
    for name in ("data", "eval"):
        Path(f"{name}.jsonl").write_text(row + ('{"prompt": "3"}\n' if name == table else ""), encoding="utf-8")
    _write(
        '[data]\nsource = "jsonl"\npath = "data.jsonl"\n[eval]\nevery = 1\npath = "eval.jsonl"\n'
        '[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 32\n[backend]\ndevices = "cpu"\n'
    )
    code, checks = _examine(capsys)
    assert code == 1
    assert [name for name, check in checks.items() if check["status"] == "missing"] == [f"[{table}] path"]
    assert f"{table}.jsonl has 1 invalid row: line 2" in checks[f"[{table}] path"]["detail"]
    assert checks[f"[{table}] path"]["fix"] == f"fix the file, or set [{table}] path to another"
    measured = {name for name in checks if name.endswith(", prompts")}
    assert measured == {"[data], prompts", "[eval], prompts"} - {f"[{table}], prompts"}


def test_an_adapter_path_that_another_run_uses_is_a_warning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "logs" / "other").mkdir(parents=True)
    publish_folder(tmp_path / "adapter", lambda draft: None, run=str(tmp_path / "logs" / "other"))
    _write(f'[backend]\ndevices = "cpu"\nadapter_path = "{tmp_path}/adapter"\n')
    code, checks = _examine(capsys)
    assert code == 0
    assert checks["[backend] adapter_path"]["status"] == "warning"
    assert f"holds the adapter of {tmp_path}/logs/other" in checks["[backend] adapter_path"]["detail"]
    assert _examine(capsys, "--log-dir", "logs/other")[1]["[backend] adapter_path"]["status"] == "ok"
    publish_folder(tmp_path / "small", lambda draft: None)
    found = _examine(capsys, "--adapter-path", str(tmp_path / "small"))[1]["[backend] adapter_path"]
    assert found["status"] == "warning"
    assert "holds an adapter that no run wrote, so adapters stay in the checkpoints" in found["detail"]


def test_an_adapter_path_that_a_service_does_not_write_is_not_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    publish_folder(tmp_path / "adapter", lambda draft: None, run=str(tmp_path / "logs" / "other"))
    _write(f'[backend]\nbackend = "tinker"\nadapter_path = "{tmp_path}/adapter"\n')
    checks = _examine(capsys)[1]
    assert "[backend] adapter_path" not in checks and "[logging] log_dir" in checks


def test_a_judge_that_terms_replace_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    judged = {"reward.type": "judge"}
    assert [name for name, _ in missing_keys(load_config(None, judged))] == ["OPENAI_API_KEY"]
    assert not list(missing_keys(load_config(None, judged | {"reward.terms": [{"type": "math"}]})))
    assert list(missing_keys(load_config(None, {"reward.terms": [{"type": "judge"}]})))


@pytest.mark.parametrize("command", ["doctor", "explain", "plan"])
def test_runs_that_cannot_share_a_model_are_rejected_by_every_command(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    _write(
        '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[campaign]\nshare_model = true\n'
        'conditions = [{ advantage_mode = "grpo" }, { advantage_mode = "maxrl", lora_rank = 8 }]\n'
    )
    assert run([command]) == 2
    assert "share_model needs one model.lora_rank" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "code"), [("doctor", 1), ("explain", 1), ("plan", 2)])
def test_a_run_that_cannot_be_resumed_is_reported_by_every_command(
    capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    settings = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nseed = 1\nmax_tokens = 16\n'
    _write(settings)
    Path("logs").mkdir()
    Path("logs/config.toml").write_text(settings, encoding="utf-8")
    Checkpoints(Path("logs"), 1, print).save(0, {"log_sizes": {}}, lambda folder: None)
    for changes, words in (
        (("--resume", "absent"), "there is no folder absent to resume from"),
        (("--resume", "logs", "--lr", "0.5"), "was trained with other settings"),
    ):
        assert run([command, "retrain.toml", *changes]) == code
        output = capsys.readouterr()
        assert words in output.out + output.err
    assert run([command, "retrain.toml", "--resume", "logs"]) == 0


def test_a_resume_with_more_examples_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    settings = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nseed = 1\nmax_tokens = 16\n'
    settings += '[data]\nsource = "jsonl"\npath = "rows.jsonl"\n'
    _write(settings)
    Path("logs").mkdir()
    Path("logs/config.toml").write_text(settings, encoding="utf-8")
    state = {"log_sizes": {}, "order": {"position": 1, "examples": 1}}
    Checkpoints(Path("logs"), 1, print).save(0, state, lambda folder: None)
    row = '{"prompt": "1+1=", "answer": "2"}\n'
    Path("rows.jsonl").write_text(row, encoding="utf-8")
    assert run(["doctor", "retrain.toml", "--resume", "logs"]) == 0
    Path("rows.jsonl").write_text(2 * row, encoding="utf-8")
    assert run(["doctor", "retrain.toml", "--resume", "logs"]) == 1
    assert "the checkpoint was made with 1 examples, the data now has 2" in capsys.readouterr().out


def test_every_condition_of_a_campaign_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    base = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
    base += "[campaign]\nseeds = [1]\n"
    first = '[[campaign.conditions]]\nadvantage_mode = "grpo"\n'
    _write(f"{base}{first}[[campaign.conditions]]\nmax_tokens = 100000\n")
    code, checks = _examine(capsys)
    assert code == 1
    assert "(maxrl+gtpo_sepa_max_tokens=100000)" in checks["[training] max_tokens"]["detail"]
    _write(f'{base}{first}[[campaign.conditions]]\nmodel = "./absent"\n')
    code, checks = _examine(capsys)
    assert code == 1 and checks["model"]["detail"] == "no such folder: ./absent"
    Path("tiny.gguf").write_bytes(b"GGUF")
    _write(f'{base}{first}[[campaign.conditions]]\nmodel = "tiny.gguf"\n')
    code, checks = _examine(capsys)
    assert code == 1 and "is a file, not the folder of a model" in checks["model"]["detail"]
    assert checks["model"]["fix"] == 'retrain import-gguf tiny.gguf FOLDER, and model = "FOLDER"'
    _write(f'{base}{first}[[campaign.conditions]]\nreward = {{ type = "judge" }}\n')
    code, checks = _examine(capsys)
    assert code == 1 and checks["OPENAI_API_KEY"]["status"] == "missing"
    # No run has what the file says of all.
    _write(f"{base.replace('16', '100000')}[[campaign.conditions]]\nmax_tokens = 16\n")
    assert _examine(capsys)[0] == 0


@pytest.mark.parametrize(("command", "code"), [("doctor", 1), ("explain", 1), ("plan", 2)])
def test_a_folder_that_holds_another_campaign_is_reported(
    capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    text = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
    text += '[logging]\nlog_dir = "logs/c"\n[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n'
    _write(text)
    config = load_config(Path("retrain.toml"))
    folder = Path("logs/c").absolute()
    folder.mkdir(parents=True)
    Manifest(folder).begin(config, plan_runs(config, folder, "retrain.toml"))
    assert run([command, "retrain.toml"]) == 0
    capsys.readouterr()
    assert run([command, "retrain.toml", "--campaign.seeds", "[2]"]) == code
    output = capsys.readouterr()
    assert "holds another campaign" in " ".join((output.out + output.err).split())


def test_a_campaign_without_a_folder_is_checked_where_it_makes_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
    _write(f'{text}[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\n')
    # A file in place of the folder that a single run would write to.
    Path("logs").mkdir()
    Path("logs/train").write_text("", encoding="utf-8")
    code, checks = _examine(capsys)
    assert code == 0 and checks["[logging] log_dir"]["detail"].startswith("logs: ")


def test_a_model_that_lacks_a_shard_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model")
    Path("model/model.safetensors").rename("model/model-00001-of-00002.safetensors")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    _write('[model]\nmodel = "./model"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run(command) == code
        output = capsys.readouterr()
        assert "is incomplete: its index names model-00002-of-00002.safetensors" in output.out + output.err
    # A download without the .bin files has their index; transformers reads the safetensors.
    shutil.copy(Path("model") / shards[0], Path("model") / shards[1])
    other = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    Path("model/pytorch_model.bin.index.json").write_text(json.dumps(other), encoding="utf-8")
    assert run(["explain"]) == 0


def test_a_model_without_weights_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model", ignore=shutil.ignore_patterns("*.safetensors"))
    _write('[model]\nmodel = "./model"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run(command) == code
        output = capsys.readouterr()
        message = " ".join((output.out + output.err).split())
        assert "has no weights (no model.safetensors, no index, no pytorch_model.bin)" in message
    # Other files may be named there.
    assert run(["explain", "--init-kwargs", '{variant = "fp16"}']) == 0
    _write('[model]\nmodel = "./model"\n[backend]\nbackend = "e2e.fakes.build"\n[training]\nmax_tokens = 16\n')
    for command in ("doctor", "explain"):
        assert run([command]) == 0, "a plugin has weights of its own"


def test_a_model_that_the_run_would_replace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model")
    _write('[model]\nmodel = "./model"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run([*command, "--adapter-path", "model"]) == code
        output = capsys.readouterr()
        assert "is the folder of [model] model, which the run" in " ".join((output.out + output.err).split())


def test_truncated_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model")
    _write('[model]\nmodel = "./model"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    path = Path("model/model.safetensors")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run(command) == code
        output = capsys.readouterr()
        message = " ".join((output.out + output.err).split())
        assert f"model.safetensors is truncated: its header says {size:,} bytes, it has {size - 1:,}" in message
        assert "copy or download it again" in message


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "start_trials", start_trials)
    shutil.copytree(resolve_model("builtin:tiny"), "model", ignore=shutil.ignore_patterns("tokenizer*"))
    _write('[model]\nmodel = "./model"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run(command) == code
        output = capsys.readouterr()
        message = " ".join((output.out + output.err).split())
        assert "has no tokenizer (no tokenizer.json" in message
        assert "AutoTokenizer.from_pretrained(BASE).save_pretrained('./model')" in message
    assert not Path("logs").exists()


def test_an_adapter_is_not_taken_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("adapter")
    shutil.copytree(resolve_model("builtin:tiny"), folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}', encoding="utf-8")
    _write('[model]\nmodel = "adapter"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    for command, code in ((["doctor"], 1), (["explain"], 1), ([], 2)):
        assert run(command) == code
        output = capsys.readouterr()
        message = " ".join((output.out + output.err).split())
        assert "holds an adapter of some/base, not a model" in message and "merge_and_unload" in message
        assert "the tokenizer of the base" in message


@pytest.mark.parametrize("command", ["doctor", "explain"])
def test_fsdp_is_said_to_need_several_processes(capsys: pytest.CaptureFixture[str], command: str) -> None:
    _write('[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n')
    assert run([command, "--fsdp"]) == 0
    assert "fsdp needs several processes: start it with retrain launch --processes N" in capsys.readouterr().out


def test_a_folder_that_a_run_is_using_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _write('[backend]\ndevices = "cpu"\n[logging]\nlog_dir = "~/logs/a"\n')
    Path("logs/a").mkdir(parents=True)
    with lock_folder(Path("logs/a")):
        code, checks = _examine(capsys)
    assert code == 0
    assert checks["[logging] log_dir"]["status"] == "warning"
    assert "a run is using it" in checks["[logging] log_dir"]["detail"]
    assert _examine(capsys)[1]["[logging] log_dir"]["status"] == "ok"


@pytest.mark.parametrize(("every", "found"), [(0, ", not evaluated: [eval] every is 0"), (1, "")])
def test_held_out_problems_that_are_not_evaluated_are_said_to_be_so(
    capsys: pytest.CaptureFixture[str], every: int, found: str
) -> None:
    Path("held_out.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    _write(
        '[model]\nmodel = "builtin:tiny"\n[backend]\ndevices = "cpu"\n[training]\nmax_tokens = 16\n'
        f'[data]\nsource = "arithmetic"\n[eval]\nsource = "jsonl"\npath = "held_out.jsonl"\nevery = {every}\n'
    )
    _, checks = _examine(capsys)
    assert checks["[eval] path"]["detail"].endswith(f"held_out.jsonl (1 example{found})")
