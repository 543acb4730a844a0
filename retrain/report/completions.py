"""The completions of a run: an index of where each group begins, and groups read from there.

generations.jsonl may be gigabytes in size, so texts are read only on demand.
"""

from __future__ import annotations

import re
import time
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from retrain.storage.logs import has_step, parse_rows
from retrain.types import JsonObject

# How generation_rows of retrain.tracking.jsonl begins a row.
_START = re.compile(rb'\{"step": (\d{1,15}), "prompt": ')
_PROMPT_END = b', "completion": '
_CHECK_EVERY = 256
_SHOWN = ("reward", "outcome", "num_tokens", "finish_reason", "reference", "answer", "transcript", "detail")


class CompletionIndex:
    """Step, place, size and prompt of every group; grows with the file."""

    def __init__(self, path: Path, group_size: int) -> None:
        self.path = path
        self.group_size = group_size
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.steps, self.offsets, self.counts, self.prompts = array("q"), array("q"), array("l"), array("L")
        """One entry per group. Prompts are checksums."""
        self.end = 0
        self.seen = b""
        self.total = 0
        self.share_read = 1.0
        self._last: tuple[int, bytes] = (-1, b"")

    def __len__(self) -> int:
        return len(self.steps)

    def update(self, budget_s: float = float("inf")) -> bool:
        """Index what was appended; returns whether the end was reached."""
        try:
            with self.path.open("rb", buffering=1 << 20) as file:
                file.seek(self.end - len(self.seen))
                if file.read(len(self.seen)) != self.seen:
                    self.clear()
                    file.seek(0)
                return self._scan(file, time.monotonic() + budget_s)
        except OSError:
            self.clear()
            return True

    def list_steps(self) -> list[list[int]]:
        """Each step with its number of groups."""
        found: list[list[int]] = []
        for step in self.steps:
            if found and found[-1][0] == step:
                found[-1][1] += 1
            else:
                found.append([step, 1])
        return found

    def groups_of(self, step: int) -> range:
        """The numbers of the groups of a step."""
        return range(bisect_left(self.steps, step), bisect_right(self.steps, step))

    def groups_with(self, prompt: int) -> list[int]:
        """The numbers of the groups of a prompt, by its checksum."""
        return [number for number, found in enumerate(self.prompts) if found == prompt]

    def bytes_of(self, numbers: Sequence[int]) -> int:
        """The size of groups in the file."""
        return sum(self._end_of(number) - self.offsets[number] for number in numbers)

    def read(self, numbers: Sequence[int]) -> Iterator[JsonObject]:
        """Groups with their texts: step, place within the step, prompt and members."""
        if not numbers:
            return
        with self.path.open("rb") as file:
            for number in numbers:
                file.seek(self.offsets[number])
                data = file.read(self._end_of(number) - self.offsets[number])
                rows = list(parse_rows(data.split(b"\n")))
                if rows:
                    yield self._group(number, rows)

    def _group(self, number: int, rows: Sequence[JsonObject]) -> JsonObject:
        step = self.steps[number]
        members = [
            {"text": row.get("completion") or ""} | {key: row[key] for key in _SHOWN if key in row} for row in rows
        ]
        return {
            "step": step,
            "at": number - bisect_left(self.steps, step),
            "prompt": rows[0].get("prompt") or "",
            "prompt_id": self.prompts[number],
            "members": members,
        }

    def _end_of(self, number: int) -> int:
        return self.offsets[number + 1] if number + 1 < len(self) else self.end

    def _scan(self, file: Iterator[bytes], until: float) -> bool:
        for count, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            self._add(line)
            self.end += len(line)
            self.seen = line[-32:]
            if count % _CHECK_EVERY == 0 and time.monotonic() > until:
                self.share_read = min(1.0, self.end / max(1, self.path.stat().st_size))
                return False
        self.share_read = 1.0
        return True

    def _add(self, line: bytes) -> None:
        match = _START.match(line)
        end = line.find(_PROMPT_END, match.end()) if match else -1
        if match and end > 0:
            step, prompt = int(match[1]), line[match.end() : end]
        else:
            row = next(parse_rows([line]), {})
            if not has_step(row):
                return
            step, prompt = row["step"], str(row.get("prompt")).encode("utf-8", "replace")
        self.total += 1
        if self._last == (step, prompt) and self.counts[-1] < self.group_size:
            self.counts[-1] += 1
            return
        self._last = step, prompt
        self.steps.append(step)
        self.offsets.append(self.end)
        self.counts.append(1)
        self.prompts.append(zlib.crc32(prompt))


def is_truncated(member: Mapping[str, object], max_tokens: int) -> bool:
    """Whether a completion was cut off at a token limit."""
    if "finish_reason" in member:
        return member["finish_reason"] == "length"
    # Older logs: a lone turn of that length may still have ended by itself, and several turns cannot be told apart.
    length = member.get("num_tokens")
    return isinstance(length, int) and length >= max_tokens and "transcript" not in member


def shows(member: Mapping[str, object], kind: str, max_tokens: int) -> bool:
    """Whether a completion belongs to a kind: right, wrong, truncated, errors; empty is all."""
    outcome = member.get("outcome")
    if kind == "truncated":
        return is_truncated(member, max_tokens)
    if kind == "errors":
        return outcome not in ("right", "wrong")
    return not kind or outcome == kind


def matches(group: JsonObject, wanted: Mapping[str, str], max_tokens: int) -> bool:
    """Whether one completion of a group has the wanted kind, reward and words."""
    words = wanted.get("search", "").lower()
    if words and words not in group["prompt"].lower() and not any(words in m["text"].lower() for m in group["members"]):
        return False
    least, most = (float(wanted[key]) if wanted.get(key) else None for key in ("least", "most"))
    return any(
        shows(member, wanted.get("show", ""), max_tokens)
        and (least is None or (member.get("reward") is not None and member["reward"] >= least))
        and (most is None or (member.get("reward") is not None and member["reward"] <= most))
        for member in group["members"]
    )
