"""`retrain report DIR…`: a self-contained HTML report on runs and campaigns."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.runtime.text import plural
from retrain.storage.checkpoint import explain_write_error
from retrain.storage.logs import REPORT


@click.command("report", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option("--output", type=click.Path(path_type=Path), help="Output file; by default report.html in the first DIR.")
@click.option("--png", type=click.Path(path_type=Path), help="Also write the main curves as PNG to this folder.")
def command(folders: tuple[Path, ...], output: Path | None, png: Path | None) -> int:
    """Write an HTML page with curves, statistics and completions of the runs in DIR (default: ./logs)."""
    folders = folders or (Path("logs"),)
    from retrain.report import build_page, collect  # noqa: PLC0415  (slow to import)

    data = collect(folders)
    target = output or folders[0] / REPORT
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(build_page(data), encoding="utf-8", errors="replace")
    except OSError as error:
        raise explain_write_error(error, target.parent, is_of_run=False) from error
    click.echo(f"Wrote {target} ({target.stat().st_size / 2**20:.1f} MiB, {plural(len(data['runs']), 'run')})")
    if png is not None:
        from retrain.report.plots import write_plots  # noqa: PLC0415  (matplotlib is an extra)

        for path in write_plots(data, png):
            click.echo(f"Wrote {path}")
    return 0
