"""The runtime of every service: its table, its core's inbox and effects, its life; no service lives here."""

from shared.service.runtime import Runtime, run
from shared.service.table import Core, Every, Fault, Listen, Outside, Publishes, Service

__all__ = ["Core", "Every", "Fault", "Listen", "Outside", "Publishes", "Runtime", "Service", "run"]
