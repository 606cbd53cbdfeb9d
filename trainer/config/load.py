"""The loader: defaults < TOML file < environment < command line.

A mistake is one line that names the setting, where it was set and the nearest valid name.
Standard library only, so that the pod's side starts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from trainer.config.rules import check
from trainer.config.tree import KEYS, SECTIONS, Config, ConfigError

DEFAULT_FILE = "/etc/ratchet/config.toml"
"""Where a pod's ConfigMap is mounted; taken when no file is named and this one is there."""

RESOLVED_ENV = "RATCHET_RESOLVED_CONFIG"
"""Set by `ratchet run` for its ranks: a file with the resolved settings, so all ranks agree."""

_ENV_PREFIX = "RATCHET_"
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each one that is not a default came from."""

    config: Config
    sources: Mapping[str, str]
    """`train.epochs` -> "in job.toml", "by the environment variable ..." or "on the command line"."""
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
    origin, tables = _read(source, environ)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    sources: dict[str, str] = {}

    for key, value in _from_file(tables, origin):
        section, _, name = key.partition(".")
        values[section][name] = value
        sources[key] = f"in {origin}"
    for key, text, where in [*_from_environment(environ), *((k, v, "on the command line") for k, v in overrides)]:
        _apply(values, key, text, where)
        sources[key] = where

    config = _build(values)
    check(config, sources)
    return Resolved(config, sources, origin)


def load_for_worker(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The settings inside a rank: what `ratchet run` resolved, else the same loader (plain torchrun).

    Args:
        argv: `[CONFIG] [--section.field VALUE ...]`, looked at only without `ratchet run`.
        environ: the environment; None: this process's own.
    """
    environ = os.environ if environ is None else environ
    if path := environ.get(RESOLVED_ENV):
        return from_json(Path(path).read_text(encoding="utf-8"))
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
            text = next(words, "--")
            if text.startswith("--"):
                raise ConfigError(f"--{key} needs a value: --{key} VALUE (or --{key}=VALUE, if it begins with --)")
        overrides.append((key, text))
    return positional, overrides


def to_json(config: Config) -> str:
    """The settings as one JSON document, the form in which ranks receive them and checkpoints keep them."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def from_json(text: str) -> Config:
    """The settings that `to_json` wrote."""
    return _build(json.loads(text))


def dump_toml(config: Config) -> str:
    """The settings as a TOML file that `load` reads back to the same tree."""
    lines: list[str] = []
    for section in SECTIONS:
        table = dataclasses.asdict(getattr(config, section))
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def environment_name(key: str) -> str:
    """The environment variable of a setting: `train.epochs` -> `RATCHET_TRAIN__EPOCHS`."""
    return _ENV_PREFIX + key.replace(".", "__").upper()


def builtin_names() -> list[str]:
    """Names of the built-in workloads, which are TOML files beside their code."""
    return sorted(p.name.removesuffix(".toml") for p in resources.files("trainer.workloads").iterdir()
                  if p.name.endswith(".toml"))


def _build(values: Mapping[str, Mapping[str, Any]]) -> Config:
    return Config(**{name: cls(**values[name]) for name, cls in SECTIONS.items()})


def _read(source: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Find and parse the file: (its name for people, its tables)."""
    by = ""
    if not source and (source := environ.get("RATCHET_CONFIG")):
        by = ", which RATCHET_CONFIG names"
    source = source or (DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else "digits")
    names = builtin_names()
    if source in names:
        text = (resources.files("trainer.workloads") / f"{source}.toml").read_text(encoding="utf-8")
        return f"built-in workload {source}", tomllib.loads(text)
    try:
        return source, tomllib.loads(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no file {source!r}{by} and no built-in workload of that name"
                          f" (built-in: {', '.join(names)}){_nearest(source, names)}") from None
    except OSError as error:
        raise ConfigError(f"can't read {source!r}{by}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}{by} is not text in UTF-8: {error}") from None
    except ValueError as error:  # TOMLDecodeError, or a whole number of more digits than Python reads
        raise ConfigError(f"{source}{by} is not valid TOML: {error}") from None


def _from_file(tables: Mapping[str, Any], origin: str) -> Iterator[tuple[str, Any]]:
    where = f"in {origin}"
    for section, table in tables.items():
        if section not in SECTIONS:
            if isinstance(table, dict):
                raise ConfigError(f"unknown section {section!r} {where}{_nearest(section, SECTIONS)}")
            raise ConfigError(f"unknown setting {section!r} {where}, above all sections{_nearest(section, KEYS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} = {table!r} {where}: must be a table, write [{section}] above its settings")
        for name, value in table.items():
            key = f"{section}.{name}"
            yield key, _typed(value, _kind(key, where), key, where)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    single = {key.replace(".", "_").upper(): key for key in KEYS}
    for name in sorted(environ):
        if not name.startswith(_ENV_PREFIX):
            continue
        rest = name.removeprefix(_ENV_PREFIX)
        if _SERVICE_LINK.match(environ[name]) and rest.upper().endswith(("_PORT", "_TCP", "_UDP", "_SCTP")):
            # Kubernetes makes such variables for every Service called ratchet-*: for ratchet-metrics
            # it is RATCHET_METRICS_PORT=tcp://10.0.0.1:9464, which is nobody's setting.
            continue
        if "__" in rest:
            yield rest.lower().replace("__", "."), environ[name], f"by the environment variable {name}"
        elif rest in single:
            # Other RATCHET_ names are left alone: RATCHET_S3_SERVICE_HOST is made by Kubernetes too.
            raise ConfigError(f"environment variable {name}: two underscores part section and field:"
                              f" {environment_name(single[rest])}")


def _apply(values: dict[str, dict[str, Any]], key: str, text: str, where: str) -> None:
    """Set one value of the environment or the command line, which is text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key} = {text!r} {where}: must be text in UTF-8") from None
    section, _, rest = key.partition(".")
    name, _, entry = rest.partition(".")
    kind = _kind(f"{section}.{name}" if entry else key, where)
    if not _is_table(kind):
        if entry:
            raise ConfigError(f"unknown setting {key!r} {where}: {section}.{name} has no parts")
        values[section][name] = _parse(text, kind, key, where)
    elif entry:
        _set_entry(values[section].setdefault(name, {}), entry, text, f"{key} {where}")
    else:
        raise ConfigError(f"{key} {where}: set one entry of this table, as in {key}.ENTRY")


def _set_entry(table: dict[str, Any], entry: str, text: str, what: str) -> None:
    """Set `a.b` in a free table to a TOML value if the text reads as one, else to the text itself."""
    *path, last = entry.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{what}: {part} is a value, not a table")
    try:
        [value] = tomllib.loads(f"value = {text}").values()
    except ValueError:  # TOMLDecodeError, or more than one line
        value = text
    table[last] = value if _is_plain(value) else text


def _kind(key: str, where: str) -> Any:
    """The type of a setting. Raises ConfigError when there is no such setting."""
    if key not in KEYS:
        raise ConfigError(f"unknown setting {key!r} {where}{_nearest(key, KEYS)}")
    section, _, name = key.partition(".")
    return typing.get_type_hints(SECTIONS[section])[name]


def _is_table(kind: Any) -> bool:
    return typing.get_origin(kind) is Mapping


def _typed(value: Any, kind: Any, key: str, where: str) -> Any:
    """Check a TOML value, which has a type already."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is str and whole:
        return str(value)  # launch.nproc_per_node = 2
    if kind is float and whole:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if typing.get_origin(kind) is Literal:
        ok = value in typing.get_args(kind)
    elif _is_table(kind):
        ok = isinstance(value, dict) and _is_plain(value)
    elif kind is int:
        ok = whole
    elif kind is float:
        ok = isinstance(value, float) and math.isfinite(value)
    else:
        ok = isinstance(value, kind)
    if not ok:
        raise ConfigError(f"{key} = {value!r} {where}: must be {describe(kind)}")
    return value


def _parse(text: str, kind: Any, key: str, where: str) -> Any:
    value: Any = text
    if kind is bool:
        value = {"true": True, "1": True, "yes": True, "on": True,
                 "false": False, "0": False, "no": False, "off": False}.get(text.lower(), text)
    elif kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
    return _typed(value, kind, key, where)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it too, for that is how ranks and checkpoints receive the settings."""
    match value:
        case dict():
            return all(map(_is_plain, value.values()))
        case list():
            return all(map(_is_plain, value))
        case float():
            return math.isfinite(value)
        case _:
            return isinstance(value, (str, int))


def describe(kind: Any) -> str:
    """What values a setting of this type takes, in words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if _is_table(kind):
        return "a table of text, finite numbers, true or false, lists and tables"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the name that was meant: one that ends in the same word, else the most similar one."""
    last = name.rpartition(".")[2]
    close = [key for key in known if key.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's too, except that JSON leaves DEL as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return "{ " + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + " }"
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case _:
            return repr(value)
