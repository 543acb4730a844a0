"""Fields of TrainingArguments that do not apply here: one that was changed is refused with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from retrain.errors import ConfigIssue
from retrain.grpo.parameters import defaults, is_declared

_SHARDING = "says how weights are sharded, which the launcher does.  Try: accelerate launch --config_file zero3.yaml"
_HUB = (
    "needs the Hugging Face hub, to which nothing is sent from here.  Try: trainer.save_model(), then upload the folder"
)
_EVAL = "is of evaluations by loss; here completions of the evaluation prompts are sampled and scored"
_LOADER = "is of transformers' data loader; here prompts are encoded once and taken in an order fixed by the seed"

REASONS = {
    "fp16": "trains in float16, which needs a loss scaler that retrain lacks.  Try: bf16=True",
    "tf32": "changes how float32 is multiplied.  Try: torch.set_float32_matmul_precision in the script",
    "torch_compile": "is not how the model is run here",
    "use_liger_kernel": "replaces layers that retrain runs itself",
    "auto_find_batch_size": "is not needed: a step is split into passes that fit the memory",
    "optim_args": "is of other optimisers than AdamW",
    "label_smoothing_factor": "is of a loss over labels, and there are none",
    "neftune_noise_alpha": "is of supervised fine-tuning",
    "data_seed": "is apart from the seed, which here is the seed of every draw.  Try: seed",
    "full_determinism": "is a matter of torch.  Try: torch.use_deterministic_algorithms(True)",
    "deepspeed": _SHARDING,
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": _SHARDING,
    "accelerator_config": _SHARDING,
    "load_best_model_at_end": "needs a measure of the best model.  Try: eval_strategy, and choose a checkpoint",
    "logging_first_step": "is one line more.  Try: logging_steps=1",
    "do_train": "says what a script is to do.  Try: trainer.train()",
    "do_eval": "says what a script is to do.  Try: trainer.evaluate()",
    "do_predict": "says what a script is to do, and there is nothing to predict",
    "per_device_eval_batch_size": "has no use: the engine samples all prompts of an evaluation at once",
    "save_only_model": "would leave out what a resume needs",
}
_PREFIXES = {
    "hub_": _HUB,
    "push_to_hub": _HUB,
    "dataloader_": _LOADER,
    "eval_": _EVAL,
    "trackio_": "is of a Space.  Try: TRACKIO_SPACE_ID",
}
# What transformers' own parser of command lines gives where nothing was said.
_UNSAID: dict[str, object] = {"include_num_input_tokens_seen": False, "debug": None}
_OTHERWISE = "belongs to the training loop of transformers, which does not run here"


def find_inherited(config: Any) -> Iterator[ConfigIssue]:
    """A problem for each field that is not declared here and does not have its default."""
    usual = defaults(type(config))
    for field in dataclasses.fields(config):
        value, unsaid = vars(config)[field.name], _UNSAID.get(field.name, usual[field.name])
        # local_rank is written by launchers, not by users.
        if is_declared(field) or value in (usual[field.name], unsaid) or field.name == "local_rank":
            continue
        reason, _, hint = _reason(field.name).partition("  ")
        text = f"= {value!r} cannot be used: it {reason.rstrip('.')}."
        yield ConfigIssue(field.name, text, hint or "Leave it out.")


def _reason(name: str) -> str:
    by_prefix = (text for prefix, text in _PREFIXES.items() if name.startswith(prefix))
    return REASONS.get(name) or next(by_prefix, _OTHERWISE)
