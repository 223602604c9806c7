"""Starts a deadline-tracker: ``python -m services.deadline_tracker``."""

import asyncio

from services.deadline_tracker.service import serve
from services.deadline_tracker.settings import TrackerSettings

if __name__ == "__main__":
    asyncio.run(serve(TrackerSettings()))
