"""Starts a monitor: ``python -m services.monitor``."""

import asyncio
import resource
import sys

# nats-py imports aiohttp where it is installed, for WebSockets, which no setting of ours asks for: 9 MiB
sys.modules.setdefault("aiohttp", None)  # type: ignore[arg-type]

from services.monitor.service import make_probe, serve  # noqa: E402
from services.monitor.settings import MonitorSettings  # noqa: E402

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a ring is a descriptor; a shell gives 1,024
    settings = MonitorSettings()
    asyncio.run(serve(settings, make_probe(settings)))
