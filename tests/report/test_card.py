"""The Markdown card of a run or campaign."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from retrain.builtin import resolve_model
from retrain.cli import run

from .folders import write_run


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    for mode, lift in (("grpo", 0.0), ("maxrl", 0.2)):
        for seed in (1, 2, 3):
            write_run(tmp_path / "sweep" / f"{mode}_{seed}", seed, mode, lift=lift + 0.001 * seed)
    return tmp_path / "sweep"


def card_of(*arguments: str) -> str:
    assert run(["card", "--no-plots", *arguments]) == 0
    return (Path(arguments[0]) / "card" / "README.md").read_text(encoding="utf-8")


def test_a_campaign_begins_with_its_verdict_and_has_a_row_for_each_run(campaign: Path) -> None:
    card = card_of(str(campaign))
    title, _, sentence = card.splitlines()[:3]
    assert title == "# sweep" and sentence.startswith("**maxrl+gtpo_sepa is ")
    assert "| maxrl_3 | maxrl+gtpo_sepa | 3 | 6/6 | 63.3% (53.3 to 73.3) |" in card
    assert "## Comparison: held-out pass@1 at step 6" in card
    assert '| algorithm.advantage_mode | `"grpo"` | `"maxrl"` |' in card


def test_statistics_name_their_condition_if_there_are_several(campaign: Path) -> None:
    def comparison() -> list[str]:
        return card_of(str(campaign)).partition("## Comparison")[2].partition("\n## ")[0].splitlines()

    assert any(line.startswith("- Sign-flip p = ") for line in comparison())
    for seed in (1, 2, 3):
        write_run(campaign / f"scaled_{seed}", seed, "grpo_scaled", lift=0.1)
    lines = comparison()
    assert "| grpo+gtpo_sepa | 3 | 0.4220 | – | – | – |" in lines, "the baseline"
    for condition in ("maxrl+gtpo_sepa", "grpo_scaled+gtpo_sepa"):
        assert sum(line.startswith(f"- {condition}: Sign-flip p = ") for line in lines) == 1
    unnamed = [line for line in lines if line.startswith("- ") and "+gtpo_sepa: " not in line]
    assert unnamed and all(line.startswith(("- Noise floor", "- Note")) for line in unnamed)


def test_runs_that_are_not_compared_say_why(campaign: Path) -> None:
    path = campaign / "maxrl_3" / "config.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("max_examples = 128", "max_examples = 7"), encoding="utf-8")
    card = card_of(str(campaign))
    assert "## Comparison" not in card
    assert "- The conditions are not compared: " in card and "was evaluated differently" in card
    assert "Try: retrain compare FOLDER --metric correct_rate" in card, "a card has no such flag"


def test_a_run_shows_before_and_after_and_what_is_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", 1, steps=30)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"max_token_hit_rate": 0.5}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    card = card_of(str(folder))
    assert "- one: truncation, 50% of completions, since step 0 (`retrain man --topic truncation`)" in card
    assert "## Comparison" not in card and "torch" in card


def test_a_forced_resume_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", 1)
    assert "--force-resume" not in card_of(str(folder))
    state = json.loads((folder / "trainer_state.json").read_text())
    state["forced"] = ["[training] lr: 0.001 -> 5e-05 at step 4"]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert "- one: --force-resume: [training] lr: 0.001 -> 5e-05 at step 4." in card_of(str(folder))


def test_a_check_is_unknown_only_if_it_is_in_all_runs(campaign: Path) -> None:
    path = campaign / "grpo_1" / "eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, right in zip((rows[0], rows[-1]), (0, 1), strict=True):
        row |= {"eval_pass_at_1": float(right), "correct": [right] * 20, "counted": [1] * 20}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checks = card_of(str(campaign)).partition("## Checks")[2].partition("##")[0]
    assert "\nFine where known: learning (1 of 6 runs).  \n" in checks
    unknown = checks.partition("Unknown (not measured, too few steps, or within noise): ")[2]
    assert "entropy" in unknown and "learning" not in unknown


def test_a_verdict_over_fewer_problems_than_the_table_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", 1)
    path = folder / "eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"eval_pass_at_1": 0.5, "correct": [1, 0, 0, 1], "counted": [1, 1, 1, 1]}
    rows[1] |= {"eval_pass_at_1": 2 / 3, "correct": [1, 0, 1, 0], "counted": [1, 1, 1, 0]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = card_of(str(folder))
    assert "**Held-out pass@1 went from 33.3% to 66.7% between steps 0 and 6, which may be noise:" in card
    assert ", only the 3 of 4 problems with a score in both evaluations).**" in card
    assert "| 6/6 | 50.0% (" in card


@pytest.mark.parametrize(("step", "cells"), [(0, "41.0% (31.0 to 51.0) | –"), (6, "– | 41.0% (31.0 to 51.0)")])
def test_a_single_evaluation_is_before_or_after_training(tmp_path: Path, step: int, cells: str) -> None:
    folder = write_run(tmp_path / "one", 1)
    lines = (folder / "eval.jsonl").read_text().splitlines()
    (folder / "eval.jsonl").write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] == step))
    assert f"| 6/6 | {cells} |" in card_of(str(folder))


def test_a_readme_that_is_no_card_is_not_replaced(campaign: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# My own notes\n")
    arguments = ["card", str(campaign), "--no-plots", "--output", str(tmp_path / "mine")]
    assert run(arguments) == 2
    assert (tmp_path / "mine" / "README.md").read_text() == "# My own notes\n"
    (tmp_path / "mine" / "README.md").write_text("# Model Card for Model ID\n\n[More Information Needed]\n")
    assert run(arguments) == 0 and run(arguments) == 0


@pytest.mark.parametrize("quantized", [False, True])
def test_the_blank_card_of_peft_is_replaced_until_somebody_fills_it_in(
    campaign: Path, tmp_path: Path, quantized: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    if quantized:
        model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    card = tmp_path / "adapter" / "README.md"
    blank = card.read_text()
    arguments = ["card", str(campaign), "--no-plots", "--output", str(tmp_path / "adapter")]
    for filled in (
        blank.replace("[More Information Needed]", "By Ann.", 1),
        blank.replace("---\n", "---\nlicense: mit\n", 1),
        f"{blank}\nDo not use it.\n",
        f"{blank}\n- accuracy: 0.83\n",
        blank.replace("### Results\n", "### Results\n- gsm8k: 61.2%\n"),
    ):
        card.write_text(filled)
        assert run(arguments) == 2 and card.read_text() == filled
    card.write_text(blank)
    assert run(arguments) == 0 and card.read_text() != blank


def test_a_model_card_begins_with_its_metadata(tmp_path: Path) -> None:
    card = card_of(str(write_run(tmp_path / "one", 1)), "--hub")
    assert card.startswith("---\nbase_model: builtin:tiny\nlibrary_name: peft\n")


def test_every_model_is_named(campaign: Path) -> None:
    for seed in (1, 2, 3):
        path = campaign / f"maxrl_{seed}" / "config.toml"
        path.write_text(path.read_text(encoding="utf-8").replace("builtin:tiny", "some/other"), encoding="utf-8")
    card = card_of(str(campaign), "--hub")
    assert card.startswith("---\nbase_model:\n- builtin:tiny\n- some/other\nlibrary_name: peft\n")
    assert "6 runs, 2 conditions; builtin:tiny, some/other. Created" in card
    assert "Try: retrain compare FOLDER --allow-different-models" in card, "a card has no such flag"


def test_a_folder_without_runs_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["card", str(tmp_path)]) == 2
    assert "is neither a run nor a campaign" in capsys.readouterr().err


def test_without_matplotlib_the_flag_that_does_without_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["card", str(write_run(tmp_path / "one", 1))]) == 2
    assert '[plots]", or --no-plots' in capsys.readouterr().err
    assert not (tmp_path / "one" / "card").exists()
