"""Logs: one event per line on standard output, JSON in a pod and readable on a terminal.

Every process of a pod writes to the same stream, so each line is one write. Records of other
libraries (torch, boto3, kubernetes, warnings) go through the same renderer. Secrets are
blanked last, in the finished line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import FilteringBoundLogger, Processor

from trainer.config.tree import Log

_SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|authorization|private_?key|api_?key")
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@\"]*:[^/\s@\"]+(?=@)")
_BLANK = "***"
_SHORTEST_SECRET = 6
"""Shorter values of secret-looking variables (`0`, `true`, `none`) would blank half the text."""

Event = MutableMapping[str, Any]


def configure(settings: Log, **context: object) -> None:
    """Set up the logs of this process; a second call replaces the first.

    Call it after the import of torch, whose loggers are taken over too.

    Args:
        settings: format and level.
        **context: what every line carries (rank, local_rank, world_size, run, pod); empty values are left out.
    """
    console = settings.format == "console" or (settings.format == "auto" and sys.stdout.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    facts = {name: value for name, value in context.items() if value is not None and value != ""}
    if console:
        facts = {name: value for name, value in facts.items() if name == "rank"}
    shared: list[Processor] = [
        _adding(facts),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
        _blank_secret_names,
    ]
    render = [*(_console() if console else _json()), _blanking(_secrets(os.environ))]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _STDOUT)),
        cache_logger_on_first_use=False,  # modules keep a logger from import on; lines are rare enough
    )
    handler = logging.StreamHandler(cast("TextIO", _STDOUT))
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
    ))
    logging.basicConfig(handlers=[handler], force=True, level=_foreign_level(level))
    logging.captureWarnings(True)
    _take_over_torch()


def get_logger() -> FilteringBoundLogger:
    """The logger of this process. Short verbs and plain nouns: `log.info("saved", step=120)`."""
    return cast("FilteringBoundLogger", structlog.get_logger())


class _Stdout:
    """Whatever `sys.stdout` is at the moment of the write: the live view puts itself in between.

    A reader that went away or a full disk costs the line and never the run.
    """

    def write(self, text: str) -> int:
        self._try(lambda: sys.stdout.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(sys.stdout.flush)

    @staticmethod
    def _try(act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            # What is buffered would fail again when Python ends, and make 120 of the exit code.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
        except (OSError, ValueError):
            pass


_STDOUT = _Stdout()


def _foreign_level(level: int) -> int:
    # Never debug: at that level botocore prints signed requests.
    return logging.INFO if level <= logging.DEBUG else max(level, logging.WARNING)


def _take_over_torch() -> None:
    """Undo the handlers that torch gives its loggers, which write plain text to standard error."""
    for name in list(logging.root.manager.loggerDict):
        if name == "torch" or name.startswith("torch."):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


def _console() -> list[Processor]:
    colors = sys.stdout.isatty() or "FORCE_COLOR" in os.environ
    return [_short_numbers,
            structlog.dev.ConsoleRenderer(colors=colors and "NO_COLOR" not in os.environ, sort_keys=False,
                                          pad_event_to=0, pad_level=False,
                                          exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    # Without locals: they would put tensors and secrets into the log.
    frames = ExceptionDictTransformer(show_locals=False, max_frames=20)
    return [structlog.processors.ExceptionRenderer(frames), _finite_and_ordered,
            structlog.processors.JSONRenderer(default=str)]


def _adding(facts: Mapping[str, object]) -> Processor:
    # Not structlog's contextvars: threads start with an empty context.
    def add(_logger: Any, _method: str, event: Event) -> Event:
        for name, value in facts.items():
            event.setdefault(name, value)
        return event

    return add


def _short_numbers(_logger: Any, _method: str, event: Event) -> Event:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in event.items()}


def _finite_and_ordered(_logger: Any, _method: str, event: Event) -> Event:
    """Time, level and event first, then the rest; NaN and Inf as text, because JSON has no such numbers."""
    first = {name: event.pop(name) for name in ("timestamp", "level", "event") if name in event}
    return {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**first, **event}.items()}


def _blank_secret_names(_logger: Any, _method: str, event: Event) -> Event:
    for name, value in event.items():
        if isinstance(value, str) and name != "event" and _SECRET_NAME.search(name):
            event[name] = _BLANK
    return event


def _secrets(environ: Mapping[str, str]) -> list[str]:
    return sorted({form for name, value in environ.items() for form in (value, json.dumps(value)[1:-1])
                   if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
                   and not name.endswith(("_FILE", "_PATH"))}, key=len, reverse=True)


def blank(text: str) -> str:
    """A text for others to read, without the secrets of this process's environment and the passwords of URLs."""
    return _blanked(text, _secrets(os.environ))


def _blanking(secrets: list[str]) -> Processor:
    def processor(_logger: Any, _method: str, line: Any) -> str:
        assert isinstance(line, str)
        return _blanked(line, secrets)

    return processor


def _blanked(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, _BLANK)
    return _URL_PASSWORD.sub(_BLANK, text)
