// In place of CUDA's driver and of NCCL: counts what is taken and not given back, and fails where `fake_fault` says so.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT std::atomic<int> fake_contexts, fake_libraries, fake_functions, fake_waiting, fake_streams, fake_memories,
    fake_windows;
std::atomic<int> fake_contexts, fake_libraries, fake_functions, fake_waiting, fake_streams, fake_memories, fake_windows;

enum Fault : int { kNone, kUnreachable, kNoPeers, kNoAddress, kNoWindow };
EXPORT int fake_fault;
int fake_fault = kNone;

// What returns that all went well, whatever it is called with.
#define DOES_NOTHING(name) \
  EXPORT int name(...) { return 0; }

DOES_NOTHING(cuCtxPushCurrent_v2)
DOES_NOTHING(cuCtxPopCurrent_v2)
DOES_NOTHING(cuFuncLoad)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuKernelSetAttribute)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuMemsetD8Async)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleLoadData)
DOES_NOTHING(cuStreamSynchronize)
DOES_NOTHING(cuTensorMapEncodeTiled)

EXPORT int cuGetErrorString(int, const char** text) { return *text = "a fault of the stand-in", 0; }
EXPORT int cuDeviceGet(int* handle, int device) { return *handle = device, 0; }
EXPORT int cuDevicePrimaryCtxRetain(void**, int) { return ++fake_contexts, 0; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return --fake_contexts, 0; }
EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned) { return *memory = calloc(1, bytes), 0; }
EXPORT int cuMemFreeHost(void* memory) { return free(memory), 0; }
EXPORT int cuStreamCreate(void** stream, unsigned) { return *stream = &fake_streams, ++fake_streams, 0; }
EXPORT int cuStreamDestroy_v2(void*) { return --fake_streams, 0; }

// Loading code that begins with "wait" ends when a function has been found meanwhile, or fails after 5 seconds.
EXPORT int cuLibraryLoadData(void** library, const char* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (strncmp(code, "wait", 4) == 0) {
    const int before = fake_functions++;
    ++fake_waiting;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (fake_functions == before + 1 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    --fake_waiting;
    if (fake_functions == before + 1) return 1;
  }
  *library = reinterpret_cast<void*>(static_cast<intptr_t>(++fake_libraries));
  return 0;
}
EXPORT int cuLibraryUnload(void*) { return --fake_libraries, 0; }
EXPORT int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return *kernel = library, strcmp(name, "missing") == 0;
}
EXPORT int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, ++fake_functions, 0; }

struct Team {
  int ranks, rank, stride;
};

DOES_NOTHING(ncclCommUserRank)

EXPORT const char* ncclGetErrorString(int) { return "a fault of the stand-in"; }
EXPORT int ncclGetVersion(int* version) { return *version = 22900, 0; }
EXPORT int ncclCommGetAsyncError(void*, int* result) { return *result = 0, 0; }
EXPORT int ncclCommCount(void*, int* count) { return *count = 2, 0; }
EXPORT int ncclCommCuDevice(void*, int* device) { return *device = 0, 0; }
EXPORT int ncclMemAlloc(void** memory, size_t) { return *memory = &fake_memories, ++fake_memories, 0; }
EXPORT int ncclMemFree(void*) { return --fake_memories, 0; }
EXPORT int ncclCommWindowRegister(void*, void*, size_t, void** window, int) {
  if (fake_fault != kNoWindow) *window = &fake_windows, ++fake_windows;
  return 0;
}
EXPORT int ncclCommWindowDeregister(void*, void*) { return --fake_windows, 0; }
EXPORT Team ncclTeamLsa(void*) { return {fake_fault == kUnreachable ? 1 : 2, 0, 1}; }
EXPORT int ncclGetLsaDevicePointer(void*, size_t, int, void** peer) {
  *peer = fake_fault == kNoAddress ? nullptr : &fake_memories;
  return fake_fault == kNoPeers;
}
