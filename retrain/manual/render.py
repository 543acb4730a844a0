"""The manual as plain text, JSON data, an HTML page and a man page."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from textwrap import fill, indent

from retrain.manual import Block, Manual, Section

_INLINE = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<bold>[^*]+)\*\*")
_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8884; }
code, pre { font: 0.9em/1.45 ui-monospace, monospace; background: #8882; border-radius: 4px; }
code { padding: 0.1em 0.3em; } pre { padding: 0.8rem; overflow-x: auto; } pre code { padding: 0; background: none; }
dd { margin: 0 0 0.7rem 1.5rem; } nav ul { columns: 3; list-style: none; padding: 0; }
"""


def as_text(sections: Sequence[Section], width: int = 80, emphasize: Callable[[str], str] = str) -> str:
    """Titles at the margin, headings indented by two, the rest by four; `emphasize` styles titles for a terminal."""
    parts = []
    for section in sections:
        blocks = [
            f"  {emphasize(block.text)}" if block.kind == "heading" else indent(_block_text(block, width - 4), "    ")
            for block in section.blocks
        ]
        parts.append(f"{emphasize(section.title.upper())}\n" + "\n\n".join(blocks))
    return "\n\n".join(parts) + "\n"


def as_data(section: Section) -> dict[str, object]:
    """A section for `--format json`."""
    text = section_text(section, width=80)
    return {"topic": section.topic, "title": section.title, "text": text, "commands": section.commands}


def section_text(section: Section, width: int) -> str:
    """The body of a section as plain text, with code spans in backticks."""
    return "\n\n".join(_block_text(block, width) for block in section.blocks)


def _block_text(block: Block, width: int) -> str:
    if block.kind == "heading":
        return block.text
    if block.kind == "code":
        return indent(block.text, "    ")
    if block.kind == "list":
        return "\n".join(_wrap(text, width, "- ", "  ") for _, text in block.items)
    if block.kind == "definitions":
        pairs = ((_wrap(_plain(term), width), _wrap(text, width, "    ", "    ")) for term, text in block.items)
        return "\n".join(f"{term}\n{text}" for term, text in pairs)
    return _wrap(block.text, width)


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> str:
    return fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _plain(text: str) -> str:
    return _INLINE.sub(lambda found: found["code"] or found["bold"], text)


def as_html(manual: Manual, sections: Sequence[Section], version: str) -> str:
    """A self-contained HTML page."""
    links = "".join(f'<li><a href="#{section.topic}">{html.escape(section.title)}</a></li>' for section in sections)
    bodies = "\n".join(_section_html(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>retrain: the manual</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f"<h1>retrain</h1>\n<p>Version {html.escape(version)}, {manual.date}</p>\n<nav><ul>{links}</ul></nav>\n"
        f"{bodies}\n</body>\n</html>\n"
    )


def _section_html(section: Section) -> str:
    blocks = "\n".join(map(_block_html, section.blocks))
    return f'<section>\n<h2 id="{section.topic}">{html.escape(section.title)}</h2>\n{blocks}\n</section>'


def _block_html(block: Block) -> str:
    if block.kind == "heading":
        return f"<h3>{_inline_html(block.text)}</h3>"
    if block.kind == "code":
        return f"<pre><code>{html.escape(block.text)}</code></pre>"
    if block.kind == "list":
        return f"<ul>{''.join(f'<li>{_inline_html(text)}</li>' for _, text in block.items)}</ul>"
    if block.kind == "definitions":
        pairs = (f"<dt>{_inline_html(term)}</dt><dd>{_inline_html(text)}</dd>" for term, text in block.items)
        return f"<dl>{''.join(pairs)}</dl>"
    return f"<p>{_inline_html(block.text)}</p>"


def _inline_html(text: str) -> str:
    # Escaping does not change backticks and asterisks, so spans can be found afterwards.
    return _INLINE.sub(
        lambda found: f"<code>{found['code']}</code>" if found["code"] else f"<strong>{found['bold']}</strong>",
        html.escape(text),
    )


def as_roff(manual: Manual, sections: Sequence[Section], version: str) -> str:
    """A page for `man -l`, in the man macros."""
    # Without .nh flags could be broken at hyphens.
    lines = [f'.TH RETRAIN 1 "{manual.date}" "retrain {version}" "User Commands"', ".nh"]
    for section in sections:
        lines.append(f'.SH "{_escape(section.title.upper())}"')
        for index, block in enumerate(section.blocks):
            after_title = index == 0 or section.blocks[index - 1].kind == "heading"
            lines += _block_roff(block, after_title)
    return "\n".join(lines) + "\n"


def _block_roff(block: Block, after_title: bool) -> list[str]:
    if block.kind == "heading":
        return [f'.SS "{_inline_roff(block.text)}"']
    if block.kind == "code":
        return [".RS 4", ".EX", *(_guard(_escape(line)) for line in block.text.splitlines()), ".EE", ".RE"]
    if block.kind == "list":
        return [line for _, text in block.items for line in (r".IP \(bu 2", _inline_roff(text))]
    if block.kind == "definitions":
        return [line for term, text in block.items for line in (".TP", _inline_roff(term), _inline_roff(text))]
    # A heading already starts a paragraph.
    return [_inline_roff(block.text)] if after_title else [".PP", _inline_roff(block.text)]


def _inline_roff(text: str) -> str:
    parts = []
    end = 0
    for found in _INLINE.finditer(text):
        parts += [_escape(text[end : found.start()]), rf"\fB{_escape(found['code'] or found['bold'])}\fR"]
        end = found.end()
    return _guard("".join([*parts, _escape(text[end:])]))


def _guard(line: str) -> str:
    """Protect a leading dot or apostrophe, which would start a request."""
    return rf"\&{line}" if line.startswith((".", "'")) else line


_ROFF = str.maketrans({"\\": r"\e", "-": r"\-", '"': r"\(dq", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"})


def _escape(text: str) -> str:
    """Escape characters that are special in roff, and non-ASCII characters by code point."""
    escaped = text.translate(_ROFF)
    return "".join(sign if sign.isascii() else rf"\[u{ord(sign):04X}]" for sign in escaped)
