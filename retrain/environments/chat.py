"""A conversation with the policy that keeps every token as it was sampled.

Each turn extends the tokens of earlier turns by what the chat template adds. Where the template rewrites earlier
messages, as some do with thinking, or the environment passes a different history, the turn starts a new branch, which
is trained as a separate row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from retrain.environments import ChatOver, Message, Reply, Tool, as_messages
from retrain.environments.template import ChatTemplate, Written
from retrain.environments.tools import calls_to_wire, read_calls
from retrain.errors import RolloutError
from retrain.types import Completion, IntArray, Segment

Sample = Callable[[IntArray, int], Awaitable[Completion]]
"""Samples one completion of a prompt, up to a number of tokens."""


@dataclass(frozen=True)
class Limits:
    """The limits of one conversation."""

    max_tokens: int
    """Per turn."""
    context: int
    """Tokens of the conversation."""
    max_turns: int = -1
    max_prompt_tokens: int = 0


@dataclass
class Branch:
    """A sequence of turns in which each extends the tokens of the previous one."""

    prompt_ids: IntArray
    history: list[Message] = field(default_factory=list)
    """Messages as the environment sees them."""
    shown: list[Message] = field(default_factory=list)
    """Messages as passed to the template: replies with every sampled character."""
    text: str = ""
    """The rendered prompt of the last turn."""
    written: Written = field(default_factory=lambda: Written("", ""))
    """The last reply."""
    parts: list[Completion] = field(default_factory=list)
    """Sampled and inserted tokens, alternating."""

    def ids(self) -> IntArray:
        """All tokens so far."""
        return np.concatenate([self.prompt_ids, *(part.token_ids_T for part in self.parts)])


class PolicyChat:
    """The `Chat` of one rollout."""

    def __init__(self, template: ChatTemplate, sample: Sample, limits: Limits, seed: int) -> None:
        self.template = template
        self.sample = sample
        self.limits = limits
        self.seed = seed
        self.branches: list[Branch] = []
        self.transcript: list[Message] = []
        self.turns = 0
        self.truncated = False
        """Whether max_turns or the context ended it, or a token limit cut off one of its turns."""
        self.context_full = False
        """Whether the end of the context cut off a turn or left no room for one."""
        self.finish_reason: Literal["stop", "length"] = "stop"
        self.cut_from = 0
        """Tokens of the longest prompt that max_prompt_tokens cut."""

    async def ask(self, new: str | Message | Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Add messages and return the model's reply."""
        before = self.branches[-1].history if self.branches else []
        return await self.reply_to([*before, *as_messages(new)], tools)

    async def reply_to(self, history: Sequence[Message], tools: Sequence[Tool] = ()) -> Reply:
        """Reply to a history, extending the branch that it continues."""
        if self.turns == self.limits.max_turns:
            self._end(f"max_turns = {self.turns} is reached")
        messages = [clean(message) for message in history]
        if not any(message["content"].strip() for message in messages):
            raise RolloutError("the environment sent an empty prompt.")
        branch, ids = self._find_branch(messages, tools)
        room = self.limits.context - len(ids)
        if room < 1 and not self.turns:
            raise RolloutError(
                f"the first prompt has {len(ids)} tokens; the context length is {self.limits.context}.  "
                "Try: shorter prompts, fewer tools, or a model with a longer context"
            )
        if room < 1:
            self.context_full, self.finish_reason = True, "length"
            self._end("the context is full")
        completion = await self.sample(ids, min(self.limits.max_tokens, room))
        self.context_full |= completion.finish_reason == "length" and room < self.limits.max_tokens
        return self._append(branch, messages, ids, completion)

    def completion(self) -> Completion:
        """All branches as one completion, with segments where there are several."""
        parts = [part for branch in self.branches for part in branch.parts]
        if not parts:
            return Completion(
                np.zeros(0, np.int64), np.zeros(0, np.float32), "", "stop", transcript=tuple(self.transcript)
            )
        entropies = [part.entropies_T for part in parts if part.entropies_T is not None]
        sampled = [_mask(part) for part in parts]
        return Completion(
            token_ids_T=np.concatenate([part.token_ids_T for part in parts]),
            logprobs_T=np.concatenate([part.logprobs_T for part in parts]),
            text="\n\n".join(m["content"] for m in self.transcript if m["role"] == "assistant"),
            finish_reason=self.finish_reason,
            entropies_T=np.concatenate(entropies) if len(entropies) == len(parts) else None,
            sampled_T=None if all(mask.all() for mask in sampled) else np.concatenate(sampled),
            segments=self._segments(),
            transcript=tuple(self.transcript),
        )

    def _find_branch(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[Branch, IntArray]:
        """The branch that a history continues, or a new one, and the prompt of its next turn."""
        for branch in reversed(self.branches):
            known = len(branch.history)
            if len(messages) <= known or not all(map(same, branch.history, messages)):
                continue
            shown = [*branch.shown, *messages[known:]]
            text = self.template.render(shown, tools)
            added = self.template.text_after(branch.text, branch.written, text)
            if added is not None:
                branch.shown, branch.text = shown, text
                return branch, np.concatenate([branch.ids(), self.template.encode(added, begins=False)])
        text = self.template.render(messages, tools)
        ids = self.template.encode(text, begins=True)
        if 0 < self.limits.max_prompt_tokens < len(ids):
            self.cut_from = max(self.cut_from, len(ids))
            ids = ids[-self.limits.max_prompt_tokens :]
        return Branch(ids, shown=list(messages), text=text), ids

    def _append(self, branch: Branch, messages: list[Message], ids: IntArray, completion: Completion) -> Reply:
        inserted = ids[len(branch.ids()) :]
        if len(inserted):
            branch.parts.append(_inserted(inserted, completion.entropies_T is not None))
        if not branch.parts:
            self.branches.append(branch)
        branch.parts.append(completion)
        branch.written = self.template.read(completion)
        calls = read_calls(completion.text, self.turns)
        message: dict[str, object] = {"role": "assistant", "content": completion.text}
        if calls:
            message["tool_calls"] = calls_to_wire(calls)
        self._record(messages, message)
        branch.history = [*messages, message]
        branch.shown = [*branch.shown, {"role": "assistant", "content": branch.written.content}]
        self.turns += 1
        is_cut = completion.finish_reason == "length"
        if is_cut:
            self.truncated, self.finish_reason = True, "length"
        return Reply(completion.text, calls, is_cut)

    def _record(self, messages: list[Message], reply: Message) -> None:
        """Add new messages and the reply to the transcript."""
        known = max(_shared(branch.history, messages) for branch in self.branches)
        self.transcript += [*messages[known:], reply]

    def _end(self, why: str) -> None:
        self.truncated = True
        raise ChatOver(why)

    def _segments(self) -> tuple[Segment, ...]:
        rows, at = [], 0
        for branch in self.branches:
            length = sum(len(part.token_ids_T) for part in branch.parts)
            rows.append(Segment(branch.prompt_ids, at, at + length))
            at += length
        return tuple(rows)


def clean(message: Message) -> Message:
    """A message with its content as plain text; raises for other content."""
    kept = {key: value for key, value in message.items() if key in ("role", "tool_calls", "tool_call_id", "name")}
    return {**{key: value for key, value in kept.items() if value}, "content": text_of(message.get("content"))}


def text_of(content: object) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RolloutError(f"a message of the environment has content of type {type(content).__name__}.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RolloutError(f"the environment sent a message with {kind!r} in it; retrain trains on text only.")
        texts.append(str(part["text"]))
    return "".join(texts)


def same(one: Message, other: Message) -> bool:
    """Whether two messages are equal. Tool calls are part of the text and have several formats, so they are ignored."""
    return bool(one["role"] == other["role"] and one["content"] == other["content"])


def _shared(history: Sequence[Message], messages: Sequence[Message]) -> int:
    """The number of messages in the common prefix of two histories."""
    return next((n for n, pair in enumerate(zip(history, messages, strict=False)) if not same(*pair)), len(history))


def _mask(part: Completion) -> np.ndarray:
    return part.sampled_T if part.sampled_T is not None else np.ones(len(part.token_ids_T), dtype=np.bool_)


def _inserted(ids: IntArray, with_entropies: bool) -> Completion:
    """Tokens inserted by the environment, with unused placeholder log-probs."""
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Completion(ids, zeros, "", "stop", zeros if with_entropies else None, np.zeros(len(ids), dtype=np.bool_))
