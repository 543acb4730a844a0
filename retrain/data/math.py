r"""The `math` source: five subjects of the MATH competition problems (Hendrycks et al. 2021, arXiv:2103.03874)."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from retrain.data.hub import load_rows
from retrain.data.rows import BOX_INSTRUCTION
from retrain.errors import ConfigError, ConfigIssue
from retrain.rewards.match import last_boxed
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import schema

DATASET = "EleutherAI/hendrycks_math"
SUBJECTS = ("intermediate_algebra", "precalculus", "number_theory", "counting_and_probability", "geometry")
EASY_SUBJECTS = ("algebra", "prealgebra")


class MathSource:
    """4,551 problems to train on and 2,942 to test on; `[data] subset` narrows them to one subject."""

    def __init__(self, section: schema.Data) -> None:
        self.dataset = DATASET
        self._section = section

    def load(self) -> list[Example]:
        """Load all subjects; the answer is the last box of each solution."""
        section = self._section
        if section.subset and section.subset not in SUBJECTS + EASY_SUBJECTS:
            problem = ConfigIssue(
                "[data] subset", f"is {section.subset!r}.", f"Known: {', '.join(SUBJECTS + EASY_SUBJECTS)}."
            )
            raise ConfigError("there is no such MATH subject.", (problem,))
        subjects = (self._load_subject(subject) for subject in ((section.subset,) if section.subset else SUBJECTS))
        # In turn, so that the first n problems are of all subjects.
        return [example for turn in zip_longest(*subjects) for example in turn if example is not None]

    def _load_subject(self, subject: str) -> list[Example]:
        split = self._section.split
        return [
            Example(
                f"{row['problem']}\n\n{BOX_INSTRUCTION}",
                _read_answer(row["solution"]),
                f"{subject}/{split}/{index}",
                {"subject": subject, "level": row["level"]},
            )
            for index, row in enumerate(load_rows(DATASET, subject, split))
        ]


def _read_answer(solution: str) -> str:
    # Two number-theory solutions have an empty box, where the text concludes that there are 0 such primes.
    return last_boxed(solution) or ("0" if r"\boxed{}" in solution else "")
