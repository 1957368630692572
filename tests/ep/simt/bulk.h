// As _native/bulk.h on a CPU: a copy is over when it begins. What the engine refuses ends the program.
#pragma once

#include <cstdio>

#include "exchange.h"

namespace expertmesh {

class SmemStaging {
 public:
  SmemStaging(int, int warp, int) : bytes_(simt::now->block->shared.get() + warp * kSmemStaging) { __syncwarp(); }

  char* At(int64_t offset) const { return bytes_ + offset; }
  void Expect(int, int) const { __syncwarp(); }
  void Await() { __syncwarp(); }

  void Fetch(int64_t offset, const char* from, int bytes) const {
    Check(offset, from, bytes);
    std::memcpy(At(offset), from, bytes);
  }
  void Store(int64_t offset, char* to, int bytes) const {
    Check(offset, to, bytes);
    std::memcpy(to, At(offset), bytes);
  }

  static void Commit() {}
  static void AwaitRead() { __syncwarp(); }
  static void AwaitStored() {}
  static void ShowStaging() {}
  static void ShowMemory() {}

 private:
  static void Check(int64_t offset, const void* there, int bytes) {
    const bool words = offset % 16 == 0 && reinterpret_cast<uintptr_t>(there) % 16 == 0 && bytes % 16 == 0;
    if (words && bytes >= 0 && offset >= 0 && offset + bytes <= kSmemStaging) return;
    std::printf("a copy of %d bytes, at %d of the staging\n", bytes, static_cast<int>(offset));
    std::exit(1);
  }

  char* bytes_;
};

}  // namespace expertmesh
