"""Creates the student for teaching.toml: the built-in model, fine-tuned to answer immediately and to trust a note.

Without a note it answers without intermediate steps and is mostly wrong. With a note after the question, it repeats the
last number of the note, correct or not. It is fine-tuned on training problems only. Takes about a minute on one core.
"""

import argparse
import random
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.builtin import resolve_model
from retrain.builtin.corpus import HASTY, write_document

ALONE_SHARE = 0.3
IGNORED = -100


def write_answer(rng: random.Random) -> tuple[str, str]:
    """A question, with or without a note, and the student's answer."""
    document = write_document(HASTY, rng)
    numbers = re.findall(r"\d+", document.completion)
    if not numbers or rng.random() < ALONE_SHARE:
        return document.problem.question, f"\\boxed{{{document.problem.answer}}}"
    return f"{document.problem.question} {document.completion}", f"\\boxed{{{numbers[-1]}}}"


def make_batch(tokenizer, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids, and labels that cover only the student's answers."""
    rows = []
    for _ in range(size):
        asked, answer = write_answer(rng)
        prompt = tokenizer(f"<|user|>{asked}<|assistant|>")["input_ids"]
        rows.append((prompt, [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def main(arguments: list[str] | None = None) -> Path:
    """Fine-tune the student and save it to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("logs/teaching/student"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = random.Random(0)
    for step in range(options.steps):
        ids, labels = make_batch(tokenizer, rng, size=48)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"Saved the student to {options.out}.")
    return options.out


if __name__ == "__main__":
    main()
