from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from retrain.analysis.measure import measure
from retrain.analysis.runs import find_runs, read_run
from retrain.campaign.progress import read_progress
from retrain.cli import run
from retrain.cli.ui import Handler
from retrain.errors import ConfigError
from retrain.report import build_page, collect
from retrain.report.completions import shows
from retrain.report.contents import add_tokens, describe_origin
from retrain.report.live import LiveReport
from retrain.storage.checkpoint import read_state
from tests.cases import slow
from tests.report.folders import write_run


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"grpo_s{seed}", seed)
        write_run(tmp_path / f"maxrl_s{seed}", seed, mode="maxrl", lift=0.2 + 0.001 * seed)
    return tmp_path


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_a_page_holds_all_its_data_and_names_no_other_host(campaign: Path) -> None:
    assert run(["report", str(campaign)]) == 0
    page = (campaign / "report.html").read_text()
    assert len(data_of(page)["runs"]) == 6
    assert not re.search(r'(src|href)="https?:', page)


def test_without_a_folder_the_runs_in_logs_are_shown(
    campaign: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("home"))
    Path("logs").symlink_to(campaign)
    assert run(["report"]) == 0
    assert len(data_of(Path("logs/report.html").read_text())["runs"]) == 6
    monkeypatch.chdir(campaign)
    for command in ("report", "ui", "card"):
        assert run([command]) == 2
        assert "there is no folder logs" in capsys.readouterr().err


def test_a_folder_of_folders_is_searched_and_runs_alike_are_distinguished(tmp_path: Path) -> None:
    for name in ("train", "copy", "sweeps/2026/grpo_s1"):
        write_run(tmp_path / name, 1)
    write_run(tmp_path / "sweeps" / "other", 2)
    (tmp_path / ".hidden").mkdir()
    assert run(["status", str(tmp_path)]) == 0
    runs = collect([tmp_path])["runs"]
    assert len(runs) == 4
    alike = [f"grpo+gtpo_sepa in {tmp_path / name}" for name in ("train", "copy", "sweeps/2026/grpo_s1")]
    assert sorted(one["condition"] for one in runs) == sorted([*alike, "grpo+gtpo_sepa"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a run nor a campaign"):
        collect([tmp_path / "empty"])


def test_text_of_a_completion_cannot_end_the_script_it_stands_in(campaign: Path) -> None:
    page = build_page(collect([campaign]))
    assert "</script><b>" not in page
    assert "</script><b>bold</b>" in data_of(page)["groups"][0]["members"][0]["text"]


def test_text_that_spells_a_placeholder_is_left_alone(campaign: Path) -> None:
    data = collect([campaign]) | {"subtitle": "/*SCRIPT*/ /*DATA*/"}
    assert data_of(build_page(data))["subtitle"] == "/*SCRIPT*/ /*DATA*/"


def test_the_verdict_carries_the_comparison_and_the_difference_of_each_seed(campaign: Path) -> None:
    verdict = collect([campaign])["verdict"]
    (row,) = verdict["rows"]
    assert row["verdict"] == "statistically_significant_improvement"
    assert row["difference"] == pytest.approx(0.202)
    assert [pair["seed"] for pair in row["pairs"]] == [1, 2, 3]
    assert [pair["difference"] for pair in row["pairs"]] == pytest.approx([0.201, 0.202, 0.203])
    assert verdict["sentence"].startswith(
        "maxrl+gtpo_sepa is better than grpo+gtpo_sepa: +20.2 points of held-out pass@1"
    )
    assert verdict["noise"] > 0


def test_an_input_that_changed_between_runs_gives_no_winner(campaign: Path) -> None:
    for path in campaign.iterdir():
        state = {"status": "finished", "step": 6, "code": {"mine": path.name.partition("_")[0]}}
        (path / "trainer_state.json").write_text(json.dumps(state))
    verdict = collect([campaign])["verdict"]
    assert verdict["rows"][0]["verdict"] == "significant_difference"
    assert " is different from " in verdict["sentence"]
    assert any("not measured alike: the code of mine changed between their runs" in note for note in verdict["notes"])


def test_means_over_evaluations_that_do_not_compare_say_so(campaign: Path) -> None:
    for path in campaign.iterdir():
        rows = [json.loads(line) for line in (path / "eval.jsonl").read_text().splitlines()]
        own = {"problems": path.name[-1], "code": {"mine": path.name.partition("_")[0]}}
        (path / "eval.jsonl").write_text("".join(json.dumps(row | own) + "\n" for row in rows))
    verdict = collect([campaign])["verdict"]
    assert verdict["sentence"].endswith(
        "The runs were evaluated on different problems and by different versions of a reward, so these rates do not "
        "compare."
    )
    assert any("evaluated on different problems" in note for note in verdict["notes"])


def test_the_verdict_of_one_run_is_before_and_after(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    verdict = collect([tmp_path / "a"])["verdict"]
    assert verdict["kind"] == "evaluation"
    assert verdict["sentence"] == (
        "Held-out pass@1 stayed at 50.0% between steps 0 and 6: +0.0 points "
        "(95% interval -100.0 to +100.0, 2 problems)."
    )
    assert (verdict["rows"][0]["before"]["low"], verdict["rows"][0]["after"]["step"]) == (pytest.approx(0.31), 6)


def test_evaluations_on_other_problems_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    first, last = (json.loads(line) for line in (tmp_path / "a" / "eval.jsonl").read_text().splitlines())
    rows = [first | {"problems": "a"}, last | {"problems": "b", "eval_pass_at_1": 0.9, "correct": [1, 1]}]
    (tmp_path / "a" / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = collect([tmp_path / "a"])
    assert page["verdict"]["kind"] == "training"
    assert page["verdict"]["sentence"].endswith(
        "1 earlier evaluation with other problems, sampling options or reward code is left out."
    )
    assert page["runs"][0]["flips"] is None
    assert "held-out" not in next(check["value"] for check in page["runs"][0]["health"] if check["name"] == "learning")


def test_untrained_weights_give_no_verdict(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"grpo_s{seed}", seed)
    write_run(tmp_path / "shorter_s1", 1, mode="grpo_scaled", steps=4)
    verdict = collect([tmp_path])["verdict"]
    assert verdict["kind"] == "evaluation" and "distinguish" not in verdict["sentence"]
    assert verdict["sentence"].endswith("The runs are at different steps (4 to 6).")
    (note,) = verdict["notes"]
    assert "no common evaluation after training" in note
    assert "(grpo+gtpo_sepa: steps 0, 6; grpo_scaled+gtpo_sepa: steps 0, 4)" in note


def test_a_shorter_condition_is_left_out_of_the_comparison(campaign: Path) -> None:
    write_run(campaign / "shorter_s1", 1, mode="grpo_scaled", steps=4)
    verdict = collect([campaign])["verdict"]
    assert (verdict["kind"], [row["condition"] for row in verdict["rows"]]) == ("comparison", ["maxrl+gtpo_sepa"])
    assert any("Left out, without an evaluation at step 6: grpo_scaled+gtpo_sepa" in note for note in verdict["notes"])


def test_runs_with_other_problems_in_the_same_file_are_not_compared(campaign: Path) -> None:
    for path, problems in ((campaign / "grpo_s1", "a"), (campaign / "maxrl_s1", "b")):
        rows = [json.loads(line) | {"problems": problems} for line in (path / "eval.jsonl").read_text().splitlines()]
        (path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="were evaluated on different problems at step 6"):
        measure(find_runs([campaign]), "eval_pass_at_1")


def test_runs_with_other_sampling_or_another_k_are_noted_or_not_compared(campaign: Path) -> None:
    for name, change in (("grpo_s1", {"k": 1, "sampling": {}}), ("maxrl_s1", {"k": 4, "sampling": {"n": 4}})):
        path = campaign / name / "eval.jsonl"
        rows = [json.loads(line) | change for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = find_runs([campaign])
    assert "The runs were evaluated with different sampling options." in measure(runs, "eval_pass_at_1").notes
    with pytest.raises(ConfigError, match="different k in pass@k: 1, 4"):
        measure(runs, "eval_pass_at_k")


def test_without_evaluations_the_verdict_is_the_training_rate(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, steps=30)
    (tmp_path / "a" / "eval.jsonl").unlink()
    verdict = collect([tmp_path / "a"])["verdict"]
    # The rate is 0.31 + 0.05 per step: means over steps 0-9 and 20-29.
    assert verdict["sentence"] == (
        "The correct rate in training rose from 53.5% to 153.5% between the first 10 and the last 10 steps."
    )


def test_steps_before_an_edit_are_not_compared_with_those_after_it(tmp_path: Path) -> None:
    for name, seed, at in (("a", 1, 12), ("b", 2, 30)):
        write_run(tmp_path / name, seed, steps=30)
        (tmp_path / name / "eval.jsonl").unlink()
        state = tmp_path / name / "trainer_state.json"
        state.write_text(json.dumps(read_state(tmp_path / name) | {"edited_at": at}))
    assert collect([tmp_path / "a"])["verdict"]["sentence"] == (
        "The correct rate in training rose from 111.0% to 156.0% between the first 9 and the last 9 steps. "
        "Steps before 12 are left out: data, code or options of the run were changed there."
    )
    learning = next(check for check in read_progress(tmp_path / "a").health if check.name == "learning")
    assert (learning.level, learning.value) == ("unknown", "fewer than 20 steps")
    # Nothing was trained after this one.
    learning = next(check for check in read_progress(tmp_path / "b").health if check.name == "learning")
    assert learning.level == "ok"
    assert "rose from 54.5% to 154.5%" in collect([tmp_path / "b"])["verdict"]["sentence"]
    together = collect([tmp_path])["verdict"]["sentence"]
    assert "In 1 run, steps before a change of data, code or options are left out." in together


def test_a_training_rate_that_only_fluctuates_may_be_noise(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, steps=12)
    (tmp_path / "a" / "eval.jsonl").unlink()
    path = tmp_path / "a" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rates = [0.1, 0.1, 0.2, 0.1, 0.1, 0.2, 0.2, 0.3, 0.1, 0.0, 0.1, 0.2]
    changed = [row | {"correct_rate": rate} for row, rate in zip(rows, rates, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert collect([tmp_path / "a"])["verdict"]["sentence"] == (
        "The correct rate in training went from 13.3% to 15.0% between the first 6 and the last 6 steps, which may be "
        "noise."
    )


def test_several_seeds_of_one_condition_are_each_shown_before_and_after(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"s{seed}", seed)
    verdict = collect([tmp_path])["verdict"]
    assert [row["seed"] for row in verdict["rows"]] == [1, 2]
    assert "on average over 2 runs" in verdict["sentence"]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.5, 0.4, 0.75), "went from 50.0% to 55.0% between the first and last step on average over 3 runs"),
        ((0.75, 0.7, 0.8), "rose from 50.0% to 75.0% between the first and last step on average over 3 runs"),
    ],
)
def test_a_mean_change_that_differs_between_runs_may_be_noise(
    tmp_path: Path, ends: tuple[float, ...], words: str
) -> None:
    for seed, end in enumerate(ends):
        write_run(tmp_path / f"s{seed}", seed, steps=2)
        (tmp_path / f"s{seed}" / "eval.jsonl").unlink()
        path = tmp_path / f"s{seed}" / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        changed = [row | {"correct_rate": rate} for row, rate in zip(rows, (0.5, end), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    sentence = collect([tmp_path])["verdict"]["sentence"]
    assert words in sentence
    assert sentence.endswith("which may be noise.") == ("went" in words)


def test_problems_that_flipped_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    rows = [json.loads(line) for line in (tmp_path / "a" / "eval.jsonl").read_text().splitlines()]
    rows[1] |= {"correct": [1, 1]}
    (tmp_path / "a" / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flips = collect([tmp_path / "a"])["runs"][0]["flips"]
    assert (flips["gained"], flips["lost"], flips["problems"]) == (1, 0, 2)
    flipped = {"problem": 1, "before": [0, 1], "after": [1, 1], "gained": True}
    assert flips["list"] == [flipped]
    problems = ('{"prompt": "1 + 1", "reference": "2"}', '{"prompt": "2 + 3", "reference": "5"}')
    (tmp_path / "a" / "eval_problems.jsonl").write_text("\n".join(problems))
    assert collect([tmp_path / "a"])["runs"][0]["flips"]["list"] == [flipped | {"prompt": "2 + 3"}]


def test_every_run_has_its_health_checks(campaign: Path) -> None:
    checks = {check["name"]: check for check in collect([campaign])["runs"][0]["health"]}
    assert len(checks) == 8
    assert checks["dead groups"]["level"] == "unknown", "six steps are fewer than ten"
    assert checks["dead groups"]["value"] == "50% of groups gave no signal, fewer than 10 steps"
    assert checks["dead groups"]["rule"].startswith("warning from 50%")


def test_the_page_explains_the_checks_that_are_not_ok(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, steps=12)
    metrics = tmp_path / "a" / "metrics.jsonl"
    rows = [json.loads(line) | {"max_token_hit_rate": 0.5} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    advice = collect([tmp_path / "a"])["advice"]
    assert next(iter(advice)) == "truncation" and "no-learning" not in advice
    assert "max_tokens" in json.dumps(advice["truncation"])


def test_only_options_that_differ_between_conditions_are_listed(campaign: Path) -> None:
    data = collect([campaign])
    assert [row["option"] for row in data["configs"]] == ["algorithm.advantage_mode"]
    assert data["configs"][0]["values"] == ['"grpo"', '"maxrl"']


def test_what_all_runs_share_is_listed_beside_what_differs(campaign: Path) -> None:
    shared = {row["option"]: row["value"] for row in collect([campaign])["settings"]}
    assert shared["model.model"] == '"builtin:tiny"'
    assert "algorithm.advantage_mode" not in shared and "training.seed" not in shared


def test_different_models_are_shown_but_not_compared(campaign: Path) -> None:
    for folder in campaign.glob("maxrl*"):
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace('"builtin:tiny"', '"some/model"'))
    data = collect([campaign])
    assert data["verdict"]["kind"] == "evaluation" and "different models" in data["verdict"]["notes"][0]
    assert data["verdict"]["sentence"].startswith("Held-out pass@1: grpo+gtpo_sepa")
    assert "42.0% → 42.0%, maxrl+gtpo_sepa" in data["verdict"]["sentence"]
    assert len(data["runs"]) == 6


def test_a_campaigns_page_says_with_what_it_was_run(tmp_path: Path) -> None:
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    data = {"runs": [], "status": "finished", "started": "then", "ended": "later", "host": "h", "versions": versions}
    (tmp_path / "manifest.json").write_text(json.dumps(data | {"git": {"commit": "a" * 40, "dirty": True}}))
    (sentence,) = describe_origin([tmp_path])
    assert "started then, ended later, on h; python 3.11.7, torch 2.13.0; git aaaaaaaaaaaa with changes." in sentence


def test_torn_lines_are_left_out(campaign: Path) -> None:
    before = len(collect([campaign])["groups"])
    for name in ("metrics.jsonl", "emergence/generations.jsonl"):
        with (campaign / "grpo_s1" / name).open("a") as file:
            file.write('{"step": 6, "comp')
    assert len(collect([campaign])["groups"]) == before


def test_a_long_run_is_shown_in_whole_steps_spread_over_it(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.report.contents.MAX_COMPLETIONS", 6 * 4)
    data = collect([campaign])
    assert {group["step"] for group in data["groups"]} == {0, 5}
    assert all(len(group["members"]) == 2 for group in data["groups"])
    assert data["groups_note"].startswith("24 of 72 completions: complete steps")


def test_dead_groups_and_time_are_accounted_for(campaign: Path) -> None:
    one = collect([campaign])["runs"][0]
    assert one["totals"] == {"groups": 6, "all_right": 0, "all_wrong": 3, "errors": 0}
    assert one["series"]["other_time_s"] == pytest.approx([0.4] * 6)


def test_a_folder_without_runs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run nor a campaign"):
        collect([tmp_path])
    assert run(["report", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),
        ("127.0.0.1", 200),
        ("[::1]:1", 200),
        ("LOCALHOST", 200),
        ("evil.example:8765", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("", 403),
    ],
)
def test_the_live_page_answers_only_names_of_this_machine(campaign: Path, host: str, status: int) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, LiveReport((campaign,)))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
        connection.request("GET", "/", headers={"Host": host})
        answer = connection.getresponse()
        page = answer.read().decode()
        server.shutdown()
    assert answer.status == status
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    if status == 200:
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy


def test_a_port_in_use_is_wrong_input(campaign: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, LiveReport((campaign,)))) as server:
        assert run(["ui", str(campaign), "--port", str(server.server_address[1])]) == 2


def test_a_port_that_cannot_be_is_wrong_input(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ui", str(campaign), "--port", "99999"]) == 2
    assert "99999 is not in the range" in capsys.readouterr().err


NESTED = float("inf")
"""Stands for a value that is nested too deeply to be parsed."""


@pytest.mark.parametrize("name", ["eval.jsonl", *slow("metrics.jsonl", "emergence/generations.jsonl")])
def test_odd_values_in_the_logs_do_not_end_the_report(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, 1)
    rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    for key in rows[0]:
        for odd in (NESTED, None, "x", float("nan"), [], [None], {}, True, -1, 10**30):
            text = "".join(json.dumps(row) + "\n" for row in [*rows[:-1], rows[-1] | {key: odd}])
            (tmp_path / name).write_text(text.replace("Infinity", 100_000 * "[" + 100_000 * "]"))
            build_page(collect([tmp_path]))
            read_run(tmp_path)
            assert read_progress(tmp_path).status != "", (key, odd)


def test_a_completion_is_truncated_if_a_limit_cut_it_off() -> None:
    assert shows({"num_tokens": 90, "finish_reason": "length", "transcript": ()}, "truncated", 40)
    assert not shows({"num_tokens": 90, "finish_reason": "stop", "transcript": ()}, "truncated", 40)
    # Rows of older versions.
    assert shows({"num_tokens": 40}, "truncated", 40) and not shows({"num_tokens": 39}, "truncated", 40)
    assert not shows({"num_tokens": 90, "transcript": ()}, "truncated", 40), "max_tokens limits a turn"


@pytest.mark.parametrize(("num_tokens", "is_found"), [(2, True), (3, True), (1, False)])
def test_recorded_tokens_belong_to_a_completion_with_as_many_sampled_ones(num_tokens: int, is_found: bool) -> None:
    group = {"at": 0, "members": [{"num_tokens": num_tokens}]}
    found = add_tokens(group, [[{"text": ["a", "b", "c"], "sampled": [1, 0, 1]}]])
    assert ("tokens" in found["members"][0]) is is_found
