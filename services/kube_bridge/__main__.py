"""Starts a kube-bridge: ``python -m services.kube_bridge``."""

import asyncio

from services.kube_bridge.service import serve
from services.kube_bridge.settings import KubeBridgeSettings

if __name__ == "__main__":
    asyncio.run(serve(KubeBridgeSettings()))
