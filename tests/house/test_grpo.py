"""The table of GRPOConfig: whole, without an empty cell, and each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

from retrain.config.options import options_by_path
from retrain.grpo import GRPOConfig
from retrain.grpo.parameters import declarations, docs_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "grpo.md"


def test_the_page_holds_the_table() -> None:
    assert docs_table(GRPOConfig) in PAGE.read_text(encoding="utf-8")


def test_every_parameter_has_a_row_without_an_empty_cell() -> None:
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in docs_table(GRPOConfig).splitlines() if line.startswith("| `")
    ]
    assert [row[0].strip(" `") for row in rows] == list(declarations(GRPOConfig))
    for row in rows:
        assert len(row) == 5 and all(cell.strip(" `") for cell in row), row


def test_every_test_that_the_table_names_exists() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^(?:async )?def (test_\w+)", texts, re.MULTILINE))
    named = {test for each in declarations(GRPOConfig).values() for test in each.tested_by.split()}
    assert named and named - there == set()


def test_every_twin_is_an_option() -> None:
    for name, declared in declarations(GRPOConfig).items():
        if declared.twin.startswith("none: "):
            continue
        sections = re.findall(r"\[+([a-z]+)", declared.twin)
        keys = [
            key for part in re.findall(r"`([^`]+)`", declared.twin) for key in [part.split("] ")[-1].split(" = ")[0]]
        ]
        known = {path.partition(".")[2] for path in options_by_path() if path.partition(".")[0] in sections} | {
            "weight"
        }
        assert [key for key in keys if not key.startswith("[") and key not in known] == [], (name, declared.twin)
