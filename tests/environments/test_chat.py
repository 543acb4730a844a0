"""Conversations keep their tokens: what was sampled stays, what a template adds is inserted, what it rewrites forks."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.environments import ChatOver, Message
from retrain.environments.chat import Limits, PolicyChat, text_of
from retrain.environments.template import ChatTemplate
from retrain.environments.tools import read_calls
from retrain.errors import RolloutError
from retrain.types import Completion, IntArray
from tests.environments.table import TextEngine, tiny_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


# As Qwen3 does: thoughts of earlier turns are left out.
FORGETS = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}"
    "<|assistant|>{{ m['content'].split('THOUGHT')[-1] if not loop.last else m['content'] }}<|end|>"
    "{%- else -%}<|user|>{{ m['content'] }}{%- endif -%}{%- endfor -%}<|assistant|>"
)
TRIMS = tiny_tokenizer().chat_template.replace("message['content']", "message['content'] | trim")


def chat_with(answers: Sequence[str], template: Any = None, **limits: Any) -> tuple[PolicyChat, list[IntArray]]:
    """A chat whose replies are given, and the prompts it was sampled with."""
    tokenizer, left, prompts = template or tiny_tokenizer(), list(answers), []
    engine = TextEngine(lambda _: left.pop(0), tokenizer)

    async def sample(ids: IntArray, max_tokens: int) -> Completion:
        prompts.append(ids)
        return engine.complete("", max_tokens)

    own = Limits(**{"max_tokens": 64, "context": 2048, **limits})
    return PolicyChat(ChatTemplate(tokenizer), sample, own, seed=0), prompts


def converse(chat: PolicyChat, *messages: str) -> None:
    async def run() -> None:
        for message in messages:
            await chat.ask(message)

    asyncio.run(run())


def test_a_later_turn_extends_the_tokens_of_the_earlier_ones() -> None:
    chat, prompts = chat_with(["first answer", "second"])
    converse(chat, "1+1=?", "and 2+2=?")
    whole = chat.completion()
    assert np.array_equal(
        prompts[1], np.concatenate([prompts[0], whole.token_ids_T[: len(prompts[1]) - len(prompts[0])]])
    )
    assert (
        tiny_tokenizer().decode(prompts[1])
        == "<|user|>1+1=?<|assistant|>first answer<|end|><|user|>and 2+2=?<|assistant|>"
    )
    assert len(chat.branches) == 1


def test_tokens_that_the_environment_wrote_are_masked() -> None:
    chat, _ = chat_with(["one", "two"])
    converse(chat, "a", "b")
    whole = chat.completion()
    assert whole.sampled_T is not None
    sampled = tiny_tokenizer().decode(whole.token_ids_T[whole.sampled_T])
    inserted = tiny_tokenizer().decode(whole.token_ids_T[~whole.sampled_T])
    assert sampled == "one<|end|>two<|end|>"
    assert inserted == "<|user|>b<|assistant|>"
    assert not whole.logprobs_T[~whole.sampled_T].any()


def test_a_single_turn_is_an_ordinary_completion() -> None:
    chat, _ = chat_with(["one"])
    converse(chat, "a")
    whole = chat.completion()
    assert whole.sampled_T is None
    assert whole.text == "one"
    assert [(row.start, row.stop) for row in whole.segments] == [(0, len(whole.token_ids_T))]


def test_an_answer_cut_short_is_closed_by_the_template() -> None:
    chat, prompts = chat_with(["1+1=2. 2+2=4. 3+3=6.", "two"], max_tokens=3)
    converse(chat, "a", "b")
    cut = tiny_tokenizer().decode(prompts[1])
    assert cut.count("<|end|>") == 1
    assert cut.endswith("<|end|><|user|>b<|assistant|>")


def test_a_template_that_rewrites_history_gives_one_row_a_turn() -> None:
    chat, prompts = chat_with(["hmm THOUGHT 2", "hmm THOUGHT 4"], tokenizer_with(FORGETS))
    converse(chat, "1+1=?", "2+2=?")
    whole = chat.completion()
    assert len(chat.branches) == 2
    assert whole.sampled_T is None, "every row holds only what was sampled"
    assert [row.start for row in whole.segments] == [0, whole.segments[0].stop]
    assert whole.segments[1].stop == len(whole.token_ids_T)
    assert np.array_equal(whole.segments[1].prompt_ids, prompts[1])
    assert "hmm" not in tiny_tokenizer().decode(prompts[1])


def test_blanks_that_a_template_trims_do_not_fork() -> None:
    chat, prompts = chat_with(["  padded ", "two"], tokenizer_with(TRIMS))
    converse(chat, "a", "b")
    assert len(chat.branches) == 1
    assert "  padded <|end|><|user|>b" in tiny_tokenizer().decode(prompts[1])


def test_a_model_without_a_template_continues_in_plain_text() -> None:
    chat, prompts = chat_with(["one", "two"], tokenizer_with(None))
    converse(chat, "a", "b")
    assert len(chat.branches) == 1
    assert tiny_tokenizer().decode(prompts[1]).replace("<|end|>", "") == "aone\n\nb"


def test_conversations_of_two_parties_are_two_rows_and_not_one_a_turn() -> None:
    chat, _ = chat_with(["a1", "b1", "a2", "b2"])

    async def run() -> None:
        one: list[Message] = [{"role": "user", "content": "I am one"}]
        two: list[Message] = [{"role": "user", "content": "I am two"}]
        for _ in range(2):
            for history in (one, two):
                reply = await chat.reply_to(history)
                history += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "go on"}]

    asyncio.run(run())
    assert len(chat.branches) == 2
    assert [m["content"] for m in chat.transcript if m["role"] == "assistant"] == ["a1", "b1", "a2", "b2"]


def test_the_transcript_has_each_message_once_even_when_it_repeats() -> None:
    chat, _ = chat_with(["no", "no", "yes"])
    converse(chat, "guess", "guess", "guess")
    assert [(m["role"], m["content"]) for m in chat.transcript] == [
        ("user", "guess"),
        ("assistant", "no"),
        ("user", "guess"),
        ("assistant", "no"),
        ("user", "guess"),
        ("assistant", "yes"),
    ]


@pytest.mark.parametrize(("answers", "is_cut"), [(["1+1=2. " * 8, "2"], True), (["2", "2"], False)])
def test_one_turn_that_is_cut_off_truncates_the_rollout(answers: list[str], is_cut: bool) -> None:
    chat, _ = chat_with(answers, max_tokens=12)
    converse(chat, "a", "b")
    assert chat.truncated is is_cut
    completion = chat.completion()
    assert completion.finish_reason == ("length" if is_cut else "stop")
    assert completion.sampled_T is not None
    assert completion.num_sampled == completion.sampled_T.sum() < len(completion.token_ids_T)


def test_after_the_last_turn_the_chat_is_over() -> None:
    chat, _ = chat_with(["one", "two"], max_turns=2)
    with pytest.raises(ChatOver, match="max_turns = 2 is reached"):
        converse(chat, "a", "b", "c")
    assert chat.truncated and chat.turns == 2
    assert chat.completion().text == "one\n\ntwo"


def test_a_full_context_ends_the_chat_and_leaves_no_tokens_behind() -> None:
    chat, prompts = chat_with(["1+1=2. " * 4, "two"], context=40)
    with pytest.raises(ChatOver, match="context is full"):
        converse(chat, "a", "1+1=2. " * 8)
    assert chat.truncated and chat.context_full
    assert len(prompts) == 1
    # No turn was cut off, but the conversation was.
    assert chat.completion().sampled_T is None and chat.completion().finish_reason == "length"


def test_near_the_end_of_the_context_a_turn_gets_what_is_left() -> None:
    chat, prompts = chat_with(["1+1=2. " * 40], context=30)
    converse(chat, "a")
    assert len(prompts[0]) + len(chat.completion().token_ids_T) == 30
    assert chat.context_full


def test_a_turn_that_max_tokens_cuts_off_does_not_fill_the_context() -> None:
    chat, _ = chat_with(["1+1=2. " * 40], max_tokens=5)
    converse(chat, "a")
    assert chat.truncated and not chat.context_full


def test_a_first_prompt_that_does_not_fit_is_an_error() -> None:
    chat, _ = chat_with(["x"], context=5)
    with pytest.raises(RolloutError, match=r"the first prompt has .* tokens; the context length is 5"):
        converse(chat, "1+1=2. " * 8)


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(RolloutError, match="empty prompt"):
        converse(chat_with(["x"])[0], "  ")


def test_images_are_rejected_with_a_sentence() -> None:
    with pytest.raises(RolloutError, match="'image_url' in it; retrain trains on text only"):
        text_of([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}])
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"


def test_a_template_that_rejects_a_conversation_is_quoted() -> None:
    picky = tokenizer_with("{{ raise_exception('roles must alternate') if messages | length > 1 }}<|assistant|>")
    with pytest.raises(RolloutError, match=r"chat template rejected .*roles must alternate"):
        converse(chat_with(["a", "b"], picky)[0], "a", "b")


def test_tools_are_offered_in_the_templates_own_format() -> None:
    own = "{%- if tools -%}<|system|>TOOLS {{ tools | length }}{%- endif -%}" + tiny_tokenizer().chat_template
    chat, prompts = chat_with(["x"], tokenizer_with(own))
    asyncio.run(chat.ask("a", [TOOL]))
    assert tiny_tokenizer().decode(prompts[0]).startswith("<|system|>TOOLS 1<|user|>a")


def test_tools_are_described_where_the_template_has_no_format_for_them() -> None:
    chat, prompts = chat_with(["x"])
    asyncio.run(chat.ask("a", [TOOL]))
    assert '"name": "add"' in tiny_tokenizer().decode(prompts[0]).partition("<|user|>")[0]


def test_a_tool_conversation_extends_whatever_the_spelling_of_the_call() -> None:
    call = '<tool_call>{"arguments":{"b": 2,"a":1},   "name": "add"}</tool_call>'
    chat, prompts = chat_with([call, "3"])

    async def run() -> None:
        reply = await chat.ask("1 and 2?", [TOOL])
        assert [(c.name, dict(c.arguments)) for c in reply.tool_calls] == [("add", {"a": 1, "b": 2})]
        await chat.ask({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}, [TOOL])

    asyncio.run(run())
    assert len(chat.branches) == 1
    assert call in tiny_tokenizer().decode(prompts[1])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call here", []),
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1}, "")]),
        ('{"name": "add"', []),
        ("<tool_call>nonsense</tool_call>", [("", {}, "nonsense")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", {"a": 1}, "")]),
        (
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            [("add", {}, '{"name": "add", "arguments": [1]}')],
        ),
        ("<tool_call><function=add><parameter=a>\n1\n</parameter></function></tool_call>", [("add", {"a": 1}, "")]),
        ("5", []),
        ("[" * 100_000, []),
    ],
)
def test_calls_are_read_and_broken_ones_kept(text: str, calls: list[tuple[str, dict[str, Any], str]]) -> None:
    assert [(call.name, dict(call.arguments), call.broken) for call in read_calls(text)] == calls


def test_half_a_surrogate_pair_in_a_message_is_written_as_a_question_mark() -> None:
    (call,) = read_calls(r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>')
    template = ChatTemplate(tiny_tokenizer())
    text = template.render([{"role": "user", "content": f"unknown tool {call.name}"}], ())
    ids = template.encode(text, begins=True)
    assert "unknown tool ?" in tiny_tokenizer().decode(ids)


@pytest.mark.parametrize(
    "text",
    [
        "x" + " " * 100_000 + "y",
        "<function=a>" + "<parameter=b>\n" * 20_000,
        "<function=" * 20_000,
        "<function=a>" + "<parameter=" * 20_000,
    ],
)
def test_an_endless_call_is_read_in_no_time(text: str) -> None:
    began = time.process_time()
    assert len(read_calls(f"<tool_call>{text}")) == 1
    assert time.process_time() - began < 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=2, max_size=4), st.booleans())
def test_later_messages_leave_earlier_tokens_unchanged(answers: list[str], trims: bool) -> None:
    chat, prompts = chat_with(answers, tokenizer_with(TRIMS) if trims else None)
    converse(chat, *("ask " + str(number) for number in range(len(answers))))
    whole = chat.completion()
    for before, after in itertools.pairwise(prompts):
        if len(chat.branches) == 1:
            assert np.array_equal(after[: len(before)], before)
    sampled = whole.sampled_T if whole.sampled_T is not None else np.ones(len(whole.token_ids_T), bool)
    expected = [i for a in answers for i in [*tiny_tokenizer()(a, add_special_tokens=False)["input_ids"], 0]]
    assert whole.token_ids_T[sampled].tolist() == expected[: int(sampled.sum())]
    assert whole.segments[-1].stop == len(whole.token_ids_T)
