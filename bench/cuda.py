"""The few calls of CUDA's driver that `bench.real_gpu` needs, by ctypes: no toolkit, no package. Nothing else calls it.

The kernels are PTX text, which the driver compiles for whatever GPU there is (Turing or later).
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

_SLEEP_IN_CONTEXT, _SLEEP_FOR_EVENT = 4, 1  # wait for the GPU without spinning
PTX: Final = b"""
.version 6.3
.target sm_75
.address_size 64

// So much arithmetic, each step waiting for the last: a task of so many rounds, however often it is preempted.
.visible .entry work(.param .u64 rounds, .param .u64 out)
{
  .reg .u64 %n, %o;
  .reg .f32 %x;
  .reg .pred %p;
  ld.param.u64 %n, [rounds];
  ld.param.u64 %o, [out];
  cvta.to.global.u64 %o, %o;
  mov.f32 %x, 0f3F800000;
again:
  fma.rn.f32 %x, %x, 0f3F7FFFFF, 0f33800000;
  sub.u64 %n, %n, 1;
  setp.ne.u64 %p, %n, 0;
  @%p bra again;
  st.global.f32 [%o], %x;
  ret;
}

// Looks at the GPU's clock for so long and notes each pause longer than `pause`: then another context had the GPU.
// marks[0]: how many; then began, ended, began, ended, ... in ns.
.visible .entry trace(.param .u64 length, .param .u64 pause, .param .u64 marks, .param .u64 most)
{
  .reg .u64 %until, %pause, %last, %now, %gap, %m, %at, %end;
  .reg .pred %p;
  ld.param.u64 %until, [length];
  ld.param.u64 %pause, [pause];
  ld.param.u64 %m, [marks];
  ld.param.u64 %end, [most];
  cvta.to.global.u64 %m, %m;
  shl.b64 %end, %end, 3;
  add.u64 %end, %end, %m;
  add.u64 %at, %m, 8;
  mov.u64 %last, %globaltimer;
  add.u64 %until, %until, %last;
  st.global.u64 [%at], %last;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %gap, %now, %last;
  setp.le.u64 %p, %gap, %pause;
  @%p bra same;
  add.u64 %gap, %at, 24;
  setp.ge.u64 %p, %gap, %end;
  @%p bra done;
  st.global.u64 [%at+8], %last;
  st.global.u64 [%at+16], %now;
  add.u64 %at, %at, 16;
same:
  mov.u64 %last, %now;
  setp.lt.u64 %p, %now, %until;
  @%p bra again;
done:
  st.global.u64 [%at+8], %last;
  add.u64 %at, %at, 8;
  sub.u64 %at, %at, %m;
  shr.u64 %at, %at, 3;
  st.global.u64 [%m], %at;
  ret;
}
"""


class CudaError(RuntimeError):
    """There is no driver, no device, or a call failed; says which."""


class Gpu:
    """The first device, in a context of this process. Raises CudaError."""

    def __init__(self) -> None:
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from error
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.call("cuDevicePrimaryCtxSetFlags_v2", device, _SLEEP_IN_CONTEXT)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self._kernels = {each: ctypes.c_void_p() for each in ("work", "trace")}
        for each, kernel in self._kernels.items():
            self.call("cuModuleGetFunction", ctypes.byref(kernel), module, each.encode())
        self._began, self._ended = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (self._began, self._ended):
            self.call("cuEventCreate", ctypes.byref(event), _SLEEP_FOR_EVENT)

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            raise CudaError(f"{function}: CUDA error {code}")

    def allocate(self, size: int) -> int:
        """The address of so many bytes of the device, until this process ends."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def run(self, kernel: str, *arguments: int) -> float:
        """One thread of it, from its launch to its end; returns the microseconds between the two by CUDA's events."""
        words = (ctypes.c_uint64 * len(arguments))(*arguments)
        size, passed_ms = ctypes.sizeof(ctypes.c_uint64), ctypes.c_float()
        places = (ctypes.addressof(words) + size * index for index in range(len(arguments)))
        pointers = (ctypes.c_void_p * len(arguments))(*places)
        self.call("cuEventRecord", self._began, None)
        self.call("cuLaunchKernel", self._kernels[kernel], 1, 1, 1, 1, 1, 1, 0, None, pointers, None)
        self.call("cuEventRecord", self._ended, None)
        self.call("cuEventSynchronize", self._ended)
        self.call("cuEventElapsedTime", ctypes.byref(passed_ms), self._began, self._ended)
        return passed_ms.value * 1_000

    def read_words(self, address: int, number: int) -> list[int]:
        """Words of 8 bytes."""
        into = (ctypes.c_uint64 * number)()
        self.call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(8 * number))
        return list(into)
