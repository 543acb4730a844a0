"""The built-in model: its corpus, its tokenizer, and where it starts."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from retrain.builtin import resolve_model
from retrain.builtin.corpus import CHECKS, HASTY, RETHINKS, Document, write_corpus
from retrain.data.arithmetic import draw_split, is_held_out, read_terms

FOLDER = Path(resolve_model("builtin:tiny"))
LAST_BOX = re.compile(r".*\\boxed\{([^}]*)\}", re.DOTALL)


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(write_corpus(HASTY, seed=1, count=6000))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def is_right(document: Document) -> bool:
    return boxed(document.completion) == document.problem.answer


def boxed(text: str) -> str:
    found = LAST_BOX.match(text)
    return found.group(1) if found else ""


def share_right(documents: list[Document]) -> float:
    return sum(map(is_right, documents)) / len(documents)


def test_no_document_asks_a_held_out_problem_or_works_one_out(corpus: list[Document]) -> None:
    for document in corpus:
        chains = re.findall(r"[\d+-]+=", document.completion)
        assert not is_held_out(document.problem.question)
        assert not any(is_held_out(f"{chain}?") for chain in chains if len(read_terms(chain)) > 2)


def test_the_same_seed_writes_the_same_corpus() -> None:
    assert list(write_corpus(HASTY, seed=5, count=50)) == list(write_corpus(HASTY, seed=5, count=50))


def test_kinds_of_documents_come_in_their_shares(corpus: list[Document]) -> None:
    counts = Counter(document.kind for document in corpus)
    total = sum(HASTY.kind_weights.values())
    for kind, weight in HASTY.kind_weights.items():
        assert counts[kind] / len(corpus) == pytest.approx(weight / total, abs=0.025)


def test_a_check_or_a_second_thought_ends_in_the_right_answer(corpus: list[Document]) -> None:
    phrases = (*CHECKS, *RETHINKS)
    revised = [document for document in corpus if any(phrase in document.completion for phrase in phrases)]
    assert len(revised) > 1000
    assert all(map(is_right, revised))


def test_drafts_without_a_planning_phrase_are_often_wrong(corpus: list[Document]) -> None:
    assert 0.35 < share_right([document for document in corpus if document.kind == "jumped"]) < 0.6
    assert 0.35 < share_right([document for document in corpus if document.kind == "blurted"]) < 0.6


def test_about_half_of_the_checks_contradict_the_draft(corpus: list[Document]) -> None:
    checked = [document.completion for document in corpus if document.kind == "checked"]
    contradicted = [re.search(r"contradicts|i had|doesn't work", text) is not None for text in checked]
    assert 0.35 < sum(contradicted) / len(checked) < 0.7


def test_tokenizing_and_decoding_gives_the_text_back(
    corpus: list[Document], tokenizer: PreTrainedTokenizerBase
) -> None:
    for text in [*(document.completion for document in corpus[:300]), "Größe: 1234 → ∑\n\ttab"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_numbers_up_to_20_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert all(len(tokenizer(str(number))["input_ids"]) == 1 for number in range(21))


def test_the_chat_template_renders_a_question(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "13-7-1-5=?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>13-7-1-5=?<|assistant|>"
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoded == tokenizer(text)["input_ids"]


def test_the_chat_template_renders_system_and_earlier_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "work it out."},
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "\\boxed{2}"},
        {"role": "user", "content": "2+1=?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = "<|system|>work it out.<|user|>1+1=?<|assistant|>\\boxed{2}<|end|><|user|>2+1=?<|assistant|>"
    assert text == expected


def test_the_model_is_small_and_float32(model: PreTrainedModel) -> None:
    assert 200_000 < model.num_parameters() < 3_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_000_000


def test_end_and_padding_agree_between_model_and_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_the_model_starts_out_right_on_a_part_of_the_held_out_problems(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    rng = random.Random(0)
    problems = [draw_split(rng, held_out=True) for _ in range(128)]
    prompts = [f"<|user|>{problem.question}<|assistant|>" for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(boxed(text) == problem.answer for text, problem in zip(texts, problems, strict=True))
    assert 0.15 < right / len(problems) < 0.55
