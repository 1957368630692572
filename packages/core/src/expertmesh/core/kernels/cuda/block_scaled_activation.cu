// Up projection of rows of 8 bits in blocks of 128, its gated activation times the rows' weights, and the quantization of
// that in blocks along its features and again along its rows, for Hopper in one kernel. Rows are read where their tokens
// are (GATHERS), or lie side by side:
// h[r] as `split_gemm.cu` has it, a gate and an up half, then what `quantize_both.cu` makes of it, to the bit.
//
// A tile's left columns are 128 of the gate half, its right ones the same 128 of the up half, so that a consumer has
// both numbers of each activation, and 128 rows of 128 columns are a block in either direction. The consumers activate
// and quantize what they have summed, while the producers fill the stages for their next tile. The largest numbers of
// columns pass between them through shared memory. A room takes three parts of a tile, one after the other: gate, up,
// and both copies of 8 bits.
//
// If h is NARROW, it is quantized along its features, as the activation is, and that has no other copy. Then a room
// takes two parts: gate and up, and the copy.
//
// Compiled at run time, without headers, after `hopper.cuh`, `split_rows.cuh`, `activation.cuh` and
// `scales.cuh`, whose macros it has.
static_assert(!WIDE && !LOW_RANK && ROOMS == 2, "rooms take turns");

__device__ __forceinline__ Halves halves_of(int n, int parts) { return {n, parts / 2 + n}; }

__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int k, Halves halves, int group) {
  load(weight, to, ready, k, halves.left * PART_N, group);
  load(weight, to + PART_N * BLOCK, ready, k, halves.right * PART_N, group);
}

// How many of its rows are its group's, and which columns it has.
__device__ __forceinline__ int more_of(int n, int rows) { return min(rows, TILE_M) << 16 | n; }

// In the scratch memory: of each warp what its tile's first stage said; the largest magnitudes of each warp's columns,
// of two tiles in turn; and each consumer's multipliers of columns.
constexpr int WARPS = CONSUMERS * 4;
constexpr int NOTES = SCRATCH_AT, LARGEST_AT = NOTES + WARPS * 16, OF_TILE = WARPS * PART_N * 2;
constexpr int MULTIPLIERS = LARGEST_AT + 2 * OF_TILE;
static_assert(SCRATCH == WARPS * 16 + 2 * OF_TILE + CONSUMERS * PART_N * 4, "as launched");
// Among the barriers of `bar.sync`: of all consumers, and of each.
constexpr int ALL_CONSUMERS = 1, ONE_CONSUMER = 2;
// In a room: the copy along the features, 64 lines of 128 bytes; and the one along the rows, two columns in a line. Or
// so many lines of gate, and of up.
constexpr int ALONG_ROWS = PART_M * 128;

__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The parts of all tiles of one consumer, which its two rooms take in turn.
struct Parts {
  u32 smem;
  int consumer;
  u32 turn = 0;

  __device__ __forceinline__ Room room() const {
    const int at = consumer * ROOMS + turn % ROOMS;
    const u32 barrier = smem + BARRIERS + 8 * at;
    return {barrier + READY, barrier + FREE, smem + at * ROOM};
  }
  // Of the barrier that says it is ready; the other is ahead by one.
  __device__ __forceinline__ u32 parity() const { return turn / ROOMS % 2; }
  __device__ __forceinline__ u32 next_parity() const { return parity() ^ 1; }
};

// What is read of rows, and where scales go.
struct Routing {
  const float* weights;
  const int* source;  // of rows that lie side by side: whether they are tokens'
  int num_rows, width;  // of the activation
  Stored *h_scale, *scale, *scale_rows;
};

// A consumer's part of activations: pairs of numbers of 16 bits, by columns, of this thread's upper and lower row.
typedef u32 Pairs[SUMS / 2];

// Of this thread's two rows: the largest of a block, the upper one in the low half.
__device__ __forceinline__ u32 largest_of_rows(const Pairs& a) {
  u32 of[2] = {};
#pragma unroll
  for (int i = 0; i < SUMS / 2; i++) of[i % 2] = larger(of[i % 2], magnitudes(a[i]));
  u32 both = larger(__byte_perm(of[0], of[1], 0x5410), __byte_perm(of[0], of[1], 0x7632));
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) both = larger(both, __shfl_xor_sync(~0u, both, apart));
  return both;
}

// One of two halves of `of` is kept, the lane that far apart gets the other for its own.
template <int HALF_OF>
__device__ __forceinline__ void share(u32 (&of)[SUMS / 4], u32 lane, int apart) {
  const bool upper = lane & apart;
#pragma unroll
  for (int i = 0; i < HALF_OF; i++) {
    const u32 low = of[i], high = of[HALF_OF + i];
    of[i] = larger(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, apart));
  }
}

// Leaves the largest of a warp's columns, two in a word. Eight lanes have the same ones: each ends with two words.
__device__ __forceinline__ void find_largest_of_columns(const Pairs& a, u32 lane, u32 to) {
  u32 of[SUMS / 4];
#pragma unroll
  for (int i = 0; i < SUMS / 4; i++) of[i] = larger(magnitudes(a[2 * i]), magnitudes(a[2 * i + 1]));
  share<8>(of, lane, 16);
  share<4>(of, lane, 8);
  share<2>(of, lane, 4);
  to += (lane / 4 * 8 + lane % 4) * 4;
  put_word(to, of[0]);
  put_word(to + 16, of[1]);
}

// The copy along the features: a lane's numbers of two times eight columns in a word.
__device__ __forceinline__ void stage_along_features(const Pairs& a, u32 thread, u32 to, float upper, float lower) {
  const u32 lane = thread % 32, at = to + (thread / 32 * 16 + lane % 16) * 128, swizzle = (lane % 8 ^ lane / 16) * 16;
#pragma unroll
  for (int i = 0; i < SUMS / 2; i += 8) {
    u32 of[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 low = unpack(a[i + j / 2 * 4 + j % 2]), high = unpack(a[i + j / 2 * 4 + j % 2 + 2]);
      const float m = j % 2 ? lower : upper;
      of[j] = to_8_bits(low.x * m, low.y * m, high.x * m, high.y * m);
    }
    put_matrices(at + (i * 4 ^ swizzle), of[0], of[1], of[2], of[3]);
  }
}

// Where the 16 rows of a warp are of a column, of the copy along the rows.
__device__ __forceinline__ u32 place_of_column(u32 column, u32 warp) {
  return column / 2 * 128 + ((column % 2 * 4 + warp) ^ column / 2 % 4) * 16;
}

// The copy along the rows: a lane's upper and lower row of two columns in a word.
__device__ __forceinline__ void stage_along_rows(const Pairs& a, u32 thread, u32 to, u32 multipliers) {
  const u32 lane = thread % 32, at = to + place_of_column(lane, thread / 32);
#pragma unroll
  for (int i = 0; i < SUMS / 4; i += 4) {
    u32 of[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 upper = unpack(a[2 * (i + j)]), lower = unpack(a[2 * (i + j) + 1]);
      const int2 m = get_pair(multipliers + ((i + j) * 8 + lane % 4 * 2) * 4);
      const float left = __int_as_float(m.x), right = __int_as_float(m.y);
      of[j] = to_8_bits(upper.x * left, lower.x * left, upper.y * right, lower.y * right);
    }
    put_transposed(at + i / 4 * (32 / 2 * 128), of[0], of[1], of[2], of[3]);
  }
}

// What a consumer does with its sums: hands over h, activates and quantizes it, and hands that over.
struct Quantizer {
  Parts parts;
  Routing of;
  // Of this thread's upper and lower row: its weight, and all bits if it is of the group and holds a token, else none.
  float weight[2];
  u32 held[2];

  __device__ __forceinline__ u32 note(u32 thread) const {
    return parts.smem + NOTES + (parts.consumer * 4 + thread / 32) * 16;
  }

  // Weights are read while the tile is multiplied.
  __device__ __forceinline__ void begin(const Ring& ring) {
    const u32 thread = thread_of_consumer();
    const int4 tile = get(which(ring));
    if (thread % 32 == 0) put(note(thread), tile);
    const int row = parts.consumer * PART_M + thread / 32 * 16 + thread % 32 / 4, rows = tile.w >> 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int here = row + 8 * i;
#if GATHERS
      const bool holds = here < rows && (int)get_word(token_of_row(ring, here)) >= 0;
#else
      const bool holds = here < rows && __ldg(of.source + tile.x + here) >= 0;
#endif
      held[i] = holds ? ~0u : 0;
      weight[i] = holds ? __ldg(of.weights + tile.x + here) : 0;
    }
  }

  __device__ __forceinline__ void pass(const float (&sums)[SUMS]) {
    hand_over(parts.room(), parts.next_parity(), sums);
    parts.turn++;
  }

  // The multipliers of this thread's upper and lower row, whose scales are stored: of `scales` that are `apart`.
  __device__ __forceinline__ float2 scale_rows(const Pairs& a, u32 thread, int row, Stored* scales, int apart) const {
    const u32 largest = largest_of_rows(a);
    const Scale<Stored> upper = scale_of(largest & 0xFFFF), lower = scale_of(largest >> 16);
    if (thread % 4 == 0 && row < of.num_rows) scales[(u64)row * apart] = upper.stored;
    if (thread % 4 == 1 && row + 8 < of.num_rows) scales[(u64)(row + 8) * apart] = lower.stored;
    return make_float2(upper.multiplier, lower.multiplier);
  }

#if NARROW
  // One half of h, of this tile's columns, in 8 bits.
  __device__ __forceinline__ void stage_half(
      const float (&sums)[SUMS], u32 thread, int row, int n, int half, u32 to) const {
    Pairs h;
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) h[i] = pack(sums[2 * i], sums[2 * i + 1]);
    const int blocks = of.width / BLOCK;
    const float2 by = scale_rows(h, thread, row, of.h_scale + half * blocks + n, 2 * blocks);
    stage_along_features(h, thread, to, by.x, by.y);
  }
#endif

  // The room that is free next.
  __device__ __forceinline__ Room next_room() const {
    const Room room = parts.room();
    wait_barrier(room.free, parts.next_parity());
    return room;
  }

  __device__ __forceinline__ void hand_over_room(Room room, u32 lane) {
    __syncwarp();
    if (lane == 0) arrive(room.ready);
    parts.turn++;
  }

  // Where this consumer's multipliers of columns are, when all of its threads are here.
  __device__ __forceinline__ u32 scale_columns(const Pairs& a, u32 thread, int first_row, int n) const {
    const u32 largest = parts.smem + LARGEST_AT + parts.turn % 2 * OF_TILE;
    const u32 multipliers = parts.smem + MULTIPLIERS + parts.consumer * PART_N * 4;
    find_largest_of_columns(a, thread % 32, largest + (parts.consumer * 4 + thread / 32) * PART_N * 2);
    meet(ALL_CONSUMERS, CONSUMERS * 128);
    u32 magnitude = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) magnitude = max(magnitude, get_u16(largest + w * PART_N * 2 + thread * 2));
    const Scale<Stored> scale = scale_of(magnitude);
    put_word(multipliers + thread * 4, __float_as_int(scale.multiplier));
    if (parts.consumer == 0) of.scale_rows[(u64)(first_row / BLOCK) * of.width + n * PART_N + thread] = scale.stored;
    meet(ONE_CONSUMER + parts.consumer, 128);
    return multipliers;
  }

  __device__ __forceinline__ void take(float (&left)[SUMS], float (&right)[SUMS]) {
    const u32 thread = thread_of_consumer(), lane = thread % 32;
    __syncwarp();
    const int4 tile = get(note(thread));
    const int n = tile.w & 0xFFFF, row = tile.x + parts.consumer * PART_M + thread / 32 * 16 + lane / 4;
#if NARROW
    const Room first = next_room();
    stage_half(left, thread, row, n, 0, first.at);
    stage_half(right, thread, row, n, 1, first.at + ALONG_ROWS);
    hand_over_room(first, lane);
#else
    pass(left);
    pass(right);
#endif
    Pairs a;
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
      const u32 gates = pack(left[2 * i], left[2 * i + 1]), ups = pack(right[2 * i], right[2 * i + 1]);
      a[i] = activate(gates, ups, weight[i % 2]) & held[i % 2];  // no branch: pairs overlap
    }
    clear(left), clear(right);
    const float2 by = scale_rows(a, thread, row, of.scale + n, of.width / BLOCK);
#if !NARROW
    const u32 multipliers = scale_columns(a, thread, tile.x, n);
#endif
    const Room room = next_room();
    stage_along_features(a, thread, room.at, by.x, by.y);
#if !NARROW
    stage_along_rows(a, thread, room.at + ALONG_ROWS, multipliers);
#endif
    hand_over_room(room, lane);
  }
};

// What is written of an activation.
struct Copies {
  u8 *h, *data, *data_rows;
  int num_rows, width;
};

// A unit of 16 columns, whose numbers lie as lanes had them.
__device__ __forceinline__ int4 columns_in_order(int4 v) {
  return make_int4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                   __byte_perm(v.z, v.w, 0x7632));
}

// One of 16 rows.
__device__ __forceinline__ int4 rows_in_order(int4 v) {
  return make_int4(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420), __byte_perm(v.x, v.y, 0x7531),
                   __byte_perm(v.z, v.w, 0x7531));
}

constexpr int TOGETHER = BURST / 2;

// A warp stores 128 columns along the features of as many of 64 rows as are live.
__device__ __forceinline__ void store_along_features(u32 from, u8* out, u64 first_byte, u32 pitch, int live) {
  const int lane = threadIdx.x % 32, unit = lane % 8, line = lane / 8;
  u8* to = out + first_byte + (u64)line * pitch + unit * 16;
#pragma unroll 1
  for (int first = 0; first < PART_M; first += 4 * TOGETHER) {
    int4 v[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const int here = first + 4 * i + line;
      v[i] = columns_in_order(get(from + here * 128 + (unit ^ here % 8) * 16));
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++, to += 4 * pitch)
      if (first + 4 * i + line < live) *(int4*)to = v[i];
  }
}

// Both copies of 64 rows from `row` on, of 128 columns.
__device__ __forceinline__ void store_copies(Room room, u32 parity, Copies copies, int row, int column) {
  const int lane = threadIdx.x % 32, live = copies.num_rows - row;
  wait_barrier(room.ready, parity);
  store_along_features(room.at, copies.data, (u64)row * copies.width + column, copies.width, live);
#if !NARROW
  const int sixteen = lane % 4, line = lane / 4;
  u8* to = copies.data_rows + (u64)(column + line) * copies.num_rows + row + sixteen * 16;
#pragma unroll 1
  for (int first = 0; first < PART_N; first += 8 * TOGETHER) {
    int4 v[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      v[i] = rows_in_order(get(room.at + ALONG_ROWS + place_of_column(first + 8 * i + line, sixteen)));
#pragma unroll
    for (int i = 0; i < TOGETHER; i++, to += (u64)8 * copies.num_rows)
      if (sixteen * 16 < live) *(int4*)to = v[i];
  }
#endif
  __syncwarp();
  if (lane == 0) arrive(room.free);
}

// Gate and up of 64 rows, in 8 bits.
__device__ __forceinline__ void store_narrow(Room room, u32 parity, Copies copies, int row, int column) {
  const u32 pitch = copies.width * 2;
  const int live = copies.num_rows - row;
  wait_barrier(room.ready, parity);
#pragma unroll 1
  for (int half = 0; half < 2; half++)
    store_along_features(
        room.at + half * ALONG_ROWS, copies.h, (u64)row * pitch + half * copies.width + column, pitch, live);
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(room.free);
}

__device__ __forceinline__ void store_tiles(Tiles tiles, Parts parts, Copies copies) {
  while (tiles.next()) {
    const int row = tiles.row + parts.consumer * PART_M, column = tiles.n * PART_N;
#if NARROW
    store_narrow(parts.room(), parts.parity(), copies, row, column);
    parts.turn++;
#else
    const u32 pitch = copies.width * 4;  // of h
    const int lines = tiles.end - row;
    u8* to = copies.h + (u64)row * pitch + column * 2;
#pragma unroll 1
    for (int half = 0; half < 2; half++, to += pitch / 2, parts.turn++)
      store_part(parts.room(), parts.parity(), to, pitch, lines, PART_N * 2);
#endif
    store_copies(parts.room(), parts.parity(), copies, row, column);
    parts.turn++;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) block_scaled_activation(
#if GATHERS
    const u8* tokens, const int* index, const float* row_scales,
#else
    const __grid_constant__ TensorMap rows, const int* source, const float* row_scales,
#endif
    const __grid_constant__ TensorMap weight, const float* weight_scales, const float* routing_weights, const int* sizes,
#if GATHERS
    int num_tokens, int bytes,
#endif
    int num_rows, int steps, int width, int num_groups, u8* h,
#if NARROW
    Stored* h_scale, u8* data, Stored* scale) {
  u8* data_rows = nullptr;
  Stored* scale_rows = nullptr;
#else
    u8* data, Stored* scale, u8* data_rows, Stored* scale_rows) {
  Stored* h_scale = nullptr;
#endif
#if GATHERS
  const int* source = nullptr;
#endif
  extern __shared__ __align__(1024) u8 shared[];  // swizzles repeat so
  const u32 smem = (u32)__cvta_generic_to_shared(shared);
  const int consumer = consumer_of_warp(), warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
#if GATHERS
  begin_block(smem, warp, sizes, num_groups, &weight, nullptr);
#else
  begin_block(smem, warp, sizes, num_groups, &weight, &rows);
#endif
  const Tiles tiles{smem + TABLE, num_groups, width / PART_N};
  Ring ring{smem + BARRIERS, STAGES_AT - BARRIERS, STAGE_BYTES, STAGES, consumer < 0};
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
#if GATHERS
    const Tokens of{tokens, index, num_tokens, bytes, num_rows};
    if (warp < 2) gather_tiles(of, &weight, warp, tiles, steps, 2 * width, ring);
#else
    if (warp == 0) load_tiles({&rows, &weight}, {}, tiles, steps, 2 * width, ring);
#endif
    if (warp >= 2) store_tiles(tiles, {smem, warp - 2}, {h, data, data_rows, num_rows, width});
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Scales scales{row_scales, weight_scales, consumer, num_rows, steps};
    const Routing routing{routing_weights, source, num_rows, width, h_scale, scale, scale_rows};
    multiply_tiles(scales, consumer, ring, Quantizer{{smem, consumer}, routing});
  }
}
