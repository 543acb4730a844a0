"""`retrain schema`: the JSON schema that editors complete and check a configuration with."""

from __future__ import annotations

import click

from retrain.config.reference import schema_text


@click.command("schema", short_help="Print the JSON schema of a configuration.")
def command() -> None:
    """Print the JSON schema of a configuration.

    Editors that know TOML schemas (taplo, Even Better TOML) find it through the first line of a file that
    `retrain init` wrote. To refresh it after an update: retrain schema > retrain.schema.json
    """
    click.echo(schema_text(), nl=False)
