"""A LoRA adapter on a loaded model, a KL penalty, a cosine schedule with a warm-up."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Digits:
    """A reward that is an object: the share of digits."""

    __name__ = "digits"

    def __call__(self, prompts, completions, trainer_state=None, **kwargs):
        assert trainer_state is not None and trainer_state.global_step >= 0
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def main(model: str, output_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    args = GRPOConfig(
        output_dir=output_dir,
        run_name=None,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=16,
        max_steps=4,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        weight_decay=0.01,
        max_grad_norm=0.5,
        adam_beta2=0.99,
        beta=0.05,
        loss_type="dr_grpo",
        scale_rewards=False,
        epsilon=0.2,
        epsilon_high=0.28,
        logging_steps=1,
        save_steps=2,
        save_total_limit=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=False,
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[Digits()],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{n} times two is"} for n in range(2, 20)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    result = trainer.train()
    print("steps", result.global_step, "kl", any("kl" in key for row in trainer.state.log_history for key in row))
    trainer.save_model(output_dir + "/final")


if __name__ == "__main__":
    main(*sys.argv[1:])
