"""Starts SkyRL's Tinker API server, and the engine it starts in turn, with the interpreter that runs this file.

As shipped it insists on `uv run`, which would fetch an environment of its own; and on Python below 3.12 pydantic
refuses one of its types.
"""

from __future__ import annotations

import runpy
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict


def main() -> None:
    """`api ...` serves; `engine ...` is what the server starts to compute."""
    part = sys.argv.pop(1)
    if part == "engine":
        runpy.run_module("skyrl.tinker.engine", run_name="__main__", alter_sys=True)
        return
    import uvicorn
    from skyrl.tinker import api

    def command(parent: list[str], config: typing.Any) -> list[str]:
        return [sys.executable, __file__, "engine", *api.config_to_argv(config)]

    api._build_uv_run_cmd_engine = command
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    port = int(options.pop("--port"))
    parser = __import__("argparse").ArgumentParser()
    api.add_model(parser, api.EngineConfig)
    args = parser.parse_args([word for pair in options.items() for word in pair])
    api.app.state.engine_config = api.EngineConfig.model_validate(vars(args))
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
