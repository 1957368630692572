// Rows of 8 bits times each group's weight for Hopper, whose products of 128 of the contraction are added in float32: what
// `split_gemm.cu` and `block_scaled_activation.cu` share. Each product has scales of its own (BLOCKS), or all of a
// group share one: the tensor cores alone would add them in about 14 bits.
//
// A block has tiles of 128 rows and of twice 128 columns, left and right, a step of 128 of the contraction at a time.
// One producer warp loads; two consumer warpgroups multiply 64 rows each, 128 columns at a time, for products of more
// would not fit into registers beside all sums; one warp for each consumer stores. One consumer scales a product and
// adds it while the other multiplies. While a product is under way, what the next one needs is computed, read or waited
// for: it begins right after the sums. Of 16 bits, both halves of a tile's results have room in shared memory, so that a
// consumer waits for none to leave. Blocks share no operands in clusters: shared memory is busiest, with 96 KB read by
// products and 48 KB written by loads in a step, 1152 of its clocks, when the tensor cores take 1024; multicast would
// save neither, and its stages wait for both blocks.
//
// A term of low rank may be part of the sums, out[r] += u[r] @ b[group of r]^T, in 16 bits: a tile's first steps, each
// of 64 of the rank, whose bytes are those of 128 in 8 bits.
//
// Rows may be those of tokens at an index (GATHERS), zeros where there is none: two producer warps then copy them by
// `cp.async`, and leave their numbers in shared memory for the consumers, which read their scales.
//
// Compiled at run time, without headers, after `hopper.cuh` and before a kernel's own text. Macros that come before
// both: WIDE (float32 results) or HALF (float16 ones), BLOCKS, LOW_RANK (the rank of such a term, 0 without one), GATHERS,
// STAGES (of the pipeline), BAND (of tiles of rows that run together), ROOMS (parts of a consumer's results that are
// staged at most), SCRATCH (bytes of shared memory for what comes behind the sums), REGISTERS_PRODUCER and
// REGISTERS_CONSUMER. What stands alone on a line is replaced: INSTRUCTIONS (`multiply`, and with a term
// `multiply_low_rank`).

constexpr int CONSUMERS = 2;               // warpgroups that multiply
constexpr int THREADS = 128 + CONSUMERS * 128;
constexpr int BLOCK = 128;                 // of the contraction, and columns of a weight, that share a scale
constexpr int TILE_M = 128, TILE_N = 256, PART_M = TILE_M / CONSUMERS, PART_N = BLOCK;
constexpr int SUMS = PART_M * PART_N / 128;  // of a thread in a part
constexpr int SLICE = 32;                  // of the contraction, of one instruction
constexpr int SLICES = BLOCK / SLICE;
constexpr int RANK_STEP = BLOCK / 2, LOW_RANK_STEPS = (LOW_RANK + RANK_STEP - 1) / RANK_STEP;
// Of 16 bytes, that a thread stores at once.
constexpr int BURST = REGISTERS_PRODUCER < 40 ? 2 : REGISTERS_PRODUCER < 56 ? 4 : 8;
static_assert(fit(THREADS, CONSUMERS), "consumers would wait forever for registers");

// Shared memory: results, stages for operands, barriers, and the table of groups.
constexpr int STRIP = PART_M * 128;        // lines of 128 bytes of a result
constexpr int STRIPS = WIDE ? 4 : 2;       // of a part
constexpr int ROOM = STRIPS * STRIP;        // of a part
constexpr int STAGED_BYTES = ROOMS * ROOM;  // of a consumer
constexpr int STAGES_AT = CONSUMERS * STAGED_BYTES, OF_RHS = TILE_M * BLOCK, STAGE_BYTES = OF_RHS + TILE_N * BLOCK;
constexpr int BARRIERS = STAGES_AT + STAGES * STAGE_BYTES, ROWS_AT = BARRIERS + 320;  // the tokens of a stage's rows
constexpr int SCRATCH_AT = ROWS_AT + (GATHERS ? STAGES * TILE_M * 4 : 0), TABLE = SCRATCH_AT + SCRATCH;
constexpr int READY = 128, FREE = 160, WHICH = 192;  // among the barriers
static_assert(STAGES >= 2, "a consumer waits for the next stage before it frees one");
static_assert(STAGES <= 8, "as many barriers have room");
static_assert(!(GATHERS && LOW_RANK), "rows of the term lie side by side");

INSTRUCTIONS

__device__ __forceinline__ int2 get_pair(u32 from) {
  int2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// Of the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int before = __shfl_up_sync(~0u, x, i);
    if (lane >= i) x += before;
  }
  return x;
}

// Writes to the table, 8 bytes each, of each group how many tiles of rows and how many rows come before it, and at last
// those of all. One warp.
__device__ __forceinline__ void count_tiles(const int* sizes, int num_groups, u32 table) {
  const int lane = threadIdx.x % 32;
  int tiles = 0, rows = 0;
  put_pair(table, 0, 0);
  for (int first = 0; first < num_groups; first += 32) {
    const int g = first + lane, size = g < num_groups ? __ldg(sizes + g) : 0;
    const int last_tile = tiles + sum_up_to((size + TILE_M - 1) / TILE_M), end = rows + sum_up_to(size);
    if (g < num_groups) put_pair(table + 8 * (g + 1), last_tile, end);
    tiles = __shfl_sync(~0u, last_tile, 31), rows = __shfl_sync(~0u, end, 31);
  }
}

// The tiles of a block, one after the other. All of a warp.
struct Tiles {
  u32 table;
  int num_groups, num_n;
  int item = blockIdx.x;
  int group, row, end, n;  // end: of the group's rows; n: of tiles of columns

  __device__ __forceinline__ bool next() {
    const int num_m = get_word(table + 8 * num_groups);
    if (item >= num_m * num_n) return false;
    // Tiles that run together share rows and columns, so that both stay in L2.
    const int band = item / (BAND * num_n), inner = item % (BAND * num_n), high = min(num_m - band * BAND, BAND);
    const int m = band * BAND + inner % high;
    n = inner / high;
    item += gridDim.x;
    group = 0;
    for (int first = 1; first <= num_groups; first += 32) {
      const int g = first + threadIdx.x % 32;
      const u32 before = __ballot_sync(~0u, g <= num_groups && get_word(table + 8 * g) <= m);
      group += __popc(before);
      if (before != ~0u) break;
    }
    const int2 here = get_pair(table + 8 * group);
    row = here.y + (m - here.x) * TILE_M, end = get_word(table + 8 * group + 12);
    return true;
  }
};

// What each kernel says of a tile's columns.
//
// The left and the right 128 columns of its n-th tile, of so many parts of 128.
struct Halves {
  int left, right;
};
__device__ __forceinline__ Halves halves_of(int n, int parts);
// One thread loads both, from step `k` of the contraction on.
__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int k, Halves halves, int group);
// A word of its own about a tile: the n-th, with so many rows up to its group's end.
__device__ __forceinline__ int more_of(int n, int rows);

// A tile's first stage says which tile it is: its first row, where the scales of its left columns (-1 for no tile, at
// the end) and of its right columns are, or its group, and the word of the kernel.
__device__ __forceinline__ u32 which(const Ring& ring) { return ring.smem + WHICH + 16 * ring.stage; }

// What it says, of results with so many parts.
__device__ __forceinline__ int4 note_of(const Tiles& tiles, Halves halves, int parts, int steps) {
  if (!BLOCKS) return make_int4(tiles.row, tiles.group, tiles.group, more_of(tiles.n, tiles.end - tiles.row));
  const int first = tiles.group * parts;
  return make_int4(tiles.row, (first + halves.left) * steps, (first + halves.right) * steps,
                   more_of(tiles.n, tiles.end - tiles.row));
}

#if GATHERS
__device__ __forceinline__ u32 token_of_row(const Ring& ring, int row) {
  return ring.smem + ROWS_AT - BARRIERS + (ring.stage * TILE_M + row) * 4;
}

// Rows of tokens of so many bytes, at an index.
struct Tokens {
  const u8* data;
  const int* index;
  int count, bytes, num_rows;
};

// Of two warps each copies half of a tile's rows, eight lanes a row's line, so four rows at once; the first one loads
// the weight, too. A tile's tokens are found while the one before it is copied.
__device__ __forceinline__ void gather_tiles(
    Tokens tokens, const TensorMap* weight, int half, Tiles tiles, int steps, int width, Ring ring) {
  constexpr int OWN = TILE_M / 2, TURNS = OWN / 4;
  const int lane = threadIdx.x % 32, unit = lane % 8, line = lane / 8, parts = (width + PART_N - 1) / PART_N;
  const u32 to = (half * OWN + line) * BLOCK;
  const bool loads = half == 0 && lane == 0;
  int found[OWN / 32];  // of every 32nd row; -1: no token
  auto next = [&] {
    if (!tiles.next()) return false;
#pragma unroll
    for (int i = 0; i < OWN / 32; i++) {
      const int at = tiles.row + half * OWN + i * 32 + lane, token = at < tokens.num_rows ? __ldg(tokens.index + at) : -1;
      found[i] = (u32)token < (u32)tokens.count ? token : -1;
    }
    return true;
  };
  bool more = next();
  while (more) {
    u32 from[TURNS], exists = 0;  // in units
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int token = __shfl_sync(~0u, found[i / 8], i % 8 * 4 + line);
      from[i] = max(token, 0) * (tokens.bytes / UNIT) + unit;
      exists |= (u32)(token >= 0) << i;
    }
    // Its first stage says which tile it is.
    const Halves halves = halves_of(tiles.n, parts);
    const int group = tiles.group;
    wait_barrier(ring.empty(), ring.parity);
#pragma unroll
    for (int i = 0; i < OWN / 32; i++) put_word(token_of_row(ring, half * OWN + i * 32 + lane), found[i]);
    if (loads) put(which(ring), note_of(tiles, halves, parts, steps));
    __syncwarp();
    more = next();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const u32 at = ring.at(), ready = ring.full();
      wait_barrier(ring.empty(), ring.parity);
      if (loads) {
        expect_bytes(ready, STAGE_BYTES - OF_RHS);
        load_weight(weight, at + OF_RHS, ready, step * BLOCK, halves, group);
      }
      if (half == 1 && lane == 0) arrive(ready);
      const u8* here = tokens.data + step * BLOCK;
      const u32 live = step * BLOCK + unit * UNIT < tokens.bytes ? exists : 0;
#pragma unroll
      for (int i = 0; i < TURNS; i++)
        copy_unit(at + to + i * 4 * BLOCK + (unit ^ i % 2 * 4 ^ line) * UNIT, here + (u64)from[i] * UNIT, live >> i & 1);
      arrive_after_copies(ready);
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  if (loads) put(which(ring), make_int4(0, -1, 0, 0));
  if (lane == 0) arrive(ring.full());
  arrive(ring.full());
}
#else
// Rows that lie side by side, and weights.
struct Operands {
  const TensorMap *lhs, *rhs;
};

// One warp loads both.
__device__ __forceinline__ void load_tiles(
    Operands operands, Operands low_rank, Tiles tiles, int steps, int width, Ring ring) {
  const bool one = threadIdx.x % 32 == 0;
  const int parts = (width + PART_N - 1) / PART_N;
  while (tiles.next()) {
    const Halves halves = halves_of(tiles.n, parts);
    const int4 tile = note_of(tiles, halves, parts, steps);
#pragma unroll 1
    for (int step = -LOW_RANK_STEPS; step < steps; step++) {
      const u32 at = ring.at(), ready = ring.full();
      wait_barrier(ring.empty(), ring.parity);
      if (one) {
        if (step == -LOW_RANK_STEPS) put(which(ring), tile);
        expect_bytes(ready, STAGE_BYTES);
        const bool low = LOW_RANK && step < 0;
        const int k = low ? (step + LOW_RANK_STEPS) * RANK_STEP : step * BLOCK;
        load(low ? low_rank.lhs : operands.lhs, at, ready, k, tiles.row);
        load_weight(low ? low_rank.rhs : operands.rhs, at + OF_RHS, ready, k, halves, tiles.group);
      }
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  if (one) put(which(ring), make_int4(0, -1, 0, 0)), arrive(ring.full());
}
#endif

// Read anew, so that nothing which follows from it is kept in registers, of which the sums leave few.
__device__ __forceinline__ u32 thread_of_consumer() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 128;
}

// A room for a part of a consumer's results on their way out, and its barriers: whether it is there, and whether the room
// is free.
struct Room {
  u32 ready, free, at;
};

// A consumer leaves a part in a room: in strips of 128 bytes of its lines, units of 16 bytes swizzled by the line's
// number.
__device__ __forceinline__ void hand_over(Room room, u32 parity, const float (&sums)[SUMS]) {
  const u32 thread = thread_of_consumer(), lane = thread % 32, warp = thread / 32;
  wait_barrier(room.free, parity);
#if WIDE
  const u32 at = room.at + (warp * 16 + lane / 4) * 128 + lane % 2 * 8;
  const u32 swizzle = (lane / 4 ^ lane % 4 / 2) * 16;
#pragma unroll
  for (int j = 0; j < SUMS / 4; j++) {
    const u32 here = at + j / 4 * STRIP + (j % 4 * 32 ^ swizzle);
    put_pair(here, __float_as_int(sums[4 * j]), __float_as_int(sums[4 * j + 1]));
    put_pair(here + 8 * 128, __float_as_int(sums[4 * j + 2]), __float_as_int(sums[4 * j + 3]));
  }
#else
  const u32 at = room.at + (warp * 16 + lane % 16) * 128, swizzle = (lane % 8 ^ lane / 16) * 16;
#pragma unroll
  for (int j = 0; j < SUMS; j += 8)
    put_matrices(at + j / 32 * STRIP + (j % 32 * 4 ^ swizzle), pack(sums[j], sums[j + 1]), pack(sums[j + 2], sums[j + 3]),
                 pack(sums[j + 4], sums[j + 5]), pack(sums[j + 6], sums[j + 7]));
#endif
  __syncwarp();
  if (lane == 0) arrive(room.ready);
}

// A warp stores a part to `to`, but for lines and bytes of them beyond so many.
__device__ __forceinline__ void store_part(Room room, u32 parity, u8* to, u32 pitch, int lines, int bytes) {
  constexpr int UNITS = STRIPS * 8, AT_ONCE = 32 / UNITS;  // of a line; lines
  const int lane = threadIdx.x % 32, unit = lane % UNITS, line = lane / UNITS;
  const u32 from = room.at + unit / 8 * STRIP + line * 128;
  const int live = unit * 16 < bytes ? lines - line : 0;
  to += (u64)line * pitch + unit * 16;
  wait_barrier(room.ready, parity);
#pragma unroll 1
  for (int first = 0; first < PART_M; first += BURST * AT_ONCE) {
    int4 v[BURST];
#pragma unroll
    for (int i = 0; i < BURST; i++) {
      const int here = first + i * AT_ONCE;
      v[i] = get(from + here * 128 + (unit % 8 ^ (line + here) % 8) * 16);
    }
#pragma unroll
    for (int i = 0; i < BURST; i++, to += AT_ONCE * pitch)
      if (first + i * AT_ONCE < live) store(to, v[i]);
  }
  __syncwarp();
  if (lane == 0) arrive(room.free);
}

// Begins the product of a consumer's rows and of 128 columns, which these descriptors say.
__device__ __forceinline__ void begin(float (&product)[SUMS], u64 of_rows, u64 of_columns) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < SLICES; k++)
    multiply(product, of_rows + k * SLICE / 16, of_columns + k * SLICE / 16, k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void add(
    float (&sums)[SUMS], const float (&product)[SUMS], float of_upper, float of_lower) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = fmaf(product[i], i % 4 < 2 ? of_upper : of_lower, sums[i]);
}

__device__ __forceinline__ void clear(float (&sums)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0;
}

#if LOW_RANK
// Adds the term of low rank to a tile's sums. Its first stage is full, as the one after its last then is.
__device__ __forceinline__ void add_low_rank(float (&left)[SUMS], float (&right)[SUMS], int mine, Ring& ring) {
#pragma unroll
  for (int step = 0; step < LOW_RANK_STEPS; step++) {
    const u64 of_rows = descriptor(ring.at() + mine), of_columns = descriptor(ring.at() + OF_RHS);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < SLICES; k++) {
      if (step * RANK_STEP + k * SLICE / 2 >= LOW_RANK) break;
      const u64 rows = of_rows + k * SLICE / 16, columns = of_columns + k * SLICE / 16;
      multiply_low_rank(left, rows, columns, 1);
      multiply_low_rank(right, rows, columns + PART_N * BLOCK / 16, 1);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    finish(left), finish(right);
    if (threadIdx.x % 32 == 0) arrive(ring.empty());
    ring.next();
    wait_barrier(ring.full(), ring.parity);
  }
}
#endif

#if BLOCKS
// `x` of another lane.
__device__ __forceinline__ float from_lane(float x, u32 lane) {
  float of_lane;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xFFFFFFFF;" : "=f"(of_lane) : "f"(x), "r"(lane));
  return of_lane;
}

// A thread's scales of a tile: of its two rows, and of the weight's columns on the left and on the right. A row's four
// lanes hold those of four steps, half a warp those of 16 of the weight. The next ones are read while the step before
// them is multiplied: a read takes longer than a product.
struct Scales {
  static constexpr int OF_ROW = 4, OF_WEIGHT = 16;
  static constexpr u32 NONE = ~0u;
  const float *rows, *weights;
  int consumer, num_rows, steps;
  u32 upper_at, lower_at, weight_at;  // where a lane's first scales of the tile are
  float upper, lower, weight;

  // To the tile of this stage; whether there is one. What lies beyond the last row is not stored: any scale will do.
  __device__ __forceinline__ bool move(const Ring& ring) {
    const int4 tile = get(which(ring));
    const u32 thread = thread_of_consumer(), lane = thread % 32;
#if GATHERS
    const int row = consumer * PART_M + thread / 32 * 16 + lane / 4;
    const int upper_row = get_word(token_of_row(ring, row)), lower_row = get_word(token_of_row(ring, row + 8));
    upper_at = upper_row < 0 ? NONE : upper_row * steps + lane % OF_ROW;
    lower_at = lower_row < 0 ? NONE : lower_row * steps + lane % OF_ROW;
#else
    const int row = tile.x + consumer * PART_M + thread / 32 * 16 + lane / 4;
    upper_at = min(row, num_rows - 1) * steps + lane % OF_ROW;
    lower_at = min(row + 8, num_rows - 1) * steps + lane % OF_ROW;
#endif
    weight_at = (lane < OF_WEIGHT ? tile.y : tile.z) + lane % OF_WEIGHT;
    // Shuffled, so that the compiler knows it to be the same in a warp.
    return __shfl_sync(~0u, tile.y, 0) >= 0;
  }

  // A row without a token has no scale.
  __device__ __forceinline__ float of_row(u32 first, int step) const {
    return GATHERS && first == NONE ? 0 : read_scale(rows + (first + step));
  }

  // Those from this step on, if they are not there.
  __device__ __forceinline__ void read(int step) {
    if (step % OF_ROW != 0 || step >= steps) return;
    const int left = steps - step, lane = thread_of_consumer() % 32;
    if (lane % OF_ROW < left) upper = of_row(upper_at, step), lower = of_row(lower_at, step);
    if (step % OF_WEIGHT == 0 && lane % OF_WEIGHT < left) weight = read_scale(weights + (weight_at + step));
  }

  // What a step's products are multiplied by, at first on the left.
  __device__ __forceinline__ float4 of(u32 step) const {
    const u32 here = threadIdx.x & 28 | step % OF_ROW;
    const float of_upper = from_lane(upper, here), of_lower = from_lane(lower, here);
    const float left = from_lane(weight, step % OF_WEIGHT), right = from_lane(weight, OF_WEIGHT + step % OF_WEIGHT);
    return make_float4(of_upper * left, of_lower * left, of_upper * right, of_lower * right);
  }
};
#else
// The scale of a tile's group. A row without a token is zeros.
struct Scales {
  const float *rows, *weights;
  int consumer, num_rows, steps;
  float of_rows, of_weight;

  // To the tile of this stage; whether there is one.
  __device__ __forceinline__ bool move(const Ring& ring) {
    const int group = __shfl_sync(~0u, get(which(ring)).y, 0);
    if (group >= 0) of_rows = read_scale(rows + group), of_weight = read_scale(weights + group);
    return group >= 0;
  }

  __device__ __forceinline__ void read(int) {}

  __device__ __forceinline__ float4 of(u32) const {
    const float factor = product_of_scales(of_rows, of_weight);
    return make_float4(factor, factor, factor, factor);
  }
};
#endif

// `result.begin(ring)` may read what a tile's first stage says; `result.take(left, right)` takes a tile's sums and clears
// them.
template <class Taker>
__device__ __forceinline__ void multiply_tiles(Scales scales, int consumer, Ring ring, Taker result) {
  float left[SUMS], right[SUMS], product[SUMS];
  wait_barrier(ring.full(), ring.parity);
  if (GATHERS) fence_shared();
  bool live = scales.move(ring);
  if (!live) return;
  result.begin(ring);
  scales.read(0);
  clear(left), clear(right);
  int step = 0;
  const int mine = consumer * PART_M * BLOCK;
#if LOW_RANK
  add_low_rank(left, right, mine, ring);
#endif
  u64 of_rows = descriptor(ring.at() + mine), of_columns = descriptor(ring.at() + OF_RHS);
  float4 factors = scales.of(0), next;
#pragma unroll 1
  while (true) {
    begin(product, of_rows, of_columns);
    finish(product);
    add(left, product, factors.x, factors.y);
    begin(product, of_rows, of_columns + PART_N * BLOCK / 16);
    const u32 empty = ring.empty();
    ring.next(), step++;
    of_rows = descriptor(ring.at() + mine), of_columns = descriptor(ring.at() + OF_RHS);
    asm volatile("" : "+l"(of_rows), "+l"(of_columns));  // computed here, while a product is under way
    wait_barrier(ring.full(), ring.parity);
    if (GATHERS) fence_shared();  // rows were copied by threads
    if (step < scales.steps) {
      next = scales.of(step);
      scales.read(step + 1);
    } else {
      step = 0;
      live = scales.move(ring);
      if (live) scales.read(0);
    }
    finish(product);
    if (threadIdx.x % 32 == 0) arrive(empty);
    add(right, product, factors.z, factors.w);
    if (step == 0) {
      result.take(left, right);
      if (!live) break;
      result.begin(ring);
#if LOW_RANK
      add_low_rank(left, right, mine, ring);
      of_rows = descriptor(ring.at() + mine), of_columns = descriptor(ring.at() + OF_RHS);
#endif
      next = scales.of(0);
    }
    factors = next;
  }
}

// Barriers of a block, and the table of groups. All threads.
__device__ __forceinline__ void begin_block(
    u32 smem, int warp, const int* sizes, int num_groups, const TensorMap* weight, const TensorMap* rows) {
  if (threadIdx.x == 32) {
    if (!GATHERS) prefetch_descriptor(rows);
    prefetch_descriptor(weight);
    for (int i = 0; i < STAGES; i++) {
      init_barrier(smem + BARRIERS + FULL + 8 * i, GATHERS ? 2 + 64 : 1);
      init_barrier(smem + BARRIERS + EMPTY + 8 * i, CONSUMERS * 4);
    }
    for (int i = 0; i < CONSUMERS * ROOMS; i++) {
      init_barrier(smem + BARRIERS + READY + 8 * i, 4);
      init_barrier(smem + BARRIERS + FREE + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 0) count_tiles(sizes, num_groups, smem + TABLE);
  __syncthreads();
}
