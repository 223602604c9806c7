"""Starts a monitor: ``python -m services.monitor``."""

import asyncio
import resource

from services.monitor.service import make_probe, serve
from services.monitor.settings import MonitorSettings

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a ring is a descriptor; a shell gives 1,024
    settings = MonitorSettings()
    asyncio.run(serve(settings, make_probe(settings)))
