"""Starts a placer: ``python -m services.placer``."""

import asyncio

from services.placer.service import serve
from services.placer.settings import PlacerSettings

if __name__ == "__main__":
    asyncio.run(serve(PlacerSettings()))
