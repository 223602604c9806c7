"""Starts a monitor: ``python -m services.monitor``."""

import asyncio

from services.monitor.service import make_probe, serve
from services.monitor.settings import MonitorSettings

if __name__ == "__main__":
    settings = MonitorSettings()
    asyncio.run(serve(settings, make_probe(settings)))
