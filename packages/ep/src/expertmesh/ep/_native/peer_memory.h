// Words of memory that other GPUs write or read while a kernel runs, and the clock by which it waits for them.
#pragma once

#include <cstdint>

namespace expertmesh {

__device__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ void StoreRelease(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ void StoreRelaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// With relaxed stores after it: a release of all of them.
__device__ void FenceRelease() { asm volatile("fence.release.sys;" ::: "memory"); }

__device__ uint64_t Nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace expertmesh
