"""`retrain grpo run.yaml key=value …`: YAML files composed by Hydra into one flat table of settings.

A run file names one file of each group. A group file is in a package named like its group (Hydra's default) or global;
either way the result is one table, in which the run file overrides the groups and the command line overrides both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError, MissingExtraError

try:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingExtraError(
        'retrain grpo needs the package hydra-core, which is not installed.  Try: pip install -e ".[grpo]"'
    ) from error

GROUPS = ("model", "data", "trainer")
RUN = "run"


def compose_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Every setting of a run, by name."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}.  Try: retrain grpo init, then configs/run/tiny.yaml")
    if path.suffix != ".yaml":
        raise ConfigError(f"{str(path)!r} does not end in .yaml, the only ending that Hydra reads.")
    folder = path.resolve().parent
    root = folder.parent if folder.name == RUN else folder
    words = [_as_hydra(root, given) for given in overrides]
    name: str | None = path.stem
    if root != folder:
        # As a global file, so that it overrides its groups and they can be selected by name.
        name, words = None, [f"+{RUN}@_global_={path.stem}", *words]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(root)):
            composed = compose(config_name=name, overrides=words)
        tables = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"{path} cannot be composed: {' '.join(str(error).split())}") from error
    assert isinstance(tables, dict)
    return flatten(tables)


def flatten(tables: Mapping[Any, Any]) -> dict[str, Any]:
    """One table: groups first, then the run, then global settings; later ones override earlier ones."""
    settings: dict[str, Any] = {}
    packages = [name for name in (*GROUPS, RUN) if isinstance(tables.get(name), Mapping)]
    for package in packages:
        settings = merge(settings, flatten(tables[package]))
    return merge(settings, {str(key): value for key, value in tables.items() if key not in packages})


def merge(settings: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Both as one; a table in `later` replaces only the keys that it has."""
    merged = dict(settings)
    for key, value in later.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merge(before, value)
        merged[key] = value
    return merged


def _as_hydra(root: Path, given: str) -> str:
    """`key=value` sets a key whether or not the files have it; `group=file` and Hydra's own syntax stay unchanged."""
    key, sign, _ = given.partition("=")
    if not sign:
        raise ConfigError(f"{given!r} is no setting.  Try: key=value")
    if key[:1] in ("+", "~") or "@" in key or (root / key).is_dir():
        return given
    return f"++{given}"
