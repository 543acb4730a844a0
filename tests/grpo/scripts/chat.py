"""A conversation with an answer column: two rewards of different weight, an evaluation, a callback."""

import re
import sys

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Work it out and put the answer into \\boxed{}."


def is_right(prompts, completions, answer, **kwargs):
    """1 for the answer in a box."""
    texts = [completion[0]["content"] for completion in completions]
    found = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in texts]
    return [float(bool(boxes) and boxes[-1] == wanted) for boxes, wanted in zip(found, answer, strict=True)]


def has_box(completions, completion_ids, level, **kwargs):
    """Half a point for a box; says nothing about easy problems."""
    assert len(completions) == len(completion_ids) == len(level)
    texts = [completion[0]["content"] for completion in completions]
    return [None if how == "easy" else 0.5 * ("\\boxed{" in text) for text, how in zip(texts, level, strict=True)]


class Watch(TrainerCallback):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.steps = self.logs = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs += 1


def row(a: int, b: int) -> dict:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a} + {b}"}]
    return {"prompt": messages, "answer": str(a + b), "level": "easy" if a < 3 else "hard"}


def main(model: str, output_dir: str) -> None:
    rows = [row(a, b) for a in range(1, 9) for b in range(1, 9)]
    dataset = Dataset.from_list(rows).train_test_split(test_size=4, seed=0)
    args = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=24,
        num_train_epochs=0.1,
        learning_rate=1e-3,
        reward_weights=[1.0, 0.2],
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        beta=0.0,
        bf16=False,
        use_cpu=True,
    )
    watch = Watch()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[is_right, has_box],
        args=args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        callbacks=[watch],
    )
    result = trainer.train()
    logged = [row for row in trainer.state.log_history if "rewards/is_right/mean" in row]
    print("steps", result.global_step, watch.steps, "logged", len(logged) > 0, watch.logs > 0)
    metrics = trainer.evaluate()
    print("evaluated", "eval_reward" in metrics, "eval_rewards/is_right/mean" in metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
