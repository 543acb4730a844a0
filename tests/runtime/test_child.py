"""`retrain` in another process: what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import retrain
from retrain.runtime.child import python_command

STARTS_ANOTHER = """
import subprocess
from retrain.runtime.child import python_command
found = "import random, sys; print('mine' if hasattr(random, 'score') else 'python')"
print(subprocess.run([*python_command(), "-c", found], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.parametrize(
    ("started", "expected"),
    [(["script/start.py"], "python"), (["-P", "-m", "start"], "python"), (["-m", "start"], "mine")],
)
def test_another_process_finds_a_module_of_the_working_directory_only_if_this_one_does(
    tmp_path: Path, started: list[str], expected: str
) -> None:
    (tmp_path / "random.py").write_text("def score(response, reference): ...\n")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "start.py").write_text(STARTS_ANOTHER)
    folders = [str(Path(retrain.__file__).parents[1]), str(tmp_path / "script")]
    done = subprocess.run(
        [sys.executable, *started],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_a_main_module_without_a_specification_is_no_module_of_m(monkeypatch: pytest.MonkeyPatch) -> None:
    # A notebook or a debugger may replace it.
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    del sys.modules["__main__"].__spec__
    assert python_command() == [sys.executable, "-P"]
