"""The loader: defaults < TOML file < environment < command line.

A mistake is one line that names the setting, where it was set and the nearest valid name.
Standard library only, so that the pod's side starts at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trainer.config.tree import SECTIONS, Config, ConfigError, check

DEFAULT_FILE = "/etc/ratchet/config.toml"
"""Where a pod's ConfigMap is mounted; taken when no file is named and this one is there."""

RESOLVED_ENV = "RATCHET_RESOLVED_CONFIG"
"""Set by `ratchet run` for its ranks: a file with the resolved settings, so all ranks agree."""

_ENV_PREFIX = "RATCHET_"


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each one that is not a default came from (`train.epochs` -> source)."""

    config: Config
    sources: Mapping[str, str]
    origin: str
    """The TOML file or built-in workload that was read."""


def load(source: str | None = None, overrides: Sequence[tuple[str, str]] = (),
         environ: Mapping[str, str] | None = None) -> Resolved:
    """Resolve the settings.

    Args:
        source: a TOML file or the name of a built-in workload; None: RATCHET_CONFIG, else
            /etc/ratchet/config.toml if it is there, else `digits`.
        overrides: (`section.field`, text) of the command line.
        environ: the environment; None: this process's own.

    Raises:
        ConfigError: on any mistake.
    """
    environ = os.environ if environ is None else environ
    source = source or environ.get("RATCHET_CONFIG") or (DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else "digits")
    origin, tables = _read(source)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    sources: dict[str, str] = {}

    for section, table in tables.items():
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}] in {origin}{_nearest(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {origin} must be a table: write [{section}] above its settings")
        for name, value in table.items():
            kind = _kind(section, name, f"in {origin}")
            values[section][name] = _typed(value, kind, f"{section}.{name}", f"in {origin}")
            sources[f"{section}.{name}"] = origin
    for key, text, where in [*_from_environment(environ), *((k, v, "on the command line") for k, v in overrides)]:
        _apply(values, key, text, where)
        sources[key] = where

    config = Config(**{name: cls(**values[name]) for name, cls in SECTIONS.items()})
    try:
        check(config)
    except ConfigError as error:
        key = str(error).split(" ", 1)[0]
        where = sources.get(key)
        raise ConfigError(f"{error} (set {where if where and where != origin else 'in ' + origin})"
                          if where else str(error)) from None
    return Resolved(config, sources, origin)


def load_for_worker(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The settings inside a rank: what `ratchet run` resolved, else the same loader (plain torchrun).

    Args:
        argv: `[CONFIG] [--section.field VALUE ...]`, looked at only without `ratchet run`.
    """
    environ = os.environ if environ is None else environ
    if path := environ.get(RESOLVED_ENV):
        tables = json.loads(Path(path).read_text())
        return Config(**{name: cls(**tables[name]) for name, cls in SECTIONS.items()})
    positional, overrides = split_arguments(argv)
    if len(positional) > 1:
        raise ConfigError(f"unexpected argument {positional[1]!r}: at most one file or workload is taken")
    return load(positional[0] if positional else None, overrides, environ).config


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split `CONFIG --train.epochs 3 --run.name=x` into positional words and overrides."""
    positional: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            positional.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            try:
                text = next(words)
            except StopIteration:
                raise ConfigError(f"--{key} needs a value: --{key} VALUE") from None
        overrides.append((key, text))
    return positional, overrides


def to_json(config: Config) -> str:
    """The settings as one JSON document, the form in which ranks receive them and checkpoints keep them."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def dump_toml(config: Config) -> str:
    """The settings as a TOML file that `load` reads back to the same tree."""
    lines: list[str] = []
    for section in SECTIONS:
        table = dataclasses.asdict(getattr(config, section))
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def builtin_names() -> list[str]:
    """Names of the built-in workloads, which are TOML files beside their code."""
    return sorted(p.name.removesuffix(".toml") for p in resources.files("trainer.workloads").iterdir()
                  if p.name.endswith(".toml"))


def _read(source: str) -> tuple[str, dict[str, Any]]:
    if source in builtin_names():
        return f"built-in workload {source}", tomllib.loads(
            (resources.files("trainer.workloads") / f"{source}.toml").read_text())
    path = Path(source)
    try:
        return str(path), tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no file {source!r} and no built-in workload of that name"
                          f" (built-in: {', '.join(builtin_names())})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {source!r}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    keys = {f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    single = {key.replace(".", "_").upper(): key for key in keys}
    for name in sorted(environ):
        if not name.startswith(_ENV_PREFIX):
            continue
        rest = name.removeprefix(_ENV_PREFIX)
        if "__" in rest:
            yield rest.lower().replace("__", "."), environ[name], f"by the environment variable {name}"
        elif rest in single:
            # Other RATCHET_ names are left alone: Kubernetes makes some for every Service called ratchet-*.
            section, _, field = single[rest].partition(".")
            raise ConfigError(f"environment variable {name}: two underscores part section and field: "
                              f"{_ENV_PREFIX}{section.upper()}__{field.upper()}")


def _apply(values: dict[str, dict[str, Any]], key: str, text: str, where: str) -> None:
    section, _, name = key.partition(".")
    if section not in SECTIONS or not name:
        every = [f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
        raise ConfigError(f"unknown setting {key!r} {where}{_nearest(key, every)}")
    name, _, option = name.partition(".")
    kind = _kind(section, name, where)
    if typing.get_origin(kind) is not None and typing.get_origin(kind) is not Literal:
        if not option:
            raise ConfigError(f"{key} {where}: set one entry of it, as in {section}.{name}.ENTRY")
        values[section][name] = {**values[section].get(name, {}), option: _guess(text)}
    elif option:
        raise ConfigError(f"unknown setting {key!r} {where}: {section}.{name} has no parts")
    else:
        values[section][name] = _parse(text, kind, key, where)


def _kind(section: str, name: str, where: str) -> Any:
    hints = typing.get_type_hints(SECTIONS[section])
    if name not in hints:
        raise ConfigError(f"unknown setting {section}.{name} {where}"
                          f"{_nearest(f'{section}.{name}', [f'{section}.{hint}' for hint in hints])}")
    return hints[name]


def _typed(value: Any, kind: Any, key: str, where: str) -> Any:
    """Check a TOML value, which has a type already."""
    if typing.get_origin(kind) is Literal:
        ok = value in typing.get_args(kind)
    elif kind is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if ok else value
    elif kind is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif isinstance(kind, type):
        ok = isinstance(value, kind)
    else:
        ok = isinstance(value, dict)
    if not ok:
        raise ConfigError(f"{key} = {value!r} {where}: must be {_describe(kind)}")
    return value


def _parse(text: str, kind: Any, key: str, where: str) -> Any:
    """Read a value of the environment or the command line, which is text."""
    value: Any = text
    if kind is bool:
        value = {"true": True, "1": True, "yes": True, "on": True,
                 "false": False, "0": False, "no": False, "off": False}.get(text.lower(), text)
    elif kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            pass
    return _typed(value, kind, key, where)


def _guess(text: str) -> Any:
    """An entry of a free table: a TOML value if it reads as one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    names: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    return names.get(kind, "a table")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict() | types.MappingProxyType():
            return "{ " + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return str(value)
