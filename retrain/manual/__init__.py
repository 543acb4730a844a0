"""The manual: its source file, parsed into sections and blocks.

`retrain.md` uses a subset of Markdown: `##` sections, `###` headings, paragraphs, `-` lists, definition
lists (a term, then a line that starts with `: `) and fenced code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from retrain.errors import ConfigError

SOURCE = Path(__file__).with_name("retrain.md")

_COMMENT = re.compile(r"\s*<!--.*-->\s*")
_TRAILING_COMMENT = re.compile(r"\s+#\s.*$")


@dataclass(frozen=True)
class Block:
    """One piece of a section. A list has one (term, text) pair per item; terms of a plain list are empty."""

    kind: Literal["heading", "paragraph", "list", "definitions", "code"]
    text: str = ""
    items: tuple[tuple[str, str], ...] = ()
    language: str = ""


@dataclass(frozen=True)
class Section:
    """One topic of the manual."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def topic(self) -> str:
        """Its name for `--topic`."""
        return topic_of(self.title)

    def parts(self) -> Iterator[Section]:
        """What follows each of its headings, as sections."""
        starts = [index for index, block in enumerate(self.blocks) if block.kind == "heading"]
        for start, end in pairwise([*starts, len(self.blocks)]):
            yield Section(self.blocks[start].text, self.blocks[start + 1 : end])

    def defines(self, term: str) -> bool:
        """Whether one of its lists describes a term."""
        return any(name.strip("`") == term for block in self.blocks for name, _ in block.items)

    @property
    def commands(self) -> list[str]:
        """The shell commands in its code blocks, without comments."""
        shells = (block.text for block in self.blocks if block.kind == "code" and block.language == "bash")
        lines = (line.strip() for text in shells for line in text.replace("\\\n", " ").splitlines())
        return [" ".join(_TRAILING_COMMENT.sub("", line).split()) for line in lines if line and line[0] != "#"]


@dataclass(frozen=True)
class Manual:
    """The manual; `date`, from its first line, is when its text was last revised."""

    date: str
    sections: tuple[Section, ...]

    def find(self, topic: str) -> Section:
        """The section of a topic, or the part under a heading; raises with a suggestion when there is none."""
        headings = (part for section in self.sections for part in section.parts())
        by_topic = {part.topic: part for part in (*headings, *self.sections)}
        wanted = topic_of(topic)
        if wanted not in by_topic:
            symptoms = [part.topic for part in self.find("troubleshooting").parts()]
            close = get_close_matches(wanted, by_topic, n=1)
            hint = f"Topics: {', '.join([section.topic for section in self.sections] + symptoms)}."
            if close:
                hint = f"Did you mean {close[0]!r}?"
            elif within := [section.topic for section in self.sections if section.defines(wanted)]:
                hint = f"It is described in {within[0]!r}."
            raise ConfigError(f"the manual has no topic {topic!r}.  {hint}")
        return by_topic[wanted]


def topic_of(title: str) -> str:
    """A title as one lower-case word: `Exit status` is `exit-status`."""
    return "-".join(title.lower().split())


@cache
def read_manual() -> Manual:
    """Read the manual of this installation, once: the live report asks for it at every update."""
    return parse_manual(SOURCE.read_text(encoding="utf-8"))


def parse_manual(text: str) -> Manual:
    """Parse the text of a manual."""
    head, *bodies = re.split(r"^## ", text, flags=re.MULTILINE)
    date = re.search(r"\d{4}-\d{2}-\d{2}", head)
    sections = []
    for body in bodies:
        title, _, rest = body.partition("\n")
        sections.append(Section(title.strip(), tuple(_parse_blocks(rest))))
    return Manual(date[0] if date else "", tuple(sections))


def _parse_blocks(text: str) -> Iterator[Block]:
    """Blocks in order. Code is split off first, because it may contain blank lines and look like other blocks."""
    for part in re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL):
        if part.startswith("```"):
            language, _, code = part[3:-3].partition("\n")
            yield Block("code", code.rstrip("\n"), language=language.strip())
            continue
        lines = [line for line in part.splitlines() if not _COMMENT.fullmatch(line)]
        for chunk in re.split(r"\n\s*\n", "\n".join(lines)):
            if chunk.strip():
                yield _parse_chunk(chunk.strip("\n"))


def _parse_chunk(chunk: str) -> Block:
    if chunk.startswith("### "):
        return Block("heading", chunk.removeprefix("### ").strip())
    if chunk.startswith("- "):
        return Block("list", items=tuple(("", _join(item)) for item in re.split(r"^- ", chunk, flags=re.MULTILINE)[1:]))
    if re.search(r"^: ", chunk, flags=re.MULTILINE):
        return Block("definitions", items=tuple(_parse_definitions(chunk)))
    return Block("paragraph", _join(chunk))


def _parse_definitions(chunk: str) -> Iterator[tuple[str, str]]:
    term, text = "", ""
    for line in chunk.splitlines():
        if line.startswith(": "):
            text = line[2:]
        elif line.startswith("  "):
            text += "\n" + line
        else:
            if term:
                yield term, _join(text)
            term, text = line, ""
    yield term, _join(text)


def _join(text: str) -> str:
    return " ".join(text.split())
