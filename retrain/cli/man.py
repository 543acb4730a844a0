"""`retrain man`: show the manual or one topic, or update its generated parts."""

from __future__ import annotations

import json
import shutil
import sys

import click

from retrain.cli.console import terminal_width
from retrain.errors import ConfigError
from retrain.manual import SOURCE, read_manual
from retrain.manual.render import as_data, as_html, as_roff, as_text

_WIDEST_TEXT = 100
_PIPE_WIDTH = 80


@click.command("man", short_help="Read the manual.")
@click.option("--topic", metavar="TOPIC", help="Show only one section, e.g. quickstart.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "html", "roff"]),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.option("--list-topics", is_flag=True, help="List the sections.")
@click.option("--path", is_flag=True, help="Print the path of the manual's source file.")
@click.option("--sync", is_flag=True, help="Rewrite the generated parts of the source file.")
@click.option("--check", is_flag=True, help="Exit with 1 if the generated parts are stale.")
def command(topic: str | None, form: str, list_topics: bool, path: bool, sync: bool, check: bool) -> int:
    """Read the manual: guides, all commands and options, troubleshooting and a glossary.

    `retrain help` prints the commands and options only, and `retrain COMMAND --help` one command.
    """
    if sum([list_topics, path, sync, check]) > 1:
        raise ConfigError("--list-topics, --path, --sync and --check are mutually exclusive.")
    if path:
        click.echo(SOURCE)
    elif list_topics:
        for section in read_manual().sections:
            click.echo(section.topic)
    elif sync or check:
        return _sync(write=sync)
    else:
        _show(topic, form)
    return 0


def _show(topic: str | None, form: str) -> None:
    manual = read_manual()
    sections = manual.sections if topic is None else (manual.find(topic),)
    if form == "text":
        width = min(terminal_width() or _PIPE_WIDTH, _WIDEST_TEXT)
        _print_text(as_text(sections, width, lambda title: click.style(title, bold=True)))
        return
    if form == "json":
        entries = [as_data(section) for section in sections]
        click.echo(json.dumps(entries if topic is None else entries[0], indent=2, ensure_ascii=False))
        return
    from retrain.runtime.version import version  # noqa: PLC0415  (reading package metadata costs start-up time)

    render = as_html if form == "html" else as_roff
    click.echo(render(manual, sections, version()), nl=False)


def _print_text(text: str) -> None:
    """Use a pager when the text is longer than the terminal is high."""
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        click.echo_via_pager(text)
    else:
        click.echo(text, nl=False)


def _sync(write: bool) -> int:
    """Compare the source with freshly generated parts, and rewrite it if asked to."""
    from retrain.cli.sync import fill_manual  # noqa: PLC0415  (imports the schema)

    present = SOURCE.read_text(encoding="utf-8")
    wanted = fill_manual(present)
    if present == wanted:
        click.echo("The manual is up to date.")
        return 0
    if not write:
        click.echo("The manual is stale.  Try: retrain man --sync", err=True)
        return 1
    try:
        SOURCE.write_text(wanted, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{SOURCE} cannot be written: {error.strerror}.") from error
    click.echo(f"Rewrote {SOURCE}.")
    return 0
