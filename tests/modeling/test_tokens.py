from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.tiny import write_tokenizer
from tokenizers import Tokenizer, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from retrain.errors import ConfigError
from retrain.modeling.tokens import PromptEncoder, load_tokenizer, vocabulary_texts
from retrain.types import Example


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)


def encode(folder: Path, example: Example, system: str = "", most: int = 0) -> str:
    encoder = PromptEncoder(load_tokenizer(str(folder)), system, most, lambda line: None)
    return "".join(map(chr, encoder.encode(example)))


def test_a_plain_prompt_becomes_one_user_message(folder: Path) -> None:
    assert encode(folder, Example("2 + 2?", "4")) == "[user]2 + 2?>"


def test_a_system_prompt_comes_first_unless_the_messages_bring_their_own(folder: Path) -> None:
    chat = Example(({"role": "system", "content": "be kind"}, {"role": "user", "content": "2 + 2?"}), "4")
    assert encode(folder, Example("2 + 2?", "4"), system="be brief") == "[system]be brief[user]2 + 2?>"
    assert encode(folder, chat, system="be brief") == "[system]be kind[user]2 + 2?>"


def test_long_prompts_are_cut_from_the_left(folder: Path) -> None:
    assert encode(folder, Example("2 + 2?", "4"), most=4) == " 2?>"


def test_each_distinct_prompt_is_encoded_once(folder: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(folder)), "", 0, lambda line: None)
    first = encoder.encode(Example("a", "1"))
    assert encoder.encode(Example("a", "2")) is first
    assert encoder.encode(Example(({"role": "user", "content": "a"},), "1")) is not first
    assert encoder.longest([Example("a", "1"), Example("abc", "1")]) == len(first) + 2


def test_without_a_chat_template_messages_are_joined_as_text(tmp_path: Path) -> None:
    bare = write_tokenizer(tmp_path, chat_template=None)
    logged: list[str] = []
    encoder = PromptEncoder(load_tokenizer(str(bare)), "be brief", 0, logged.append)
    assert "".join(map(chr, encoder.encode(Example("2 + 2?", "4")))) == "be brief\n\n2 + 2?"
    assert logged == ["Warning: the tokenizer has no chat template; prompts are given to the model as plain text."]


def test_every_token_id_has_a_text(folder: Path) -> None:
    texts = vocabulary_texts(load_tokenizer(str(folder)))
    assert len(texts) == 128
    assert texts[65] == "A"


def test_a_tokenizer_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"could not be loaded.*point at the folder"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_tokenizer_that_cannot_be_loaded_says_the_whole_reason(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text('{"model_type": "llama"}')
    tmp_path.joinpath("tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"from one of: \(1\) .* \(3\) .*Try: check the files there") as raised:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(raised.value) and "check the id" not in str(raised.value)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "llama", "gpt2"])
def test_a_model_without_a_tokenizer_says_how_to_save_one(tmp_path: Path, family: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": family}))
    expected = r"has no tokenizer \(no tokenizer\.json.*AutoTokenizer\.from_pretrained\(BASE\)\.save_pretrained\('/"
    with pytest.raises(ConfigError, match=expected):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "bert", "t5", "reformer"])
def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path, family: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": family}))
    added = {"7": {"content": "<tool_call>", "special": False}}
    tmp_path.joinpath("tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ConfigError, match="has a tokenizer without a vocabulary"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("vocabulary", "unknown", "added"),
    [
        (["<unk>", "猫", "犬"], "<unk>", []),
        (["猫", "犬"], None, []),
        (["<unk>"], "<unk>", ["0", "1", "+"]),
        (["<unk>", "A", "C", "G", "T"], "<unk>", []),
    ],
)
def test_a_small_vocabulary_is_one(
    tmp_path: Path, vocabulary: list[str], unknown: str | None, added: list[str]
) -> None:
    words = {word: id for id, word in enumerate(vocabulary)}
    model = models.WordLevel(words, unk_token=unknown) if unknown else models.WordLevel(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=unknown)
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == len(vocabulary) + len(added)


def test_a_tokenizer_of_bytes_needs_no_file_of_a_vocabulary(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    tmp_path.joinpath("config.json").write_text('{"model_type": "t5"}')
    assert list(load_tokenizer(str(tmp_path))("a", add_special_tokens=False)["input_ids"]) == [ord("a") + 3]
