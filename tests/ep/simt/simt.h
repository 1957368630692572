// What the exchange's kernels and tests/ep/nvlink_alone.cu use of CUDA, on a CPU: a lane is a fiber, and all lanes of all
// launches run in turn on one thread. A lane gives way where it waits: for its warp, its block, or a word in memory.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace simt {

constexpr int kLanes = 32, kStack = 1 << 16;

// Where `size` lanes meet, each with a value; the values of two meetings are kept, as a lane may be late to read.
struct Meeting {
  int size, count = 0;
  unsigned turn = 0;
  std::vector<uint64_t> values[2];

  explicit Meeting(int size) : size(size) {
    for (auto& v : values) v.resize(size);
  }
  const std::vector<uint64_t>& Meet(int lane, uint64_t value);
};

struct Block {
  Meeting all;
  std::unique_ptr<char[]> shared;

  Block(int threads, size_t bytes) : all(threads), shared(new char[bytes]()) {}
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  std::function<void()> run;
  std::shared_ptr<Meeting> warp;
  std::shared_ptr<Block> block;
  unsigned thread, of, grid;
  bool done = false;
};

inline std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* now = nullptr;
inline ucontext_t scheduler;

inline void GiveWay() { swapcontext(&now->context, &scheduler); }

inline const std::vector<uint64_t>& Meeting::Meet(int lane, uint64_t value) {
  const unsigned mine = turn;
  values[mine % 2][lane] = value;
  if (++count == size) {
    count = 0;
    ++turn;
  }
  while (turn == mine) GiveWay();
  return values[mine % 2];
}

inline void Enter() {
  now->run();
  now->done = true;
  GiveWay();
}

inline void Launch(int grid, int threads, size_t shared, const std::function<void()>& kernel) {
  for (int b = 0; b < grid; ++b) {
    auto block = std::make_shared<Block>(threads, shared);
    std::shared_ptr<Meeting> warp;
    for (int t = 0; t < threads; ++t) {
      if (t % kLanes == 0) warp = std::make_shared<Meeting>(kLanes);
      auto fiber = std::make_unique<Fiber>();
      fiber->run = kernel;
      fiber->warp = warp;
      fiber->block = block;
      fiber->thread = t;
      fiber->of = b;
      fiber->grid = grid;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStack;
      makecontext(&fiber->context, Enter, 0);
      fibers.push_back(std::move(fiber));
    }
  }
}

struct Index {
  unsigned x;
};

}  // namespace simt

inline simt::Index threadIdx, blockIdx, gridDim;

namespace simt {

// Until all that was launched is done.
inline void Run() {
  for (bool left = true; left;) {
    left = false;
    for (auto& fiber : fibers) {
      if (fiber->done) continue;
      left = true;
      now = fiber.get();
      threadIdx.x = now->thread;
      blockIdx.x = now->of;
      gridDim.x = now->grid;
      swapcontext(&scheduler, &now->context);
    }
  }
  fibers.clear();
}

inline int Lane() { return now->thread % kLanes; }

template <typename T>
const std::vector<uint64_t>& OfWarp(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return now->warp->Meet(Lane(), bits);
}

template <typename T>
T Of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace simt

// ---- of a warp; all lanes take part

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return simt::Of<T>(simt::OfWarp(value)[lane % simt::kLanes]);
}

inline unsigned __ballot_sync(unsigned, bool value) {
  unsigned lanes = 0;
  const auto& all = simt::OfWarp(value);
  for (int i = 0; i < simt::kLanes; ++i) lanes |= static_cast<unsigned>(all[i] & 1) << i;
  return lanes;
}

inline bool __all_sync(unsigned, bool value) { return __ballot_sync(0, value) == 0xffffffffu; }

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  unsigned result = 0;
  for (uint64_t bits : simt::OfWarp(value)) result |= simt::Of<unsigned>(bits);
  return result;
}

inline int __reduce_max_sync(unsigned, int value) {
  int result = value;
  for (uint64_t bits : simt::OfWarp(value)) result = std::max(result, simt::Of<int>(bits));
  return result;
}

inline void __syncwarp() { simt::OfWarp(0); }
inline void __syncthreads() { simt::now->block->all.Meet(simt::now->thread, 0); }

// ---- of a lane; nothing runs beside it

inline void __threadfence() {}
inline void __threadfence_system() {}

inline uint32_t atomicAdd(uint32_t* p, uint32_t value) { return std::exchange(*p, *p + value); }
inline uint32_t atomicExch(uint32_t* p, uint32_t value) { return std::exchange(*p, value); }

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __ffsll(unsigned long long bits) { return __builtin_ffsll(static_cast<long long>(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }

template <typename A, typename B>
auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return std::min(static_cast<C>(a), static_cast<C>(b));
}
template <typename A, typename B>
auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return std::max(static_cast<C>(a), static_cast<C>(b));
}

template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline float __uint_as_float(uint32_t bits) { return simt::Of<float>(bits); }
inline float __int_as_float(int32_t bits) { return simt::Of<float>(static_cast<uint32_t>(bits)); }

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// ---- types of 16 bits

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float v) { return __float2bfloat16_rn(v); }

using __half = _Float16;
inline float __half2float(__half v) { return static_cast<float>(v); }
inline __half __float2half_rn(float v) { return static_cast<__half>(v); }

// ---- the host

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaMemcpyDefault = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
constexpr int cudaHostAllocMapped = 0, cudaStreamNonBlocking = 0;

template <typename T>
int cudaMalloc(T** p, size_t bytes) {
  *p = static_cast<T*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
  return cudaSuccess;
}
inline int cudaHostAlloc(void** p, size_t bytes, int) { return cudaMalloc(p, bytes); }
inline int cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline int cudaMemset(void* p, int value, size_t bytes) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
template <typename Kernel>
int cudaFuncSetAttribute(Kernel*, int, int) {
  return cudaSuccess;
}
inline int cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  *stream = stream;
  return cudaSuccess;
}
inline int cudaDeviceSynchronize() {
  simt::Run();
  return cudaSuccess;
}
inline int cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(int) { return "an error"; }
