"""Whether the GPUs of a job reach each other's memory, as far as that is known before a program runs.

NCCL knows when the program runs, too late to choose another transport. All processes must come to the same answer.
"""

import ctypes
import functools

import jax

from expertmesh.ep import hosts

_LIBRARY = "libnvidia-ml.so.1"
_NVLINK, _OK = 2, 0  # nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t


@functools.cache
def unsupported() -> str | None:
    """Why it is not known that all GPUs of the job reach each other over NVLink, or None.

    Known it is on one host, of which the driver shows all GPUs to every process.
    """
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return "this process has no GPU, as where a program is compiled ahead of time"
    found = {hosts.host_of(device) for device in devices}
    if len(found) > 1:
        return f"the job's GPUs are on {len(found)} hosts; name transport='nvlink' if groups do not cross them"
    try:
        count, pairs = _linked()
    except (OSError, AttributeError) as error:
        return f"the driver's library {_LIBRARY} cannot be asked for links: {error}"
    if count < len(devices):
        return f"the driver shows {count} of the job's {len(devices)} GPUs to this process"
    if not pairs:
        return "not every two GPUs of this host are linked by NVLink"
    return None


def _linked() -> tuple[int, bool]:
    """How many GPUs the driver shows, whatever CUDA_VISIBLE_DEVICES is, and whether every two are linked."""
    library = ctypes.CDLL(_LIBRARY)

    def call(function: str, *arguments: object) -> None:
        if status := getattr(library, function)(*arguments):
            raise OSError(f"{function} returned {status}")

    call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        for i, handle in enumerate(handles):
            call("nvmlDeviceGetHandleByIndex_v2", i, ctypes.byref(handle))
        status, linked = ctypes.c_int(), True
        for i, one in enumerate(handles):
            for other in handles[:i]:
                call("nvmlDeviceGetP2PStatus", one, other, _NVLINK, ctypes.byref(status))
                linked &= status.value == _OK
        return count.value, linked
    finally:
        call("nvmlShutdown")
