"""Completions of a given length: prompts are text, one reward."""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def near_twenty(completions, **kwargs):
    """The nearer to twenty characters, the better."""
    return [-abs(20 - len(completion)) for completion in completions]


def main(model: str, output_dir: str) -> None:
    prompts = [f"{a} + {b} =" for a in range(2, 8) for b in range(2, 8)]
    args = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        learning_rate=1e-3,
        max_steps=3,
        logging_steps=1,
        save_steps=3,
        temperature=1.0,
        seed=7,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=near_twenty,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print("rewards", len(rewards), all(-100 <= reward <= 0 for reward in rewards))
    trainer.save_model(output_dir + "/final")


if __name__ == "__main__":
    main(*sys.argv[1:])
