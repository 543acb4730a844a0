"""How fast and how right is the `math` reward?

    python benchmarks/rewards.py [--math math_train.jsonl] [--gsm8k gsm8k_train.jsonl] [--seconds 20]

Without paths it uses the extracts of MATH and GSM8K in tests/rows. It measures, in one process:

- gold: each reference against itself, and against the solution that it comes from;
- altered: each MATH answer against other problems' answers, with a number off by one, a sign changed, two parts
  swapped, and the value cut to two decimals. What is accepted is checked by sympy, with another parser and arithmetic;
- throughput on answers that all differ: half right in another symbolic form and half wrong, then only right ones, in
  CPU time; and the first mixture through a pool of one worker process.

Exits 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import sympy
from math_verify import parse

from retrain.rewards import RewardPool, RewardSpec, TermSpec
from retrain.rewards.answers.notation import tidy
from retrain.rewards.answers.parse import read
from retrain.rewards.answers.values import evaluate
from retrain.rewards.match import answer_of, normalize, split_answer
from retrain.rewards.math import MathReward, equal_mathematics

EXTRACTS = Path(__file__).parents[1] / "tests" / "rows"
LEAST_MIXED, LEAST_WORST = 300.0, 60.0
_NUMBER = re.compile(r"\d+")

Pair = tuple[str, str]


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_golds(math: Sequence[dict[str, str]], gsm8k: Sequence[dict[str, str]]) -> list[str]:
    """The references that are not right against themselves or their own solution."""
    reward = MathReward()
    failed = []
    for row in math:
        answer = row["answer"].strip()
        if answer and not (reward.score(row["solution"], answer) and reward.score(f"\\boxed{{{answer}}}", answer)):
            failed.append(answer)
    for row in gsm8k:
        answer = answer_of(row["answer"])
        if not reward.score(f"\\boxed{{{answer}}}", row["answer"]):
            failed.append(answer)
    return failed


def alter(answer: str, others: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Answers that are not meant: another problem's, off by one, another sign, parts swapped, cut to two decimals."""
    yield from draw.choices(others, k=2)
    numbers = list(_NUMBER.finditer(answer))
    if numbers:
        found = draw.choice(numbers)
        shifted = int(found[0]) + draw.choice((-1, 1))
        yield answer[: found.start()] + str(abs(shifted)) + answer[found.end() :]
    yield answer[1:] if answer.startswith("-") else f"-{answer}"
    signs = [at for at, sign in enumerate(answer) if sign in "+-" and at]
    if signs:
        at = draw.choice(signs)
        yield answer[:at] + ("-" if answer[at] == "+" else "+") + answer[at + 1 :]
    if len(numbers) > 1:
        one, other = sorted(draw.sample(numbers, 2), key=lambda number: number.start())
        yield answer[: one.start()] + other[0] + answer[one.end() : other.start()] + one[0] + answer[other.end() :]
    yield from cut_decimals(answer)


def cut_decimals(answer: str) -> Iterator[str]:
    """The value with two digits after the point, cut and rounded."""
    node = read(answer)
    try:
        value = float(evaluate(node, {})) if node is not None else float("nan")
    except (ArithmeticError, ValueError, TypeError):
        return
    if value == value and abs(value) < 1e12 and value != int(value):
        yield f"{int(value * 100) / 100:.2f}"
        yield f"{value:.2f}"


def altered_pairs(golds: Sequence[str], seed: int = 0) -> list[Pair]:
    """Every altered answer with the reference it was made from, unless the text stayed the same."""
    draw = random.Random(seed)
    return [(altered, gold) for gold in golds for altered in alter(gold, golds, draw) if altered != gold]


def sympy_agrees(answer: str, gold: str) -> bool:
    """Whether sympy, by math-verify's parser, finds the difference to be zero, or the structures equal."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    one, other = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (answer, gold))
    if not one or not other:
        return False
    try:
        if one[0] == other[0]:
            return True
        return bool(sympy.simplify(one[0] - other[0]) == 0)
    except (TypeError, AttributeError, ValueError):
        return False


def rewrite(answer: str, draw: random.Random) -> str | None:
    """The same value in another symbolic form; None for what is no expression."""
    node = read(answer)
    if node is None or type(node).__name__ not in ("Number", "Symbol", "Operation"):
        return None
    k, n = draw.randint(2, 97), draw.randint(2, 9)
    forms = (
        rf"\frac{{{k}\left({answer}\right)}}{{{k}}}",
        rf"\left({answer}\right) + \sqrt{{{k}}} - \sqrt{{{k}}}",
        rf"\frac{{\left({answer}\right)\sqrt{{{k}}}}}{{\sqrt{{{k}}}}}",
        rf"{k} + \left({answer}\right) - {k}",
        rf"\left({answer}\right)\cdot\left(\sin^2 {n} + \cos^2 {n}\right)",
        rf"\frac{{1}}{{{n}}}\left({answer}\right) + \frac{{{n - 1}}}{{{n}}}\left({answer}\right)",
    )
    return draw.choice(forms)


def rate(pairs: Sequence[Pair], seconds: float) -> tuple[float, int]:
    """Comparisons per second of CPU time, over at most so many seconds, and how many were right."""
    for cached in (equal_mathematics, read, tidy, normalize, split_answer):
        cached.cache_clear()
    began, right, done = time.process_time(), 0, 0
    for answer, gold in pairs:
        right += equal_mathematics(answer, gold)
        done += 1
        if time.process_time() - began > seconds:
            break
    return done / (time.process_time() - began), right


def run(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--math", type=Path, default=EXTRACTS / "math.jsonl", help="rows of MATH")
    parser.add_argument("--gsm8k", type=Path, default=EXTRACTS / "gsm8k.jsonl", help="rows of GSM8K")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for each throughput")
    options = parser.parse_args(arguments)
    math, gsm8k = read_rows(options.math), read_rows(options.gsm8k)
    golds = [row["answer"].strip() for row in math if row["answer"].strip()]
    held = []

    failed = check_golds(math, gsm8k)
    held.append(not failed)
    print(f"gold: {len(failed)} of {len(math)} + {len(gsm8k)} references are not right against themselves {failed[:5]}")

    pairs = altered_pairs(golds)
    accepted = [(answer, gold) for answer, gold in pairs if equal_mathematics(answer, gold)]
    unconfirmed = [(answer, gold) for answer, gold in accepted if not sympy_agrees(answer, gold)]
    print(f"altered: {len(pairs)}, accepted {len(accepted)}, of which sympy does not confirm {len(unconfirmed)}:")
    for answer, gold in unconfirmed:
        print(f"  {answer}   for   {gold}")

    draw = random.Random(1)
    rewritten = [(form, gold) for gold in draw.sample(golds, len(golds)) if (form := rewrite(gold, draw)) is not None]
    wrong = [(form, gold) for (form, _), gold in zip(rewritten, draw.sample(golds, len(rewritten)), strict=True)]
    mixed = [pair for both in zip(rewritten, wrong, strict=True) for pair in both]
    for name, work, least in (("half right, half wrong", mixed, LEAST_MIXED), ("all right", rewritten, LEAST_WORST)):
        speed, right = rate(work, options.seconds)
        held.append(speed >= least)
        print(f"throughput, {name}: {speed:,.0f} per second and process (at least {least:.0f}), {right} right")
    print(f"through a pool of one process, wall time: {pool_rate(mixed[:4000]):,.0f} per second")
    return 0 if all(held) else 1


def pool_rate(pairs: Sequence[Pair]) -> float:
    """Items per second of a pool with one worker, from boxes to scores."""
    items = [(f"So the answer is $\\boxed{{{answer}}}$.", gold) for answer, gold in pairs]
    with RewardPool(RewardSpec((TermSpec("math"),)), workers=1) as pool:
        began = time.perf_counter()
        pool.score(items)
        return len(items) / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(run())
