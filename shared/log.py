"""How every process logs: structlog to stderr, one JSON object a line or text for people; no service lives here."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer

Logger = structlog.typing.FilteringBoundLogger


def configure(level: str = "info", style: Literal["json", "console"] = "json") -> None:
    """Send what this process logs to stderr; the standard library's loggers (nats, asyncio) go the same way."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    if style == "json":
        # without local variables: they are large, and may hold what a request meant for its container alone
        frames = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        last = [frames, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=_to_stderr,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    formatter = structlog.stdlib.ProcessorFormatter(processors=[*_of_stdlib(), *last], foreign_pre_chain=shared)
    handler.setFormatter(formatter)
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)


def _to_stderr(*_: object) -> structlog.PrintLogger:
    """The stderr of now: the one at the start may have been replaced and closed."""
    return structlog.PrintLogger(sys.stderr)


def _of_stdlib() -> list[Any]:
    return [structlog.stdlib.ProcessorFormatter.remove_processors_meta]


def logger(**bound: object) -> Logger:
    """A logger that says ``bound`` with every line."""
    return cast(Logger, structlog.get_logger(**bound))
