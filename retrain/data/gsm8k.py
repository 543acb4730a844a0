"""The `gsm8k` source: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.data.hub import load_rows
from retrain.data.rows import BOX_INSTRUCTION
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

DATASET = "openai/gsm8k"


class Gsm8kSource:
    """7,473 problems to train on and 1,319 to test on, each with a whole number as its answer."""

    def __init__(self, section: schema.Data) -> None:
        self.dataset = DATASET
        self._section = section

    def load(self) -> list[Example]:
        """Load the split; the answer is the number after `####`, without thousands separators."""
        section = self._section
        rows = load_rows(DATASET, section.subset or "main", section.split)
        return [
            Example(
                f"{row['question']}\n\n{BOX_INSTRUCTION}",
                row["answer"].rpartition("####")[2].strip().replace(",", ""),
                f"{section.split}/{index}",
            )
            for index, row in enumerate(rows)
        ]
