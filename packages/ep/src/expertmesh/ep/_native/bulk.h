// Copies between a warp's part of shared memory and any GPU's memory, by the engine that needs neither registers nor
// lanes while they are on the way. Addresses and lengths are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace expertmesh {

constexpr int kRoom = 14336;  // bytes of a warp

// A warp's room, and two barriers that say when what was fetched is there: one batch may be awaited while the next is
// on the way. Batch b is the b-th since the kernel began.
class Room {
 public:
  static constexpr int Bytes(int warps) { return warps * (kRoom + 16); }

  __device__ Room(char* shared, int warps, int warp, int lane)
      : bytes_(shared + warp * kRoom), barriers_(Address(shared + warps * kRoom + 16 * warp)) {
    if (lane == 0) {
      for (int b = 0; b < 2; ++b) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers_ + 8 * b) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ char* At(int64_t offset) const { return bytes_ + offset; }

  // The warp: so many bytes will be fetched, as the next batch.
  __device__ void Expect(int bytes, int lane) {
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Barrier(expected_)), "r"(bytes)
                   : "memory");
    }
    ++expected_;
    __syncwarp();
  }

  // One lane, of the batch that is expected last.
  __device__ void Fetch(int64_t offset, const char* from, int bytes) const {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     Address(At(offset))),
                 "l"(from), "r"(bytes), "r"(Barrier(expected_ - 1))
                 : "memory");
  }

  // The warp: until the first batch that is not there yet is there.
  __device__ void Await() {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(Barrier(awaited_)), "r"(awaited_ >> 1 & 1)
          : "memory");
    }
    ++awaited_;
  }

  // One lane; the same lane waits for it.
  __device__ void Store(int64_t offset, char* to, int bytes) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(Address(At(offset))),
                 "r"(bytes)
                 : "memory");
  }

  __device__ static void Commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

  // The warp: until its stores, but for the last `kLater` that were committed, have read the room.
  template <int kLater = 0>
  __device__ static void AwaitRead() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
    __syncwarp();
  }

  // Each lane: until its stores are done.
  __device__ static void AwaitStored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

  // What a lane has written to the room can be stored.
  __device__ static void ShowRoom() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // What a lane has seen of other memory can be fetched.
  __device__ static void ShowMemory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

 private:
  __device__ static uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  __device__ uint32_t Barrier(uint32_t batch) const { return barriers_ + 8 * (batch & 1); }

  char* bytes_;
  uint32_t barriers_;
  uint32_t expected_ = 0, awaited_ = 0;  // batches
};

}  // namespace expertmesh
