"""Sums, differences and products for a model of 135 million parameters: writes the problems and scores the answers.

python examples/smollm2_task.py      # writes examples/smollm2_train.jsonl and examples/smollm2_test.jsonl again
"""

from __future__ import annotations

import json
import random
import re
from itertools import combinations_with_replacement
from pathlib import Path

HELD_OUT = 512
LARGEST = {"+": 29, "-": 29, "*": 12}


def score(response: str, reference: str) -> float:
    """1.0 if the last number in the response is the reference."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == reference)


def problem(a: int, operation: str, b: int) -> dict[str, str]:
    """One row of the files."""
    answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return {"prompt": f"What is {a} {operation} {b}? Answer with the number only.", "answer": str(answer)}


def split() -> dict[str, list[dict[str, str]]]:
    """The rows of both files. Both orders of a sum or product are in the same file: 3 + 8 does not give 8 + 3 away."""
    rng = random.Random(0)
    pairs = [
        (low, operation, high)
        for operation, largest in LARGEST.items()
        for low, high in combinations_with_replacement(range(1, largest + 1), 2)
    ]
    rng.shuffle(pairs)
    rows: dict[str, list[dict[str, str]]] = {"test": [], "train": []}
    for low, operation, high in pairs:
        part = rows["test" if len(rows["test"]) < HELD_OUT else "train"]
        part.append(problem(high, operation, low))
        if operation != "-" and low != high:
            part.append(problem(low, operation, high))
    rows["test"] = rows["test"][:HELD_OUT]
    return rows


def main(folder: Path = Path(__file__).parent) -> None:
    """Write both files to `folder`."""
    for name, rows in split().items():
        (folder / f"smollm2_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
