"""`retrain help`: the full reference, one table of options, or one command."""

from __future__ import annotations

from difflib import get_close_matches

import click

from retrain.cli import COMMANDS, app
from retrain.cli.console import can_ask
from retrain.config.options import all_options
from retrain.config.reference import help_text
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigError


# Unknown options are accepted, because a flag can be the topic.
@click.command(
    "help",
    short_help="Print the reference for all commands and options.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("topic", required=False)
@click.pass_context
def command(context: click.Context, topic: str | None) -> None:
    """Print the reference for all commands and options, or only of TOPIC.

    TOPIC is a command, a table such as training, or an option such as lr. For guides, see `retrain man`.
    """
    summaries = {name: summary for name, (_, summary) in COMMANDS.items()}
    text = help_text(summaries) if topic is None else _explain_topic(context, topic)
    if can_ask():
        click.echo_via_pager(text)
    else:
        click.echo(text, nl=False)


def _explain_topic(context: click.Context, topic: str) -> str:
    if topic in COMMANDS:
        chosen = app.get_command(context, topic)
        assert chosen is not None
        return chosen.get_help(click.Context(chosen, info_name=topic, parent=context.parent)) + "\n"
    name = topic.strip("[]").lstrip("-").replace("-", "_")
    options = [option for option in all_options() if name in (option.section, option.path)]
    options = options or [o for o in all_options() if name in (o.key, o.flag[2:].replace("-", "_"))]
    if options:
        return help_text({}, only=options)
    known = [*COMMANDS, *TrainConfig.model_fields, *(option.key for option in all_options())]
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else "Try: retrain help"
    raise ConfigError(f"there is no command, table or option {topic!r}.  {hint}")
