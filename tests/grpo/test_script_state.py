"""What a script sees of its run: steps after a resume, failing callbacks, and the model before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from retrain.backends.local import frozen
from retrain.errors import CheckpointError, ConfigError
from retrain.grpo import GRPOConfig
from tests.grpo.test_trainer import ROWS, TINY, make, shortest


def test_a_resumed_run_knows_its_step_from_the_beginning(tmp_path: Path) -> None:
    steps: list[int] = []

    def watching(completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return shortest(completions)

    make(tmp_path / "run", rewards=watching, lr_scheduler_type="constant").train()
    more = make(tmp_path / "run", rewards=watching, lr_scheduler_type="constant", max_steps=3)
    assert more.train(resume_from_checkpoint=True).global_step == 3
    assert steps == [0, 1, 2]
    done = make(tmp_path / "run", rewards=watching, lr_scheduler_type="constant", max_steps=3)
    assert done.train(resume_from_checkpoint=True).global_step == 3


class Fails(TrainerCallback):  # type: ignore[misc]
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            raise self.error


@pytest.mark.parametrize(("error", "steps"), [(ValueError(), 4), (KeyboardInterrupt(), 4), (ValueError(), 2)])
def test_a_callback_that_raises_leaves_a_checkpoint(error: BaseException, steps: int, tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=steps, callbacks=[Fails(error)])
    with pytest.raises(type(error)):
        trainer.train()
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["step"] == 2
    assert (tmp_path / "run" / "checkpoints" / "step_000002").is_dir()


def test_a_whole_model_that_was_given_is_the_trained_one_afterwards(tmp_path: Path) -> None:
    model, before = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    trainer = make(tmp_path / "run", model=model, processing_class=tokenizer, peft_config=None)
    trainer.train()
    assert trainer.model is model
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    own, first = model.state_dict(), before.state_dict()
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    assert any(not torch.equal(own[name], first[name]) for name in own)


def test_the_model_is_the_given_one_until_this_run_has_begun(tmp_path: Path) -> None:
    make(tmp_path / "run").train()
    assert make(tmp_path / "run").model == "builtin:tiny"


def test_arguments_of_the_model_hold_for_what_is_loaded_of_it_later(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", model_init_kwargs={"num_hidden_layers": 1}, max_steps=1)
    trainer.train()
    assert trainer.model.config.num_hidden_layers == 1


def test_a_frozen_copy_of_the_policy_is_loaded_as_it_was(tmp_path: Path) -> None:
    config = make(tmp_path / "run", model_init_kwargs={"num_hidden_layers": 1}, peft_config=None).config()
    policy = frozen.load_policy(config.model, config.lora, 0, torch.device("cpu"), print)
    assert frozen._load(config.model.model, policy, config, print).layers == 1
    assert frozen._load(TINY, policy, config, print).layers > 1


def test_a_column_that_a_row_lacks_is_none_there(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", rows=[*ROWS[:2], {"prompt": "x", "other": 1}])
    assert [example.meta for example in trainer.examples] == [
        {"answer": 1, "level": 0, "other": None},
        {"answer": 2, "level": 1, "other": None},
        {"answer": None, "level": None, "other": 1},
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs holds tokenize, which is set here"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": "x"}}, "which is no number"),
        ({"model_init_kwargs": {"num_hidden_layers": "x"}}, "does not fit builtin:tiny"),
    ],
)
def test_a_table_that_cannot_be_handed_on_is_refused(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path / "run", **arguments).train()


def test_a_resume_with_other_prompts_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run").train()
    other = make(tmp_path / "run", rows=[{**row, "prompt": "another"} for row in ROWS], max_steps=3)
    with pytest.raises(CheckpointError, match="was trained on other prompts"):
        other.train(resume_from_checkpoint=True)


def test_a_reason_with_a_hint_ends_in_one_stop() -> None:
    with pytest.raises(ConfigError, match=r"is sent from here\.  Try: trainer\.save_model"):
        GRPOConfig("run", push_to_hub=True)
