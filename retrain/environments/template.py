"""The chat template: conversations into text and token ids, and what a further turn adds to tokens already there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.environments import Message, Tool
from retrain.environments.tools import without_tools
from retrain.errors import RolloutError
from retrain.types import Completion, IntArray

_PROBE: tuple[Message, ...] = ({"role": "user", "content": "probe"},)
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Written:
    """What a completion looks like as text: the message that a template is given, and the stop token it ended with."""

    content: str
    stop: str


class ChatTemplate:
    """Renders messages as the model's tokenizer says; plain text where it says nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.has_tool_format = tokenizer.chat_template is not None and self._knows_tools()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The text of a conversation, up to where the model is to go on."""
        if not self.has_tool_format:
            messages, tools = without_tools(messages, tools), ()
        if self.tokenizer.chat_template is None:
            return _plain(messages)
        try:
            return self._apply(messages, tools)
        except Exception as error:
            # Templates are programs of whoever made the model; most refuse with a sentence of their own.
            raise RolloutError(f"the model's chat template refused the conversation: {error}") from error

    def encode(self, text: str, begins: bool) -> IntArray:
        """Token ids; `begins` says that the text is the beginning of a prompt."""
        # A template has already written the special tokens.
        special = begins and self.tokenizer.chat_template is None
        return np.asarray(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int64)

    def read(self, completion: Completion) -> Written:
        """The text of sampled tokens with nothing left out, so that a template gives it back as it was."""
        ids = completion.token_ids_T
        ended = completion.finish_reason == "stop" and len(ids) > 0 and int(ids[-1]) in self.special
        content = self._decode(ids[:-1]) if ended else self._decode(ids)
        return Written(content, self._decode(ids[-1:]) if ended else "")

    def text_after(self, text: str, written: Written, following: str) -> str | None:
        """What `following`, a later render, adds to `text` and the completion; None when it rewrites either."""
        if not following.startswith(text):
            return None
        rest = following[len(text) :]
        # Plain text has no stop tokens; the one that was sampled stays where it is.
        stop = written.stop if self.tokenizer.chat_template is not None else ""
        # Templates trim messages; the tokens keep the blanks that were sampled.
        for content in dict.fromkeys((written.content, written.content.strip())):
            if rest.startswith(content + stop):
                return rest[len(content) + len(stop) :]
        return None

    def _decode(self, ids: IntArray) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return text

    def _knows_tools(self) -> bool:
        return self._apply(_PROBE, (_PROBE_TOOL,)) != self._apply(_PROBE, ())


def _plain(messages: Sequence[Message]) -> str:
    """Paragraphs, where a model was never taught a chat: its own text goes on right behind the prompt."""
    text = ""
    for message in messages:
        gap = "\n\n" if text and message["role"] != "assistant" else ""
        text += gap + message["content"]
    return text
