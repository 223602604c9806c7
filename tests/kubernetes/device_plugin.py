"""A small device plugin for a real kubelet: registers itself in its folder of plugins and gives what it is asked for.

It speaks pluginregistration/v1 and deviceplugin/v1beta1 of k8s.io/kubelet over gRPC, with messages written by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tests.wire import put


class DevicePlugin:
    """Offers ``ids`` as ``resource``. ``folder``: the kubelet's `plugins_registry`."""

    def __init__(self, folder: Path, resource: str, *ids: str) -> None:
        self._socket = folder / f"{resource.replace('/', '-')}.sock"
        self._resource, self._ids = resource, ids
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "pluginregistration.Registration": {
                "GetInfo": unary(self._info),
                "NotifyRegistrationStatus": unary(_nothing),
            },
            "v1beta1.DevicePlugin": {
                "GetDevicePluginOptions": unary(_nothing),
                "ListAndWatch": stream(self._list),
                "Allocate": unary(_allocated),
            },
        }
        made = [grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()]
        self._server.add_generic_rpc_handlers(made)
        self._server.add_insecure_port(f"unix://{self._socket}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.stop(1).wait()
        self._socket.unlink(missing_ok=True)

    def _info(self, _: bytes, __: Any) -> bytes:
        """PluginInfo."""
        return put(1, "DevicePlugin") + put(2, self._resource) + put(3, str(self._socket)) + put(4, "v1beta1")

    def _list(self, _: bytes, __: Any) -> Iterator[bytes]:
        """ListAndWatchResponse, once: nothing changes."""
        yield b"".join(put(1, put(1, each) + put(2, "Healthy")) for each in self._ids)
        self._ended.wait()


def _nothing(_: bytes, __: Any) -> bytes:
    return b""


def _allocated(asked: bytes, _: Any) -> bytes:
    """AllocateResponse: for each container, of which these tests have one, nothing but the devices themselves."""
    return put(1, b"")
