// The kernels of the transport "nvlink" without JAX and NCCL: four ranks on one GPU. All ranks at once must be right.
// One after the other (--serial), so that a sanitizer may run them, all but the last time out waiting and fill what did
// not come with bits of 1; the last must be right.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "exchange.cu"

using namespace expertmesh;

#define CHECK(call)                                                               \
  do {                                                                            \
    cudaError_t error = (call);                                                   \
    if (error != cudaSuccess) {                                                   \
      std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(error));          \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

constexpr int kRanks = 4, kLocal = 2, kBlocks = 3;
constexpr int kCanary = 256;  // bytes behind what a kernel writes

template <typename T>
T* OnDevice(const std::vector<T>& values) {
  T* p = nullptr;
  CHECK(cudaMalloc(&p, values.size() * sizeof(T)));
  CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
  return p;
}

template <typename T>
std::vector<T> OnHost(const T* p, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), p, count * sizeof(T), cudaMemcpyDefault));
  return values;
}

// As handlers.cc does.
template <typename Kernel, typename... A>
cudaError_t Launch(Kernel* kernel, cudaStream_t stream, const A&... arguments) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  kernel<<<kBlocks, 32 * kWarps, kShared, stream>>>(arguments...);
  return cudaGetLastError();
}

void Require(bool holds, const char* what, int at);

// Memory that a kernel writes, with a canary behind it.
struct Written {
  char* at = nullptr;
  size_t bytes;

  explicit Written(size_t size) : bytes(size) {
    CHECK(cudaMalloc(&at, bytes + kCanary));
    CHECK(cudaMemset(at, 0x5a, bytes + kCanary));
  }
  void Check() const {
    for (char c : OnHost(at + bytes, kCanary)) Require(c == 0x5a, "canary", static_cast<int>(bytes));
  }
};

// Launches all ranks: together, or one after the other beginning with `first`.
template <typename F>
void EachRank(bool serial, int first, F launch) {
  static cudaStream_t streams[kRanks] = {};
  for (int i = 0; i < kRanks; ++i) {
    const int r = (first + i) % kRanks;
    if (streams[r] == nullptr) CHECK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    CHECK(launch(r, streams[r]));
    if (serial) CHECK(cudaDeviceSynchronize());
  }
  CHECK(cudaDeviceSynchronize());
}

void Require(bool holds, const char* what, int at) {
  if (holds) return;
  std::printf("%s: wrong at %d\n", what, at);
  std::exit(1);
}

struct Routes {
  int tokens, choices, capacity;
  std::vector<int32_t> slot[kRanks], source[kRanks], row[kRanks];

  Routes(int tokens, int choices, int capacity) : tokens(tokens), choices(choices), capacity(capacity) {
    for (int r = 0; r < kRanks; ++r) {
      slot[r].assign(tokens * choices, -1);
      source[r].assign(capacity, -1);
      row[r].assign(kRanks * tokens * choices, -1);
    }
  }
  // Row n of rank r is of choice c.
  void Set(int r, int n, int c) {
    source[r][n] = c;
    row[r][c] = n;
    slot[c / choices / tokens][c % (tokens * choices)] = r * capacity + n;
  }
};

// Tokens of drawn experts.
Routes Draw(std::mt19937& random, ByToken) {
  Routes routes(37, 3, 70);
  std::vector<int> expert(kRanks * routes.tokens * routes.choices);
  for (int& e : expert) e = static_cast<int>(random() % (kRanks * kLocal + 1)) - 1;
  for (int r = 0; r < kRanks; ++r) {
    int n = 0;
    for (int e = r * kLocal; e < (r + 1) * kLocal; ++e) {
      for (size_t c = 0; c < expert.size(); ++c) {
        if (expert[c] == e && n < routes.capacity) routes.Set(r, n++, static_cast<int>(c));
      }
    }
  }
  return routes;
}

// Few tokens, of which each rank but a token's own may have a row: choice r is of rank r. Some rows are of none.
Routes Draw(std::mt19937& random, ByRow) {
  Routes routes(5, kRanks, 4);
  for (int r = 0; r < kRanks; ++r) {
    for (int n = 0; n < routes.capacity; ++n) {
      const int t = static_cast<int>(random() % (kRanks * routes.tokens)), c = t * kRanks + r;
      if (t / routes.tokens != r && routes.row[r][c] < 0 && random() % 4) routes.Set(r, n, c);
    }
  }
  return routes;
}

template <typename Places>
void Run(bool serial, int slices, int64_t bytes, int64_t more_bytes, int features, std::mt19937& random) {
  const Routes routes = Draw(random, Places{});
  const int num_tokens = routes.tokens, num_choices = routes.choices, capacity = routes.capacity;
  const int group = Places::kLong ? kRanks * capacity : kRanks * num_tokens;  // staging rows
  const auto padded = [](int64_t value) { return (value + 15) / 16 * 16; };
  Exchange x[kRanks] = {};
  Record* record = nullptr;
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&record), sizeof(Record), cudaHostAllocMapped));
  *record = Record{};
  const int64_t stride = std::max(padded(bytes) + padded(more_bytes), padded(features * 4)), flags = num_tokens * slices;
  const int64_t staging = (kFlags + kRanks * flags * 4 + 15) / 16 * 16;
  std::vector<Written> written;
  char* windows[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    windows[r] = written.emplace_back(staging + 2 * group * stride).at;
    CHECK(cudaMemset(windows[r], 0, staging));
    CHECK(cudaMemset(windows[r] + staging, 0xff, 2 * group * stride));
  }
  for (int r = 0; r < kRanks; ++r) {
    for (int p = 0; p < kRanks; ++p) x[r].window[p] = windows[p];
    x[r].record = record;
    x[r].slot = OnDevice(routes.slot[r]);
    x[r].source = OnDevice(routes.source[r]);
    x[r].row = OnDevice(routes.row[r]);
    x[r].flags = flags;
    x[r].staging = staging;
    x[r].half = group * stride;
    x[r].stride = stride;
    x[r].timeout = serial ? 20'000'000 : 20'000'000'000;
    x[r].rank = r;
    x[r].size = kRanks;
    x[r].tokens = num_tokens;
    x[r].choices = num_choices;
    x[r].capacity = capacity;
    x[r].slices = slices;
    x[r].senders = 1;
  }

  const int64_t part_bytes[] = {bytes, more_bytes};
  const int num_parts = more_bytes ? 2 : 1;
  std::vector<char> tokens[2][kRanks];
  Parts parts[kRanks] = {};
  for (int r = 0; r < kRanks; ++r) {
    parts[r].count = num_parts;
    for (int p = 0; p < num_parts; ++p) {
      tokens[p][r].resize(num_tokens * part_bytes[p]);
      for (char& c : tokens[p][r]) c = static_cast<char>(random());
      char* result = written.emplace_back(capacity * part_bytes[p]).at;
      parts[r].part[p] = Part{OnDevice(tokens[p][r]), result, part_bytes[p], p ? padded(bytes) : 0};
    }
  }
  for (int turn = 0; turn < 3; ++turn) {
    EachRank(serial, turn + 1, [&](int r, cudaStream_t stream) {
      const bool wide = (bytes | more_bytes) % 16 == 0;
      return Launch(wide ? Dispatch<BulkRows<Places>> : Dispatch<AnyRows>, stream, x[r], parts[r]);
    });
    for (int r = 0; r < kRanks; ++r) {
      if (serial && r != turn % kRanks) continue;
      for (int p = 0; p < num_parts; ++p) {
        const auto rows = OnHost(parts[r].part[p].result, capacity * part_bytes[p]);
        for (int n = 0; n < capacity; ++n) {
          const int c = routes.source[r][n], t = c / num_choices;
          std::vector<char> want(part_bytes[p], 0);
          if (c >= 0) std::memcpy(want.data(), &tokens[p][t / num_tokens][t % num_tokens * part_bytes[p]], part_bytes[p]);
          Require(!std::memcmp(want.data(), &rows[n * part_bytes[p]], part_bytes[p]), "dispatch", n);
        }
      }
    }
    if (serial) {
      Require(record->epoch == static_cast<uint32_t>(turn + 1) && record->phase == 2, "the record of a wait", turn);
    } else {
      Require(record->epoch == 0, "no rank times out", turn);
    }
  }

  using T = __nv_bfloat16;
  std::vector<T> rows[kRanks];
  const T* held[kRanks];
  T* out[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    for (int i = 0; i < capacity * features; ++i) rows[r].push_back(__float2bfloat16(static_cast<int>(random() % 17) - 8));
    held[r] = OnDevice(rows[r]);
    out[r] = reinterpret_cast<T*>(written.emplace_back(num_tokens * features * sizeof(T)).at);
  }
  const auto check = [&](auto wire) {
    using W = decltype(wire);
    EachRank(serial, 1, [&](int r, cudaStream_t stream) {
      const auto kernel =
          features % 8 == 0 ? Combine<T, W, BulkSums<T, W>, Places> : Combine<T, W, AnySums<T, W>, Places>;
      return Launch(kernel, stream, x[r], reinterpret_cast<const char*>(held[r]), reinterpret_cast<char*>(out[r]),
                    features);
    });
    for (int r = 0; r < kRanks; ++r) {
      if (serial && r != 0) continue;
      const auto sums = OnHost(out[r], num_tokens * features);
      for (int t = 0; t < num_tokens; ++t) {
        for (int f = 0; f < features; ++f) {
          float want = 0;  // of small integers: exact in every type
          for (int k = 0; k < num_choices; ++k) {
            const int s = routes.slot[r][t * num_choices + k];
            if (s >= 0) want += __bfloat162float(rows[s / capacity][s % capacity * features + f]);
          }
          Require(__bfloat162float(sums[t * features + f]) == want, "combine", t);
        }
      }
    }
  };
  check(float{});
  check(__nv_bfloat16{});
  check(__half{});
  for (const Written& memory : written) memory.Check();
}

// `--serial`, or `--by-row` for these alone.
int main(int count, char** arguments) {
  const bool serial = count > 1 && !std::strcmp(arguments[1], "--serial");
  const bool by_row = count > 1 && !std::strcmp(arguments[1], "--by-row");
  std::mt19937 random(0);
  if (!by_row) {
    Run<ByToken>(serial, 1, 48, 0, 24, random);
    Run<ByToken>(serial, 4, 4096, 20, 1024, random);
    Run<ByToken>(serial, 1, 14, 3, 7, random);
    Run<ByToken>(serial, 8, 528, 8, 264, random);
    Run<ByToken>(serial, 2, 4096, 128, 4096, random);
    Run<ByToken>(serial, 8, 4096, 128, 4096, random);  // a warp has so many pieces that it flags several at once
    Run<ByToken>(serial, 1, 36864, 224, 18432, random);  // more than a warp's room
  }
  Run<ByRow>(serial, 1, 48, 0, 24, random);
  Run<ByRow>(serial, 7, 4096, 0, 1024, random);
  Run<ByRow>(serial, 2, 36864, 224, 18432, random);
  Run<ByRow>(serial, 15, 245760, 0, 61440, random);  // as of weights
  std::printf("ok\n");
}
