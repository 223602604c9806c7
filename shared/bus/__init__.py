"""The bus: everything that goes over NATS; only ``connection`` imports its client."""

from shared.bus.atomic import MOST_KEYS
from shared.bus.bus import Bus, rfc3339
from shared.bus.connection import LinkEvent, Listening, Msg, NoResponders
from shared.bus.jetstream import ApiError, Stored, StoredMsg

__all__ = [
    "MOST_KEYS",
    "ApiError",
    "Bus",
    "LinkEvent",
    "Listening",
    "Msg",
    "NoResponders",
    "Stored",
    "StoredMsg",
    "rfc3339",
]
