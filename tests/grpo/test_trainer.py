"""GRPOTrainer end to end on the embedded model: scripts for TRL, resume, callbacks, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from retrain.builtin import resolve_model
from retrain.cli import run
from retrain.config import load_config
from retrain.errors import CheckpointError, ConfigError, PluginError
from retrain.grpo import GRPOConfig, GRPOTrainer
from retrain.grpo.problems import RowEncoder
from retrain.trainer import train
from retrain.types import Example

SCRIPTS = Path(__file__).parent / "scripts"
TINY = resolve_model("builtin:tiny")
ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1, "level": n % 2} for n in range(8)]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def shortest(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def make(folder: Path, *, model: Any = "builtin:tiny", rewards: Any = shortest, rows: Any = ROWS, **others: Any) -> Any:
    """A trainer of a run of seconds; arguments of GRPOConfig are among the others."""
    own = {"eval_dataset", "processing_class", "callbacks", "peft_config"}
    arguments = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        **{key: value for key, value in others.items() if key not in own},
    }
    given = {"peft_config": LORA, **{key: value for key, value in others.items() if key in own}}
    return GRPOTrainer(model, rewards, GRPOConfig(str(folder), **arguments), rows, **given)


def logged(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("length", ["rewards 3 True"]),
        ("chat", ["steps 3 3 logged True True", "evaluated True True"]),
        ("adapter", ["steps 4 kl True"]),
    ],
)
def test_a_script_for_trl_runs_with_only_its_import_changed(
    script: str, printed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (SCRIPTS / f"{script}.py").read_text()
    assert text.count("from trl import GRPOConfig, GRPOTrainer") == 1 and text.count("trl") == 1
    names: dict[str, Any] = {"__name__": f"trl_{script}"}
    exec(compile(text.replace("from trl import", "from retrain.grpo import"), script, "exec"), names)
    names["main"](TINY, str(tmp_path / "run"))
    shown = capsys.readouterr().out.splitlines()
    assert all(line in shown for line in printed)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    if script != "chat":
        mark = "adapter_config.json" if script == "adapter" else "config.json"
        assert (tmp_path / "run" / "final" / mark).exists()
        assert (tmp_path / "run" / "final" / "tokenizer.json").exists()


def test_a_run_from_python_is_the_run_of_its_toml(tmp_path: Path) -> None:
    problems = [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a in range(2, 6) for b in range(2, 6)]
    messages = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in problems]
    trainer = make(tmp_path / "python", rewards="match", rows=messages, max_completion_length=40, temperature=0.9)
    trainer.train()
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    own = trainer.config().model_dump(by_alias=True)
    options = {f"{table}.{key}": value for table in own for key, value in (own[table] or {}).items()}
    options |= {
        "data.source": "jsonl",
        "data.path": str(tmp_path / "problems.jsonl"),
        "logging.log_dir": str(tmp_path / "toml"),
        "backend.adapter_path": str(tmp_path / "adapter"),
    }
    train(load_config(None, options))
    for mine, theirs in zip(logged(tmp_path / "python"), logged(tmp_path / "toml"), strict=True):
        for key in ("loss", "mean_reward", "grad_norm", "num_datums", "correct_rate"):
            assert mine[key] == theirs[key], key


@pytest.mark.slow
def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    whole.train()
    make(tmp_path / "parts", max_steps=2, lr_scheduler_type="constant").train()
    rest = make(tmp_path / "parts", max_steps=4, lr_scheduler_type="constant")
    result = rest.train(resume_from_checkpoint=True)
    assert result.global_step == 4
    losses = [[row["loss"] for row in logged(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    newest = tmp_path / "parts" / "checkpoints" / "step_000004"
    again = make(tmp_path / "parts", max_steps=5, lr_scheduler_type="constant", resume_from_checkpoint=str(newest))
    assert again.train().global_step == 5
    with pytest.raises(CheckpointError, match="is not the newest checkpoint"):
        again.train(resume_from_checkpoint=str(newest))


def test_the_command_line_says_why_it_cannot_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run").train()
    assert run(["--resume", str(tmp_path / "run"), "--max-steps", "4"]) == 2
    assert "begun by a script" in capsys.readouterr().err


class Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, stop_at: int = 0) -> None:
        self.events: list[str] = []
        self.stop_at = stop_at

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("init")

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(f"begin of {state.max_steps}")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == self.stop_at
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.events.append(f"log {logs['step']}")

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        saved = sorted(path.name for path in (Path(args.output_dir) / "checkpoints").iterdir())
        self.events.append(f"saved {saved[-1]}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.events.append("evaluated" if "eval_pass_at_1" in metrics else "nothing")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("end")


def test_callbacks_are_told_in_order(tmp_path: Path) -> None:
    watch = Watch()
    arguments = {"logging_steps": 2, "save_steps": 2, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make(tmp_path / "run", callbacks=[watch], eval_dataset=ROWS[:2], **arguments)
    trainer.train()
    assert watch.events == [
        "init", "begin of 3", "step 1", "log 1", "evaluated", "step 2", "log 2", "saved step_000002", "step 3", "log 3",
        "evaluated", "saved step_000003", "log 3", "evaluated", "end",
    ]  # fmt: skip
    assert [row["step"] for row in trainer.state.log_history] == [1, 2, 3, 3]
    assert ["eval_pass_at_1" in row for row in trainer.state.log_history] == [True, False, True, True]


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=5)
    trainer.add_callback(Watch(stop_at=2))
    assert trainer.train().global_step == 2
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["step"] == 2
    assert make(tmp_path / "run", max_steps=5).train(resume_from_checkpoint=True).global_step == 5


class Wishful(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_save = True


class Optimistic(TrainerCallback):  # type: ignore[misc]
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


def test_a_callback_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="listens to on_optimizer_step"):
        make(tmp_path / "run", callbacks=[Optimistic])
    with pytest.raises(ConfigError, match=r"no transformers\.TrainerCallback"):
        make(tmp_path / "run", callbacks=[print])
    with pytest.raises(ConfigError, match=r"set control\.should_save, which has no effect"):
        make(tmp_path / "run", callbacks=[Wishful]).train()


def test_the_trained_model_can_be_had_and_saved(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", peft_config=None)
    assert trainer.model == "builtin:tiny"
    with pytest.raises(CheckpointError, match="no weights yet"):
        trainer.save_model(str(tmp_path / "early"))
    trainer.train()
    before = AutoModelForCausalLM.from_pretrained(TINY).state_dict()
    after = trainer.model.state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], after[name]) for name in after)
    adapted = make(tmp_path / "lora")
    adapted.train()
    assert adapted.model.peft_config["default"].r == 4


def test_a_loaded_model_is_trained_from_its_own_weights(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    trainer = make(tmp_path / "run", model=model, processing_class=tokenizer)
    trainer.train()
    kept = Path(trainer.config().model.model)
    weights = AutoModelForCausalLM.from_pretrained(kept).get_input_embeddings().weight
    assert torch.equal(weights, model.get_input_embeddings().weight)
    # A second run in the same place moves the first away, with the model that it was given.
    make(tmp_path / "run", model=model, processing_class=tokenizer).train()
    assert kept.is_dir() and (tmp_path / "run.1" / kept.name).is_dir()


def test_a_fresh_peft_model_is_its_base_and_its_configuration(tmp_path: Path) -> None:
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), config)
    trainer = make(
        tmp_path / "run", model=model, peft_config=None, processing_class=AutoTokenizer.from_pretrained(TINY)
    )
    found = trainer.config()
    assert (found.model.lora_rank, found.lora.alpha, found.lora.target_modules) == (2, 4, "q_proj,v_proj")
    assert found.model.dtype == "fp32"
    trained = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), config)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    with pytest.raises(ConfigError, match="was trained already"):
        make(tmp_path / "run", model=trained, peft_config=None)
    with pytest.raises(ConfigError, match="has its adapter already"):
        make(tmp_path / "run", model=trained)


def test_a_lora_configuration_without_targets_takes_those_of_peft(tmp_path: Path) -> None:
    found = make(tmp_path / "run", peft_config=LoraConfig(r=2, lora_alpha=4)).config()
    assert found.lora.target_modules == "q_proj,v_proj"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LoraConfig(r=2, use_dora=True), "use_dora = True has no twin"),
        (LoraConfig(r=2, bias="all"), "bias = 'all' has no twin"),
        (LoraConfig(r=2, task_type="SEQ_CLS"), "is not CAUSAL_LM"),
        (LoraConfig(r=2, target_modules=".*_proj"), "is a pattern"),
        (PrefixTuningConfig(num_virtual_tokens=2), "only peft.LoraConfig has a twin"),
    ],
)
def test_an_adapter_without_a_twin_is_refused(config: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path / "run", peft_config=config)


def test_unused_columns_are_kept_from_the_rewards(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def watch(completions: list[str], **columns: Any) -> list[float]:
        seen.append(set(columns))
        return shortest(completions)

    given = {"prompts", "completion_ids", "trainer_state", "log_metric"}
    make(tmp_path / "kept", rewards=watch, max_steps=1).train()
    make(tmp_path / "removed", rewards=watch, max_steps=1, remove_unused_columns=True).train()
    assert seen == [given | {"answer", "level"}, given]


def test_the_chat_template_is_given_its_arguments() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    message = Example(({"role": "user", "content": "2 + 2"},), "")
    quiet, loud = (RowEncoder(tokenizer, "", 0, print, {"loud": value}) for value in (False, True))
    assert tokenizer.decode(loud.encode(message)) == tokenizer.decode(quiet.encode(message)) + "!"


def test_a_prompt_that_is_text_is_given_as_it_stands() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    encoder = RowEncoder(tokenizer, "", 0, print)
    assert encoder.encode(Example("2 + 2 =", "")).tolist() == tokenizer("2 + 2 =")["input_ids"]


def test_a_long_prompt_loses_its_beginning() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    whole = tokenizer("1 + 2 + 3 + 4 =")["input_ids"]
    assert RowEncoder(tokenizer, "", 3, print).encode(Example("1 + 2 + 3 + 4 =", "")).tolist() == whole[-3:]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (None, "train_dataset is missing"),
        ([], "train_dataset has no rows"),
        ("openai/gsm8k", "neither a Dataset nor a list"),
        ({"train": ROWS}, r"a dict of splits \(train\)"),
        ([{"question": "2 + 2"}], "row 0 has no field 'prompt'; it has question"),
        ([{"prompt": ""}], "row 0 has an empty 'prompt'"),
        ([{"prompt": [{"role": "user"}]}], "a message without role and content"),
        ([{"prompt": "2", "completions": "x"}], "has a column 'completions'"),
        (["2 + 2"], "row 0 is a str"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(rows: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path / "run", rows=rows)


def test_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a stream"):
        make(tmp_path / "run", rows=Dataset.from_list(ROWS).to_iterable_dataset())


def test_a_reward_by_name_needs_an_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 0 has no answer or solution"):
        make(tmp_path / "run", rewards="match", rows=[{"prompt": "2 + 2"}])


def test_a_reward_that_raises_ends_the_run(tmp_path: Path) -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("no such column")

    with pytest.raises(PluginError, match="'broken' raised ValueError"):
        make(tmp_path / "run", rewards=broken).train()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"args": object()}, "from retrain.grpo import GRPOConfig"),
        ({"optimizers": (1, 2)}, "cannot use optimizers"),
        ({"tools": [print]}, "cannot use tools"),
        ({"quantisation": 1}, "takes no argument 'quantisation'"),
        ({"model": 3}, "a model id, a folder"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GRPOTrainer(**{"model": "builtin:tiny", "reward_funcs": shortest, "train_dataset": ROWS, **arguments})


def test_nulls_of_trl_are_let_pass() -> None:
    trainer = GRPOTrainer("builtin:tiny", shortest, train_dataset=ROWS, optimizers=(None, None), tools=None)
    assert trainer.args.output_dir == "builtin:tiny-GRPO"


def test_an_evaluation_is_the_same_while_training_and_after(tmp_path: Path) -> None:
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    trainer = make(tmp_path / "run", eval_dataset=ROWS[:3], **arguments)
    trainer.train()
    last = logged(tmp_path / "run", "eval.jsonl")[-1]
    found = trainer.evaluate()
    assert found["eval_reward"] == last["eval_reward"] == found["eval_rewards/shortest/mean"] < 0
    assert "eval_reward" in trainer.state.log_history[0] and "eval_reward" not in trainer.state.log_history[1]
    assert {"reward", "learning_rate", "kl", "completions/clipped_ratio"} <= set(trainer.state.log_history[0])


def test_an_evaluation_needs_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no eval_dataset"):
        make(tmp_path / "run").evaluate()


def test_scaled_advantages_have_a_spread_of_one() -> None:
    from retrain.advantages import compute_advantages

    found = compute_advantages([0.0, 1.0, 2.0, 1.0], [[-1.0]] * 4, advantage_mode="grpo_scaled", transform_mode="none")
    spread = (2 / 3) ** 0.5
    expected = [-1 / (spread + 1e-4), 0.0, 1 / (spread + 1e-4), 0.0]
    assert found.episode_advantages == pytest.approx(expected)
