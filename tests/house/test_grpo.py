"""The page of GRPOConfig's parameters has the names and defaults of the class and of TRL."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import trl

from retrain.grpo import GRPOConfig

PAGE = Path(__file__).parents[2] / "docs" / "grpo-parameters.md"


def test_the_page_has_every_own_parameter_with_its_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*?) \| \S", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ours = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    shown = {name: (default, other) for name, default, other in rows}
    expected = {}
    for name, default in ours.items():
        other = "—" if name not in theirs else "the same" if theirs[name] == default else f"`{theirs[name]!r}`"
        expected[name] = (repr(default), other)
    assert shown == {name: expected[name] for name in shown}
    own = {name for name in ours if name not in theirs or theirs[name] != ours[name]}
    assert own <= set(shown)
