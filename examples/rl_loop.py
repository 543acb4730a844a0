"""Reinforcement learning with a verifiable reward, in one plain file.

The built-in model with 0.4 M parameters learns sums such as `13-7-1-5=?` on a CPU. This uses retrain's model files and
problems but not its training loop, and shows the method itself:

    1 roll out   sample a group of completions for each of a few problems
    2 score      1 for the correct number in a box, 0 for anything else
    3 credit     the advantage of a completion is its reward minus the mean of its group
    4 train      one step up the gradient of  ratio · advantage  over the sampled tokens

    python examples/rl_loop.py --steps 40
"""

import argparse
import random
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import retrain.builtin
from retrain.data.arithmetic import Problem, draw_split

FOLDER = Path(retrain.builtin.__file__).parent / "tiny"
BOX = re.compile(r"\\boxed\{(\d+)\}")


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], options: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample `options.group` completions per problem: token ids, mask of real tokens, mask of sampled tokens."""
    chats = [[{"role": "user", "content": problem.question}] for problem in problems for _ in range(options.group)]
    # Prompts are padded on the left, so that every completion starts in the same column.
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=options.max_tokens)
    width = prompts["input_ids"].shape[1]
    answers = ids[:, width:]
    # A completion ends with its first EOS token; everything after it is padding.
    ended = (answers == tokenizer.eos_token_id).cumsum(dim=1)
    kept = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_token_id))
    real = torch.cat([prompts["attention_mask"].bool(), kept], dim=1)
    sampled = torch.cat([torch.zeros_like(prompts["attention_mask"]).bool(), kept], dim=1)
    return ids, real, sampled


def score(tokenizer: PreTrainedTokenizerBase, row: torch.Tensor, answer: str) -> float:
    """1 if the last box contains the answer, else 0."""
    found = BOX.findall(tokenizer.decode(row))
    return float(bool(found) and found[-1] == answer)


def token_logprobs(model: PreTrainedModel, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token given the previous ones; column t belongs to token t + 1."""
    # Positions count real tokens only, so that left padding does not shift them.
    positions = (real.long().cumsum(dim=1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=real.long(), position_ids=positions).logits[:, :-1]
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rewards: torch.Tensor,
    group: int,
) -> float:
    """One update. Groups whose rewards are all equal have zero advantages and are skipped."""
    ids, real, sampled = rollouts
    by_group = rewards.view(-1, group)
    advantages = (by_group - by_group.mean(dim=1, keepdim=True)).flatten()
    live = advantages != 0
    if not live.any():
        return 0.0
    mask = sampled[live][:, 1:]
    new = token_logprobs(model, ids[live], real[live])
    # The sampling policy is the trained policy, so the ratio is 1; only its gradient matters.
    ratio = torch.exp(new - new.detach())
    loss = -(ratio * advantages[live, None] * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], options: argparse.Namespace
) -> float:
    """Accuracy on held-out problems, one completion each."""
    once = argparse.Namespace(group=1, max_tokens=options.max_tokens)
    ids, _, _ = sample(model, tokenizer, problems, once)
    return sum(score(tokenizer, row, problem.answer) for row, problem in zip(ids, problems, strict=True)) / len(
        problems
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and return the mean reward of each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="problems per step")
    parser.add_argument("--group", type=int, default=16, help="completions per problem")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--held-out", type=int, default=128, help="number of evaluation problems")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    drawn, fixed = random.Random(options.seed), random.Random(0)
    held_out = [draw_split(fixed, held_out=True) for _ in range(options.held_out)]
    print(f"held-out before: {evaluate(model, tokenizer, held_out, options):.1%}")
    history = []
    for step in range(options.steps):
        started = time.perf_counter()
        problems = [draw_split(drawn, held_out=False) for _ in range(options.batch)]
        rollouts = sample(model, tokenizer, problems, options)
        answers = [problem.answer for problem in problems for _ in range(options.group)]
        rewards = torch.tensor([score(tokenizer, *pair) for pair in zip(rollouts[0], answers, strict=True)])
        loss = train_step(model, optimizer, rollouts, rewards, options.group)
        history.append(float(rewards.mean()))
        print(f"step {step:3d}  reward {history[-1]:.3f}  loss {loss:+.4f}  {time.perf_counter() - started:.1f} s")
    print(f"held-out after:  {evaluate(model, tokenizer, held_out, options):.1%}")
    return history


if __name__ == "__main__":
    main()
