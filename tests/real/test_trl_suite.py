"""TRL's own tests of its GRPO trainer, with the import changed and nothing else.

They come with TRL's repository only, so `RETRAIN_TRL_REPO` names a checkout of it. Its commit need not be the installed
version: what counts is which cases pass with the installed TRL, and that these pass with retrain.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from . import trl_standins
from .conftest import Prepare

CHECKOUT = os.environ.get("RETRAIN_TRL_REPO")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not CHECKOUT, reason="RETRAIN_TRL_REPO does not name a checkout of TRL's repository"),
]

ROOT = Path(__file__).parents[2]
FILE = "tests/test_grpo_trainer.py"
PLUGIN = Path(__file__).with_name("trl_plugin.py")
COPIED = ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/testing_utils.py", FILE)
LEFT_OUT = {
    "TestGRPOTrainerVLM": "vision-language models, which retrain leaves to TRL",
    "TestGRPOTrainerSlow": "needs a GPU and models from the Hub",
}
PACKAGES = ("accelerate", "datasets", "peft", "torch", "transformers", "trl")
# TRL's tests of tools are skipped without it.
INSTALLS = [["install", "--no-deps", "jmespath==1.1.0"]]
# One name of the trainer or its arguments at least, and nothing that retrain.grpo does not have.
IMPORT = re.compile(r"^from trl import ((?:GRPOConfig|GRPOTrainer)(?:, (?:GRPOConfig|GRPOTrainer))*)$", re.MULTILINE)
# A case that must be sampled and scored by retrain: a fallback to TRL would pass them all.
PLAIN = "TestGRPOTrainer::test_train[trl-internal-testing/tiny-Qwen2ForCausalLM-2.5]"

Results = dict[str, tuple[str, str]]
"""By case: passed, skipped or failed, and what it logged and printed, or why it did not pass."""


class Suite:
    """TRL's tests in a folder of their own, next to the stand-ins for what they load."""

    def __init__(self, folder: Path, checkout: Path, python: Path) -> None:
        self.folder, self.checkout, self.python = folder, checkout, python
        trl_standins.write_standins(folder / "small", checkout, trl_standins.NAMES, 4096, 100)
        whole = [name for name in trl_standins.NAMES if "Qwen" in name]
        # A step with all tokens takes seconds, so there are few rows.
        trl_standins.write_standins(folder / "whole", checkout, whole, trl_standins.WHOLE, 4)

    @property
    def key(self) -> str:
        """A name for everything that TRL's own results depend on."""
        texts = [*(version(name) for name in PACKAGES), repr(LEFT_OUT)]
        texts += [path.read_text() for path in (Path(trl_standins.__file__), PLUGIN)]
        texts += [(self.checkout / name).read_text() for name in COPIED]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]

    def run(self, name: str, is_changed: bool) -> Results:
        """The results of all cases, with retrain's trainer or TRL's."""
        folder = self.folder / name
        for each in COPIED:
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.checkout / each, folder / each)
        if is_changed:
            text, count = IMPORT.subn(r"from retrain.grpo import \1", (folder / FILE).read_text())
            assert count == 1, f"{FILE} imports TRL's trainer in another way"
            (folder / FILE).write_text(text)
        shutil.copy(PLUGIN, folder)
        for each in ("small", "whole"):
            (folder / each).mkdir()
            (folder / each / trl_standins.OWNER).symlink_to(self.folder / each / trl_standins.OWNER)
        options = ["-q", "-n", "2", "-p", "no:cacheprovider", "-p", PLUGIN.stem, "--timeout=1800"]
        options += ["--junitxml=results.xml", "-o", "junit_logging=all"]
        options += [f"--deselect={FILE}::{each}" for each in LEFT_OUT]
        with (folder / "output.txt").open("w") as output:
            command = [self.python, "-m", "pytest", *options, FILE]
            done = subprocess.run(
                command, cwd=folder, env=self._environment(), stdout=output, stderr=output, check=False
            )
        # 1: some tests failed, which the results say.
        assert done.returncode in (0, 1), (folder / "output.txt").read_text()[-5000:]
        return read_results(folder / "results.xml")

    def _environment(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        return own | {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, sysconfig.get_path("purelib")))),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "cache"),
        }


def read_results(path: Path) -> Results:
    """The results in a file of JUnit's format."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
        wrong = [each for each in case if each.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if wrong:
            results[name] = ("failed", wrong[0].attrib.get("message", ""))
        elif skipped is not None:
            results[name] = ("skipped", skipped.attrib.get("message", ""))
        else:
            results[name] = ("passed", case.findtext("system-out", "") + case.findtext("system-err", ""))
    return results


def keep_results(path: Path, suite: Suite) -> Results:
    """TRL's own results, which are kept: they take half of the time."""
    if not path.exists():
        found = suite.run("theirs", is_changed=False)
        # Anything else is a fault of this environment, and fewer cases would be compared.
        is_late = any(text.startswith("Failed: Timeout") for _, text in found.values())
        assert len(passed(found)) >= 100 and not is_late, describe(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    return {name: (outcome, text) for name, (outcome, text) in json.loads(path.read_text()).items()}


def passed(results: Results) -> set[str]:
    return {name for name, (outcome, _) in results.items() if outcome == "passed"}


def describe(results: Results) -> str:
    """Counts, and the reasons of what did not pass, for the screen (`pytest -s`)."""
    lines = [repr(dict(Counter(outcome for outcome, _ in results.values())))]
    reasons = Counter(f"{outcome}: {text[:150]!r}" for outcome, text in results.values() if outcome != "passed")
    fallbacks = (re.findall("Using TRL for .*", text) for outcome, text in results.values() if outcome == "passed")
    reasons.update(line for found in fallbacks for line in set(found))
    return "\n  ".join([*lines, *(f"{count} × {reason}" for reason, count in reasons.most_common())])


@pytest.fixture(scope="module")
def suite(side_venv: Prepare, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("trl"), Path(CHECKOUT or "").resolve(), side_venv("jmespath", INSTALLS))


def test_what_passes_with_trl_passes_with_retrain(suite: Suite) -> None:
    home = Path(os.environ.get("RETRAIN_REAL", ".real")).resolve()
    theirs = keep_results(home / "trl_suite" / f"{suite.key}.json", suite)
    ours = suite.run("ours", is_changed=True)
    print(f"\nTRL: {describe(theirs)}\nretrain: {describe(ours)}")
    assert {name: ours.get(name) for name in passed(theirs) - passed(ours)} == {}
    assert "Using TRL for" not in ours[PLAIN][1]
