// What is used of CUDA's driver and of NCCL, from the copies that XLA has open: a communicator must not meet a second
// NCCL, and a machine without GPUs has neither.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <type_traits>

namespace expertmesh {

class Library {
 public:
  explicit Library(const char* name) : name_(name), handle_(dlopen(name, RTLD_NOW | RTLD_NOLOAD)) {
    if (handle_ == nullptr) problem = name_ + " is not open in this process";
  }

  std::string problem;  // why it cannot be used, or empty

 protected:
  template <typename F>
  void Find(const char* name, F& function) {
    FindIfThere(name, function);
    if (function == nullptr && problem.empty()) problem = std::string(name) + " is missing in " + name_;
  }

  template <typename F>
  void FindIfThere(const char* name, F& function) {
    function = handle_ == nullptr ? nullptr : reinterpret_cast<F>(dlsym(handle_, name));
  }

 private:
  std::string name_;
  void* handle_;
};

// A failure is not kept: XLA may open the library later.
template <typename L>
const L& Opened() {
  static std::mutex mutex;
  static L* opened = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (opened == nullptr || !opened->problem.empty()) opened = new L;
  return *opened;
}

struct Driver : Library {
  using Stream = void*;
  using Context = void*;
  using Module = void*;
  using Function = void*;
  using Address = unsigned long long;
  enum : int { kSuccess = 0, kMaxDynamicSharedBytes = 8 };  // CU_FUNC_ATTRIBUTE_...
  enum : unsigned { kNonBlocking = 1, kPortable = 1, kMapped = 2 };

  int (*GetErrorString)(int, const char**);
  int (*DeviceGet)(int*, int);
  int (*Retain)(Context*, int);
  int (*Release)(int);
  int (*Push)(Context);
  int (*Pop)(Context*);
  int (*HostAlloc)(void**, size_t, unsigned);
  int (*HostFree)(void*);
  int (*Memset)(Address, unsigned char, size_t, Stream);
  int (*StreamCreate)(Stream*, unsigned);
  int (*StreamDestroy)(Stream);
  int (*StreamSynchronize)(Stream);
  int (*ModuleLoad)(Module*, const void*);
  int (*GetFunction)(Function*, Module, const char*);
  int (*SetAttribute)(Function, int, int);
  int (*LoadFunction)(Function);  // null before CUDA 12.4
  int (*Launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);

  Driver() : Library("libcuda.so.1") {
    Find("cuGetErrorString", GetErrorString);
    Find("cuDeviceGet", DeviceGet);
    Find("cuDevicePrimaryCtxRetain", Retain);
    Find("cuDevicePrimaryCtxRelease_v2", Release);
    Find("cuCtxPushCurrent_v2", Push);
    Find("cuCtxPopCurrent_v2", Pop);
    Find("cuMemHostAlloc", HostAlloc);
    Find("cuMemFreeHost", HostFree);
    Find("cuMemsetD8Async", Memset);
    Find("cuStreamCreate", StreamCreate);
    Find("cuStreamDestroy_v2", StreamDestroy);
    Find("cuStreamSynchronize", StreamSynchronize);
    Find("cuModuleLoadData", ModuleLoad);
    Find("cuModuleGetFunction", GetFunction);
    Find("cuFuncSetAttribute", SetAttribute);
    FindIfThere("cuFuncLoad", LoadFunction);
    Find("cuLaunchKernel", Launch);
  }

  std::string Text(int error) const {
    const char* text = nullptr;
    GetErrorString(error, &text);
    return text == nullptr ? "error " + std::to_string(error) : text;
  }
};

struct Nccl : Library {
  using Comm = void*;
  struct Team {
    int ranks, rank, stride;
  };
  enum : int { kSuccess = 0, kInProgress = 7, kSymmetric = 1 };

  int (*GetVersion)(int*);
  const char* (*GetErrorString)(int);
  int (*GetAsyncError)(Comm, int*);
  int (*Count)(Comm, int*);
  int (*UserRank)(Comm, int*);
  int (*Device)(Comm, int*);
  int (*Alloc)(void**, size_t);
  int (*Free)(void*);
  int (*Register)(Comm, void*, size_t, void**, int);
  int (*Deregister)(Comm, void*);
  Team (*Reachable)(Comm);                         // the ranks that load from and store to each other's memory
  int (*PeerAddress)(void*, size_t, int, void**);  // null before NCCL 2.29
  int version = 0;

  Nccl() : Library("libnccl.so.2") {
    Find("ncclGetVersion", GetVersion);
    Find("ncclGetErrorString", GetErrorString);
    Find("ncclCommGetAsyncError", GetAsyncError);
    Find("ncclCommCount", Count);
    Find("ncclCommUserRank", UserRank);
    Find("ncclCommCuDevice", Device);
    Find("ncclMemAlloc", Alloc);
    Find("ncclMemFree", Free);
    Find("ncclCommWindowRegister", Register);
    Find("ncclCommWindowDeregister", Deregister);
    Find("ncclTeamLsa", Reachable);
    FindIfThere("ncclGetLsaDevicePointer", PeerAddress);
    if (problem.empty()) GetVersion(&version);
    else if (GetVersion != nullptr) problem += "; NCCL >= 2.28 has it";
  }
};

}  // namespace expertmesh
