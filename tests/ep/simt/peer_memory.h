// As _native/peer_memory.h on a CPU.
#pragma once

#include <cstdint>

#include "simt.h"

namespace expertmesh {

// Whoever polls gives way to those it waits for.
inline uint32_t LoadAcquire(const uint32_t* p) {
  simt::GiveWay();
  return *p;
}
inline void StoreRelease(uint32_t* p, uint32_t v) { *p = v; }
inline void StoreRelaxed(uint32_t* p, uint32_t v) { *p = v; }
inline void FenceRelease() {}
// The clock goes on when it is read, so that a slow machine lets nothing time out.
inline uint64_t Nanoseconds() {
  static uint64_t now = 0;
  return now += 100'000;
}

}  // namespace expertmesh
