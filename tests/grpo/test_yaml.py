"""`retrain grpo`: YAML groups composed by Hydra, and the starter tree."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import trl
import yaml
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from retrain.builtin import resolve_model
from retrain.cli import run
from retrain.errors import ConfigError
from retrain.grpo import GRPOConfig, settings
from retrain.grpo.checks import check_before_loading, locked
from retrain.grpo.compose import compose_settings, flatten
from retrain.grpo.rewards import NamedReward, load_rewards, text_of
from retrain.grpo.rows import load_rows, to_dataset
from retrain.grpo.run import build_trainer, describe_change, plain_template
from retrain.grpo.settings import RunSettings, find_unused, read_arguments, read_settings
from retrain.modeling.tokens import PromptEncoder
from retrain.types import Example
from tests.cases import slow


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The starter tree in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    assert run(["grpo", "init"]) == 0
    return tmp_path / "configs"


def test_every_starter_file_holds_settings_that_there_are(configs: Path) -> None:
    for path in configs.glob("*/*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict)
    composed = compose_settings(configs / "run" / "tiny.yaml", ["model=qwen3_4b", "data=my_dataset"])
    assert composed["model_name_or_path"] == "Qwen/Qwen3-4B-Instruct-2507" and composed["prompt_column"] == "question"
    with pytest.raises(ConfigError, match="my_rewards"):
        build_trainer(composed)


def test_the_command_line_wins_over_the_run_and_the_run_over_its_groups(configs: Path) -> None:
    path = configs / "run" / "tiny.yaml"
    assert compose_settings(path, [])["learning_rate"] == 2e-3
    assert compose_settings(path, ["learning_rate=5e-6"])["learning_rate"] == 5e-6
    (configs / "trainer" / "grpo.yaml").write_text("temperature: 0.1\nbeta: 0.5\n")
    composed = compose_settings(path, ["top_k=5"])
    assert (composed["temperature"], composed["beta"], composed["top_k"]) == (0.8, 0.5, 5)
    for word in ("trainer.beta=0.7", "+trainer.beta=0.7", "++run.beta=0.7"):
        assert compose_settings(path, [word])["beta"] == 0.7
    assert compose_settings(path, ["trainer.learning_rate=5e-6"])["learning_rate"] == 5e-6
    assert compose_settings(path, ["model.model_name_or_path=org/b"])["model_name_or_path"] == "org/b"
    nested = compose_settings(path, ["trainer.model_init_kwargs.dtype=float32"])
    assert nested["model_init_kwargs"]["dtype"] == "float32"


def test_a_group_file_can_be_switched_whatever_package_it_is_in(configs: Path) -> None:
    path = configs / "run" / "tiny.yaml"
    (configs / "model" / "other.yaml").write_text("# @package _global_\nmodel_name_or_path: org/other\n")
    assert compose_settings(path, ["model=other"])["model_name_or_path"] == "org/other"
    path.write_text("# @package _global_\n" + path.read_text())
    assert compose_settings(path, ["model=other"])["model_name_or_path"] == "org/other"
    assert compose_settings(path, [])["model_name_or_path"] == "builtin:tiny"


def test_a_file_outside_run_is_its_own_root(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("model_name_or_path: builtin:tiny\n")
    (tmp_path / "train.yaml").write_text("defaults:\n  - model: tiny\n  - _self_\nseed: 3\n")
    assert compose_settings(tmp_path / "train.yaml", ["seed=4"]) == {"model_name_or_path": "builtin:tiny", "seed": 4}


def test_packages_become_one_table() -> None:
    nested = {"run": {"model": {"name": "a", "seed": 1}, "seed": 2}, "data": {"seed": 0, "split": "x"}, "top_k": 3}
    assert flatten(nested) == {"name": "a", "seed": 2, "split": "x", "top_k": 3}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["learning_rat=1"], "unknown setting 'learning_rat'.  Did you mean learning_rate?"),
        (["lr=1"], "unknown setting 'lr'.  Did you mean learning_rate?"),
        (["group_size=4"], "Did you mean num_generations?"),
        (["--resume"], "Try: resume_from_checkpoint=true"),
        (["--multirun"], "--multirun is not an option of retrain grpo, which trains one run.  Try: one command"),
        (["learning_rate=1e-4,1e-5"], "'learning_rate=1e-4,1e-5' has several values.  Try: one command per value"),
        (["system_prompt=within \\boxed{}."], "Try: quotes inside of quotes, 'system_prompt=\"VALUE\"'"),
        (["--lr", "1e-5"], "Try: learning_rate=1e-5"),
        (["max_steps=-3"], "max_steps must be above 0, or -1 for num_train_epochs, got -3."),
        (["num_generations=6"], "generation_batch_size (64) must be divisible by num_generations (6)"),
        (["model=nope"], "error: model=nope: there is no file model/nope.yaml.  Known: "),
        (["model=tinyy"], "Did you mean model=tiny?"),
        (["learning_rate"], "'learning_rate' is not a setting.  Try: key=value"),
        (["--learning_rate", "1e-5"], "--learning_rate is not an option of retrain grpo.  Try: learning_rate=1e-5"),
        (["--num-generations=4"], "Try: num_generations=4"),
        (["learning_rate=fast"], "learning_rate must be a number, got 'fast'"),
        (["completion_only_training=false"], "completion_only_training = false cannot be used"),
        (["lora_rank=-1"], "lora_rank must be a whole number"),
        (["reward_funcs=maths"], "Did you mean 'math'?"),
        (["reward_funcs=wordy"], "'wordy' is not a known reward. Known: match, math, judge, or module:function."),
        (
            ["reward_funcs=judge"],
            "OPENAI_API_KEY is not set.  Try: set OPENAI_API_KEY=... in .env, or OPENAI_BASE_URL=",
        ),
        (["reward_funcs=custom"], "'custom' names no function.  Try: module:function"),
        (["reward_funcs=think_format_reward"], "Try: trl.rewards:think_format_reward"),
        (["dataset_name=org/rows"], "unknown setting 'dataset_name'.  Did you mean dataset_id_or_path?"),
        (["use_peft=true"], "Leave it out: a lora_rank above 0 trains an adapter."),
        (["dtype=float32"], "unknown setting 'dtype'.  It belongs to model_init_kwargs: {dtype: …}."),
        (["reward_funcs=my_rewards:score"], "there is no module 'my_rewards'"),
        (["reward_funcs=my_rewards:score"], "or add its folder to PYTHONPATH"),
        (["model_name_or_path=configs"], 'model_name_or_path = "configs" has no weights'),
        (["model_name_or_path=./no/model"], 'model_name_or_path = "./no/model": no such folder.'),
        (["dataset_id_or_path=./no/rows"], "dataset_id_or_path: there is no folder no/rows (looked in"),
        (["model_name_or_path=builtin:huge"], "error: model_name_or_path: there is no built-in model 'builtin:huge'"),
        (["max_prompt_length=x"], "max_prompt_length must be a whole number of at least 1, got 'x'"),
        (["vllm_device=cuda:1"], "vllm_device = 'cuda:1': TRL runs vLLM on the training GPU"),
        (["dataset_id_or_path=''"], "dataset_id_or_path is missing"),
        (["tokenizer_kwargs=3"], "tokenizer_kwargs must be a table"),
        (["output_dir=${nothing}"], "cannot be composed"),
        (["output_dir=???"], "cannot be composed"),
        (["keep_columns=[level]"], "keep_columns names 'level'"),
        (["answer_column=level"], "row 0 has no column level; it has prompt"),
        (["trainer_type=[grpo]"], "trainer_type must be grpo or sft, got ['grpo']"),
        (["max_steps=true"], "max_steps must be a whole number, got True"),
        (["reward_weights=[1,2]"], "reward_weights has 2 numbers for 1 function."),
        (["trainer_type=dpo"], "trainer_type must be grpo or sft, got 'dpo'"),
        (["trainer=teacher_sft", "num_generations=4"], "num_generations is a setting of trainer_type: grpo"),
        (["optim=fast"], "fast is not a valid OptimizerNames"),
        (["max_train_examples=-1"], "max_train_examples must be a whole number of at least 1, got -1"),
        (["max_val_examples=abc"], "max_val_examples must be a whole number"),
        (["lora_dropout=x"], "lora_dropout must be a number, got 'x'"),
        (["lora_target_modules=[1,2]"], "lora_target_modules must be all-linear or a list of names"),
        (["prompt_column=3"], "prompt_column must be a string, got 3"),
        (["train_split=3"], "train_split must be a string"),
        (["keep_columns=level"], "keep_columns must be a list of names, got 'level'"),
    ],
)
def test_a_wrong_setting_is_refused(
    words: list[str], text: str, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["grpo", "configs/run/tiny.yaml", "max_train_examples=8", *words]) == 2
    assert text in capsys.readouterr().err


def test_truncated_weights_are_refused(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model")
    weights = Path("model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert run(["grpo", "configs/run/tiny.yaml", "model_name_or_path=./model"]) == 2
    assert 'model_name_or_path = "./model": model.safetensors is truncated' in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert run(["grpo", "configs/run/tiny.yaml", "model_name_or_path=./model"]) == 2
    assert 'model_name_or_path = "./model" has no tokenizer (no tokenizer.json' in capsys.readouterr().err


def test_a_missing_file_and_a_folder_that_exists_are_refused(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["grpo", "configs/run/none.yaml"]) == 2
    assert run(["grpo", "init"]) == 2
    assert run(["grpo", "init", "a", "b"]) == 2
    shown = capsys.readouterr().err
    assert "there is no file 'configs/run/none.yaml'" in shown and "zero1.yaml (and 17 more) exists already" in shown
    assert run(["grpo", "init", "elsewhere"]) == 0


def test_files_and_columns_become_rows(tmp_path: Path) -> None:
    rows = [
        {"ask": "2 + 2", "is": 4, "level": "easy", "other": 1},
        {"ask": "3 + 3", "is": 6, "level": "hard", "other": 2},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    run = RunSettings(
        dataset_id_or_path=file,
        prompt_column="ask",
        answer_column="is",
        keep_columns=["level"],
        system_prompt="Be brief.",
    )
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    assert load_rows(run, "train", 1) == [{"prompt": asked, "answer": 4, "level": "easy"}]
    with pytest.raises(ConfigError, match=r"nowhere.* could not be loaded"):
        load_rows(RunSettings(dataset_id_or_path=str(tmp_path / "nowhere")), "train", None)
    (tmp_path / "rows.csv").write_text("question,answer\ngröße?,4\n", encoding="cp1252")
    with pytest.raises(ConfigError, match=r"could not be loaded: .*: 'utf-8' codec can't decode"):
        load_rows(RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv")), "train", None)


def test_a_row_without_an_answer_is_refused_where_answers_are_compared(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2", "answer": 4}, {"question": "3 + 3", "answer": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), reward_funcs=["my:own", "match"])
    with pytest.raises(ConfigError, match=r"row 1 has an empty answer\."):
        load_rows(run, "train", None)
    assert len(load_rows(dataclasses.replace(run, reward_funcs="my:own"), "train", None)) == 2
    (tmp_path / "rows.jsonl").write_text('{"question": "2 + 2", "answer": ""}\n')
    with pytest.raises(ConfigError, match=r"row 0 has an empty answer\."):
        load_rows(run, "train", None)
    # A trainer of one's own may hand it such a row, too.
    reward = NamedReward("match")
    assert reward(["\\boxed{None}", "\\boxed{4}"], answer=[None, 4]) == [None, 1.0]
    reward.close()


def test_an_output_folder_is_held_by_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs" / "one"
    with locked(str(folder)):
        with pytest.raises(ConfigError, match=r"in use by another run.*Try: another output_dir"), locked(str(folder)):
            pass
        # Other processes of the same run.
        monkeypatch.setenv("RANK", "1")
        with locked(str(folder)):
            pass
    assert not folder.exists()
    (tmp_path / "file").touch()
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match=r"output_dir = .* cannot be written to"), locked(str(tmp_path / "file")):
        pass


def test_functions_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo_test_rewards.py").write_text("def one(completions, **columns):\n    return [1.0]\n")
    named, function = load_rewards(["math", "grpo_test_rewards:one"])
    assert isinstance(named, NamedReward) and named.__name__ == "math" and function(["x"]) == [1.0]


def test_the_named_columns_win_over_others_of_the_usual_names(tmp_path: Path) -> None:
    row = {"ask": "2 + 2", "is": 4, "prompt": "another", "answer": 5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), prompt_column="ask", answer_column="is")
    assert load_rows(run, "train", None) == [{"prompt": [{"role": "user", "content": "2 + 2"}], "answer": 4}]


@pytest.mark.parametrize("word", ["val_split=test", "train_split=test", "dataset_config=main"])
def test_a_file_has_no_splits(word: str, configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2 + 2", "answer": "4"}) + "\n")
    words = ["dataset_id_or_path=rows.jsonl", "val_split=null", "max_val_examples=null", word]
    assert run(["grpo", "configs/run/tiny.yaml", *words]) == 2
    name, _, value = word.partition("=")
    shown = capsys.readouterr().err
    assert f"{name} = {value!r} has no effect: rows.jsonl is a file" in shown and f"Try: {name}=null" in shown


@pytest.mark.parametrize("word", ["eval_strategy=steps", "eval_on_start=true"])
def test_evaluations_need_held_out_rows(word: str, configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2 + 2", "answer": "4"}) + "\n")
    words = ["dataset_id_or_path=rows.jsonl", "val_split=null", "max_val_examples=null", word]
    assert run(["grpo", "configs/run/tiny.yaml", *words]) == 2
    shown = capsys.readouterr().err
    assert f"{word.partition('=')[0]} needs held-out rows, and there is no val_split." in shown
    assert "Try: val_split=validation and dataset_id_or_path=FOLDER with train.jsonl and validation.jsonl" in shown


@pytest.mark.parametrize(("split", "advised"), [("test", ""), ("validation", ""), ("dev", "val_split=validation and ")])
def test_the_advice_for_a_file_with_a_split_can_be_followed(
    split: str, advised: str, configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2 + 2", "answer": "4"}) + "\n")
    assert run(["grpo", "configs/run/tiny.yaml", "dataset_id_or_path=rows.jsonl", f"val_split={split}"]) == 2
    name = "validation" if advised else split
    hint = f"Try: val_split=null, or {advised}dataset_id_or_path=FOLDER with train.jsonl and {name}.jsonl in it"
    assert hint in capsys.readouterr().err
    Path("folder").mkdir()
    for held, answer in (("train", "4"), (name, "5")):
        Path(f"folder/{held}.jsonl").write_text(json.dumps({"prompt": "2 + ?", "answer": answer}) + "\n")
    assert load_rows(RunSettings(dataset_id_or_path="folder"), name, None)[0]["answer"] == "5"


def test_a_folder_with_a_file_for_each_split_has_them(tmp_path: Path) -> None:
    for split, answer in (("train", "4"), ("validation", "5")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": "2 + ?", "answer": answer}) + "\n")
    run = RunSettings(dataset_id_or_path=str(tmp_path))
    assert [load_rows(run, split, None)[0]["answer"] for split in ("train", "validation")] == ["4", "5"]


def test_a_table_on_the_command_line_adds_to_that_of_a_file(configs: Path) -> None:
    (configs / "model" / "tiny.yaml").write_text("model_init_kwargs:\n  revision: main\n  dtype: float32\n")
    composed = compose_settings(configs / "run" / "tiny.yaml", ["model_init_kwargs.dtype=bfloat16"])
    assert composed["model_init_kwargs"] == {"revision": "main", "dtype": "bfloat16"}


def test_only_yaml_is_read(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (configs / "run" / "tiny.yml").write_text("max_steps: 3\n")
    assert run(["grpo", "configs/run/tiny.yml"]) == 2
    assert "does not end in .yaml" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"a: [1,", b"a:\n\tb: 1", b"a: 1\na: 2", b"a: !own 1", b"a: \xff", b"42", b"null: 1"])
def test_a_file_that_is_no_yaml_is_refused(text: bytes, configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (configs / "run" / "odd.yaml").write_bytes(text)
    assert run(["grpo", "configs/run/odd.yaml"]) == 2
    assert "odd.yaml cannot be composed: " in capsys.readouterr().err


EARLY = """
import sys
from retrain.cli import run

assert run(["grpo", "configs/run/tiny.yaml", *sys.argv[1:]]) == 2
print(*({"torch", "transformers", "trl", "datasets"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "given",
    [
        ["learning_rate=fast", "num_generation=4", "max_prompt_length=0", "lora_rank=x"],
        *slow(
            (["resume_from_checkpoint=logs/typo"],),
            (["reward_funcs=toml_style:one"],),
            (["reward_funcs=maths", "lora_rank=0"],),
            (["dataset_id_or_path=no.jsonl"],),
            (["reward_funcs=no:no"],),
            (["resume_from_checkpoint=true", "output_dir=logs/none"],),
            (["output_dir=''"],),
            (["report_to=wandb"],),
            (["temperature=0"],),
        ),
    ],
)
def test_a_wrong_value_is_found_before_trl_is_imported(given: list[str], configs: Path, tmp_path: Path) -> None:
    Path("toml_style.py").write_text("def one(response, reference):\n    return 1.0\n")
    keyless = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    keyless |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    command = [sys.executable, "-c", EARLY, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=keyless)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
    assert given[0].partition("=")[0] in done.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("model_name_or_path=nowhere/model", 'model_name_or_path = "nowhere/model": no such folder, not in the cache'),
        *slow(
            ("dataset_id_or_path=nowhere/rows", "nowhere/rows is not in the cache of the Hugging Face Hub"),
            ("dataset_id_or_path=gsm8k", "openai/gsm8k is not in the cache of the Hugging Face Hub"),
        ),
    ],
)
def test_without_the_hub_what_is_not_cached_is_refused_before_trl_is_imported(
    given: str, text: str, configs: Path, tmp_path: Path
) -> None:
    # Nobody listens there.
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-c", EARLY, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert text in done.stderr and "Retrying" not in done.stderr
    note = "The Hugging Face Hub (http://127.0.0.1:9) cannot be reached; only cached files will be used."
    assert done.stdout.strip() == note


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_arguments_read_from_source_are_those_of_the_class(kind: str) -> None:
    config_class = {"grpo": GRPOConfig, "sft": trl.SFTConfig}[kind]
    assert set(read_arguments(kind)) == {field.name for field in dataclasses.fields(config_class) if field.init}


def test_another_version_of_trl_is_asked_for_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "version", lambda package: "1.99")
    read_arguments.cache_clear()
    assert "learning_rate" in read_arguments("sft")
    read_arguments.cache_clear()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({0: 0.1, 4: 0.2, 6: 0.3}, "0.1000 before and 0.3000 after"),
        ({0: 0.1, 4: 0.2}, "0.1000 before and 0.2000 after step 4"),
        ({4: 0.2, 6: 0.3}, "0.2000 after step 4 and 0.3000 after step 6"),
        ({4: 0.2}, "0.2000 after step 4"),
        ({0: 0.1}, "0.1000 before"),
    ],
)
def test_only_an_evaluation_at_step_0_is_before_training(values: dict[int, float], text: str) -> None:
    assert describe_change(values, steps=6) == text


@pytest.mark.parametrize("rank", [0, None])
def test_an_override_of_the_rank_makes_a_note_of_the_files_other_settings_of_an_adapter(rank: int | None) -> None:
    assert find_unused(RunSettings(lora_rank=rank, lora_alpha=32), {}) == [
        "lora_alpha = 32 is not used: there is no lora_rank."
    ]
    assert find_unused(RunSettings(lora_rank=4, lora_alpha=32), {}) == []


def test_values_that_trl_takes_beyond_its_annotations_are_taken() -> None:
    given = {"model_name_or_path": "builtin:tiny", "dataset_id_or_path": "arithmetic", "reward_funcs": "match"}
    for name, value in (("scale_rewards", False), ("scale_rewards", "none"), ("fsdp", True), ("fsdp", ["offload"])):
        assert read_settings({**given, name: value})[1][name] == value
    # As YAML reads an unquoted `no`.
    assert read_settings({**given, "save_strategy": False})[1]["save_strategy"] == "no"


def test_functions_for_trl_need_no_answers_however_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2"}\n')
    path = str(tmp_path / "rows.jsonl")
    for name in ("trl.rewards.think_format_reward", "trl.rewards:think_format_reward", "judge"):
        assert len(load_rows(RunSettings(dataset_id_or_path=path, reward_funcs=name), "train", None)) == 1
    with pytest.raises(ConfigError, match="row 0 has none of answer"):
        load_rows(RunSettings(dataset_id_or_path=path, reward_funcs=["judge", "match"]), "train", None)


def test_a_precision_of_vllm_is_noted_where_it_is_not_used() -> None:
    run, wanted = RunSettings(lora_rank=4), {"vllm_dtype": "bfloat16"}
    note = ["vllm_dtype is not used: it needs use_vllm in this process."]
    assert find_unused(run, wanted) == find_unused(run, wanted | {"use_vllm": True, "vllm_mode": "server"}) == note
    assert find_unused(run, wanted | {"use_vllm": True}) == []


def test_a_dotted_path_is_a_function_for_trl_or_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"rewards_{tmp_path.name.replace('-', '_')}"
    code = "def of_trl(prompts, **columns):\n    return [1.0] * len(columns['completions'])\n"
    Path(f"{name}.py").write_text(f"{code}\ndef score(response, reference):\n    return 0.5\n")
    of_trl, own = load_rewards([f"{name}.of_trl", f"{name}.score"])
    assert of_trl(prompts=[], completions=["a", "b"]) == [1.0, 1.0]
    assert isinstance(own, NamedReward)
    assert own(["a", "b"], ["1", "2"]) == [0.5, 0.5]
    own.close()
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        load_rewards("no_such_module.score")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": {"role": "user", "content": "2+2?"}, "answer": 4},
            "row 1 has an object in 'prompt', where text",
        ),
        ({"prompt": 12, "answer": 4}, "row 1 has a number in 'prompt', where text or a list of messages belongs"),
        ({"prompt": ["2+2?", "x"], "answer": 4}, "row 1 has a message without role and content in 'prompt'"),
        ({"prompt": [{"role": "user", "content": None}], "answer": 4}, "row 1 has a message without role and content"),
        ({"prompt": [], "answer": 4}, "row 1 has an empty prompt"),
        ({"prompt": "2+2?", "answer": ["4"]}, "row 1 has a list in 'answer', where text or a number belongs"),
    ],
)
def test_rows_of_another_shape_are_refused_by_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], words: str
) -> None:
    good = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": 2}
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [good, row])
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_rows(RunSettings(dataset_id_or_path="rows", reward_funcs="match"), "train", None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "completion": {"role": "assistant", "content": "four"}}, "has an object in 'completion'"),
        ({"messages": 5}, "has a number in 'messages', where a list of messages belongs"),
        ({"messages": "Hello"}, "has a text in 'messages', where a list of messages belongs"),
        ({"messages": [{"role": "user", "content": "q"}]}, "has one message in 'messages'"),
        ({"prompt": "q", "completion": []}, "has an empty completion"),
        ({"text": ["a", "b"]}, "has a list in 'text', where text belongs"),
        (
            {"messages": [{"role": "user", "content": "q"}, "four"]},
            "has a message without role and content in 'messages'",
        ),
    ],
)
def test_demonstrations_of_another_shape_are_refused(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [row])
    with pytest.raises(ConfigError, match=re.escape(f"row 0 {words}")):
        load_rows(RunSettings(dataset_id_or_path="rows"), "train", None, is_sft=True)


def test_a_dataset_without_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [])
    with pytest.raises(ConfigError, match="has no rows"):
        load_rows(RunSettings(dataset_id_or_path="rows"), "train", None)


def test_an_answer_may_be_an_empty_list_to_a_function_that_takes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [{"prompt": "q", "gold": []}])
    run = RunSettings(dataset_id_or_path="rows", reward_funcs="math:prod", answer_column="gold")
    assert load_rows(run, "train", None)[0]["answer"] == []


def test_answers_of_other_kinds_are_left_to_those_who_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "any_of.py").write_text("def score(completion, reference): return float(completion in reference)\n")
    monkeypatch.chdir(tmp_path)
    day = datetime.date(2024, 1, 1)
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [{"prompt": "q", "answer": ["a", "b"]}])
    run = RunSettings(dataset_id_or_path="rows", reward_funcs="any_of.score")
    assert load_rows(run, "train", None)[0]["answer"] == ["a", "b"]
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [{"prompt": "q", "answer": day}])
    assert load_rows(dataclasses.replace(run, reward_funcs="match"), "train", None)[0]["answer"] == day
    (row,) = load_rows(run, "train", None, is_sft=True)
    assert row["completion"] == [{"role": "assistant", "content": "2024-01-01"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "folder"])
def test_texts_of_a_json_file_stay_as_they_are(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "The day after 4 January?", "answer": "2024-01-05"}, {"prompt": "q", "answer": "007", "n": 1}]
    lines, file = "".join(json.dumps(row) + "\n" for row in rows), tmp_path / name
    if name == "folder":
        file = file / "train.jsonl"
        file.parent.mkdir()
    file.write_text("\ufeff" + json.dumps(rows, indent=1) if name == "rows.json" else lines)
    run = RunSettings(dataset_id_or_path=str(tmp_path / name), reward_funcs="match")
    first, second = load_rows(run, "train", None)
    assert (first["answer"], second["answer"], first["n"], second["n"]) == ("2024-01-05", "007", None, 1)
    reward = NamedReward("match")
    assert reward(["\\boxed{2024-01-05}"], answer=[first["answer"]]) == [1.0]
    reward.close()
    (demonstrated, _) = load_rows(run, "train", None, is_sft=True)
    assert demonstrated["completion"] == [{"role": "assistant", "content": "2024-01-05"}]


def test_whole_numbers_beside_others_stay_whole(tmp_path: Path) -> None:
    for name, text in (
        ("rows.csv", "prompt,answer\n1+1=?,2\n5/2=?,2.5\n7?,007\n"),
        ("rows.jsonl", '{"prompt": "1+1=?", "answer": 2}\n{"prompt": "5/2=?", "answer": 2.5}\n'),
    ):
        (tmp_path / name).write_text(text)
        run = RunSettings(dataset_id_or_path=str(tmp_path / name), reward_funcs="match")
        completions = [row["completion"][0]["content"] for row in load_rows(run, "train", None, is_sft=True)]
        assert completions == ["2", "2.5", "007"][: len(completions)]
    reward = NamedReward("match")
    assert reward(["\\boxed{100000000000000000}"], answer=[1e17]) == [1.0]
    reward.close()


def test_numbers_and_texts_in_one_column_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 4}\n{"prompt": "b", "answer": "x^2"}\n')
    rows = load_rows(RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), reward_funcs="match"), "train", None)
    assert [row["answer"] for row in rows] == ["4", "x^2"]


def test_a_time_is_no_answer_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "q", "answer": datetime.datetime(2024, 1, 5)}
    monkeypatch.setattr("retrain.grpo.rows._load_dataset", lambda *_: [row])
    with pytest.raises(ConfigError, match="row 0 has a datetime in 'answer', where text or a number belongs"):
        load_rows(RunSettings(dataset_id_or_path="rows", reward_funcs="match"), "train", None)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no rows"),
        (b'{"prompt": "gr\xf6\xdfe?", "answer": 4}\n', r"invalid row:\n  line 1 is not UTF-8 \(byte 15\)"),
        (b'{"prompt": "a"\n', "line 1 is not JSON"),
        (b"[1, 2]", "object 1 is a number, not an object with fields"),
        (b'[{"prompt": "a"},\n {"prompt": "b"}\n {"prompt": "c"}]', r"is not JSON \(.*delimiter, line 3, column 2\)"),
        (b'"a"\n', "line 1 is a text, not an object with fields"),
        (b'{"prompt": "a", "answer": null}\n', r"rows\.jsonl'.*: row 0 has an empty answer"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), reward_funcs="match")
    with pytest.raises(ConfigError, match=problem) as caught:
        load_rows(run, "train", None)
    assert "rows.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("loss_type", "gspo", "must be one of .*grpo.*, got 'gspo'.  Try: loss_type=grpo importance_sampling_level"),
        ("loss_type", "foo", "must be one of bnpo, .*dapo, dr_grpo, grpo, .*, got 'foo'"),
        ("scale_rewards", "foo", "must be one of batch, group, none, got 'foo'"),
        ("importance_sampling_level", "word", "must be one of sequence, token, got 'word'"),
    ],
)
def test_values_that_trl_would_refuse_after_sampling_are_refused_at_once(
    setting: str, value: str, problem: str
) -> None:
    given = {"model_name_or_path": "builtin:tiny", "dataset_id_or_path": "arithmetic", "reward_funcs": "match"}
    with pytest.raises(ConfigError, match=f"{setting} {problem}"):
        read_settings({**given, setting: value})


def test_every_loss_of_trl_is_taken() -> None:
    given = {"model_name_or_path": "builtin:tiny", "dataset_id_or_path": "arithmetic", "reward_funcs": "match"}
    for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"):
        assert read_settings({**given, "loss_type": loss})[1]["loss_type"] == loss


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"report_to": "clearml"}, "report_to = 'clearml' needs the package clearml, which is not installed"),
        ({"report_to": ["flyte"]}, "report_to = 'flyte' needs the package flytekit"),
        ({"report_to": "all"}, "report_to = 'all' needs a key of wandb"),
        ({"report_to": "tensorbord"}, "report_to = 'tensorbord' is no tracker.  Did you mean tensorboard?"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1.0"),
    ],
)
def test_what_transformers_would_refuse_late_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any], problem: str
) -> None:
    monkeypatch.setattr("retrain.grpo.checks.find_spec", lambda name: name == "wandb" or None)
    monkeypatch.setattr("retrain.grpo.checks.has_wandb_key", lambda: False)
    run = RunSettings(model_name_or_path="builtin:tiny", dataset_id_or_path="arithmetic", reward_funcs="match")
    with pytest.raises(ConfigError, match=problem):
        check_before_loading(run, {"output_dir": str(tmp_path / "out"), **given}, print)


def test_a_reward_that_is_no_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"number_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text("score = 3\n")
    with pytest.raises(ConfigError, match=f"reward_funcs: {name}:score is a number, not a function"):
        load_rewards(f"{name}:score")


def test_evaluating_what_is_trained_on_is_noted() -> None:
    def notes(dataset: str, trained: str | None, held_out: str | None) -> list[str]:
        return find_unused(RunSettings(dataset_id_or_path=dataset, train_split=trained, val_split=held_out), {})

    for same in (("arithmetic", None, "train"), ("arithmetic", "nope", "test"), ("math", "test", "test")):
        assert "has the problems that are trained on: none is held out." in notes(*same)[0]
    for other in (("arithmetic", "train", "test"), ("math", "train", "test"), ("math", "train", None)):
        assert notes(*other) == []


@pytest.mark.parametrize(
    ("files", "is_refused"),
    [
        (["README.md"], True),
        (["tokenizer_config.json"], True),
        (["rows.jsonl"], False),
        (["README.md", "trainer_state.json"], False),
        (["README.md", "checkpoint-2/trainer_state.json"], False),
        (["README.md of TRL"], False),
    ],
)
def test_files_that_no_run_wrote_are_not_replaced(tmp_path: Path, files: list[str], is_refused: bool) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        path = tmp_path / name.removesuffix(" of TRL")
        path.write_text("mine" if "TRL" not in name else "tags:\n- generated_from_trainer\n")
    run = RunSettings(model_name_or_path="builtin:tiny", dataset_id_or_path="arithmetic", reward_funcs="match")
    problem = rf"output_dir = .* holds {re.escape(files[0])} and no run: .*  Try: another folder"
    with pytest.raises(ConfigError, match=problem) if is_refused else contextlib.nullcontext():
        check_before_loading(run, {"output_dir": str(tmp_path)}, print)


def test_the_model_is_not_replaced_by_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model("builtin:tiny"), "mine")
    (tmp_path / "link").symlink_to("mine")
    run = RunSettings(model_name_or_path="mine", dataset_id_or_path="arithmetic", reward_funcs="match")
    for folder in ("mine", "./mine/", "link"):
        with pytest.raises(ConfigError, match="is the folder of model_name_or_path, which the run would replace"):
            check_before_loading(run, {"output_dir": folder}, print)


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a",\n "answer": 1}\n{"prompt": "b",\n "answer": 2}\n',
        '{"prompt": "a", "answer": 1} {"prompt": "b", "answer": 2}',
        '[{"prompt": "a", "answer": 1},\n\n{"prompt": "b", "answer": 2}]\n',
    ],
)
def test_objects_may_follow_each_other_in_any_layout(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    rows = load_rows(RunSettings(dataset_id_or_path=str(tmp_path / "rows.json"), reward_funcs="match"), "train", None)
    assert [row["answer"] for row in rows] == [1, 2]


def test_whole_numbers_that_no_column_holds_stay_exact(tmp_path: Path) -> None:
    numbers = [{"prompt": "a", "answer": 2**64 - 1, "n": 2**53 + 1}, {"prompt": "b", "answer": 3, "n": 2.5}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), reward_funcs="match")
    dataset = to_dataset(load_rows(run, "train", None))
    assert list(dataset["answer"]) == ["18446744073709551615", "3"]
    assert list(dataset["n"]) == ["9007199254740993", "2.5"]


def test_a_column_without_a_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the column 'meta' of the dataset cannot be used: .*too large"):
        to_dataset([{"prompt": "a", "meta": [2**70]}])


def test_a_folder_with_a_card_keeps_its_texts_unless_the_card_says_which_files_are_meant(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "2024-01-05"}\n')
    (tmp_path / "README.md").write_text("# My rows\n")
    run = RunSettings(dataset_id_or_path=str(tmp_path), reward_funcs="match")
    assert load_rows(run, "train", None)[0]["answer"] == "2024-01-05"
    configs = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: other.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{configs}---\n")
    (tmp_path / "other.jsonl").write_text('{"prompt": "b", "answer": "x"}\n')
    assert load_rows(run, "train", None)[0]["answer"] == "x"


@pytest.mark.parametrize("begins", [False, True])
def test_a_tokenizer_without_a_template_gives_the_prompts_of_a_toml_run(tmp_path: Path, begins: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:tiny"))
    tokenizer.chat_template = None
    if begins:
        tokenizer.bos_token = tokenizer.eos_token
        first = TemplateProcessing(single="<s> $A".replace("<s>", tokenizer.bos_token), special_tokens=[
            (tokenizer.bos_token, tokenizer.bos_token_id)
        ])  # fmt: skip
        tokenizer.backend_tokenizer.post_processor = first
    wanted = PromptEncoder(tokenizer, "Add.", 0, lambda line: None).encode(Example("1+2=?", "3", "a"))
    tokenizer.chat_template = plain_template(tokenizer)
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2=?"}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert given == wanted.tolist() and (given[0] == tokenizer.bos_token_id) == begins
    answered = [*asked, {"role": "assistant", "content": "3"}]
    assert tokenizer.apply_chat_template(answered, return_dict=False)[-1] == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_model_without_a_chat_template_trains(configs: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    shutil.copytree(resolve_model("builtin:tiny"), "base", ignore=shutil.ignore_patterns("chat_template*"))
    (Path("rows.jsonl")).write_text('{"prompt": "2+3=?", "answer": "5"}\n' * 16)
    file = {"grpo": "tiny", "sft": "teacher_sft"}[kind]
    words = ["model_name_or_path=./base", "dataset_id_or_path=rows.jsonl", "max_steps=1", "val_split=null"]
    words += ["max_val_examples=null", "output_dir=out", "max_train_examples=null", "eval_strategy=no"]
    assert run(["grpo", f"configs/run/{file}.yaml", *words]) == 0, capsys.readouterr().err
    assert "the tokenizer has no chat template; prompts are given to the model as plain text" in capsys.readouterr().out


def test_a_folder_of_csv_files_keeps_its_texts(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("prompt,completion,level,score\nzip?,00501,3,2\nlabel?,NA,4\n")
    (tmp_path / "validation.csv").write_text("\ufeffprompt,completion\nprice?,1.50\n2,2.0\n", encoding="utf-8")
    run = RunSettings(dataset_id_or_path=str(tmp_path))
    for split, completions in (("train", ["00501", "NA"]), ("validation", ["1.50", "2.0"])):
        rows = load_rows(run, split, None, is_sft=True)
        assert [row["completion"][0]["content"] for row in rows] == completions
    run = RunSettings(dataset_id_or_path=str(tmp_path), reward_funcs="my:own")
    rows = load_rows(run, "train", None)
    assert [(row["level"], row["score"]) for row in rows] == [(3, 2), (4, None)]


def test_a_late_row_may_have_another_kind_of_answer(tmp_path: Path) -> None:
    lines = "".join(f"{number}+1?,{number + 1}\n" for number in range(11_000))
    for last, kind in (("2.5", float), ("x+1", str)):
        (tmp_path / "rows.csv").write_text(f"prompt,answer\n{lines}special,{last}\n")
        run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv"), reward_funcs="match")
        answers = [row["answer"] for row in load_rows(run, "train", None)]
        assert type(answers[0]) is type(answers[-1]) is kind and text_of(answers[0]) == "1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prompt,answer\na,1,2\n", "line 2 has 3 fields, and the first has 2"),
        ('prompt,answer\na,"1\n', "rows.csv: line 2 cannot be read: unexpected end of data"),
        ('prompt,answer\na,1\n"say "hi"",5\n', "rows.csv: line 3 cannot be read"),
        ("prompt,answer\n", "has no rows"),
        ("", "has no rows"),
        (",question\n0,a\n", "row 0 has none of answer.*it has Unnamed: 0, question"),
    ],
)
def test_a_damaged_csv_file_is_named_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_rows(RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv"), reward_funcs="match"), "train", None)


def test_several_files_of_a_split_are_all_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(("train.jsonl", "sub/train.jsonl")):
        (tmp_path / name).write_text(f'{{"prompt": "{number}", "answer": "1"}}\n')
    run = RunSettings(dataset_id_or_path=str(tmp_path), reward_funcs="match")
    assert len(load_rows(run, "train", None)) == 2


def test_rows_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n{"prompt": "a", "completion": "b"}\n')
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.jsonl"), reward_funcs="my:own")
    with pytest.raises(
        ConfigError, match=r"rows 0 and 1 are demonstrations of different shapes: text and prompt\+comp"
    ):
        load_rows(run, "train", None, is_sft=True)
    with pytest.raises(ConfigError, match=r"column 'id' .*  Try: keep_columns=\[\]"):
        to_dataset([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "x2"}])
    # The first row may lack what others have.
    assert list(to_dataset([{"prompt": "a"}, {"prompt": "b", "answer": "1"}])["answer"]) == [None, "1"]


def test_columns_of_a_csv_file_have_the_types_that_pandas_writes(tmp_path: Path) -> None:
    table = {
        "prompt": ["12", "34", "5", "6"],
        "answer": [5.0, 7.5, 5.0, 1e-5],
        "difficulty": [0.25, 1.0, 0.5, float("nan")],
        "verified": [True, False, True, False],
        "count": [3, 1, 2, 10**6],
        "zip": ["00501", "10115", "1", "2"],
        "label": ["NA", "x", "None", "y"],
    }
    pandas.DataFrame(table).to_csv(tmp_path / "rows.csv", na_rep="NA")
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv"), reward_funcs="my:own")
    rows = load_rows(run, "train", None)
    assert [row["prompt"][0]["content"] for row in rows] == table["prompt"]
    for name in ("answer", "verified", "count", "zip", "label"):
        assert [row[name] for row in rows] == table[name], name
        assert type(rows[0][name]) is type(table[name][0]), name
    assert [row["difficulty"] for row in rows] == [0.25, 1.0, 0.5, None]
    texts = [row["completion"][0]["content"] for row in load_rows(run, "train", 2, is_sft=True)]
    assert texts == ["5.0", "7.5"]


def test_odd_lines_of_a_csv_file_are_read_as_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\nprompt,answer,answer\na,5,wrong\n  \nb,7,wrong\n   \n")
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv"), reward_funcs="match")
    rows = load_rows(run, "train", None)
    assert [(row["answer"], row["answer.2"]) for row in rows] == [(5, "wrong"), (7, "wrong")]


@pytest.mark.parametrize(
    ("names", "is_read_as_text"),
    [
        (["validation.jsonl", "eval.jsonl"], True),
        (["val.jsonl", "train.jsonl", "constraints.txt", ".hidden/val.jsonl"], True),
        (["validation/a.jsonl"], True),
        (["validation.jsonl", "val.jsonl"], False),
        (["validation-00000-of-00002.jsonl", "validation-00001-of-00002.jsonl"], False),
    ],
)
def test_the_file_of_a_split_is_found_as_datasets_finds_it(
    tmp_path: Path, names: list[str], is_read_as_text: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "a", "answer": "2024-01-05"}\n')
    run = RunSettings(dataset_id_or_path=str(tmp_path), reward_funcs="match")
    if is_read_as_text:
        assert [row["answer"] for row in load_rows(run, "validation", None)] == ["2024-01-05"]
    else:
        with pytest.raises(ConfigError, match=r"has a datetime in 'answer'.*Try: name its JSON file itself"):
            load_rows(run, "validation", None)


def test_types_of_a_csv_file_depend_on_neither_the_limit_nor_the_size_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer,n\na,4,123456789094651489\nb,5,0.5\nc,x+1,2\n")
    run = RunSettings(dataset_id_or_path=str(tmp_path / "rows.csv"), reward_funcs="match")
    for limit in (None, 2):
        rows = load_rows(run, "train", limit)
        assert [row["answer"] for row in rows][:2] == ["4", "5"]
        assert [row["n"] for row in rows][:2] == ["123456789094651489", "0.5"]
