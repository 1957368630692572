// Rows of 16 bits, or of 8 with a scale for each group, times each group's weight for Hopper, handed tile by tile to a
// warpgroup that does what comes behind: what `gathered_activation.cu` and `gathered_activation_grad.cu` share.
//
// A cluster of two blocks works on 256 rows of a group and on 256 columns; each block has 128 of the rows, and the two
// share the weight by multicast. In a block a producer warpgroup loads: its threads copy rows by `cp.async` from where
// an index says, or one of them loads them by TMA; it loads the weight by TMA. Two consumer warpgroups multiply 64 rows
// each. They hand results, rounded, to a fourth warpgroup in two parts of 128 columns: one when a tile ends, which
// leaves registers for the other until the next tile is under way. The fourth one works on them, while the tensor cores
// go on.
//
// Products of 128 of the contraction may be added in float32 (SPLITS), 64 columns at a time: no more fit beside all sums.
// There is then room for both parts of a tile, so that none waits in registers.
//
// Compiled at run time, without headers, after `hopper.cuh` and before a kernel's own text. Macros that come before
// both: HALF, EIGHT_BITS (of an operand's numbers), SPLITS, GATHERS (rows are found by an index), SHARED (bytes), STAGES,
// and the registers of each role. INSTRUCTION, which stands alone on a line, is replaced by `multiply`.

constexpr int CONSUMERS = 2;             // warpgroups that multiply
constexpr int THREADS = 256 + CONSUMERS * 128;
constexpr int LINE = 128;                // bytes of the contraction a step, the width of a swizzle
constexpr int STEP = EIGHT_BITS ? LINE : LINE / 2;  // numbers of it
constexpr int PANEL = 64 * LINE;         // 64 columns of the weight, a step of the contraction
constexpr int PART = 64;                 // rows of a consumer
constexpr int ROWS = CONSUMERS * PART;   // of a block's tile
constexpr int COLUMNS = 256;             // of it
constexpr int OF_ROWS = COLUMNS / 64 * PANEL;  // in a stage, where rows begin
constexpr int STAGE_BYTES = OF_ROWS + ROWS * LINE;
constexpr int SUMS = COLUMNS / 2;        // of a thread
constexpr int PITCH = COLUMNS;           // bytes of a staged row: 128 columns, 16 bits each
constexpr int REGISTERS = REGISTERS_PRODUCER + REGISTERS_STORER + CONSUMERS * REGISTERS_CONSUMER;
static_assert(REGISTERS * 128 <= 65536, "consumers would wait forever for registers");

// Shared memory, from its first multiple of 1024 bytes on: barriers and words, results on their way, stages for
// operands; and at its end where each group ends.
constexpr int ROOM = ROWS * PITCH, ROOMS = SPLITS ? 2 : 1;  // of a part; each has two barriers
constexpr int STAGED_FULL = 128, STAGED_EMPTY = 144, WHICH = 512, NOTE = 640, STAGED = 1024;
constexpr int STAGES_AT = STAGED + ROOMS * ROOM;
constexpr int END = -1;  // as rows: there is no other tile

// What each kernel says of a tile's 256 columns.
//
// One thread of each block loads its half of them, for both.
__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int rank, int width, int4 tile, int step);
// Where a half of them begins, of a stage and a part of its contraction.
__device__ __forceinline__ u64 weight_at(u32 stage, int half, int k);
// Where the i-th pair of sums is, of those of a part.
__device__ __forceinline__ int pair_of(int part, int i);
__device__ void multiply(float* d, u64 rows, u64 columns, int accumulate);

INSTRUCTION

// Writes where each group ends to `ends`. One warp.
__device__ __forceinline__ void find_ends(const int* sizes, int num_groups, u32 ends) {
  const int lane = threadIdx.x % 32;
  int start = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int g = first + lane;
    int end = g < num_groups ? __ldg(sizes + g) : 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    end += start;
    if (g < num_groups) put_word(ends + 4 * g, end);
    start = __shfl_sync(~0u, end, 31);
  }
}

// A block's tiles: first rows, how many, and the first column. Clusters take columns of the same rows, then rows of the
// same group.
struct Tiles {
  u32 ends;
  int num_groups, num_columns, apart;
  int group = -1, first = 0, count = 0, item, start = 0, size = 0;
  int row, rows, column;

  // A tile's columns are so many `apart` from the next one's.
  __device__ __forceinline__ Tiles(u32 ends, int num_groups, int width, int apart)
      : ends(ends), num_groups(num_groups), num_columns(width / apart), apart(apart), item(place_of_cluster()) {}

  __device__ __forceinline__ bool next() {
    while (item >= first + count) {
      if (++group == num_groups) return false;
      first += count, start += size;
      size = get_word(ends + 4 * group) - start;
      count = (size + 2 * ROWS - 1) / (2 * ROWS) * num_columns;
    }
    int within;
    const int pair = Divisor{num_columns}.divide(item - first, within);
    const int both = min(size - pair * 2 * ROWS, 2 * ROWS), own = (both + 2 * PART - 1) / (2 * PART) * PART;
    const bool second = rank_in_cluster();
    row = start + pair * 2 * ROWS + (second ? own : 0);
    rows = second ? max(both - own, 0) : min(own, both);
    column = within * apart;
    item += gridDim.x / 2;
    return true;
  }
};

// Of each group of rows and of its weight, if they have 8 bits.
struct Scales {
  const float *lhs, *rhs;

  __device__ __forceinline__ float2 read(int group) const {
    return EIGHT_BITS ? make_float2(read_scale(lhs + group), read_scale(rhs + group)) : make_float2(1, 1);
  }
};

// A tile as its first stage tells consumers: with what its products are multiplied by in place of its group.
__device__ __forceinline__ int4 told(int4 tile, float2 scales) {
  return make_int4(tile.x, tile.y, tile.z, __float_as_int(product_of_scales(scales.x, scales.y)));
}

__device__ __forceinline__ u32 which(const Ring& ring) { return ring.smem + WHICH + 16 * ring.stage; }

// Of 128 rows each of four warps has a quarter: those whose lines its lanes copy or store, eight lanes each.
struct RowOfLane {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

  // The row of which this lane knows more.
  __device__ __forceinline__ int own() const { return lane / 4 * 16 + warp * 4 + lane % 4; }
  // The row whose line this lane takes in a turn, and the lane that knows more of it.
  __device__ __forceinline__ int taken(int turn) const { return turn * 16 + warp * 4 + lane / 8; }
  __device__ __forceinline__ int lane_of_taken(int turn) const { return turn * 4 + lane / 8; }
};

// All 128 threads: eight of them copy a row's line, sixteen rows at once, which have one place in the swizzle.
// What it knows of a row of the next tile is read while it copies this one.
__device__ __forceinline__ void load_tiles(
    const TensorMap* weight, const u8* tokens, const int* index, int num_tokens, Scales scales, int steps, int width,
    Tiles tiles, Ring ring) {
  constexpr int TURNS = ROWS / 16;
  const RowOfLane rows;
  const int unit = threadIdx.x % 8, rank = rank_in_cluster();
  const u32 to = OF_ROWS + rows.taken(0) * LINE + (unit ^ rows.taken(0) % 8) * UNIT;
  const u32 pitch = steps * (LINE / UNIT);  // of a token, in units
  auto place_of_own = [&](bool more) {
    const int place = more && rows.own() < tiles.rows ? __ldg(index + tiles.row + rows.own()) : -1;
    return (u32)place < (u32)num_tokens ? place : -1;
  };
  bool more = tiles.next();
  int place = place_of_own(more);
  float2 scales_of_next = more ? scales.read(tiles.group) : make_float2(1, 1);
#pragma unroll 1
  while (more) {
    const int4 note = make_int4(tiles.row, tiles.rows, tiles.column, tiles.group);
    const int now = place;
    const float2 scales_now = scales_of_next;
    u32 from[TURNS], exists = 0;
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int of = __shfl_sync(~0u, now, rows.lane_of_taken(i));
      from[i] = max(of, 0) * pitch + unit;
      exists |= (u32)(of >= 0) << i;
    }
    more = tiles.next();
    place = place_of_own(more);
    if (more) scales_of_next = scales.read(tiles.group);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_barrier(ring.empty(), ring.parity);
      const u32 at = ring.at(), ready = ring.full();
      if (threadIdx.x == 0) {
        if (step == 0) put(which(ring), told(note, scales_now));
        expect_bytes(ready, OF_ROWS);
        load_weight(weight, at, ready, rank, width, note, step);
      }
      const u8* here = tokens + (u64)step * LINE;
#pragma unroll
      for (int i = 0; i < TURNS; i++)
        copy_unit(at + to + i * 16 * LINE, here + (u64)from[i] * UNIT, exists >> i & 1);
      arrive_after_copies(ready);
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  if (threadIdx.x == 0) {
    put(which(ring), make_int4(0, END, 0, 0));
    arrive(ring.full());
  }
  arrive(ring.full());
}

// Of one thread. Rows lie side by side; what it loads beyond a group's end enters no result.
__device__ __forceinline__ void load_tiles(
    const TensorMap* weight, const TensorMap* rows, Scales scales, int steps, int width, Tiles tiles, Ring ring) {
  const int rank = rank_in_cluster();
#pragma unroll 1
  while (tiles.next()) {
    const int4 note = make_int4(tiles.row, tiles.rows, tiles.column, tiles.group);
    const float2 scales_now = scales.read(tiles.group);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_barrier(ring.empty(), ring.parity);
      const u32 at = ring.at(), ready = ring.full();
      if (step == 0) put(which(ring), told(note, scales_now));
      expect_bytes(ready, STAGE_BYTES);
      load_weight(weight, at, ready, rank, width, note, step);
      load(rows, at + OF_ROWS, ready, step * STEP, note.x);
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  put(which(ring), make_int4(0, END, 0, 0));
  arrive(ring.full());
}

// A consumer's results, rounded, on their way to the fourth warpgroup.
struct Handoff {
  u32 smem, to;
  u32 parity = 1;
#if !SPLITS
  u32 later[SUMS / 4];  // the second part
  bool waiting = false;
#endif

  __device__ __forceinline__ Handoff(u32 smem, int consumer) : smem(smem) {
    const int thread = threadIdx.x % 128, lane = thread % 32, row = consumer * PART + thread / 32 * 16 + lane % 16;
    to = smem + STAGED + row * PITCH + (lane / 16 ^ row % 8) * UNIT;
  }

  // For a room, of which the last one is followed by the first.
  __device__ __forceinline__ void wait(int room = 0) {
    wait_barrier(smem + STAGED_EMPTY + 8 * room, parity);
    if (room == ROOMS - 1) parity ^= 1;
  }

  __device__ __forceinline__ void pass(int room = 0) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(smem + STAGED_FULL + 8 * room);
  }

  static __device__ __forceinline__ u32 packed_of(const float (&d)[SUMS], int part, int i) {
    const int first = pair_of(part, i);
    return pack(d[first], d[first + 1]);
  }

  // Units of a row, swizzled by the row.
  __device__ __forceinline__ void stage(const u32 (&packed)[SUMS / 4], int room = 0) const {
#pragma unroll
    for (int i = 0; i < SUMS / 4; i += 4)
      put_matrices((to ^ i / 2 * UNIT) + room * ROOM, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
  }

#if SPLITS
  __device__ __forceinline__ void send_later() {}
  __device__ __forceinline__ void end() {}

  __device__ __forceinline__ void take(const float (&d)[SUMS], int4) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      u32 now[SUMS / 4];
#pragma unroll
      for (int i = 0; i < SUMS / 4; i++) now[i] = packed_of(d, part, i);
      wait(part);
      stage(now, part);
      pass(part);
    }
  }
#else
  __device__ __forceinline__ void send_later() {
    if (!waiting) return;
    wait();
    stage(later);
    pass();
    waiting = false;
  }

  __device__ __forceinline__ void take(const float (&d)[SUMS], int4 tile) {
    u32 now[SUMS / 4];
#pragma unroll
    for (int i = 0; i < SUMS / 4; i++) now[i] = packed_of(d, 0, i), later[i] = packed_of(d, 1, i);
    wait();
    if (threadIdx.x == 128) put(smem + NOTE, tile);
    stage(now);
    pass();
    waiting = true;
  }

  __device__ __forceinline__ void end() {
    send_later();
    wait();
    if (threadIdx.x == 128) put(smem + NOTE, make_int4(0, END, 0, 0));
    pass();
  }
#endif
};

#if SPLITS
constexpr int NARROW = 64, NARROW_SUMS = NARROW / 2;  // columns of a product, and of a thread

// Adds the products of a step to the sums, and frees its stage.
__device__ __forceinline__ void multiply_step(
    float (&d)[SUMS], int step, u64 rows, bool holds_rows, float factor, const Ring& ring, Handoff&) {
  if (step == 0) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] = 0;
  }
  if (holds_rows) {
#pragma unroll
    for (int first = 0; first < COLUMNS; first += NARROW) {
      float product[NARROW_SUMS];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < LINE / 32; k++) {
        const u64 columns = weight_at(ring.at(), first / (COLUMNS / 2), k) + first % (COLUMNS / 2) * LINE / 16;
        multiply(product, rows + 2 * k, columns, k > 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      finish(product);
#pragma unroll
      for (int i = 0; i < NARROW_SUMS; i++) d[first / 2 + i] = fmaf(product[i], factor, d[first / 2 + i]);
    }
  }
  ring.release();
}

__device__ __forceinline__ void end_steps(float (&)[SUMS], float, const Ring&) {}
#else
// Begins the products of a step, and frees the stage before it.
__device__ __forceinline__ void multiply_step(
    float (&d)[SUMS], int step, u64 rows, bool holds_rows, float, const Ring& ring, Handoff& handoff) {
  if (holds_rows) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < LINE / 32; k++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        multiply(d + half * (SUMS / 2), rows + 2 * k, weight_at(ring.at(), half, k), step + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  if (step == LATER) handoff.send_later();
  wait_products<1>();
  if (step > 0) ring.release_before();
}

__device__ __forceinline__ void end_steps(float (&d)[SUMS], float factor, const Ring& ring) {
  finish(d);
  ring.release_before();
#if EIGHT_BITS
#pragma unroll
  for (int i = 0; i < SUMS; i++) d[i] *= factor;
#endif
}
#endif

__device__ __forceinline__ void multiply_tiles(int consumer, int steps, Ring ring) {
  float d[SUMS];
  Handoff handoff(ring.smem, consumer);
#pragma unroll 1
  while (true) {
    wait_barrier(ring.full(), ring.parity);
    const int4 tile = get(which(ring));
    if (tile.y == END) break;
    const float factor = __int_as_float(tile.w);
    const bool holds_rows = tile.y > consumer * PART;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_barrier(ring.full(), ring.parity);
      if (GATHERS) fence_shared();  // rows were copied by threads
      const u64 rows = descriptor(ring.at() + OF_ROWS + consumer * PART * LINE);
      multiply_step(d, step, rows, holds_rows, factor, ring, handoff);
      ring.next();
    }
    end_steps(d, factor, ring);
    handoff.send_later();
    handoff.take(d, tile);
  }
  handoff.end();
}

// Barriers of a block, and where groups end. All threads; the first ones of the block do it.
__device__ __forceinline__ void begin(u32 smem, u32 ends, const TensorMap* weight, const int* sizes, int num_groups) {
  if (threadIdx.x == 32) {
    prefetch_descriptor(weight);
    for (int room = 0; room < ROOMS; room++) {
      init_barrier(smem + STAGED_FULL + 8 * room, 4 * CONSUMERS);
      init_barrier(smem + STAGED_EMPTY + 8 * room, 4);
    }
    init_stages(smem, STAGES, 4 * CONSUMERS, GATHERS ? 128 + 1 : 1);
  }
  if (threadIdx.x < 32) find_ends(sizes, num_groups, ends);
  __syncthreads();
  cluster_sync();
}

// The largest magnitudes of a unit, of the lower and of the upper halves of its words.
__device__ __forceinline__ u32 largest_of(int4 v) {
  return larger(larger(magnitudes(v.x), magnitudes(v.y)), larger(magnitudes(v.z), magnitudes(v.w)));
}

// A row's largest magnitude, of which each of its eight lanes knows a part, two numbers in a word.
__device__ __forceinline__ u32 largest_of_lanes(u32 both) {
#pragma unroll
  for (int by = 1; by < 8; by *= 2) both = larger(both, __shfl_xor_sync(~0u, both, by));
  return both;
}

// The float32 of the larger half.
__device__ __forceinline__ int amax_of(u32 both) { return __float_as_int(unpack(larger(both, both >> 16)).x); }
