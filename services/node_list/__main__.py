"""Starts a node-list: ``python -m services.node_list``."""

import asyncio

from services.node_list.service import serve
from services.node_list.settings import NodeListSettings

if __name__ == "__main__":
    asyncio.run(serve(NodeListSettings()))
