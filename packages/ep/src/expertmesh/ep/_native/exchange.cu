// Dispatch and combine by plain stores to the peers' memory.
//
// Every rank has a window that all ranks of its group can write: control words, flags of each rank, and two staging
// halves [G, stride]. Exchange number `epoch` uses half `epoch % 2`. A row is moved in slices, each with its flag. Flags
// are set after a fence, which may be one for several slices.
//
//   dispatch: the sender of token t stores it once to each rank that has a row of it, as staging row
//             rank * T + t there, then the flag; the receiver copies it to all of its rows.
//   combine:  a rank adds up its rows of token t of rank s in float32, stores the sum at s as staging row
//             rank * T + t, then the flag; s adds up what came, in order of ranks.
//
// That is staging by token. Few long rows, such as copies of weights, are staged by row: there a half has C rows in a
// dispatch, row n for what goes to receive row n, and R * C in a combine, row rank * C + n for the sum that has row n of
// `rank`. A token then has one choice at most on each rank.
//
// A flag is the epoch's number, so that it is never reset: a larger one says that its rank is further on. A half is
// written again two exchanges later: a sender first waits until every peer has finished the exchange before the last
// (`done`). Only that and a missing flag are waited for, and senders are the first blocks of the grid, so that they run
// even if the waiting ones fill the device.
//
// Rows of whole words of 16 bytes go through shared memory, staging for each warp (bulk.h): more bytes are on the way
// than registers hold, so that few SMs suffice. Others go through registers.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bulk.h"
#include "exchange.h"
#include "peer_memory.h"

namespace expertmesh {
namespace {

constexpr unsigned kAll = 0xffffffffu;

__device__ Control* ControlOf(const Exchange& x, int rank) { return reinterpret_cast<Control*>(x.window[rank]); }

// At `rank`, the flag of what `source` sends: of slice `flag % slices` of token `flag / slices`.
__device__ uint32_t* FlagOf(const Exchange& x, int rank, int source, int64_t flag) {
  return reinterpret_cast<uint32_t*>(x.window[rank] + kFlags) + source * x.flags + flag;
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

// A sender's warp waits until its half is free at every peer.
__device__ bool WaitUntilFree(const Exchange& x, uint32_t epoch, int lane) {
  bool free = true;
  for (int r = lane; r < x.size; r += 32) {
    if (r != x.rank) free &= Wait(x, &ControlOf(x, x.rank)->done[r], epoch - 2, epoch, r, 1);
  }
  return __all_sync(kAll, free);
}

// One thread waits for the warp.
__device__ bool WaitForRow(const Exchange& x, uint32_t epoch, int source, int64_t flag, int lane) {
  bool there = true;
  if (lane == 0) there = Wait(x, FlagOf(x, x.rank, source, flag), epoch, epoch, source, 2);
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
  control->taken = 0;
  control->epoch = epoch;
  __threadfence_system();
  for (int r = 0; r < x.size; ++r) {
    if (r != x.rank) StoreRelease(&ControlOf(x, r)->done[x.rank], epoch);
  }
}

__device__ uint32_t Epoch(const Exchange& x) {
  return *reinterpret_cast<volatile uint32_t*>(&ControlOf(x, x.rank)->epoch) + 1;
}

// The ranks that hold a row of a token, as bits; each lane holds the slot of a choice.
__device__ uint64_t RanksOf(const Exchange& x, int32_t slot) {
  int rank = slot < 0 ? -1 : slot / x.capacity;
  uint32_t low = __reduce_or_sync(kAll, rank >= 0 && rank < 32 ? 1u << rank : 0u);
  uint32_t high = __reduce_or_sync(kAll, rank >= 32 ? 1u << (rank - 32) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// Part of a row of every rank that is in `ranks`; each lane holds the slot of a choice.
struct Sent {
  uint64_t ranks;
  int token, slice;
  int32_t slot;
};

// The ranks after this one: each rank begins with another.
__device__ int Rank(const Exchange& x, int i) { return (x.rank + i) % x.size; }

// Which row of a half has what one rank sends another. The warp calls each function; each lane holds the slot of a choice
// of the token, or as `held` the row that the choice has here.
struct ByToken {
  static constexpr bool kLong = false;

  // In a dispatch: calls f(rank, staging row) in the lanes that store a token.
  template <typename F>
  __device__ static void EachPlace(const Exchange& x, const Sent& next, int lane, F f) {
    for (int i = lane; i < x.size; i += 32) {
      const int r = Rank(x, i);
      if (next.ranks >> r & 1) f(r, x.rank * x.tokens + next.token);
    }
  }
  // In a dispatch: of token t of rank s.
  __device__ static int Arrived(const Exchange& x, int s, int t, int32_t) { return s * x.tokens + t; }
  // In a combine: of this rank's sum of token t.
  __device__ static int Returned(const Exchange& x, int t, int32_t) { return x.rank * x.tokens + t; }
  // In a combine: of the sum of token t from rank r, which is a lane's own.
  __device__ static int From(const Exchange& x, int r, int t, int32_t) { return r * x.tokens + t; }
};

struct ByRow {
  static constexpr bool kLong = true;

  template <typename F>
  __device__ static void EachPlace(const Exchange& x, const Sent& next, int, F f) {
    const int r = next.slot / x.capacity;
    if (next.slot >= 0 && r != x.rank) f(r, next.slot % x.capacity);
  }
  __device__ static int Arrived(const Exchange&, int, int, int32_t held) { return Only(held); }
  __device__ static int Returned(const Exchange& x, int, int32_t held) { return x.rank * x.capacity + Only(held); }
  __device__ static int From(const Exchange& x, int r, int, int32_t slot) {
    int row = 0;
    for (int k = 0; k < x.choices; ++k) {
      const int32_t other = __shfl_sync(kAll, slot, k);
      if (other >= 0 && other / x.capacity == r) row = other;
    }
    return row;
  }

 private:
  // What one lane holds; the others hold -1.
  __device__ static int Only(int32_t held) { return __reduce_max_sync(kAll, held); }
};

template <typename V>
__device__ V Filled(unsigned char byte) {
  V v;
  memset(&v, byte, sizeof(V));
  return v;
}

// What a warp has to do: it is number `first` of `warps` that send, or of those that receive.
struct Role {
  int lane, warp, first, warps;
  bool sends;

  __device__ explicit Role(const Exchange& x)
      : lane(threadIdx.x % 32), warp(threadIdx.x / 32), sends(blockIdx.x < x.senders) {
    first = (sends ? blockIdx.x : blockIdx.x - x.senders) * kWarps + warp;
    warps = (sends ? x.senders : gridDim.x - x.senders) * kWarps;
  }

  // The warp's n-th piece of work. Each round begins with another warp, since work repeats: ranks in turn, and tokens
  // that go to them in turn.
  __device__ int Item(int n) const { return n * warps + (first + n) % warps; }

  // How many of `count` pieces of work each warp has, about.
  __device__ int Rounds(int count) const { return (count + warps - 1) / warps; }
};

// A receiver's pieces of work, which come in turn: a lane's choice of the token of each. The map [tokens, K] is read for
// as many pieces at once as there are lanes for, and one such read ahead, since many may be of tokens without a row.
template <typename TokenOf>
class RoundRobin {
 public:
  __device__ RoundRobin(const Exchange& x, const Role& role, const int32_t* map, int count, TokenOf token_of)
      : role_(role), map_(map), token_of_(token_of), count_(count), choices_(x.choices), each_(32 / x.choices) {
    ahead_ = Read(0);
  }

  // Of the piece after the last one; -1: none.
  __device__ int32_t Next() {
    if (n_ % each_ == 0) {
      now_ = ahead_;
      ahead_ = Read(n_ + each_);
    }
    const int32_t choice = __shfl_sync(kAll, now_, n_++ % each_ * choices_ + role_.lane);
    return role_.lane < choices_ ? choice : -1;
  }

 private:
  // Lane i has choice i % K of piece n + i / K.
  __device__ int32_t Read(int n) const {
    const int piece = role_.lane / choices_, i = role_.Item(n + piece);
    if (piece >= each_ || i >= count_) return -1;
    return map_[static_cast<int64_t>(token_of_(i)) * choices_ + role_.lane % choices_];
  }

  const Role& role_;
  const int32_t* map_;
  TokenOf token_of_;
  int count_, choices_, each_, n_ = 0;
  int32_t now_ = -1, ahead_ = -1;
};

// A sender's: when a warp has sent a piece it takes the next one that nobody has, so that rows leave in the order in
// which receivers wait for them, however long the stores of a warp take.
template <typename TokenOf>
class WorkQueue {
 public:
  __device__ WorkQueue(const Exchange& x, const Role& role, const int32_t* map, int count, TokenOf token_of)
      : role_(role), map_(map), token_of_(token_of), count_(count), choices_(x.choices),
        taken_(&ControlOf(x, x.rank)->taken) {
    Look(role.first);
  }

  // A piece, not below `count` after the last one, and a lane's choice of its token. The next is on the way.
  __device__ int Next(int32_t& choice) {
    const int piece = piece_;
    choice = choice_;
    if (piece < count_) Look(__shfl_sync(kAll, next_, 0));
    return piece;
  }

 private:
  __device__ void Look(int piece) {
    piece_ = piece;
    choice_ = -1;
    if (piece >= count_) return;
    if (role_.lane < choices_) choice_ = map_[static_cast<int64_t>(token_of_(piece)) * choices_ + role_.lane];
    if (role_.lane == 0) next_ = role_.warps + static_cast<int>(atomicAdd(taken_, 1u));
  }

  const Role& role_;
  const int32_t* map_;
  TokenOf token_of_;
  int count_, choices_;
  uint32_t* taken_;
  int piece_ = 0, next_ = 0;
  int32_t choice_ = -1;
};

// Flags of what a warp has stored at its peers, not yet set there: a lane holds each. A fence holds up all warps of the
// SM, so that there is one for several rows.
class PendingFlags {
 public:
  static constexpr int kMax = 4;

  // The warp: flag `flag` at `ranks` is to be set.
  __device__ void Add(uint64_t ranks, int flag, int lane) {
    if (lane == count_) {
      ranks_ = ranks;
      flag_ = flag;
    }
    ++count_;
  }

  // Where a warp has done so many pieces of work, or has so many left: the fewer of both. What is sent first, and last,
  // is what receivers wait for.
  __device__ bool IsDue(int rounds) const { return count_ > 0 && count_ >= min(rounds / 4, kMax); }

  // After each lane has waited for what it has stored.
  __device__ void Set(const Exchange& x, uint32_t epoch, int lane) {
    __syncwarp();
    FenceRelease();
    if (lane < count_) {
      for (uint64_t left = ranks_; left; left &= left - 1) {
        StoreRelaxed(FlagOf(x, __ffsll(left) - 1, x.rank, flag_), epoch);
      }
    }
    count_ = 0;
  }

 private:
  uint64_t ranks_ = 0;
  int flag_ = 0, count_ = 0;
};

__device__ SmemStaging StagingOf(const Role& role) { return SmemStaging(kWarps, role.warp, role.lane); }

// Moves rows whose parts are multiples of 16 bytes: a staging row is its parts, one after the other.
template <typename Places>
struct BulkRows {
  static constexpr int kBurst = 2048;  // bytes to a rank before the next rank's turn, so that none holds up the others
  SmemStaging staging;

  __device__ explicit BulkRows(const Role& role) : staging(StagingOf(role)) {}

  __device__ static int64_t Bytes(const Parts& parts) {
    const Part& last = parts.part[parts.count - 1];
    return last.offset + last.row_bytes;
  }

  // Calls f(begin, bytes) with what a part has of bytes [at, at + count) of a staging row.
  template <typename F>
  __device__ static void Cut(const Part& part, int64_t at, int count, F f) {
    const int64_t begin = max(at, part.offset), end = min(at + count, part.offset + part.row_bytes);
    if (begin < end) f(begin, static_cast<int>(end - begin));
  }

  __device__ void FetchToken(const Parts& parts, int64_t token, int64_t at, int count, int lane) {
    staging.Expect(count, lane);
    if (lane < parts.count) {
      const Part& part = parts.part[lane];
      Cut(part, at, count, [&](int64_t begin, int bytes) {
        staging.Fetch(begin - at, part.source + token * part.row_bytes + begin - part.offset, bytes);
      });
    }
  }

  template <typename Settle>
  __device__ void Send(const Exchange& x, const Parts& parts, uint32_t epoch, const Sent& next, int lane,
                       Settle settle) {
    const Range words = Slice(x, next.slice, Bytes(parts) / 16);
    for (int64_t at = words.begin * 16; at < words.end * 16; at += kSmemStaging) {
      const int count = min(static_cast<int64_t>(kSmemStaging), words.end * 16 - at);
      SmemStaging::AwaitRead();
      FetchToken(parts, next.token, at, count, lane);
      staging.Await();
      if (at == words.begin * 16) settle();
      Places::EachPlace(x, next, lane, [&](int r, int row) {
        char* to = StagingRow(x, r, epoch, row) + at;
        for (int from = 0; from < count; from += kBurst) staging.Store(from, to + from, min(kBurst, count - from));
      });
      SmemStaging::Commit();
    }
  }

  // Until what a lane has stored is there.
  __device__ static void AwaitSent() { SmemStaging::AwaitStored(); }

  // Rows without a token, in turn between warps and lanes: they are often next to each other. Of long rows a warp clears
  // a slice at a time.
  __device__ void Clear(const Exchange& x, const Parts& parts, int first, int warps, int lane) {
    Fill(0, lane);
    const int slices = Places::kLong ? x.slices : 1;
    const int64_t pieces = static_cast<int64_t>(x.capacity) * slices;
    const int64_t groups = Places::kLong ? pieces : (pieces + 31) / 32;
    for (int64_t g = first; g < groups; g += warps) {
      const int64_t i = lane * groups + g, n = i / slices, slice = i % slices;
      if (i >= pieces || x.source[n] >= 0) continue;
      for (int p = 0; p < parts.count; ++p) {
        const Part& part = parts.part[p];
        const int64_t words = part.row_bytes / 16, end = words * (slice + 1) / slices * 16;
        for (int64_t at = words * slice / slices * 16; at < end; at += kSmemStaging) {
          const int count = min(static_cast<int64_t>(kSmemStaging), end - at);
          staging.Store(0, part.result + n * part.row_bytes + at, count);
        }
      }
    }
    SmemStaging::Commit();
  }

  __device__ void Receive(const Exchange& x, const Parts& parts, uint32_t epoch, int s, int t, int slice,
                          int32_t held, bool came, int lane) {
    const Range words = Slice(x, slice, Bytes(parts) / 16);
    const int row = Places::Arrived(x, s, t, held);
    for (int64_t at = words.begin * 16; at < words.end * 16; at += kSmemStaging) {
      const int count = min(static_cast<int64_t>(kSmemStaging), words.end * 16 - at);
      SmemStaging::AwaitRead();
      if (s == x.rank) {
        FetchToken(parts, t, at, count, lane);
        staging.Await();
      } else if (came) {
        staging.Expect(count, lane);
        if (lane == 0) {
          SmemStaging::ShowMemory();
          staging.Fetch(0, StagingRow(x, x.rank, epoch, row) + at, count);
        }
        staging.Await();
      } else {
        Fill(0xff, lane);
      }
      if (held >= 0) {
        for (int p = 0; p < parts.count; ++p) {
          const Part& part = parts.part[p];
          Cut(part, at, count, [&](int64_t begin, int bytes) {
            staging.Store(begin - at, part.result + held * part.row_bytes + begin - part.offset, bytes);
          });
        }
      }
      SmemStaging::Commit();
    }
  }

  __device__ void Fill(unsigned char byte, int lane) {
    for (int i = lane * 16; i < kSmemStaging; i += 32 * 16) {
      *reinterpret_cast<uint4*>(staging.At(i)) = Filled<uint4>(byte);
    }
    SmemStaging::ShowStaging();
    __syncwarp();
  }
};

// The widest type that divides a row; staging rows and arrays begin at multiples of 16 bytes.
template <typename F>
__device__ void WithUnit(int64_t bytes, F f) {
  if (bytes % 4 == 0) {
    f(uint32_t{});
  } else if (bytes % 2 == 0) {
    f(static_cast<unsigned short>(0));
  } else {
    f(static_cast<unsigned char>(0));
  }
}

// Moves rows of any length, through registers; staged by token.
struct AnyRows {
  __device__ explicit AnyRows(const Role&) {}

  template <typename F>
  __device__ static void EachPart(const Exchange& x, const Parts& parts, int slice, F f) {
    for (int p = 0; p < parts.count; ++p) {
      const Part& part = parts.part[p];
      WithUnit(part.row_bytes, [&](auto unit) { f(part, Slice(x, slice, part.row_bytes / sizeof(unit)), unit); });
    }
  }

  template <typename Settle>
  __device__ void Send(const Exchange& x, const Parts& parts, uint32_t epoch, const Sent& next, int lane,
                       Settle settle) {
    settle();
    const int64_t row = x.rank * x.tokens + next.token;
    EachPart(x, parts, next.slice, [&](const Part& part, Range words, auto unit) {
      using V = decltype(unit);
      const V* from = reinterpret_cast<const V*>(part.source + next.token * part.row_bytes);
      for (int i = words.begin + lane; i < words.end; i += 32) {
        const V v = from[i];
        for (uint64_t left = next.ranks; left; left &= left - 1) {
          reinterpret_cast<V*>(StagingRow(x, __ffsll(left) - 1, epoch, row) + part.offset)[i] = v;
        }
      }
    });
  }

  __device__ static void AwaitSent() {}  // a fence waits for it

  __device__ void Clear(const Exchange& x, const Parts& parts, int first, int warps, int lane) {
    for (int64_t i = first; i < static_cast<int64_t>(x.capacity) * x.slices; i += warps) {
      const int64_t n = i / x.slices;
      if (x.source[n] >= 0) continue;
      EachPart(x, parts, static_cast<int>(i % x.slices), [&](const Part& part, Range words, auto unit) {
        using V = decltype(unit);
        V* to = reinterpret_cast<V*>(part.result + n * part.row_bytes);
        for (int i = words.begin + lane; i < words.end; i += 32) to[i] = Filled<V>(0);
      });
    }
  }

  __device__ void Receive(const Exchange& x, const Parts& parts, uint32_t epoch, int s, int t, int slice,
                          int32_t held, bool came, int lane) {
    const unsigned lanes = __ballot_sync(kAll, held >= 0);
    EachPart(x, parts, slice, [&](const Part& part, Range words, auto unit) {
      using V = decltype(unit);
      const char* source = s == x.rank ? part.source + t * part.row_bytes
                                       : StagingRow(x, x.rank, epoch, s * x.tokens + t) + part.offset;
      for (int first = words.begin; first < words.end; first += 32) {  // all lanes take part in shuffles
        const int i = first + lane;
        V v = Filled<V>(0xff);
        if (i < words.end && came) v = __ldcg(reinterpret_cast<const V*>(source) + i);
        for (unsigned left = lanes; left; left &= left - 1) {
          char* to = part.result + __shfl_sync(kAll, held, __ffs(left) - 1) * part.row_bytes;
          if (i < words.end) reinterpret_cast<V*>(to)[i] = v;
        }
      }
    });
  }
};

template <typename Rows>
__global__ void __launch_bounds__(32 * kWarps, 1)
    Dispatch(const __grid_constant__ Exchange x, const __grid_constant__ Parts parts) {
  const uint32_t epoch = Epoch(x);
  const Role role(x);
  const int lane = role.lane;
  Rows rows(role);
  if (role.sends) {
    const int count = WaitUntilFree(x, epoch, lane) ? x.tokens * x.slices : 0, rounds = role.Rounds(count);
    PendingFlags pending;
    const auto settle = [&](int rounds) {
      if (!pending.IsDue(rounds)) return;
      Rows::AwaitSent();
      pending.Set(x, epoch, lane);
    };
    WorkQueue slots(x, role, x.slot, count, [&](int i) { return i / x.slices; });
    int32_t slot;
    for (int i; (i = slots.Next(slot)) < count;) {
      const int n = i / role.warps;
      const Sent next{RanksOf(x, slot) & ~(1ull << x.rank), i / x.slices, i % x.slices, slot};
      if (!next.ranks) continue;
      rows.Send(x, parts, epoch, next, lane, [&] { settle(min(n, rounds - n)); });
      pending.Add(next.ranks, i, lane);
    }
    settle(0);
  } else {
    rows.Clear(x, parts, role.first, role.warps, lane);
    // Tokens in the order in which they are sent, of all ranks in turn.
    const int count = x.size * x.tokens * x.slices;
    const auto source_of = [&](int i) { return i / x.slices % x.size; };
    const auto token_of = [&](int i) { return i / x.slices / x.size; };
    RoundRobin held_rows(x, role, x.row, count, [&](int i) { return source_of(i) * x.tokens + token_of(i); });
    for (int n = 0, i; (i = role.Item(n)) < count; ++n) {
      const int32_t held = held_rows.Next();
      if (!__ballot_sync(kAll, held >= 0)) continue;
      const int slice = i % x.slices, s = source_of(i), t = token_of(i);
      const bool came = s == x.rank || WaitForRow(x, epoch, s, t * x.slices + slice, lane);
      rows.Receive(x, parts, epoch, s, t, slice, held, came, lane);
    }
    Rows::AwaitSent();
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

// What is added up to one row: lane j < count knows where term j lies. `own` terms after the first `before` are this
// rank's rows, of type T; the others are sums that came, of type W. The sum of own terms is rounded to W, as those that
// came were.
struct Terms {
  const char* at;
  int before, own, count;

  __device__ const char* Term(int j) const {
    return reinterpret_cast<const char*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(at), j));
  }
  __device__ bool Own(int j) const { return j >= before && j < before + own; }
};

__device__ float Missing() { return __int_as_float(0x7fffffff); }  // NaN

// Eight elements.
template <typename T>
struct Word {
  Pack<T, 8> pack;

  __device__ void AddTo(float (&sum)[8]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) sum[n] += Wide(pack.v[n]);
  }
};

template <>
struct Word<__nv_bfloat16> {
  uint4 words;

  __device__ void AddTo(float (&sum)[8]) const {
    const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum[2 * n] += __uint_as_float(pairs[n] << 16);
      sum[2 * n + 1] += __uint_as_float(pairs[n] & 0xffff0000u);
    }
  }
};

// Adds a word of each of `count` terms that lie `slot` bytes apart in shared memory; four are read at once.
template <typename T>
__device__ void AddTerms(float (&sum)[8], const char* from, int slot, int count) {
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    Word<T> words[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) words[u] = *reinterpret_cast<const Word<T>*>(from + (j + u) * slot);
#pragma unroll
    for (int u = 0; u < 4; ++u) words[u].AddTo(sum);
  }
  for (; j < count; ++j) reinterpret_cast<const Word<T>*>(from + j * slot)->AddTo(sum);
}

// Adds rows whose elements come in eights, a piece of all terms at a time.
template <typename T, typename W>
struct BulkSums {
  static constexpr int kElements = 8;
  static constexpr int kWord = kElements * (sizeof(T) > sizeof(W) ? sizeof(T) : sizeof(W));
  static constexpr int kSumBytes = kSmemStaging / 4;           // of a piece of the sum
  static constexpr int kTermBytes = kSmemStaging - kSumBytes;  // of a piece of all terms
  SmemStaging staging;

  __device__ explicit BulkSums(const Role& role) : staging(StagingOf(role)) {}

  // Words of each term that are in the staging at once.
  __device__ static int Most(int terms) {
    const int most = min(kSumBytes, kTermBytes / max(terms, 1)) / kWord;
    return most > 32 ? most / 32 * 32 : most;
  }

  // Writes words of the sum; `settle` is called before the first is stored.
  template <typename Out, typename Settle>
  __device__ void Add(const Terms& terms, Range words, char* out, bool came, int lane, Settle settle) {
    const int most = Most(terms.count), slot = most * kWord, after = terms.before + terms.own;
    const int pieces = (words.end - words.begin + most - 1) / most;
    if (terms.own < terms.count) SmemStaging::ShowMemory();
    const auto first = [&](int piece) { return (words.begin + static_cast<int64_t>(piece) * most) * kElements; };
    const auto length = [&](int piece) { return min(most, words.end - words.begin - piece * most) * kElements; };
    const auto fetch = [&](int piece) {
      const int count = length(piece);
      staging.Expect(count * (terms.own * sizeof(T) + (terms.count - terms.own) * sizeof(W)), lane);
      if (lane >= terms.count) return;
      const int size = terms.Own(lane) ? sizeof(T) : sizeof(W);
      staging.Fetch(lane * slot, terms.at + first(piece) * size, count * size);
    };
    fetch(0);
    for (int piece = 0; piece < pieces; ++piece) {
      const int count = length(piece);
      const char* from = staging.At(0);
      staging.Await();
      SmemStaging::AwaitRead();  // of the last piece of a sum
      for (int i = lane * kElements; i < count; i += 32 * kElements) {
        float total[kElements] = {}, sum[kElements] = {};
        AddTerms<W>(total, from + i * sizeof(W), slot, terms.before);
        if (terms.own > 0) {
          AddTerms<T>(sum, from + terms.before * slot + i * sizeof(T), slot, terms.own);
#pragma unroll
          for (int n = 0; n < kElements; ++n) total[n] += Wide(Narrow<W>(sum[n]));
        }
        AddTerms<W>(total, from + after * slot + i * sizeof(W), slot, terms.count - after);
        Pack<Out, kElements> pack;
#pragma unroll
        for (int n = 0; n < kElements; ++n) pack.v[n] = Narrow<Out>(came ? total[n] : Missing());
        *reinterpret_cast<Pack<Out, kElements>*>(staging.At(kTermBytes) + i * sizeof(Out)) = pack;
      }
      SmemStaging::ShowStaging();
      __syncwarp();
      if (piece + 1 < pieces) fetch(piece + 1);
      if (piece == 0) settle();
      if (lane == 0) staging.Store(kTermBytes, out + first(piece) * sizeof(Out), count * sizeof(Out));
      SmemStaging::Commit();
    }
  }

  __device__ static void AwaitSent() {
    SmemStaging::AwaitStored();
    __syncwarp();
  }
};

// The same for rows of any length: one element after the other.
template <typename T, typename W>
struct AnySums {
  static constexpr int kElements = 1;

  __device__ explicit AnySums(const Role&) {}

  template <typename Out, typename Settle>
  __device__ void Add(const Terms& terms, Range words, char* out, bool came, int lane, Settle settle) {
    settle();
    for (int first = words.begin; first < words.end; first += 32) {
      const int64_t i = min(first + lane, words.end - 1);  // all lanes take part in shuffles
      float total = 0, sum = 0;
      for (int j = 0; j < terms.count; ++j) {
        const char* from = terms.Term(j);
        if (terms.Own(j)) {
          sum += Wide(__ldcg(reinterpret_cast<const T*>(from) + i));
          if (!terms.Own(j + 1)) total += Wide(Narrow<W>(sum));
        } else {
          total += Wide(__ldcg(reinterpret_cast<const W*>(from) + i));
        }
      }
      if (first + lane < words.end) reinterpret_cast<Out*>(out)[i] = Narrow<Out>(came ? total : Missing());
    }
  }

  __device__ static void AwaitSent() { AnyRows::AwaitSent(); }
};

__device__ int NthBit(uint64_t bits, int n) {
  for (int i = 0; i < n; ++i) bits &= bits - 1;
  return __ffsll(bits) - 1;
}

// The rows that the lanes hold the numbers of, after `before` other terms.
__device__ int64_t OwnRow(int32_t held, unsigned lanes, int before, int lane) {
  const bool is_own = lane >= before && lane < before + __popc(lanes);
  return __shfl_sync(kAll, held, is_own ? NthBit(lanes, lane - before) : 0);
}

template <typename T, typename W, typename Sums, typename Places = ByToken>
__global__ void __launch_bounds__(32 * kWarps, 1)
    Combine(const __grid_constant__ Exchange x, const char* rows, char* out, int64_t features) {
  const uint32_t epoch = Epoch(x);
  const Role role(x);
  const int lane = role.lane;
  Sums sums(role);
  const int64_t bytes = features * sizeof(T);
  const int words = static_cast<int>(features / Sums::kElements);
  if (role.sends) {
    const int others = x.size - 1, count = WaitUntilFree(x, epoch, lane) ? others * x.tokens * x.slices : 0;
    const int rounds = role.Rounds(count);
    PendingFlags pending;
    const auto settle = [&](int rounds) {
      if (!pending.IsDue(rounds)) return;
      Sums::AwaitSent();
      pending.Set(x, epoch, lane);
    };
    // Tokens of all other ranks in turn.
    const auto rank_of = [&](int i) { return Rank(x, 1 + i / x.slices % others); };
    const auto token_of = [&](int i) { return i / x.slices / others; };
    WorkQueue held_rows(x, role, x.row, count, [&](int i) { return rank_of(i) * x.tokens + token_of(i); });
    int32_t held;
    for (int i; (i = held_rows.Next(held)) < count;) {
      const unsigned lanes = __ballot_sync(kAll, held >= 0);
      if (!lanes) continue;
      const int n = i / role.warps;
      const int slice = i % x.slices, s = rank_of(i), t = token_of(i), own = __popc(lanes);
      const Terms terms{rows + OwnRow(held, lanes, 0, lane) * bytes, 0, own, own};
      char* staged = StagingRow(x, s, epoch, Places::Returned(x, t, held));
      sums.template Add<W>(terms, Slice(x, slice, words), staged, true, lane, [&] { settle(min(n, rounds - n)); });
      pending.Add(1ull << s, t * x.slices + slice, lane);
    }
    settle(0);
  } else {
    const int count = x.tokens * x.slices;
    const int64_t mine = static_cast<int64_t>(x.rank) * x.tokens;
    RoundRobin slots(x, role, x.slot, count, [&](int i) { return i / x.slices; });
    RoundRobin held_rows(x, role, x.row + mine * x.choices, count, [&](int i) { return i / x.slices; });
    for (int n = 0, i; (i = role.Item(n)) < count; ++n) {
      const int t = i / x.slices, slice = i % x.slices;
      const int32_t slot = slots.Next();
      const uint64_t others = RanksOf(x, slot) & ~(1ull << x.rank);
      const int32_t held = held_rows.Next();
      const unsigned lanes = __ballot_sync(kAll, held >= 0);
      bool came = true;
      for (uint64_t left = others; left; left &= left - 1) {
        came &= WaitForRow(x, epoch, __ffsll(left) - 1, i, lane);
      }
      // In order of ranks: sums from the ranks before this one, this one's rows, sums from those after it.
      const int before = __popcll(others & ((1ull << x.rank) - 1)), own = __popc(lanes);
      const int count = __popcll(others) + own;
      const bool is_own = lane >= before && lane < before + own;
      const char* at = rows + OwnRow(held, lanes, before, lane) * bytes;
      const int r = !is_own && lane < count ? NthBit(others, lane < before ? lane : lane - own) : -1;
      const int came_at = Places::From(x, r, t, slot);
      if (r >= 0) at = StagingRow(x, x.rank, epoch, came_at);
      const Terms terms{at, before, own, count};
      sums.template Add<T>(terms, Slice(x, slice, words), out + t * bytes, came, lane, [] {});
    }
    Sums::AwaitSent();
  }
  Finish(x, epoch);
}

}  // namespace
}  // namespace expertmesh
