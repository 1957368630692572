// What is used of CUDA's driver, from the copy that XLA has open: a machine without GPUs has none.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace expertmesh {

// CUtensorMap
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

struct Driver {
  using Stream = void*;
  using Context = void*;
  using Library = void*;
  using Kernel = void*;
  using Function = void*;

  // CUlaunchAttribute, of which the dimensions of clusters are used; CUlaunchConfig.
  struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
  };
  struct Config {
    unsigned grid[3], block[3], shared_bytes;
    Stream stream;
    Attribute* attributes;
    unsigned num_attributes;
  };
  enum : int { kMaxDynamicSharedBytes = 8, kClusterDimension = 4 };
  // CUtensorMapL2promotion: of 128 bytes; no interleaving, zeros out of bounds.
  enum : int { kNoInterleave = 0, kPromote128 = 2, kZeros = 0 };

  int (*GetErrorString)(int, const char**);
  int (*DeviceGet)(int*, int);
  int (*Retain)(Context*, int);
  int (*Release)(int);
  int (*Push)(Context);
  int (*Pop)(Context*);
  int (*LibraryLoad)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*LibraryUnload)(Library);
  int (*LibraryKernel)(Kernel*, Library, const char*);
  int (*SetAttribute)(int, int, Kernel, int);
  int (*GetFunction)(Function*, Kernel);
  int (*LoadFunction)(Function);  // null before CUDA 12.4
  int (*Encode)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                int, int, int, int);
  int (*Zero)(uint64_t, unsigned char, size_t, Stream);
  int (*Launch)(const Config*, Function, void**, void**);
  std::string problem;  // why it cannot be used, or empty

  Driver() : handle_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (handle_ == nullptr) {
      problem = "there is no CUDA driver (libcuda.so.1)";
      return;
    }
    Find("cuGetErrorString", GetErrorString);
    Find("cuDeviceGet", DeviceGet);
    Find("cuDevicePrimaryCtxRetain", Retain);
    Find("cuDevicePrimaryCtxRelease_v2", Release);
    Find("cuCtxPushCurrent_v2", Push);
    Find("cuCtxPopCurrent_v2", Pop);
    Find("cuLibraryLoadData", LibraryLoad);
    Find("cuLibraryUnload", LibraryUnload);
    Find("cuLibraryGetKernel", LibraryKernel);
    Find("cuKernelSetAttribute", SetAttribute);
    Find("cuKernelGetFunction", GetFunction);
    Find("cuTensorMapEncodeTiled", Encode);
    Find("cuMemsetD8Async", Zero);
    Find("cuLaunchKernelEx", Launch);
    LoadFunction = reinterpret_cast<decltype(LoadFunction)>(dlsym(handle_, "cuFuncLoad"));
  }

  std::string Text(int error) const {
    const char* text = nullptr;
    GetErrorString(error, &text);
    return text == nullptr ? "error " + std::to_string(error) : text;
  }

 private:
  template <typename F>
  void Find(const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle_, name));
    if (function == nullptr && problem.empty()) problem = std::string("the CUDA driver has no ") + name + "; 12.0 has it";
  }

  void* handle_;
};

// The driver, opened at first use.
inline const Driver& Cuda() {
  static const Driver* driver = new Driver;  // never destroyed: devices may still run at exit
  return *driver;
}

}  // namespace expertmesh
