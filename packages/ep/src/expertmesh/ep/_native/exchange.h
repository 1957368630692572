// What the handlers, on the host, tell the kernels of one call. Read by C++ and by NVRTC: no header but <cstdint>.
//
// Dimension key as in route.py: T tokens of this rank, K choices per token, C receive rows, R ranks, G = R * T.
#pragma once

#include <cstdint>

namespace expertmesh {

constexpr int kMaxRanks = 64;
constexpr int kMaxChoices = 32;      // a lane of a warp holds one
constexpr int kMaxParts = 2;         // arrays that travel together: data, and scales
constexpr int kWarps = 16;           // of a block
constexpr int kSmemStaging = 14336;  // bytes of a warp's part of shared memory, besides a barrier: bulk.h
constexpr int kShared = kWarps * (kSmemStaging + 8);

// The start of every rank's window; the flags of each source rank and the two staging halves follow at kFlags.
struct Control {
  uint32_t epoch;    // of the last exchange that this rank has finished
  uint32_t arrived;  // blocks of the running kernel that are done
  uint32_t failed;   // the last epoch in which a wait timed out
  uint32_t taken;    // pieces of work that senders of the running kernel have begun
  uint32_t pad[12];
  uint32_t done[kMaxRanks];  // done[r]: the last epoch that rank r has finished reading; written by r
};
constexpr int64_t kFlags = 4096;

// In host memory, written by a kernel whose wait timed out.
struct Record {
  uint32_t epoch;  // 0: nothing happened
  uint32_t rank;
  uint32_t peer;
  uint32_t phase;  // 1: waited until the peer had read what an earlier exchange sent; 2: waited for its rows
};

struct Part {
  const char* source;  // dispatch: [T, row_bytes]
  char* result;        // dispatch: [C, row_bytes]
  int64_t row_bytes;
  int64_t offset;  // in a staging row
};

struct Parts {
  Part part[kMaxParts];
  int count;
};

struct Exchange {
  char* window[kMaxRanks];  // of every rank, as this device sees it
  Record* record;
  const int32_t* slot;    // [T, K]
  const int32_t* source;  // [C]; dispatch only
  const int32_t* row;     // [G, K]
  int64_t flags;          // flags of a source rank; a region of its own, whatever the calls before were
  int64_t staging;        // offset of the first half in a window
  int64_t half;           // bytes of a half
  int64_t stride;         // bytes of a staging row
  uint64_t timeout;       // nanoseconds
  int32_t rank, size, tokens, choices, capacity;
  int32_t slices;   // a row is moved in so many parts, by a warp each
  int32_t senders;  // blocks; those after them receive
};

enum class Type : int32_t { kF32, kBF16, kF16 };

}  // namespace expertmesh
