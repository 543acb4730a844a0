"""Output shared by the commands."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from waiting import wait_for

from retrain.cli import console, doctor, import_gguf, run


def outlast_the_silence() -> None:
    """Return once what takes long has been announced."""
    wait_for(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_only_what_takes_long_is_announced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with console.announce_if_slow("Converting ..."):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    with console.announce_if_slow("Converting ..."):
        outlast_the_silence()
    assert capsys.readouterr().err == "Converting ...\n"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["compare", "logs", "--alpha"], "nan"),
        (["diff", "a", "b", "--tolerance"], "nan"),
        (["diff", "a", "b", "--tolerance"], "inf"),
        (["plan", "retrain.toml", "--train-price"], "inf"),
        (["top", "logs", "--every"], "nan"),
    ],
)
def test_what_is_no_finite_number_is_in_no_range(
    arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, value]) == 2
    assert f"Invalid value for '{arguments[-1]}': {value} is not a finite number." in capsys.readouterr().err


def test_a_slow_doctor_says_what_it_does_and_its_json_stays_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_slowly(config: object) -> list[doctor.Check]:
        outlast_the_silence()
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    monkeypatch.setattr(doctor, "run_checks", check_slowly)
    assert run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("Importing PyTorch")
    assert captured.out.startswith("{")


def test_a_slow_conversion_says_what_it_converts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(file: Path, dtype: str) -> None:
        outlast_the_silence()
        raise import_gguf.ConfigError("enough")

    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(3_000_000))
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    monkeypatch.setattr(import_gguf, "find_spec", lambda name: True)
    monkeypatch.setattr(import_gguf, "read_gguf", read_slowly)
    assert run(["import-gguf", str(tmp_path / "m.gguf"), str(tmp_path / "m")]) == 2
    assert f"Converting {tmp_path / 'm.gguf'} (3 MB) ..." in capsys.readouterr().err
