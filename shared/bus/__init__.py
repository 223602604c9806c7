"""The bus: everything that goes over NATS; only ``connection`` imports its client."""

from shared.bus.atomic import MOST_KEYS
from shared.bus.bus import Bus, event_headers, rfc3339
from shared.bus.connection import Listening
from shared.bus.jetstream import ApiError, Stored, StoredMsg
from shared.bus.msg import LinkEvent, Msg, NoResponders

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
    "event_headers",
    "rfc3339",
]
