"""What is shown of errors in the user's code: their own lines, without ours and those of Python's import system."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.errors import PluginError
from retrain.isolation.tracebacks import describe_error, summarize_error
from retrain.plugins import import_path


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("def score(response, reference)\n", "SyntaxError: expected ':'"),
        ("TABLE = {}\nTABLE['missing']\n", "KeyError: 'missing'"),
    ],
)
def test_an_error_while_a_module_is_imported_is_shown_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, shown: str
) -> None:
    name = f"broken_{len(source)}"
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as raised:
        import_path(f"{name}.score", "reward")
    text = describe_error(raised.value)
    assert str(file) in text and text.endswith(shown) and "importlib" not in text
    assert f"{file.name}', (" not in str(raised.value), "no tuple of places"


def test_a_syntax_error_is_summarized_by_what_it_is() -> None:
    with pytest.raises(SyntaxError) as raised:
        compile("x = = 1", "<string>", "exec")
    assert summarize_error(raised.value) == "SyntaxError: invalid syntax"
