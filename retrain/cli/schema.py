"""`retrain schema`: the JSON schema for completion and validation in editors."""

from __future__ import annotations

import click

from retrain.config.reference import schema_text


@click.command("schema", short_help="Print the JSON schema of the configuration.")
def command() -> None:
    """Print the JSON schema of the configuration.

    Editors with TOML schema support (taplo, Even Better TOML) find it through the first line of files written by
    `retrain init`. To refresh it after an update: retrain schema > retrain.schema.json
    """
    click.echo(schema_text(), nl=False)
