"""Build the built-in model: train its tokenizer, pre-train its weights, save both in Hugging Face format.

`python -m retrain.builtin.make --out DIR` takes about four minutes on one CPU core. The same command with the
same versions of torch and tokenizers on the same kind of CPU gives bit-identical weights.
"""

import argparse
import hashlib
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from retrain.builtin.corpus import CAREFUL, HASTY, Document, write_corpus

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
# Numbers of up to two digits are one token: a model this small does not learn carries.
# Punctuation includes the following space, so that a step `13-7=6. ` costs six tokens.
TOKEN_PATTERN = r" ?\\boxed\{|\d{1,2}|[.,:?] ?| ?\p{L}+|[^\s\p{L}\d]|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|assistant|>{{ message['content'] }}<|end|>"
    "{%- elif message['role'] == 'system' -%}<|system|>{{ message['content'] }}"
    "{%- else -%}<|user|>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
CONTEXT_LENGTH = 256
TYPICAL_ANSWER = 28  # tokens


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights: training settings, seed and number of threads."""

    careful_steps: int = 500
    hasty_steps: int = 800
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 80
    seed: int = 0
    threads: int = 1

    @property
    def steps(self) -> int:
        """All pre-training steps."""
        return self.careful_steps + self.hasty_steps


def build_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=20,
        special_tokens=[END, PAD, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for doc in documents for text in (doc.system or "", doc.problem.question, doc.completion))
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Create the untrained model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def render(document: Document) -> str:
    """Format a document like the chat template."""
    system = f"{SYSTEM}{document.system}" if document.system else ""
    return f"{system}{USER}{document.problem.question}{ASSISTANT}{document.completion}{END}"


def batch_by_length(rows: list[list[int]], batch_size: int, seed: int) -> list[list[list[int]]]:
    """Batches of rows of similar length, in random order."""
    rng = random.Random(seed)
    by_length = sorted(rng.sample(rows, len(rows)), key=len)
    batches = [by_length[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    rng.shuffle(batches)
    return batches


def collate(batch: list[list[int]], prompt_end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right, with labels only after the prompt."""
    longest = max(map(len, batch))
    ids, labels = [], []
    for row in batch:
        padding = longest - len(row)
        answer = row.index(prompt_end) + 1
        ids.append(row + [0] * padding)
        labels.append([-100] * answer + row[answer:] + [-100] * padding)
    return torch.tensor(ids), torch.tensor(labels)


def pretrain(model: Qwen3ForCausalLM, batches: list[list[list[int]]], prompt_end: int, recipe: Recipe) -> None:
    """Train on each batch once, with a warm-up and a cosine decay to 2% of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)

    def scale(step: int) -> float:
        if step < recipe.warmup_steps:
            return (step + 1) / recipe.warmup_steps
        progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    started, running_loss = time.monotonic(), 0.0
    model.train()
    for step, batch in enumerate(batches, start=1):
        ids, labels = collate(batch, prompt_end)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        # A fixed divisor: dividing by the token count would give documents of short batches more weight.
        loss = total / (recipe.batch_size * TYPICAL_ANSWER)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        running_loss += loss.item()
        if step % 100 == 0:
            print(f"step {step}  loss {running_loss / 100:.3f}  {time.monotonic() - started:.0f} s", flush=True)
            running_loss = 0.0
    model.eval()


def make(out: Path, recipe: Recipe) -> str:
    """Build and save everything under `out`; return the sha256 of the weights."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    careful = list(write_corpus(CAREFUL, recipe.seed, recipe.careful_steps * recipe.batch_size))
    hasty = list(write_corpus(HASTY, recipe.seed + 1, recipe.hasty_steps * recipe.batch_size))
    tokenizer = build_tokenizer(hasty[:20_000])
    batches = []
    for documents in (careful, hasty):
        texts = [render(document) for document in documents]
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
        batches += batch_by_length(rows, recipe.batch_size, recipe.seed)
    model = build_model(tokenizer, recipe.seed)
    lengths = [len(row) for batch in batches for row in batch]
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}, {len(lengths):,} documents,")
    print(f"{sum(lengths) / len(lengths):.1f} tokens on average, {max(lengths)} at most", flush=True)
    pretrain(model, batches, tokenizer.convert_tokens_to_ids(ASSISTANT), recipe)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def main() -> None:
    """Parse the command line and build the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="seed of the corpus and the weights")
    parser.add_argument("--threads", type=int, default=Recipe.threads, help="CPU threads; the weights depend on it")
    options = parser.parse_args()
    recipe = Recipe(seed=options.seed, threads=options.threads)
    digest = make(options.out, recipe)
    print(f"sha256 {digest}  {options.out / 'model.safetensors'}")


if __name__ == "__main__":
    main()
