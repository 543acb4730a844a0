from __future__ import annotations

import json
import shutil
import socket
import threading
import urllib.request
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from retrain.cli import run
from retrain.cli.ui import Handler, answer
from retrain.report.contents import collect
from retrain.report.live import Known, LiveReport
from tests.report.folders import write_run


def metric(step: int, **more: object) -> str:
    return json.dumps({"step": step, "condition": "x", "correct_rate": 0.5} | more) + "\n"


def known_of(reply: dict) -> dict[str, Known]:
    return {one["id"]: Known(one["version"], one["epoch"], one["size"], one["rows"]) for one in reply["runs"]}


@pytest.fixture
def report(tmp_path: Path) -> LiveReport:
    write_run(tmp_path / "a", 1)
    live = LiveReport((tmp_path,))
    live.refresh()
    return live


def test_a_second_request_gets_only_what_changed(report: LiveReport, tmp_path: Path) -> None:
    first = report.poll({}, "")
    assert first["runs"][0]["steps"] == [0, 1, 2, 3, 4, 5] and "verdict" in first["head"]
    known = known_of(first)
    report.refresh()
    nothing = report.poll(known, first["head_version"])
    assert "head" not in nothing
    assert nothing["runs"][0].keys() == {"id", "updated"}
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(metric(6) + '{"step": 7, "corr')
    report.refresh()
    (fresh,) = report.poll(known, first["head_version"])["runs"]
    assert (fresh["from"], fresh["steps"], fresh["rows"]) == (5, [5, 6], 7)
    assert fresh["series"]["correct_rate"] == [pytest.approx(0.56), 0.5]


@pytest.mark.parametrize("error", [OverflowError("too large"), AssertionError(), IndexError("no such row")])
def test_whatever_goes_wrong_while_reading_is_shown_and_reading_goes_on(
    report: LiveReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("retrain.report.live.find_logs", fail)
        assert report.refresh() is False
    assert report.poll({}, "")["problem"] == (str(error) or "AssertionError")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(metric(6))
    report.refresh()
    assert report.poll({}, "")["problem"] == "" and report.poll({}, "")["runs"][0]["steps"][-1] == 6


def test_an_incomplete_line_is_read_once_it_is_complete(report: LiveReport, tmp_path: Path) -> None:
    line = metric(6)
    for part in (line[:20], line[20:]):
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.write(part)
        report.refresh()
    assert report.poll({}, "")["runs"][0]["steps"][-1] == 6


def test_a_resume_that_cut_the_log_is_read_again(report: LiveReport, tmp_path: Path) -> None:
    known = known_of(report.poll({}, ""))
    path = tmp_path / "a" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + metric(3, loss=0.25) + metric(4) + metric(5) + metric(6))
    report.refresh()
    (fresh,) = report.poll(known, "")["runs"]
    assert fresh["from"] == 0 and fresh["steps"] == [0, 1, 2, 3, 4, 5, 6]
    assert fresh["series"]["loss"][3] == 0.25


def test_completions_are_paged_and_filtered(report: LiveReport) -> None:
    first = report.groups({"count": "2", "order": "oldest"})
    assert [group["step"] for group in first["groups"]] == [0, 1] and first["next"] == 2
    assert report.groups({"count": "2", "order": "oldest", "from": "4"})["next"] is None
    assert [group["step"] for group in report.groups({})["groups"]] == [5, 4, 3, 2, 1, 0]
    (found,) = report.groups({"search": "1+3=?"})["groups"]
    assert (found["step"], found["prompt"], len(found["members"])) == (3, "1+3=?", 2)
    assert report.groups({"least": "2"})["groups"] == []
    assert report.groups({"show": "errors"})["groups"] == []
    assert len(report.groups({"show": "wrong", "step": "2"})["groups"]) == 1


def test_pages_do_not_move_when_groups_are_added(report: LiveReport, tmp_path: Path) -> None:
    name = report.poll({}, "")["runs"][0]["id"]
    with (tmp_path / "a" / "emergence" / "generations.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "prompt": "new", "completion": "x", "reward": 0.0, "num_tokens": 1}) + "\n")
    report.refresh()
    assert report.groups({})["groups"][0]["step"] == 6
    assert report.groups({"upto": f"{name}:6"})["groups"][0]["step"] == 5


def test_one_prompt_is_found_in_all_runs(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"s{seed}", seed)
    live = LiveReport((tmp_path,))
    live.refresh()
    group = live.groups({"step": "3"})["groups"][0]
    same = live.groups({"prompt": str(group["prompt_id"])})["groups"]
    assert [(one["step"], one["prompt"]) for one in same] == [(3, "1+3=?")] * 2
    assert len({one["run"] for one in same}) == 2


def test_another_run_in_the_same_folder_replaces_the_first(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    live = LiveReport((tmp_path,))
    live.refresh()
    (before,) = live.poll({}, "")["runs"]
    shutil.rmtree(tmp_path / "a")
    write_run(tmp_path / "a", 2, mode="maxrl")
    live.refresh()
    (after,) = live.poll({}, "")["runs"]
    assert (before["id"], before["seed"]) == (after["id"], 1) and after["seed"] == 2
    assert after["epoch"] > before["epoch"] and after["condition"] == "maxrl+gtpo_sepa" != before["condition"]


def test_a_folder_without_runs_waits_for_the_first_step(tmp_path: Path) -> None:
    live = LiveReport((tmp_path,))
    live.refresh()
    reply = live.poll({}, "")
    assert reply["runs"] == [] and reply["head"]["verdict"]["sentence"] == "Waiting for the first step."
    write_run(tmp_path / "a", 1)
    live.refresh()
    assert len(live.poll({}, "")["runs"]) == 1


def test_the_server_waits_for_a_folder_in_one_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: None)
    monkeypatch.setattr(LiveReport, "follow", lambda live: None)
    assert run(["ui", str(tmp_path / "notyet"), "--port", "0"]) == 0
    assert f"waiting for {tmp_path / 'notyet'}\n" in capsys.readouterr().out
    assert run(["ui", str(tmp_path), "--port", "0"]) == 0
    assert "waiting" not in capsys.readouterr().out
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    absent = tmp_path / "nowhere" / "notyet"
    for wrong in (absent, tmp_path / "loop", tmp_path / "file", tmp_path / "file" / "notyet"):
        assert run(["ui", str(wrong)]) == 2
        assert f"there is no folder {wrong}" in capsys.readouterr().err
    live = LiveReport((tmp_path / "notyet",))
    live.refresh()
    assert live.poll({}, "")["head"]["verdict"]["sentence"] == "Waiting for the first step."
    write_run(tmp_path / "notyet", 1)
    live.refresh()
    assert len(live.poll({}, "")["runs"]) == 1


def test_a_long_log_is_shown_from_a_preview_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.report.runlog.PREVIEW_BYTES", 100)
    monkeypatch.setattr("retrain.storage.tail._CHUNK_BYTES", 100)
    monkeypatch.setattr("retrain.report.runlog._EDGE_BYTES", 400)
    monkeypatch.setattr("retrain.report.runlog.PREVIEW_ROWS", 20)
    folder = write_run(tmp_path / "a", 1, steps=300)
    live = LiveReport((tmp_path,))
    monkeypatch.setattr("retrain.report.live.BUDGET_S", 0.0)
    assert live.refresh()
    log = live.logs[folder]
    assert log.loading < 1 and log.columns.steps[0] == 0 and log.columns.steps[-1] == 299
    assert 20 <= len(log.columns) < 40
    while live.refresh():
        pass
    assert len(live.logs[folder].columns) == 300


@pytest.mark.slow
def test_damaged_rollouts_show_no_tokens(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    live = LiveReport((tmp_path,))
    (tmp_path / "a" / "rollouts").mkdir()
    (tmp_path / "a" / "rollouts" / "step_000002.npz").write_bytes(b"damaged")
    live.refresh()
    name = live.poll({}, "")["runs"][0]["id"]
    assert answer(live, "/tokens.json", {"run": name, "step": "1"}) == {"groups": []}
    assert answer(live, "/tokens.json", {"run": name, "step": "2"}) == {"groups": []}
    assert collect([tmp_path])["groups"]


def test_the_server_answers_requests_for_data(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1)
    live = LiveReport((tmp_path,))
    live.refresh()
    name = live.poll({}, "")["runs"][0]["id"]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, live)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(f"{address}/data.json?known={name}:x:0:1:6&head=x", timeout=30) as reply:
            assert json.loads(reply.read())["runs"][0]["done"] == 6
        (tmp_path / "a" / "emergence" / "generations.jsonl").unlink()
        for path in (
            "/nothing",
            "/tokens.json?run=x&step=1",
            f"/groups.json?run={name}&step=1",
            "/groups.json?step=x",
            "/data.json?known=x",
        ):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address + path, timeout=30)
        with socket.create_connection(server.server_address) as odd:
            odd.sendall(b"GET http://[bad HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b" 404 " in odd.makefile("rb").readline()
        server.shutdown()
