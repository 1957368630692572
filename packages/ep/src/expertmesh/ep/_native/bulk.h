// Copies between a warp's part of shared memory and any GPU's memory, by the engine that needs neither registers nor
// lanes while they are on the way. Addresses and lengths are multiples of 16 bytes.
#pragma once

#include "exchange.h"

namespace expertmesh {

extern __shared__ __align__(128) char shared[];

// A warp's staging in shared memory, and the barrier that says when what was fetched is there.
class SmemStaging {
 public:
  __device__ SmemStaging(int warps, int warp, int lane)
      : bytes_(shared + warp * kSmemStaging), barrier_(Address(shared + warps * kSmemStaging + 8 * warp)) {
    if (lane == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ char* At(int64_t offset) const { return bytes_ + offset; }

  // The warp: so many bytes will be fetched.
  __device__ void Expect(int bytes, int lane) const {
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_), "r"(bytes) : "memory");
    }
    __syncwarp();
  }

  // One lane.
  __device__ void Fetch(int64_t offset, const char* from, int bytes) const {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     Address(At(offset))),
                 "l"(from), "r"(bytes), "r"(barrier_)
                 : "memory");
  }

  // The warp: until what is expected is there.
  __device__ void Await() {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(barrier_), "r"(phase_)
          : "memory");
    }
    phase_ ^= 1;
  }

  // One lane; the same lane waits for it.
  __device__ void Store(int64_t offset, char* to, int bytes) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(Address(At(offset))),
                 "r"(bytes)
                 : "memory");
  }

  __device__ static void Commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

  // The warp: until its stores have read the staging.
  __device__ static void AwaitRead() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
  }

  // Each lane: until its stores are done.
  __device__ static void AwaitStored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

  // What a lane has written to the staging can be stored.
  __device__ static void ShowStaging() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // What a lane has seen of other memory can be fetched.
  __device__ static void ShowMemory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

 private:
  __device__ static uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  char* bytes_;
  uint32_t barrier_;
  uint32_t phase_ = 0;
};

}  // namespace expertmesh
