// What the kernels of weight gradients share: tiles of 256 columns of lhs and 256 of dy for a cluster of two blocks,
// which have half of the former each and share the latter; groups in order; results that leave by TMA.
//
// Compiled at run time after `hopper.cuh`, before a kernel's own text. Macros that come before both: WIDE (float32
// results) or HALF (float16 ones), STAGES (of the pipeline), STAGE_BYTES (bytes of each), STAGES_AT (where they begin),
// STAGED (where results are staged), HANDED (parts of a consumer's that there is room for) or OWN (strips of 128 bytes
// of them, else 0), BAND (of tiles of columns of lhs that run together), PASSING (results are the first to leave L2),
// SHARED (bytes), REGISTERS_PRODUCER and REGISTERS_CONSUMER, and perhaps PLACES, KEEPING and WAVES. INTERLEAVED: of the 16
// columns of lhs that a warp has, the sums of rows r and r + 8 are those of 2 r and 2 r + 1. CROSSWISE, of such sums of
// 16 bits: the result is [dy, lhs].

constexpr int CONSUMERS = 2;           // warpgroups that multiply
constexpr int THREADS = 128 + CONSUMERS * 128;
constexpr int BLOCK = 128;             // of 8 bits: rows of a step, and bytes of a line of an operand
constexpr int TILE_M = 128, TILE_N = 256;  // columns of lhs and of dy in a block's tile
constexpr int PART_M = 64, PART_N = 128;  // of a consumer's result
constexpr int PARTS = 2;
constexpr int SHARE = TILE_N / 2;      // of dy, which a block loads for both
constexpr int SUMS = PART_M * PART_N / 128;  // of a thread in a part
constexpr int SLICE = 32;              // of 8 bits: rows of one instruction
static_assert(fit(THREADS, CONSUMERS), "consumers would wait forever for registers");

// Shared memory, from its first multiple of 1024 bytes on: barriers and words, results, stages for operands; and at its
// end the table of groups.
constexpr int LINES = OWN ? 16 : 32;                // of 128 bytes of a result, that leave at once
constexpr int LIVE = 128;                           // how many groups have rows
constexpr int STRIPS = WIDE ? 4 : 2;                // of 128 bytes, of a part
constexpr int STRIP = PART_M * 128;
constexpr int STAGED_BYTES = (OWN ? OWN : HANDED * STRIPS) * STRIP;  // of a consumer
static_assert(STAGES_AT == STAGED + CONSUMERS * STAGED_BYTES && STAGE_BYTES % 1024 == 0, "as launched");

__device__ __forceinline__ void put_pair(u32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Of a result; what lies beyond it is left out.
__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int x, int y, int z) {
#if PASSING
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
      ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "l"(PASS) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
      ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
#endif
}

__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread stored has left shared memory.
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Writes the groups (start, end, index) to the table, 16 bytes each, larger ones first: tiles that run together are
// alike, and end together. Returns how many have rows. All threads.
__device__ __forceinline__ int order(const int* sizes, int num_groups, u32 smem, u32 table) {
  const u32 room = smem + STAGED;  // of what comes there later
  if (threadIdx.x == 0) put_word(smem + LIVE, 0);
  if (threadIdx.x < 32) read_sizes(sizes, num_groups, room);
  __syncthreads();
  int live = 0;
  for (int g = threadIdx.x; g < num_groups; g += THREADS) {
    const int4 mine = get(room + 16 * g);
    put(table + 16 * place_of(g, mine.x, room, num_groups), make_int4(mine.y, mine.y + mine.x, g, 0));
    live += mine.x > 0;
  }
  if (live) asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(smem + LIVE), "r"(live) : "memory");
  fence_shared();
  __syncthreads();
  return get_word(smem + LIVE);
}

// The tiles of a cluster, one after the other.
struct Tiles {
  u32 table;
  int num_m, num_n, items;  // num_m: of both blocks
  Divisor each, band;       // tiles of a group, and of a band
  Turns turns;
  int start, end, group, m, n;

  // Of `live` groups that have so many each.
  __device__ __forceinline__ Tiles(u32 smem, u32 table, int num_m, int num_n, int live, int each)
      : table(table), num_m(num_m), num_n(num_n), items(live * each), each{each}, band{BAND * num_n}, turns(smem) {}
  __device__ __forceinline__ Tiles(u32 smem, u32 table, int num_m, int num_n, int live)
      : Tiles(smem, table, num_m, num_n, live, num_m * num_n) {}

  __device__ __forceinline__ bool next() {
    const int item = turns.take(clusters_of_wave()).number();
    if (item >= items) return false;
    locate(begin(item));
    return true;
  }

  // The group of a tile; its number in it is returned.
  __device__ __forceinline__ int begin(int item) {
    int within;
    const int4 of = get(table + 16 * each.divide(item, within));
    start = of.x, end = of.y, group = of.z;
    return within;
  }

  // Columns of the group's tile of this number.
  __device__ __forceinline__ void locate(int within) {
    int inner, row;
    const int above = band.divide(within, inner) * BAND, high = min(num_m - above, BAND);
    const int column = Divisor{high}.divide(inner, row);
    m = ((above + row) * 2 + rank_in_cluster()) * TILE_M;
    n = column * TILE_N;
  }
};

// Of 8 bits, where a tile's first step begins: TMA begins with a multiple of 16 bytes in a line, and memory is read by 32.
__device__ __forceinline__ int first_row(const Tiles& tiles) { return tiles.start / SLICE * SLICE; }

// A word's bytes from `first` on and before `end` of their line; it begins with its `byte`.
__device__ __forceinline__ u32 live_bytes(int byte, int first, int end) {
  const int before = min(max(first - byte, 0), 4), live = min(max(end - byte, 0), 4);
  return (u32)((1ull << 8 * live) - 1) & ~(u32)((1ull << 8 * before) - 1);
}

// Zeros in those of the 16 bytes at `at` that come before `first` or from `end` on in their line, whatever they hold;
// they begin with its `byte`.
__device__ __forceinline__ void clear_unit(u32 at, int byte, int first, int end) {
  int4 v = get(at);
  int* words = (int*)&v;
#pragma unroll
  for (int w = 0; w < 4; w++) words[w] &= live_bytes(byte + w * 4, first, end);
  put(at, v);
}

// A unit of 16 bytes of an operand's line, in shared memory.
__device__ __forceinline__ u32 unit_at(u32 operand, int line, int unit) {
  return operand + line * BLOCK + (unit ^ line % 8) * 16;
}

// Stages sums of 64 x 128 or, of 16 bits, packed ones of 64 x 64: lines of 128 bytes, whose units of 16 bytes are
// swizzled by their number. A consumer.
#if WIDE
__device__ __forceinline__ void stage_sums(u32 staged, const float* sums, float factor) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = lane / 4 * (INTERLEAVED ? 2 : 1), other = INTERLEAVED ? 1 : 8;  // and that of the next two sums
  const u32 at = staged + (warp * 16 + line) * 128 + lane % 2 * 8, swizzle = (line % 8 ^ lane % 4 / 2) * 16;
#pragma unroll
  for (int j = 0; j < SUMS / 4; j++) {
    const u32 here = at + j / 4 * STRIP, unit = j % 4 * 32 ^ swizzle;
    put_pair(here + unit, sums[4 * j] * factor, sums[4 * j + 1] * factor);
    put_pair(here + other * 128 + (unit ^ other % 8 * 16), sums[4 * j + 2] * factor, sums[4 * j + 3] * factor);
  }
}
#else
constexpr int PACKED = 16;  // of a thread in a strip

#if CROSSWISE
// Of 64 columns of dy, which are the lines, two words for each eight.
__device__ __forceinline__ void stage_packed(u32 staged, const u32* packed) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, line = lane % 4 * 2, unit = warp * 2 + lane / 16;
  const u32 at = staged + line * 128 + lane / 4 % 4 * 4;
#pragma unroll
  for (int i = 0; i < PACKED; i++) put_word(at + (i / 2 * 8 + i % 2) * 128 + (unit ^ line + i % 2) * 16, packed[i]);
}
#else
__device__ __forceinline__ void stage_packed(u32 staged, const u32* packed) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = INTERLEAVED ? lane % 8 * 2 + lane / 8 % 2 : lane % 16;
  const u32 at = staged + (warp * 16 + line) * 128, swizzle = (line % 8 ^ lane / 16) * 16;
#pragma unroll
  for (int i = 0; i < PACKED; i += 4)
    put_matrices(at + (i * 8 ^ swizzle), packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
}
#endif
#endif

// The gradients of the groups without rows, each of them contiguous: each block of the launch has its share. One warp.
__device__ __forceinline__ void store_zeros(u8* out, u32 table, int live, int num_groups, int K, int N) {
  const u64 bytes = (u64)K * N * (WIDE ? 4 : 2);
  for (int i = live; i < num_groups; i++) {
    u8* const group = out + get(table + 16 * i).z * bytes;
#pragma unroll 4
    for (u64 at = (blockIdx.x * 32 + threadIdx.x % 32) * 16; at < bytes; at += gridDim.x * 32 * 16)
      store(group + at, make_int4(0, 0, 0, 0));
  }
}

// A tile whose sums are complete.
struct Done {
  int group = -1, m, n;
  static constexpr int columns = TILE_N;  // of dy

  __device__ __forceinline__ Done place() const { return *this; }
};

// The way out of a consumer's results: parts are staged in shared memory, from where TMA stores them.
struct Result {
  int consumer;
  u32 staged;
  const TensorMap* out;

  // All threads of the consumer are here.
  __device__ __forceinline__ void meet() const { asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory"); }

  // Where a part is staged: in strips of 128 bytes of its lines, units of 16 bytes swizzled by the line's number.
  __device__ __forceinline__ u32 stage(int part) const {
    if (part % HANDED == 0) {
      if (threadIdx.x % 128 == 0) wait_for_stores();
      meet();
    }
    return staged + part % HANDED * STRIPS * STRIP;
  }

  // A part is staged, and leaves with those before it; `to` is where the first one goes, the next one by a step on.
  template <int STEP_M, int STEP_N>
  __device__ __forceinline__ void leave(int part, Done to) const {
    if (part % HANDED < HANDED - 1) return;
    fence_shared();
    meet();
    if (threadIdx.x % 128) return;
#pragma unroll
    for (int strip = 0; strip < HANDED * STRIPS; strip++) {
      const int p = part / HANDED * HANDED + strip / STRIPS;
      for (int line = 0; line < PART_M; line += LINES)
        store_box(out, staged + strip * STRIP + line * 128, to.n + p * STEP_N + strip % STRIPS * (PART_N / STRIPS),
                  to.m + p * STEP_M + line, to.group);
    }
    end_stores();
  }
};

// The strips of shared memory that a consumer's pieces of 64 lines of 128 bytes leave through, one after the other.
#if OWN
// Each warp sends its 16 lines. No warp waits for another.
struct Way {
  Result result;
  int sent = 0;  // pieces

  // Where the next piece is staged: the one before has left.
  __device__ __forceinline__ u32 room(int) const {
    if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(OWN - 1) : "memory");
    __syncwarp();
    return result.staged + sent % OWN * STRIP;
  }

  // A piece is staged.
  template <class Tile>
  __device__ __forceinline__ void leave(u32, int piece, const Tile& to) {
    const int line = threadIdx.x % 128 / 32 * LINES;
    // Found anew: kept, it takes a register that products need.
    const u32 staged = result.staged + sent++ % OWN * STRIP + line * 128;
    fence_shared();
    __syncwarp();
    if (threadIdx.x % 32) return;
    const Done at = to.place();
    store_box(result.out, staged, at.n + piece * (PART_N / STRIPS), at.m + line, at.group);
    end_stores();
  }
};
#else
// There is room for two; tiles have an even number of pieces.
struct Way {
  Result result;

  // Where the next piece is staged: the one before the last has left.
  __device__ __forceinline__ u32 room(int piece) const {
    const u32 staged = result.staged + piece % 2 * STRIP;
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    result.meet();
    return staged;
  }

  // A piece is staged.
  template <class Tile>
  __device__ __forceinline__ void leave(u32 staged, int piece, const Tile& to) const {
    fence_shared();
    result.meet();
    if (threadIdx.x % 128) return;
    const Done at = to.place();
    const int column = at.n + piece * (PART_N / STRIPS);
    for (int line = 0; line < PART_M; line += LINES)
      if (CROSSWISE)
        store_box(result.out, staged + line * 128, at.m, column + line, at.group);
      else
        store_box(result.out, staged + line * 128, column, at.m + line, at.group);
    end_stores();
  }
};
#endif

#if WIDE && OWN
// Stages 64 x 32 sums: lines of 128 bytes, whose units of 16 bytes are swizzled by their number. Odd lines take other
// columns first, for all banks: of the same ones, two lines beside each other have the same two units. A consumer.
__device__ __forceinline__ void stage_strip(u32 staged, const float* sums) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // addresses are found here each time: products need the registers
  const int warp = threadIdx.x % 128 / 32, line = lane / 4;
  const bool odd = line % 2;
  const u32 at = staged + (warp * 16 + line) * 128 + lane % 2 * 8, swizzle = (line ^ lane % 4 / 2 ^ line % 2 * 4) * 16;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {  // 8 columns and their next but one; both lines
    const float *x = sums + i, *y = x + 8;
    const u32 to = at + i % 4 / 2 * 8 * 128, c = i / 4 * 32;
    put_pair(to + (c ^ swizzle), odd ? y[0] : x[0], odd ? y[1] : x[1]);
    put_pair(to + (c + 64 ^ swizzle), odd ? x[0] : y[0], odd ? x[1] : y[1]);
  }
}

#endif

// A tile's result of a consumer, up to 64 x 256, on its way out: rounded, in registers, of which a piece leaves in each
// step of the next tile. `Tile`: `Done`, or what says so when it is asked.
template <class Tile>
struct Sender {
  static constexpr int WIDTH = PART_N / STRIPS;  // of a piece
  Way way;
  Tile to;
#if WIDE
  __device__ __forceinline__ void send_some() {}
  __device__ __forceinline__ void send_rest() {}

  // There are no registers in which it could wait.
  __device__ __forceinline__ void take(const float (&sums)[PARTS * SUMS], float factor, Tile tile) {
    send_part<0>(sums, factor, tile);
    if (tile.columns > PART_N) send_part<1>(sums, factor, tile);
  }

  // The first 64 columns of a part leave with the others.
  __device__ __forceinline__ void send_columns(int quarter, const float (&sums)[PARTS * SUMS], const Tile& tile) {
    if (quarter == 0) send_part<0>(sums, 1, tile);
    if (quarter == 2) send_part<1>(sums, 1, tile);
  }

  template <int PART>
  __device__ __forceinline__ void send_part(const float* sums, float factor, const Tile& tile) {
#if OWN
#pragma unroll
    for (int piece = PART * STRIPS; piece < (PART + 1) * STRIPS; piece++) {
      const u32 staged = way.room(piece);
      stage_strip(staged, sums + piece * WIDTH / 2);
      way.leave(staged, piece, tile);
    }
#else
    stage_sums(way.result.stage(PART), sums + PART * SUMS, factor);
    way.result.leave<0, PART_N>(PART, tile);
#endif
  }
#else
  static constexpr int PIECES = PARTS * STRIPS;
  int piece = PIECES;  // to send next
  u32 packed[PIECES * PACKED];

  static __device__ __forceinline__ u32 packed_of(const float* sums, int i, float factor) {
    const int first = CROSSWISE ? i / 2 * 4 + i % 2 : 2 * i, second = first + (CROSSWISE ? 2 : 1);
    return pack(sums[first] * factor, sums[second] * factor);
  }

  __device__ __forceinline__ void take(const float (&sums)[PARTS * SUMS], float factor, Tile tile) {
#pragma unroll
    for (int i = 0; i < PIECES * PACKED; i++) packed[i] = packed_of(sums, i, factor);
    to = tile, piece = 0;
  }

  // A quarter of them at once, where there are no registers in which a result could wait.
  __device__ __forceinline__ void send_columns(int quarter, const float (&sums)[PARTS * SUMS], const Tile& tile) {
    static_assert(PIECES == 4);
    u32 now[PACKED];
#pragma unroll
    for (int i = 0; i < PACKED; i++) now[i] = packed_of(sums, quarter * PACKED + i, 1);
    const u32 staged = way.room(quarter);
    stage_packed(staged, now);
    way.leave(staged, quarter, tile);
  }

  __device__ __forceinline__ void send_piece() {
    const u32 staged = way.room(piece);
    switch (piece) {
      case 0: stage_packed(staged, packed); break;
      case 1: stage_packed(staged, packed + PACKED); break;
      case 2: stage_packed(staged, packed + 2 * PACKED); break;
      default: stage_packed(staged, packed + 3 * PACKED); break;
    }
    way.leave(staged, piece, to);
    piece++;
  }

  __device__ __forceinline__ void send_some() {
    if (piece < to.columns / WIDTH) send_piece();
  }

  __device__ __forceinline__ void send_rest() {
    while (piece < to.columns / WIDTH) send_piece();
  }
#endif
};
