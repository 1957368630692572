// Dispatch and combine by plain stores to the peers' memory.
//
// Every rank has a window that all ranks of its group can write: control words, flags of each rank, and two staging
// halves [G, stride]. Exchange number `epoch` uses half `epoch % 2`. A row is moved in slices, each with its flag.
//
//   dispatch: the sender of token t stores it once to each rank that has a row of it, as staging row
//             rank * T + t there, then the flag; the receiver copies it to all of its rows.
//   combine:  a rank adds up its rows of token t of rank s in float32, stores the sum at s as staging row
//             rank * T + t, then the flag; s adds up what came, in order of ranks.
//
// A flag is the epoch's number, so that it is never reset: a larger one says that its rank is further on. A half is written again two exchanges later: a sender first
// waits until every peer has finished the exchange before the last (`done`). Only that and a missing flag are waited
// for, and senders are the first blocks of the grid, so that they run even if the waiting ones fill the device.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "exchange.h"

namespace expertmesh {
namespace {

constexpr unsigned kAll = 0xffffffffu;

__device__ uint32_t LoadAcquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ void StoreRelease(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ uint64_t Nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ Control* ControlOf(const Exchange& x, int rank) { return reinterpret_cast<Control*>(x.window[rank]); }

// At `rank`, the flag of a slice of token t that `source` sends.
__device__ uint32_t* FlagOf(const Exchange& x, int rank, int source, int64_t t, int slice) {
  return reinterpret_cast<uint32_t*>(x.window[rank] + kFlags) + source * x.flags + t * x.slices + slice;
}

struct Range {
  int begin, end;
};

__device__ Range Slice(const Exchange& x, int slice, int64_t count) {
  return {static_cast<int>(count * slice / x.slices), static_cast<int>(count * (slice + 1) / x.slices)};
}

__device__ char* StagingRow(const Exchange& x, int rank, uint32_t epoch, int64_t row) {
  return x.window[rank] + x.staging + (epoch & 1) * x.half + row * x.stride;
}

// Waits until *word has reached `epoch`; false after the timeout. Called by one thread.
__device__ bool Wait(const Exchange& x, const uint32_t* word, uint32_t reach, uint32_t epoch, int peer, uint32_t phase) {
  Control* control = ControlOf(x, x.rank);
  uint64_t start = 0;
  for (uint32_t polls = 0;; ++polls) {
    if (static_cast<int32_t>(LoadAcquire(word) - reach) >= 0) return true;
    if (polls % 256 != 255) continue;
    if (start == 0) start = Nanoseconds();
    bool late = Nanoseconds() - start > x.timeout;
    if (late && atomicExch(&control->failed, epoch) != epoch) {
      x.record->rank = x.rank;
      x.record->peer = peer;
      x.record->phase = phase;
      __threadfence_system();
      *reinterpret_cast<volatile uint32_t*>(&x.record->epoch) = epoch;
    }
    if (late || *reinterpret_cast<volatile uint32_t*>(&control->failed) == epoch) return false;
  }
}

// A sender's block waits until its half is free at every peer.
__device__ bool WaitUntilFree(const Exchange& x, uint32_t epoch) {
  bool free = true;
  if (threadIdx.x < x.size && threadIdx.x != x.rank) {
    const uint32_t* done = &ControlOf(x, x.rank)->done[threadIdx.x];
    free = Wait(x, done, epoch - 2, epoch, threadIdx.x, 1);
  }
  return __syncthreads_and(free);
}

// One thread waits for the warp.
__device__ bool WaitForRow(const Exchange& x, uint32_t epoch, int source, int64_t t, int slice, int lane) {
  bool there = true;
  if (lane == 0) there = Wait(x, FlagOf(x, x.rank, source, t, slice), epoch, epoch, source, 2);
  return __shfl_sync(kAll, there, 0);
}

// The last block says that this rank has read everything of this exchange.
__device__ void Finish(const Exchange& x, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  Control* control = ControlOf(x, x.rank);
  __threadfence();
  if (atomicAdd(&control->arrived, 1u) != gridDim.x - 1) return;
  control->arrived = 0;
  control->epoch = epoch;
  __threadfence_system();
  for (int r = 0; r < x.size; ++r) {
    if (r != x.rank) StoreRelease(&ControlOf(x, r)->done[x.rank], epoch);
  }
}

__device__ uint32_t Epoch(const Exchange& x) {
  return *reinterpret_cast<volatile uint32_t*>(&ControlOf(x, x.rank)->epoch) + 1;
}

// The ranks that hold a row of token t, as bits.
__device__ uint64_t RanksOf(const Exchange& x, int64_t t, int lane) {
  int32_t slot = lane < x.choices ? x.slot[t * x.choices + lane] : -1;
  int rank = slot < 0 ? -1 : slot / x.capacity;
  uint32_t low = __reduce_or_sync(kAll, rank >= 0 && rank < 32 ? 1u << rank : 0u);
  uint32_t high = __reduce_or_sync(kAll, rank >= 32 ? 1u << (rank - 32) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

template <typename V>
__device__ V LoadFresh(const V* p) {
  return __ldcg(p);
}

template <typename V>
__device__ V Filled(unsigned char byte) {
  V v;
  memset(&v, byte, sizeof(V));
  return v;
}

// NVIDIA H200, 2026-11-22: see docs/dev/performance-log.md.
constexpr int kUnroll = 8;  // words that a lane has on the way at once when it copies
constexpr int kSums = 3;    // packs that a lane adds up at once, of two rows each

// Copies words of a row to every rank of `ranks`.
template <typename V>
__device__ void Push(const Exchange& x, const char* source, Range words, uint64_t ranks, uint32_t epoch, int64_t row,
                     int64_t offset, int lane) {
  const V* from = reinterpret_cast<const V*>(source);
  for (int first = words.begin + lane; first < words.end; first += 32 * kUnroll) {
    V v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + 32 * u < words.end) v[u] = __ldg(from + first + 32 * u);
    }
    for (uint64_t left = ranks; left; left &= left - 1) {
      V* to = reinterpret_cast<V*>(StagingRow(x, __ffsll(left) - 1, epoch, row) + offset);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + 32 * u < words.end) to[first + 32 * u] = v[u];
      }
    }
  }
}

// Copies words of a row to the rows that the lanes in `lanes` hold the numbers of; all bits 1 if they did not come.
template <typename V>
__device__ void Spread(const char* source, char* result, int64_t bytes, Range words, unsigned lanes, int32_t row,
                       bool came, int lane) {
  const V* from = reinterpret_cast<const V*>(source);
  for (int first = words.begin; first < words.end; first += 32 * kUnroll) {
    V v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      int i = first + lane + 32 * u;
      v[u] = Filled<V>(0xff);
      if (i < words.end && came) v[u] = LoadFresh(from + i);
    }
    for (unsigned left = lanes; left; left &= left - 1) {
      V* to = reinterpret_cast<V*>(result + __shfl_sync(kAll, row, __ffs(left) - 1) * bytes);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int i = first + lane + 32 * u;
        if (i < words.end) to[i] = v[u];
      }
    }
  }
}

template <typename V>
__device__ void Clear(char* result, Range words, int lane) {
  V* to = reinterpret_cast<V*>(result);
  for (int i = words.begin + lane; i < words.end; i += 32) to[i] = Filled<V>(0);
}

// The widest type that divides a row; staging rows and arrays begin at multiples of 16 bytes.
template <typename F>
__device__ void WithUnit(int64_t bytes, F f) {
  if (bytes % 16 == 0) {
    f(uint4{});
  } else if (bytes % 4 == 0) {
    f(uint32_t{});
  } else if (bytes % 2 == 0) {
    f(static_cast<unsigned short>(0));
  } else {
    f(static_cast<unsigned char>(0));
  }
}

struct Parts {
  Part part[kMaxParts];
  int count;
};

__global__ void __launch_bounds__(32 * kWarps, 1)
    Dispatch(const __grid_constant__ Exchange x, const __grid_constant__ Parts parts) {
  const uint32_t epoch = Epoch(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool sends = blockIdx.x < x.senders;
  const int first = (sends ? blockIdx.x : blockIdx.x - x.senders) * kWarps + warp;
  const int warps = (sends ? x.senders : gridDim.x - x.senders) * kWarps;
  if (sends) {
    const bool free = WaitUntilFree(x, epoch);
    for (int i = first; free && i < x.tokens * x.slices; i += warps) {
      const int t = i / x.slices, slice = i % x.slices;
      const uint64_t ranks = RanksOf(x, t, lane) & ~(1ull << x.rank);
      if (!ranks) continue;
      const int row = x.rank * x.tokens + t;
      for (int p = 0; p < parts.count; ++p) {
        const Part& part = parts.part[p];
        WithUnit(part.row_bytes, [&](auto unit) {
          using V = decltype(unit);
          const Range words = Slice(x, slice, part.row_bytes / sizeof(V));
          Push<V>(x, part.source + t * part.row_bytes, words, ranks, epoch, row, part.offset, lane);
        });
      }
      __threadfence_system();
      __syncwarp();
      for (int r = lane; r < x.size; r += 32) {
        if (ranks >> r & 1) StoreRelease(FlagOf(x, r, x.rank, t, slice), epoch);
      }
    }
  } else {
    for (int64_t i = first; i < static_cast<int64_t>(x.capacity) * x.slices; i += warps) {
      const int64_t n = i / x.slices;
      if (x.source[n] >= 0) continue;
      for (int p = 0; p < parts.count; ++p) {
        const Part& part = parts.part[p];
        WithUnit(part.row_bytes, [&](auto unit) {
          using V = decltype(unit);
          const Range words = Slice(x, static_cast<int>(i % x.slices), part.row_bytes / sizeof(V));
          Clear<V>(part.result + n * part.row_bytes, words, lane);
        });
      }
    }
    // Tokens in the order in which they are sent, of all ranks in turn.
    for (int i = first; i < x.size * x.tokens * x.slices; i += warps) {
      const int slice = i % x.slices, s = i / x.slices % x.size, t = i / x.slices / x.size;
      const int row = s * x.tokens + t;
      const int32_t held = lane < x.choices ? x.row[static_cast<int64_t>(row) * x.choices + lane] : -1;
      const unsigned lanes = __ballot_sync(kAll, held >= 0);
      if (!lanes) continue;
      const bool came = s == x.rank || WaitForRow(x, epoch, s, t, slice, lane);
      for (int p = 0; p < parts.count; ++p) {
        const Part& part = parts.part[p];
        const char* source = s == x.rank ? part.source + t * part.row_bytes
                                         : StagingRow(x, x.rank, epoch, row) + part.offset;
        WithUnit(part.row_bytes, [&](auto unit) {
          using V = decltype(unit);
          const Range words = Slice(x, slice, part.row_bytes / sizeof(V));
          Spread<V>(source, part.result, part.row_bytes, words, lanes, held, came, lane);
        });
      }
    }
  }
  Finish(x, epoch);
}

__device__ float Wide(float v) { return v; }
__device__ float Wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ float Wide(__half v) { return __half2float(v); }
template <typename T>
__device__ T Narrow(float v);
template <>
__device__ float Narrow<float>(float v) {
  return v;
}
template <>
__device__ __nv_bfloat16 Narrow<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __half Narrow<__half>(float v) {
  return __float2half_rn(v);
}

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

// N elements, past the first-level cache: staging rows change while the kernel runs.
template <typename T, int N>
__device__ Pack<T, N> LoadPack(const char* p) {
  Pack<T, N> pack;
  if constexpr (sizeof(pack) % 16 == 0) {
    uint4 words[sizeof(pack) / 16];
#pragma unroll
    for (int w = 0; w < sizeof(pack) / 16; ++w) words[w] = __ldcg(reinterpret_cast<const uint4*>(p) + w);
    memcpy(&pack, words, sizeof(pack));
  } else if constexpr (sizeof(pack) == 8) {
    uint2 words = __ldcg(reinterpret_cast<const uint2*>(p));
    memcpy(&pack, &words, sizeof(pack));
  } else if constexpr (sizeof(pack) == 4) {
    const unsigned word = __ldcg(reinterpret_cast<const unsigned*>(p));
    memcpy(&pack, &word, sizeof(pack));
  } else {
    const unsigned short word = __ldcg(reinterpret_cast<const unsigned short*>(p));
    memcpy(&pack, &word, sizeof(pack));
  }
  return pack;
}

// The packs of a row that a lane has in one step; past the end the last one again, so that all lanes take part in
// shuffles. Only packs in front of the end are stored.
struct Step {
  int first, end, lane;

  __device__ int64_t At(int u) const { return min(first + 32 * u + lane, end - 1); }
  __device__ bool Stores(int u) const { return first + 32 * u + lane < end; }
};

// Adds this rank's rows of a token, in order of choices.
template <typename T, int N>
__device__ void AddRows(float (&sum)[kSums][N], const char* rows, int64_t bytes, const Step& step, unsigned lanes,
                        int32_t row) {
  // Two rows are on the way at once.
  for (unsigned left = lanes; left;) {
    const int one = __ffs(left) - 1;
    left &= left - 1;
    const bool second = left;
    const int other = second ? __ffs(left) - 1 : one;
    left &= left - 1;
    const char* from = rows + __shfl_sync(kAll, row, one) * bytes;
    const char* then = rows + __shfl_sync(kAll, row, other) * bytes;
    Pack<T, N> a[kSums], b[kSums];
#pragma unroll
    for (int u = 0; u < kSums; ++u) a[u] = LoadPack<T, N>(from + step.At(u) * N * sizeof(T));
    if (second) {
#pragma unroll
      for (int u = 0; u < kSums; ++u) b[u] = LoadPack<T, N>(then + step.At(u) * N * sizeof(T));
    }
#pragma unroll
    for (int u = 0; u < kSums; ++u) {
#pragma unroll
      for (int n = 0; n < N; ++n) sum[u][n] += Wide(a[u].v[n]);
    }
    if (second) {
#pragma unroll
      for (int u = 0; u < kSums; ++u) {
#pragma unroll
        for (int n = 0; n < N; ++n) sum[u][n] += Wide(b[u].v[n]);
      }
    }
  }
}

template <typename W, int N>
__device__ void StoreSums(const float (&sum)[kSums][N], char* to, const Step& step) {
#pragma unroll
  for (int u = 0; u < kSums; ++u) {
    Pack<W, N> pack;
#pragma unroll
    for (int n = 0; n < N; ++n) pack.v[n] = Narrow<W>(sum[u][n]);
    if (step.Stores(u)) *reinterpret_cast<Pack<W, N>*>(to + step.At(u) * N * sizeof(W)) = pack;
  }
}

template <typename T, typename W, int N>
__global__ void __launch_bounds__(32 * kWarps, 1)
    Combine(const __grid_constant__ Exchange x, const char* rows, char* out, int64_t features) {
  const uint32_t epoch = Epoch(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool sends = blockIdx.x < x.senders;
  const int first = (sends ? blockIdx.x : blockIdx.x - x.senders) * kWarps + warp;
  const int warps = (sends ? x.senders : gridDim.x - x.senders) * kWarps;
  const int64_t bytes = features * sizeof(T);
  if (sends) {
    const bool free = WaitUntilFree(x, epoch);
    for (int i = first; free && i < x.size * x.tokens * x.slices; i += warps) {
      const int slice = i % x.slices, s = i / x.slices % x.size, t = i / x.slices / x.size;
      if (s == x.rank) continue;
      const int64_t place = s * x.tokens + t;
      const int32_t held = lane < x.choices ? x.row[place * x.choices + lane] : -1;
      const unsigned lanes = __ballot_sync(kAll, held >= 0);
      if (!lanes) continue;
      char* to = StagingRow(x, s, epoch, x.rank * x.tokens + t);
      const Range packs = Slice(x, slice, features / N);
      for (int p = packs.begin; p < packs.end; p += 32 * kSums) {
        const Step step{p, packs.end, lane};
        float sum[kSums][N] = {};
        AddRows<T, N>(sum, rows, bytes, step, lanes, held);
        StoreSums<W, N>(sum, to, step);
      }
      __threadfence_system();
      __syncwarp();
      if (lane == 0) StoreRelease(FlagOf(x, s, x.rank, t, slice), epoch);
    }
  } else {
    for (int i = first; i < x.tokens * x.slices; i += warps) {
      const int t = i / x.slices, slice = i % x.slices;
      const uint64_t ranks = RanksOf(x, t, lane);
      const int64_t mine = x.rank * x.tokens + t;
      const int32_t held = lane < x.choices ? x.row[mine * x.choices + lane] : -1;
      const unsigned lanes = __ballot_sync(kAll, held >= 0);
      bool came = true;
      for (uint64_t left = ranks & ~(1ull << x.rank); left; left &= left - 1) {
        came &= WaitForRow(x, epoch, __ffsll(left) - 1, t, slice, lane);
      }
      const Range packs = Slice(x, slice, features / N);
      for (int p = packs.begin; p < packs.end; p += 32 * kSums) {
        const Step step{p, packs.end, lane};
        float total[kSums][N] = {};
        for (uint64_t left = ranks; left; left &= left - 1) {
          const int r = __ffsll(left) - 1;
          float sum[kSums][N] = {};
          if (r == x.rank) {
            AddRows<T, N>(sum, rows, bytes, step, lanes, held);
          } else {
            const char* from = StagingRow(x, x.rank, epoch, r * x.tokens + t);
#pragma unroll
            for (int u = 0; u < kSums; ++u) {
              const Pack<W, N> pack = LoadPack<W, N>(from + step.At(u) * N * sizeof(W));
#pragma unroll
              for (int n = 0; n < N; ++n) sum[u][n] = Wide(pack.v[n]);
            }
          }
          // This rank's own sum is rounded as if it had travelled.
#pragma unroll
          for (int u = 0; u < kSums; ++u) {
#pragma unroll
            for (int n = 0; n < N; ++n) total[u][n] += Wide(Narrow<W>(sum[u][n]));
          }
        }
        if (!came) {
#pragma unroll
          for (int u = 0; u < kSums; ++u) {
#pragma unroll
            for (int n = 0; n < N; ++n) total[u][n] = __int_as_float(0x7fc00000);
          }
        }
        StoreSums<T, N>(total, out + t * bytes, step);
      }
    }
  }
  Finish(x, epoch);
}

using CombineKernel = void (*)(const Exchange, const char*, char*, int64_t);

template <typename T, typename W>
CombineKernel OfWidth(bool wide) {
  return wide ? Combine<T, W, 16 / sizeof(T)> : Combine<T, W, 1>;
}

template <typename T>
CombineKernel OfWire(Type wire, bool wide) {
  switch (wire) {
    case Type::kF32:
      return OfWidth<T, float>(wide);
    case Type::kBF16:
      return OfWidth<T, __nv_bfloat16>(wide);
    case Type::kF16:
      return OfWidth<T, __half>(wide);
  }
  return nullptr;
}

CombineKernel Choose(Type rows, Type wire, bool wide) {
  switch (rows) {
    case Type::kF32:
      return OfWire<float>(wire, wide);
    case Type::kBF16:
      return OfWire<__nv_bfloat16>(wire, wide);
    case Type::kF16:
      return OfWire<__half>(wire, wide);
  }
  return nullptr;
}

}  // namespace

// Loads every kernel on the current device now: loading one may wait for kernels that run, and those for this device.
cudaError_t LoadKernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&Dispatch));
  const Type types[] = {Type::kF32, Type::kBF16, Type::kF16};
  for (Type rows : types) {
    for (Type wire : types) {
      for (bool wide : {false, true}) {
        if (error != cudaSuccess) return error;
        error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(Choose(rows, wire, wide)));
      }
    }
  }
  return error;
}

cudaError_t LaunchDispatch(const Exchange& x, const Part* parts, int num_parts, int blocks, cudaStream_t stream) {
  Parts all{};
  all.count = num_parts;
  for (int p = 0; p < num_parts; ++p) all.part[p] = parts[p];
  Dispatch<<<blocks, 32 * kWarps, 0, stream>>>(x, all);
  return cudaGetLastError();
}

cudaError_t LaunchCombine(const Exchange& x, const void* rows, void* out, int64_t features, Type rows_type,
                          Type wire_type, int blocks, cudaStream_t stream) {
  const bool wide = features * (rows_type == Type::kF32 ? 4 : 2) % 16 == 0;
  Choose(rows_type, wire_type, wide)<<<blocks, 32 * kWarps, 0, stream>>>(
      x, static_cast<const char*>(rows), static_cast<char*>(out), features);
  return cudaGetLastError();
}

}  // namespace expertmesh
