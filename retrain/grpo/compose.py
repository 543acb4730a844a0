"""`retrain grpo run.yaml key=value …`: YAML files composed by Hydra into one flat table of settings.

A run file names one file of each group. A group file is in a package named like its group (Hydra's default) or global;
either way the result is one table, in which the run file overrides the groups and the command line overrides both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from retrain.config.synonyms import find_same_option
from retrain.errors import ConfigError
from retrain.grpo.settings import known_settings
from retrain.runtime.packages import missing

try:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("hydra-core", "retrain grpo") from error

SWEEP_HINT = "Try: one command per value, or a campaign (docs/campaigns.md)"
PACKAGES = ("model", "data", "trainer", "run")
"""Groups and the run itself; later ones override earlier ones."""


def compose_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Every setting of a run, by name."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}.  Try: retrain grpo init, then configs/run/tiny.yaml")
    if path.suffix != ".yaml":
        raise ConfigError(f"{str(path)!r} does not end in .yaml, the only ending that Hydra reads.")
    folder = path.resolve().parent
    root = folder.parent if folder.name == "run" else folder
    words = [_as_hydra(root, given, after) for given, after in zip(overrides, [*overrides[1:], ""], strict=False)]
    for given, word in zip(overrides, words, strict=True):
        _check_override(given, word)
    name: str | None = path.stem
    if root != folder:
        # As a global file, so that it overrides its groups and they can be selected by name.
        name, words = None, [f"+run@_global_={path.stem}", *words]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(root)):
            composed = compose(config_name=name, overrides=words)
        tables = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        raise _explain_missing(error, path, root) from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        reason = " ".join(str(error).split()) or f"{type(error).__name__}, perhaps a key that is not text"
        raise ConfigError(f"{path} cannot be composed: {reason}") from error
    assert isinstance(tables, dict)
    return flatten(tables)


def _explain_missing(error: MissingConfigException, path: Path, root: Path) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    if not group or not (root / group).is_dir():
        return ConfigError(f"{path} cannot be composed: {' '.join(str(error).split())}")
    known = sorted(file.stem for file in (root / group).glob("*.yaml"))
    close = get_close_matches(name[:60], known, n=1)
    hint = f"Did you mean {group}={close[0]}?" if close else f"Known: {', '.join(known)}."
    return ConfigError(f"{group}={name}: there is no file {group}/{name}.yaml.  {hint}")


def flatten(tables: Mapping[Any, Any]) -> dict[str, Any]:
    """One table of groups, run and global settings, in which a table inside replaces only the keys that it has."""
    packages = [name for name in PACKAGES if isinstance(tables.get(name), Mapping)]
    rest = {str(key): value for key, value in tables.items() if key not in packages}
    merged = OmegaConf.to_container(OmegaConf.merge(*(flatten(tables[name]) for name in packages), rest))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _as_hydra(root: Path, given: str, after: str) -> str:
    """`key=value` sets a key whether or not the files have it; `group=file` and Hydra's own syntax stay unchanged."""
    key, sign, value = given.partition("=")
    if key in ("-m", "--multirun"):
        raise ConfigError(f"{key} is not an option of retrain grpo, which trains one run.  {SWEEP_HINT}")
    if key.startswith("-"):
        known = known_settings("grpo")
        name = key.lstrip("-").replace("-", "_")
        name = name if name in known else find_same_option(name, known) or name
        value = value or ("" if "=" in after else after) or ("true" if bool in get_args(known.get(name)) else "VALUE")
        raise ConfigError(f"{key} is not an option of retrain grpo.  Try: {name}={value}")
    if not sign:
        raise ConfigError(f"{given!r} is not a setting.  Try: key=value")
    package, dot, setting = key.lstrip("+").partition(".")
    if dot and package in PACKAGES:
        # All settings end up in one table, in which the run file overrides those that its groups have.
        return f"++{setting}={value}"
    if key[:1] in ("+", "~") or "@" in key or (root / key).is_dir():
        return given
    return f"++{given}"


def _check_override(given: str, word: str) -> None:
    """Raise for values that Hydra cannot read, or would sweep over."""
    key = given.partition("=")[0]
    hint = f"Try: quotes inside of quotes, '{key}=\"VALUE\"'"
    try:
        is_sweep = OverridesParser.create().parse_override(word).is_sweep_override()
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{given!r} cannot be read: {' '.join(str(error).split())}.  {hint}") from error
    if is_sweep:
        raise ConfigError(f"{given!r} has several values.  {SWEEP_HINT}; for a text with a comma, {hint[5:]}")
