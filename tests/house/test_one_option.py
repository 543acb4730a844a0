"""Adding an option with all facts about it is one edit in one file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import retrain

PACKAGE = Path(retrain.__file__).parent
BEFORE = "    lr: float = option("
DUMMY = """    dummy: BoundedInt = option(
        3,
        "A dummy option.",
        ge=1,
        unused=reasons.used_if("training.async_steps", bool),
        on_resume="free",
        on_tinker="The service has no dummy.",
        per_condition=False,
    )
"""
CHECKS = """
import retrain
import click
from retrain.cli.sync import options_block
from retrain.config import build_config, dump_config, find_notes
from retrain.config.flags import click_options, overrides_from
from retrain.config.reference import default_toml, docs_tables, schema_text
from retrain.checks.unsupported import find_unsupported
from retrain.errors import ConfigError
from retrain.storage.folder import meaningful_differences


def config(**tables):
    return build_config(tables, {}, "run.toml")


def error(**tables):
    try:
        config(**tables)
    except ConfigError as caught:
        return str(caught)


print(retrain.__file__)
given = {}
flags = click.Command("run", params=click_options(), callback=lambda **values: given.update(overrides_from(values)))
flags.main(["--dummy", "5"], standalone_mode=False)
assert given == {"training.dummy": 5}
assert config(training={"dummy": 5}).training.dummy == 5
assert "dummy = 5" in dump_config(config(training={"dummy": 5}))
assert "[training] dummy must be >= 1, got 0.  Try: dummy = 3" in error(training={"dummy": 0})
for text in (docs_tables(), options_block(), default_toml(), schema_text()):
    assert "A dummy option." in text
note = "[training] dummy is not used: [training] async_steps is 0"
assert [str(each) for each in find_notes(config(training={"dummy": 5}))] == [note]
assert meaningful_differences(config(), config(training={"dummy": 5})) == []
assert meaningful_differences(config(), config(training={"lr": 0.1})) != []
(issue,) = find_unsupported(config(backend={"backend": "tinker"}, training={"dummy": 5}))
assert str(issue) == (
    "[training] dummy = 5 is not possible with Tinker: The service has no dummy.  Leave it at 3."
)
assert "sets training.dummy, which is the same for all conditions" in error(campaign={"conditions": [{"dummy": 5}]})
"""


def test_an_option_is_added_by_one_edit_in_one_file(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "retrain", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "retrain" / "config" / "tables" / "training.py"
    text = file.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    file.write_text(text.replace(BEFORE, DUMMY + BEFORE), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(tmp_path)), "the copy was tested"
