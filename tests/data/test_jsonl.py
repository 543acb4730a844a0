import json
import shlex
import subprocess
import sys
from datetime import datetime
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.schema import Data
from retrain.data import ExampleOrder, build_source, digest_of, is_same_digest, load_examples
from retrain.data.order import check_example
from retrain.data.rows import final_answer
from retrain.errors import ConfigError, PluginError
from retrain.types import Example


@pytest.fixture
def load(tmp_path):
    def load_text(content: str | bytes, **options):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return list(load_examples(Data(source="jsonl", path=str(path), **options)))

    return load_text


@pytest.mark.parametrize("prompt_field", ["prompt", "problem", "question"])
@pytest.mark.parametrize(("answer_field", "answer"), [("answer", "4"), ("solution", r"so \boxed{4}.")])
def test_the_usual_field_names_are_found(load, prompt_field, answer_field, answer):
    (example,) = load(json.dumps({prompt_field: "2+2?", answer_field: answer, "topic": "sums"}))
    assert (example.prompt, example.reference, example.meta) == ("2+2?", "4", {"topic": "sums"})
    assert example.id == "line 1"


def test_named_fields_win(load):
    row = {"prompt": "not me", "ask": "2+2?", "answer": "not me", "gold": "four"}
    (example,) = load(json.dumps(row), prompt_field="ask", answer_field="gold")
    assert (example.prompt, example.reference) == ("2+2?", "four")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (4, "4"),
        (27.0, "27"),
        (0.5, "0.5"),
        ("2 * 500 = 1000\n#### 1,000", "1000"),
        ("#### -3.50\n", "-3.50"),
    ],
)
def test_answers_are_read_as_text(load, answer, reference):
    assert load(json.dumps({"prompt": "?", "answer": answer}))[0].reference == reference


@pytest.mark.parametrize(
    "answer",
    [
        " 4 ",
        "1,000",
        r"\boxed{1} then \boxed{\frac{1}{2}}",
        "def t():\n  #### part 1\n  assert f(1,2)==3",
        "#### 3\nassert f(1,2)==3",
        "assert f(1,2)==3\n  #### 3",
        "#### 3 cases, all told",
        "####",
    ],
)
@pytest.mark.parametrize("options", [{}, {"answer_field": "answer"}])
def test_a_plain_answer_is_handed_over_as_it_stands(load, answer, options):
    assert load(json.dumps({"prompt": "?", "answer": answer}), **options)[0].reference == answer


def test_a_solution_gives_its_last_box_and_one_that_was_named_may_be_without(load):
    boxed, plain = r"\boxed{1}, no: \boxed{2}", "def f():\n    #### sum\n    return 1, 2"
    assert load(json.dumps({"prompt": "?", "solution": boxed}))[0].reference == "2"
    assert load(json.dumps({"prompt": "?", "solution": plain}), answer_field="solution")[0].reference == plain


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_harmless(load):
    rows = [json.dumps({"prompt": f"{n}?\u2028", "answer": n}, ensure_ascii=False) for n in range(3)]
    found = load("\ufeff" + "\r\n\r\n".join(rows) + "\r\n\n")
    assert [example.reference for example in found] == ["0", "1", "2"]
    assert [example.id for example in found] == ["line 1", "line 3", "line 5"]
    assert found[0].prompt == "0?\u2028"


def test_a_prompt_is_text_or_messages(load):
    user = {"role": "user", "content": "2+2?"}
    system = {"role": "system", "content": "Think."}
    rows = "\n".join(json.dumps({"prompt": prompt, "answer": "4"}) for prompt in ("2+2?", [user], [system, user]))
    plain, short, whole = load(rows)
    assert (plain.prompt, short.prompt, whole.prompt) == ("2+2?", (user,), (system, user))


def convert(path):
    """Run the command that a file of another format is refused with, and load what it writes."""
    with pytest.raises(ConfigError, match="does not have one JSON object per line") as caught:
        load_examples(Data(source="jsonl", path=str(path)))
    command = str(caught.value).partition("To convert it: ")[2]
    assert "\n" not in command.replace(str(path), "")
    subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    return list(load_examples(Data(source="jsonl", path=str(path.with_suffix(".jsonl")))))


@pytest.mark.parametrize(
    ("suffix", "mark", "encoding"),
    [
        (".csv", ",", "utf-8"),
        # Excel writes a byte-order mark, and semicolons in many countries.
        (".CSV", ";", "utf-8-sig"),
        (".csv", "\t", "utf-16"),
        (".tsv", "\t", "cp1252"),
    ],
)
def test_the_command_that_a_table_is_refused_with_converts_it(tmp_path, suffix, mark, encoding):
    path = tmp_path / f"my rows' {suffix}"
    other = "," if mark == ";" else ";"
    path.write_text(
        f'prompt{mark}answer{mark}"a{other}b{other}c{other}d"\r\n"2{mark}2\n{{é}}?"{mark}007\r\n',
        newline="",
        encoding=encoding,
    )
    (example,) = convert(path)
    assert (example.prompt, example.reference) == (f"2{mark}2\n{{é}}?", "007")


def test_the_encoding_of_a_table_is_called_a_guess_if_it_is_one(tmp_path):
    path = tmp_path / "rows.csv"
    for text, encoding, is_guess in (
        ("prompt,answer\n2+2?,é", "utf-8", False),
        ("prompt,answer\nДва?,2", "cp1251", True),
    ):
        path.write_text(text, encoding=encoding)
        with pytest.raises(ConfigError) as caught:
            load_examples(Data(source="jsonl", path=str(path)))
        assert ("replace cp1252 by its encoding" in str(caught.value)) is is_guess


def test_the_command_that_an_array_is_refused_with_converts_it(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "2+2?", "answer": "4"}, {"prompt": "é", "answer": 5}], indent=1))
    assert [(example.prompt, example.reference) for example in convert(path)] == [("2+2?", "4"), ("é", "5")]
    path.write_text('{"prompt": "2+2?", "answer": "4"}\n')
    assert len(list(load_examples(Data(source="jsonl", path=str(path))))) == 1
    other = tmp_path / "other.json"
    other.write_text('[{"prompt": "é", "answer": "5"}]', encoding="utf-16")
    assert [example.prompt for example in convert(other)] == ["é"]
    # The file that the command writes must not be another's.
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"rows\.json\.jsonl$"):
        load_examples(Data(source="jsonl", path=str(path)))


@pytest.mark.slow
def test_the_command_that_a_parquet_file_is_refused_with_converts_it(tmp_path):
    import datasets

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "2+2?", "answer": "4", "at": datetime(2026, 1, 2)}]).to_parquet(path)
    assert [(example.prompt, example.reference) for example in convert(path)] == [("2+2?", "4")]


def test_a_field_that_looks_like_another_is_shown_escaped(load):
    with pytest.raises(ConfigError, match=r"it has '\\ufeffprompt', answer"):
        load(json.dumps({"\ufeffprompt": "a", "answer": "b"}))


BAD_ROWS = [
    ('{"prompt": "a", "answer": ', "is not JSON (Expecting value, column 27)"),
    ("[1, 2]", "is a list, not an object with fields"),
    ('{"text": "a", "answer": "b"}', "has none of the fields prompt, problem, question; it has text, answer"),
    ('{"prompt": "a"}', "has none of the fields answer, solution; it has prompt"),
    ('{"prompt": "a", "answer": NaN}', "has nan in 'answer', where text or a number belongs"),
    ('{"prompt": "a", "answer": -Infinity}', "has -inf in 'answer', where text or a number belongs"),
    ('{"prompt": "a", "answer": true}', "has a boolean in 'answer', where text or a number belongs"),
    ('{"prompt": "a", "answer": null}', "has null as its 'answer'"),
    ('{"prompt": " ", "answer": "b"}', "has an empty 'prompt'"),
    ('{"prompt": 3, "answer": "b"}', "has a number in 'prompt', where text or a list of messages belongs"),
    ('{"prompt": [], "answer": "b"}', "has a list in 'prompt'"),
    ('{"prompt": ["hi"], "answer": "b"}', "has a message without role and content in 'prompt'"),
    ('{"prompt": "a", "answer": ""}', "has no answer in 'answer'"),
    ('{"prompt": "a", "answer": ["b"]}', "has a list in 'answer', where text or a number belongs"),
    ('{"prompt": "a", "answer": {"b": 1}}', "has an object in 'answer', where text or a number belongs"),
    (
        '{"prompt": "a", "solution": "no box"}',
        r"""'solution' without \boxed{} (if it is the answer itself: [data] answer_field = "solution")""",
    ),
    ("{}", "it has none at all"),
    (r'{"prompt": "ab\ud800", "answer": "b"}', "has an unpaired surrogate in 'prompt' (character 3)"),
    (
        r'{"prompt": [{"role": "user", "content": "\udc00"}], "answer": "b"}',
        "has an unpaired surrogate in 'prompt' (character 1)",
    ),
    (r'{"prompt": "a", "answer": "\ud800"}', "has an unpaired surrogate in 'answer' (character 1)"),
    ('{"prompt": "a", "answer": "b", "x": ' + 100_000 * "[" + 100_000 * "]" + "}", "is nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(load, line, message):
    with pytest.raises(ConfigError) as caught:
        load('{"prompt": "a", "answer": "b"}\n\n' + line + "\n")
    (problem,) = caught.value.issues
    assert problem.where == "line 3" and message in problem.text
    assert "has 1 invalid row:" in str(caught.value)


def test_many_bad_rows_come_in_one_error_with_five_lines_and_a_count(load):
    with pytest.raises(ConfigError) as caught:
        load("\n".join(line for line, _ in BAD_ROWS))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(f"rows.jsonl has {len(BAD_ROWS)} invalid rows:")
    assert [line.split()[:2] for line in lines[1:6]] == [["line", str(number)] for number in range(1, 6)]
    assert lines[6].strip() == f"and {len(BAD_ROWS) - 5} more."


def test_text_that_is_not_utf8_is_named_by_line_and_byte(load):
    with pytest.raises(ConfigError, match=r"line 2 is not UTF-8 \(byte 13\)"):
        load(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}')


def test_a_missing_file_a_folder_and_an_empty_file_are_distinguished(load, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.jsonl"):
        load_examples(Data(source="jsonl", path=str(tmp_path / "absent.jsonl")))
    with pytest.raises(ConfigError, match="has no rows"):
        load("\n\n")
    with pytest.raises(ConfigError, match=r"is a folder; .* It holds rows\.jsonl"):
        load_examples(Data(source="jsonl", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r'path = "problems.jsonl"'):
        load_examples(Data(source="jsonl"))


@given(st.dictionaries(st.sampled_from(["prompt", "answer", "x"]), st.text(max_size=10) | st.integers() | st.none()))
def test_any_object_is_either_an_example_or_a_named_problem(tmp_path_factory, row):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        (example,) = load_examples(Data(source="jsonl", path=str(path)))
    except ConfigError as error:
        assert error.issues[0].where == "line 1"
    else:
        assert example.prompt and example.reference


def test_the_answer_of_a_text():
    assert final_answer("72") == ""
    assert final_answer("a #### b\n#### 1,234") == "1234"
    assert final_answer(r"#### 3, or \boxed{4}") == "4"


def test_a_whole_surrogate_pair_is_text_like_any_other(load):
    assert load(r'{"prompt": "\ud83d\ude00", "answer": "b"}')[0].prompt == "\U0001f600"


def test_a_source_of_ones_own_is_found_by_dotted_path(tmp_path):
    (tmp_path / "my_source.py").write_text(
        "from retrain.types import Example\n"
        "class Source:\n"
        "    def __init__(self, data): self.data = data\n"
        "    def load(self): return [Example(self.data.split, '1')]\n"
        "class Empty(Source):\n"
        "    def load(self): return []\n"
        "class Numbers(Source):\n"
        "    def load(self): return [Example('a', value) for value in (5, 2.5, 27.0, 'text')]\n"
        "class Raw(Source):\n"
        "    def load(self): return [{'prompt': 'a'}]\n"
        "class Shapeless:\n"
        "    def __init__(self, data): pass\n"
        "NOTHING = 3\n"
    )
    paths = [str(tmp_path)]
    assert load_examples(Data(source="my_source.Source", split="dev"), paths)[0].prompt == "dev"
    numbers = load_examples(Data(source="my_source.Numbers"), paths)
    assert [example.reference for example in numbers] == ["5", "2.5", "27", "text"]
    for name, message in [
        ("Empty", "has no examples"),
        ("Raw", "returned a dict as example 0; expected a retrain.types.Example"),
    ]:
        with pytest.raises(PluginError, match=message):
            load_examples(Data(source=f"my_source.{name}"), paths)
    for name, message in [("Shapeless", "has no load method"), ("NOTHING", "must be a class")]:
        with pytest.raises(PluginError, match=message):
            build_source(Data(source=f"my_source:{name}"), paths)


@pytest.mark.parametrize(
    ("body", "message", "cause"),
    [
        ("raise KeyError('rows')", r"raised KeyError\('rows'\) in load", KeyError),
        ("raise SystemExit(3)", r"raised SystemExit\(3\) in load", SystemExit),
        ("return (Example('a', 'b') for _ in range(3))", "returned a generator from load.*Try: return list", None),
        ("return None", "returned a NoneType from load", None),
        ("return [Example('a', 'b'), {'prompt': 'c'}]", r"returned a dict as example 1", None),
        ("return [Example('a', ['b'])]", r"returned list \['b'\] as the reference of example 0; expected text", None),
        ("return [Example('a', None)]", "returned NoneType None as the reference of example 0", None),
        ("return [Example('a', float('nan'))]", "returned float nan as the reference of example 0", None),
        ("return [Example('a', True)]", "returned bool True as the reference of example 0", None),
        ("return Lazy()", r"raised ZeroDivisionError\(.*\) in load", ZeroDivisionError),
    ],
)
def test_a_source_that_misbehaves_is_named(tmp_path, monkeypatch, body, message, cause):
    monkeypatch.delitem(sys.modules, "odd_source", raising=False)
    (tmp_path / "odd_source.py").write_text(
        "from collections.abc import Sequence\n"
        "from retrain.types import Example\n"
        "class Lazy(Sequence):\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, index): return 1 / 0\n"
        "class Source:\n"
        "    def __init__(self, data): pass\n"
        f"    def load(self): {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=message) as caught:
        load_examples(Data(source="odd_source.Source"))
    assert "data source 'odd_source.Source'" in str(caught.value)
    assert type(caught.value.__cause__) is (cause or type(None))


def test_a_source_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "unmade_source.py").write_text("def Source(data): raise OSError('no disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"'unmade_source.Source' raised OSError\('no disk'\) when it was created"):
        build_source(Data(source="unmade_source.Source"))


def test_an_endless_source_is_named_when_a_draw_goes_wrong(tmp_path, monkeypatch):
    (tmp_path / "endless_source.py").write_text(
        "from retrain.data import Endless\n"
        "class Source:\n"
        "    def __init__(self, data): self.split = data.split\n"
        "    def load(self): return Endless(self.draw)\n"
        "    def draw(self, rng): return 1 / 0 if self.split == 'zero' else 'text'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"'endless_source.Source' raised ZeroDivisionError\(.*\) at example 2"):
        load_examples(Data(source="endless_source.Source", split="zero"))[2]
    with pytest.raises(PluginError, match=r"'endless_source.Source' returned a str as example 0"):
        ExampleOrder(load_examples(Data(source="endless_source.Source")), seed=1).take(1)


def test_other_fields_are_part_of_a_digest_and_older_digests_lack_them():
    plain, one, other = (
        digest_of([Example("a", "1", meta=meta), Example("b", "2")]) for meta in ({}, {"want": "x"}, {"want": "y"})
    )
    assert is_same_digest(one, digest_of([Example("a", "1", meta={"want": "x"}), Example("b", "2")]))
    assert not is_same_digest(one, other)
    # What an older version recorded had only prompts and references.
    assert is_same_digest(plain, one) and is_same_digest(other, plain)
    assert not is_same_digest(plain, digest_of([Example("a", "2"), Example("b", "2")]))
    assert is_same_digest(f"{plain}+{one}", f"{plain}+{one}")
    assert not is_same_digest(f"{plain}+{one}", plain) and not is_same_digest(f"{one}+{other}", f"{other}+{one}")
    assert len({digest_of([Example("a", "1", meta={"of": np.int64(n)})]) for n in (1, 2)}) == 2
    # Objects are not written: they may differ between processes.
    assert digest_of([Example("a", "1", meta={"of": object()})]) == digest_of(
        [Example("a", "1", meta={"of": object()})]
    )


def test_a_number_of_numpy_is_an_answer():
    for value, text in (
        (np.int64(5), "5"),
        (np.float32(2.5), "2.5"),
        (np.float64(27.0), "27"),
        (Fraction(1, 2), "1/2"),
    ):
        assert check_example("a source", 0, Example("a", value)).reference == text
