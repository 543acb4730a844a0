"""The chat template: renders conversations to text and token ids, and finds what a turn adds to existing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.environments import Message, Tool
from retrain.environments.tools import without_tools
from retrain.errors import RolloutError
from retrain.modeling.tokens import Tokenizer
from retrain.types import Completion, IntArray

_PROBE: tuple[Message, ...] = ({"role": "user", "content": "probe"},)
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Written:
    """A completion as text: the message content for a template, and its stop token."""

    content: str
    stop: str


class ChatTemplate:
    """Renders messages with the tokenizer's template, or as plain text if it has none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.has_tool_format = tokenizer.chat_template is not None and self._supports_tools()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The text of a conversation, with the generation prompt."""
        if not self.has_tool_format:
            messages, tools = without_tools(messages, tools), ()
        if self.tokenizer.chat_template is None:
            return _plain(messages)
        try:
            return self._apply(messages, tools)
        except Exception as error:
            # Templates come with the model and may raise anything.
            raise RolloutError(f"the model's chat template rejected the conversation: {error}") from error

    def encode(self, text: str, begins: bool) -> IntArray:
        """Token ids; `begins` marks the beginning of a prompt."""
        # Templates include the special tokens.
        special = begins and self.tokenizer.chat_template is None
        # An unpaired surrogate, as in a tool call's \ud800, cannot be encoded.
        text = text.encode("utf-8", "replace").decode()
        return np.asarray(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int64)

    def read(self, completion: Completion) -> Written:
        """The complete text of sampled tokens, so that a template reproduces it."""
        ids = completion.token_ids_T
        ended = completion.finish_reason == "stop" and len(ids) > 0 and int(ids[-1]) in self.special
        content = self._decode(ids[:-1]) if ended else self._decode(ids)
        return Written(content, self._decode(ids[-1:]) if ended else "")

    def text_after(self, text: str, written: Written, following: str) -> str | None:
        """What a later render, `following`, adds to `text` and the completion; None if it rewrites either."""
        if not following.startswith(text):
            return None
        rest = following[len(text) :]
        # Plain text has no stop tokens; the sampled one is kept.
        stop = written.stop if self.tokenizer.chat_template is not None else ""
        # Templates strip messages; the tokens keep the sampled whitespace.
        for content in dict.fromkeys((written.content, written.content.strip())):
            if rest.startswith(content + stop):
                return rest[len(content) + len(stop) :]
        return None

    def _decode(self, ids: IntArray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return text

    def _supports_tools(self) -> bool:
        return self._apply(_PROBE, (_PROBE_TOOL,)) != self._apply(_PROBE, ())


def _plain(messages: Sequence[Message]) -> str:
    """Paragraphs, for models without a chat format."""
    text = ""
    for message in messages:
        gap = "\n\n" if text and message["role"] != "assistant" else ""
        text += gap + message["content"]
    return text
