"""Reading files: a file that is no configuration is rejected in one sentence, broken TOML with line and caret."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from retrain.config import load_config
from retrain.config.toml import MAX_BYTES, is_too_deep, parse_toml, read_text
from retrain.errors import ConfigError


def message_for(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def message_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "run.toml")
    return str(caught.value)


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    assert message_for(tmp_path / "no.toml") == f"there is no file {tmp_path}/no.toml.  Try: retrain init"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "is a folder, not a TOML file.  Try: name the file inside it." in message_for(tmp_path)


def test_a_yaml_file_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max_steps: 3\n", encoding="utf-8")
    assert message_for(path) == f"{path} is a YAML file, and only `retrain grpo` reads those.  Try: a TOML file."


def test_a_binary_file_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"ok\xff\xfe\x00\x80")
    assert (
        message_for(file) == f"{file} is not a text file (byte 2 is not UTF-8).  Try: name a TOML file, saved as UTF-8."
    )


def test_nul_bytes_are_valid_utf8_but_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "zeros.bin"
    file.write_bytes(bytes(1000))
    assert "is not valid TOML" in message_for(file) and "line 1" in message_for(file)


def test_ten_megabytes_are_rejected_immediately(tmp_path: Path) -> None:
    file = tmp_path / "big.toml"
    file.write_bytes(b"# padding\n" * 1_000_000)
    begin = time.process_time()
    assert "has 10.0 MB; a configuration has at most 1 MB." in message_for(file)
    assert time.process_time() - begin < 1


def test_an_endless_file_is_rejected() -> None:
    assert "a configuration has at most 1 MB" in message_for("/dev/zero")


def test_the_largest_allowed_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "full.toml"
    file.write_bytes(b"[training]\nlr = 0.5\n".ljust(MAX_BYTES, b"\n"))
    assert load_config(file).training.lr == 0.5


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[training]\nlr = 0.5\n")
    os.close(writer)
    try:
        assert load_config(f"/dev/fd/{reader}").training.lr == 0.5
    finally:
        os.close(reader)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "secret.toml"
    file.touch(mode=0o000)
    assert "cannot be read: Permission denied" in message_for(file)


class _Denied(type(Path())):  # type: ignore[misc]
    """A path that the system refuses to open."""

    def open(self, *arguments: object, **options: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))


def test_a_file_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").touch()
    with pytest.raises(ConfigError, match=r"secret.toml cannot be read: Permission denied"):
        read_text(_Denied(tmp_path / "secret.toml"))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "the path of the configuration is empty"),
        ("a\0b.toml", r"'a\x00b.toml' cannot be read: embedded null byte"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("a\x1b[31m.toml", r"there is no file 'a\x1b[31m.toml'"),
    ],
)
def test_an_invalid_path_is_rejected(path: str, text: str) -> None:
    assert text in message_for(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nlr = 0.5\r\n")
    assert load_config(file).training.lr == 0.5


def test_broken_toml_shows_the_line_with_a_caret() -> None:
    assert message_of("[training]\nlr = 1\nmax_steps = = 3\n").splitlines() == [
        "run.toml is not valid TOML: Invalid value (line 3)",
        "  3 | max_steps = = 3",
        "                  ^",
    ]


def test_a_tab_is_kept_above_the_caret() -> None:
    assert message_of("\tlr = ?").splitlines()[1:] == ["  1 | \tlr = ?", "      \t     ^"]


def test_an_error_at_the_end_points_after_the_last_line() -> None:
    assert message_of('[training]\nlr = """').splitlines()[1:] == ['  2 | lr = """', "              ^"]


def test_other_line_separators_do_not_shift_the_line() -> None:
    assert "  2 | b = ?" in message_of('a = "\u2028\x85"\nb = ?\n')


def test_a_very_long_line_is_truncated_around_the_caret() -> None:
    text, shown, caret = message_of(f'x = "{"a" * 5000}" ?').splitlines()
    assert "line 1" in text and len(shown) < 120 and shown[len(caret) - 1] == "?"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in message_of("lr = \x1b[31m")


def test_a_key_or_table_given_twice_is_named_with_its_line() -> None:
    assert message_of("[training]\nlr = 1\nlr = 2\n").splitlines() == [
        "run.toml is not valid TOML: lr is set twice (line 3)",
        "  3 | lr = 2",
        "      ^",
    ]
    assert "the table [training] appears twice (line 3)" in message_of("[training]\nlr = 1\n[training]\n")
    assert "tags is set twice (line 2)" in message_of('tags = []\ntags = [\n"a",\n]\n')


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\nx = " + "[" * 3000 + "]" * 3000,
        "a = 1\nx = " + "{a=" * 3000 + "1" + "}" * 3000,
        "a = 1\n" + "a." * 400_000 + "a = 1",
        "a = 1\n[" + "a." * 400_000 + "a]",
        "a = 1\nx = {" + "a." * 400_000 + "a = 1}",
    ],
    ids=["lists", "tables", "dotted key", "dotted header", "dotted key in a table"],
)
def test_deep_nesting_is_rejected_with_its_line_and_without_delay(text: str) -> None:
    begin = time.process_time()
    assert message_of(text) == "run.toml is not a configuration: line 2 is nested too deeply."
    assert time.process_time() - begin < 2


def test_a_number_that_python_cannot_read_is_reported_with_its_line() -> None:
    assert (
        message_of("a = 1\nb = " + "9" * 5000)
        == "run.toml cannot be read: it holds a number that is too large (line 2)."
    )


def test_a_long_line_of_text_does_not_slow_the_check_for_dotted_keys() -> None:
    begin = time.process_time()
    parse_toml(f'x = "{"a" * 900_000}"', "run.toml")
    parse_toml(f'x = "{"a.b " * 200_000}"', "run.toml")
    assert time.process_time() - begin < 2


def test_depth_counts_tables_and_lists() -> None:
    assert not is_too_deep({"a": [{"b": 1}]}, 3)
    assert is_too_deep({"a": [{"b": 1}]}, 2)
    assert not is_too_deep(5, 0)
