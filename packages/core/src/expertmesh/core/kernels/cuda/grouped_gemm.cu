// Grouped GEMM for Hopper, rows times weights: out[r] = lhs[r] @ rhs[group of r], zeros in padding rows.
//
// wgmma multiplies 64 columns of the weight (its M) by up to 256 rows (its N, any multiple of 8), so that a group costs
// what it holds. A cluster of two blocks works on up to 256 rows and 256 columns; the blocks share the rows by
// multicast. In a block one producer warp loads, and two consumer warpgroups multiply 64 columns each. A consumer keeps
// a result in registers, rounded, and stores it in pieces while it multiplies the next tile, so that the tensor cores
// hardly wait for an end. Products are issued by half steps, one under way while the next is: a stage is free as soon
// as it was read, and what else a consumer does is done beside products. For small groups a consumer multiplies two
// boxes of columns by up to 128 rows instead: more of the weights is under way, and the rows are read half as often.
//
// Per-tensor FP8 operands have one scale per group: out[r] = (lhs[r] @ rhs[group of r]) * lhs_scale[group] *
// rhs_scale[group]. A step's bytes are those of 16 bits, and so is all that follows from them.
//
// A term of low rank may be added to the sums, out[r] += u[r] @ b[group of r], in 16 bits: steps of 64 of its rank, in
// which the producer loads u and b (in the layout of rhs) where it loads lhs and rhs in the others.
//
// Compiled at run time, without headers, after `hopper.cuh`. Macros that come before both: SCALED (operands of 8 bits),
// LOW_RANK (there is such a term), TRANSPOSED (rhs [G, N, K], not [G, K, N]), WIDE (float32 results) or HALF (float16
// ones), BOXES (of columns, of a consumer), MIN_ROWS, MAX_ROWS and GRAIN (heights of tiles), TILE_COST, BAND, BOX_ROWS,
// SHARED (bytes), REGISTERS_PRODUCER and REGISTERS_CONSUMER, and perhaps PLACES and WAVES. What stands alone on a line
// is replaced: INSTRUCTIONS (`multiply`, and of scaled rows with a term `multiply_low_rank`, for each height) and CASES.

constexpr int CONSUMERS = 2;          // warpgroups that multiply
constexpr int THREADS = 128 + CONSUMERS * 128;
constexpr int LINE = 128;             // bytes of the contraction a step, the width of a swizzle
constexpr int BK = SCALED ? LINE : LINE / 2;
constexpr int SLICES = LINE / 32;     // of the contraction, each of one instruction
constexpr bool SCALED_BEFORE = SCALED && LOW_RANK;  // sums, before the term is added
constexpr int BOX = 64;               // columns of the weight of one TMA load
constexpr int NEXT = CONSUMERS * BOX;     // columns from a consumer's box to its next one
constexpr int COLUMNS = BOXES * NEXT;  // of a block's tile
constexpr int MAX_STAGES = 8;
constexpr int PIECE = 32;             // rows of a result that leave at once
constexpr int SUMS = BOXES * MAX_ROWS / 2;  // of a thread
constexpr int HEIGHTS = (MAX_ROWS - MIN_ROWS) / GRAIN + 1;
static_assert(fit(THREADS, CONSUMERS), "consumers would wait forever for registers");
static_assert(TRANSPOSED || !SCALED, "the tensor cores read 8 bits along the contraction alone");

// Shared memory, from its first multiple of 1024 bytes on: barriers and words, pieces of results, stages for operands;
// and at its end the table of groups.
constexpr int COSTS = 128, LIVE = 256, TILES = 384, WHICH = 512, STAGED = 1024;
constexpr int STAGED_BYTES = WIDE ? 0 : 2 * PIECE * LINE;  // of a consumer
constexpr int STAGES_AT = STAGED + CONSUMERS * STAGED_BYTES;

template <int ROWS>
__device__ void multiply(float* d, u64 columns, u64 rows, int accumulate);

// Of operands of 16 bits, where all others have 8.
template <int ROWS>
__device__ void multiply_low_rank(float* d, u64 columns, u64 rows, int accumulate);

INSTRUCTIONS

// A group's grains of rows, and its tiles if none is higher than `height` grains.
struct Extent {
  int grains, tiles;

  __device__ __forceinline__ Extent(int size, int height)
      : grains((size + GRAIN - 1) / GRAIN), tiles((grains + height - 1) / height) {}
};

// Into how many parts each tile of a last round is divided: as many as there are clusters for. Parts have rows of their
// own; of small groups columns of their own, each consumer one box of them, since weights are what takes time.
__device__ __forceinline__ int parts_of(int tiles, int clusters, int most) { return min(clusters / tiles, most); }

// How many clusters take so many tiles. Small groups wait for memory, which is left to the fewest clusters that need no
// more rounds.
__device__ __forceinline__ int clusters_for(int items) {
  const int all = clusters_of_wave();
  if (BOXES == 1 || items <= all) return all;
  const int rounds = (items + all - 1) / all;
  return (items + rounds - 1) / rounds;
}

// How many numbers so many tiles have: those of the last round one for each part.
__device__ __forceinline__ int numbers_of(int items, int clusters, int most_parts) {
  const int left = items % clusters;
  return left ? items - left + left * parts_of(left, clusters, most_parts) : items;
}

// Counts the tiles if none is higher than `height` grains, at TILES, and what they cost together, at COSTS. One warp.
__device__ __forceinline__ void try_height(
    int height, int num_groups, int num_columns, int most_parts, u32 smem, u32 room) {
  int tiles = 0, grains = 0;
  for (int g = threadIdx.x % 32; g < num_groups; g += 32) {
    const Extent mine(get_word(room + 16 * g), height);
    grains += mine.grains, tiles += mine.tiles;
  }
  tiles = __reduce_add_sync(~0u, tiles);
  grains = __reduce_add_sync(~0u, grains);
  const int clusters = clusters_of_wave(), items = tiles * num_columns, left = items % clusters;
  const float rows = (float)(grains * GRAIN) / max(tiles, 1);
  const float cost = items / clusters * (rows + TILE_COST) +
                     (left ? rows / parts_of(left, clusters, most_parts) + TILE_COST : 0);
  const int at = 4 * (MAX_ROWS / GRAIN - height);
  put_word(smem + COSTS + at, __float_as_int(cost));
  put_word(smem + TILES + at, tiles);
}

// Writes the groups (start, size, index, tiles) to the table, 16 bytes each, those of high tiles first: tiles that run
// together are alike, and end together. Returns the most grains of a tile, for which the tiles cost least (of equals
// the fewest, for which stages are the smallest), and how many tiles there are. All threads.
__device__ __forceinline__ int2 plan(
    const int* sizes, int num_groups, int num_columns, int most_parts, u32 smem, u32 table) {
  const u32 room = smem + STAGED;  // of what comes there later
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    const int live = read_sizes(sizes, num_groups, room);
    if (threadIdx.x % 32 == 0) put_word(smem + LIVE, live);
  }
  __syncthreads();
  for (int i = warp; i < HEIGHTS; i += THREADS / 32)
    try_height(MAX_ROWS / GRAIN - i, num_groups, num_columns, most_parts, smem, room);
  __syncthreads();
  static_assert(HEIGHTS <= 32);  // one for each lane
  const int lane = threadIdx.x % 32;
  const u32 cost = lane < HEIGHTS ? get_word(smem + COSTS + 4 * lane) : ~0u;  // of positive numbers the order is theirs
  const int best = 31 - __clz(__ballot_sync(~0u, cost == __reduce_min_sync(~0u, cost)));
  const int height = MAX_ROWS / GRAIN - best;
  for (int g = threadIdx.x; g < num_groups; g += THREADS) {
    const Extent mine(get_word(room + 16 * g), height);
    put_word(room + 16 * g + 8, mine.tiles ? mine.grains * 256 / mine.tiles : 0);
    put_word(room + 16 * g + 12, mine.tiles);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < num_groups; g += THREADS) {
    const int4 mine = get(room + 16 * g);
    put(table + 16 * place_of(g, mine.z, room + 8, num_groups), make_int4(mine.y, mine.x, g, mine.w));
  }
  fence_shared();  // operands may come where sizes were
  __syncthreads();
  return make_int2(height, get_word(smem + TILES + 4 * best));
}

// Where a cluster is: its group, and the rows and columns of its tile.
struct Cursor {
  u32 table;
  int num_columns;
  int index = -1, first_item = 0, items = 0;
  int start, size, group, tiles;
  int row, rows, column;  // rows: a multiple of GRAIN, the last ones perhaps after the end of the group

  // Moves on to an item. Items are asked for in ascending order.
  __device__ void seek(int item) {
    while (item >= first_item + items) {
      first_item += items;
      index++;
      const int4 of = get(table + 16 * index);
      start = of.x, size = of.y, group = of.z, tiles = of.w;
      items = tiles * num_columns;
    }
    const u32 inside = item - first_item, grains = (size + GRAIN - 1) / GRAIN;
    const u32 bands = max((tiles + BAND / 2) / BAND, 1), high = (tiles + bands - 1) / bands;
    const u32 band = inside / (high * num_columns), inner = inside % (high * num_columns);
    const u32 here = min(tiles - band * high, high), tile = band * high + inner % here;
    // All tiles of a group are alike, but for one grain.
    const u32 each = grains / tiles, more = grains % tiles;
    row = start + GRAIN * (tile * each + min(tile, more));
    rows = GRAIN * (each + (tile < more));
    column = inner / here;
  }

  // Narrows the tile to a part of its rows; false if nothing is in it.
  __device__ __forceinline__ bool divide(int part, int parts) {
    const int grains = rows / GRAIN, each = (grains + parts - 1) / parts;
    row += GRAIN * part * each;
    rows = GRAIN * min(each, grains - part * each);
    return rows > 0;
  }
};

// A tile's first stage says which tile it is: row, rows (and above them the group, if it has scales), end of the group,
// column (and above it, whether there is one box alone); no rows are the end.
__device__ __forceinline__ u32 which(const Ring& ring) { return ring.smem + WHICH + 16 * ring.stage; }
constexpr int ABOVE = 16;  // bits
constexpr int ALONE = 1 << 30;

__device__ __forceinline__ bool is_alone(int4 tile) { return BOXES == 2 && tile.w & ALONE; }
__device__ __forceinline__ int column_of(int4 tile) { return BOXES == 2 ? tile.w & ~ALONE : tile.w; }

// The scales of a tile's group.
struct Scales {
  const float *lhs, *rhs;
#if SCALED
  float of_lhs, of_rhs;

  // Begins to read them, and leaves of `tile` what an unscaled one is.
  __device__ __forceinline__ void read(int4& tile) {
    const int group = tile.y >> ABOVE;
    tile.y &= (1 << ABOVE) - 1;
    of_lhs = read_scale(lhs + group), of_rhs = read_scale(rhs + group);
  }

  __device__ __forceinline__ void apply(float (&d)[SUMS]) const {
    const float factor = product_of_scales(of_lhs, of_rhs);
#pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] *= factor;
  }
#else
  __device__ __forceinline__ void read(int4&) {}
  __device__ __forceinline__ void apply(float (&)[SUMS]) const {}
#endif
};

// How many steps there are, and how many more for a term.
struct Steps {
  int own, more;

  __device__ __forceinline__ int all() const { return LOW_RANK ? own + more : own; }
};

struct Operands {
  const TensorMap *lhs, *rhs;
};

__device__ __forceinline__ void load_tiles(
    Operands operands, Operands low_rank, Cursor cursor, int items, int most_parts, Steps steps, Ring ring) {
  const int rank = rank_in_cluster(), clusters = clusters_for(items);
  Turns turns(ring.smem);
  for (Turn turn = turns.take(clusters); turn.first < items; turn = turns.take(clusters)) {
    const int left = items - turn.first, parts = left < clusters ? parts_of(left, clusters, most_parts) : 1;
    if (turn.place / parts >= left) break;
    cursor.seek(turn.first + turn.place / parts);
    const bool alone = BOXES == 2 && parts > 1;
    if (!alone && parts > 1 && !cursor.divide(turn.place % parts, parts)) continue;
    const int boxes = (cursor.rows + BOX_ROWS - 1) / BOX_ROWS, columns = alone ? NEXT : COLUMNS;
    const int column = (cursor.column * 2 + rank) * COLUMNS + (alone ? turn.place % parts * NEXT : 0);
    const int group = cursor.group;
    for (int step = 0; step < steps.all(); step++) {
      const u32 weight = ring.at(), rows = weight + COLUMNS * LINE, ready = ring.full();
      const bool low = LOW_RANK && step >= steps.own;
      const TensorMap *lhs = low ? low_rank.lhs : operands.lhs, *rhs = low ? low_rank.rhs : operands.rhs;
      const int k = low ? (step - steps.own) * (LINE / 2) : step * BK;
      wait_barrier(ring.empty(), ring.parity);
      if (step == 0)
        put(which(ring), make_int4(cursor.row, SCALED ? cursor.rows | group << ABOVE : cursor.rows,
                                   cursor.start + cursor.size, alone ? column | ALONE : column));
      expect_bytes(ready, (columns + boxes * BOX_ROWS) * LINE);
#pragma unroll
      for (int i = 0; i < COLUMNS; i += BOX)
        if (i >= columns)
          break;
        else if (TRANSPOSED)
          load(rhs, weight + i * LINE, ready, k, column + i, group);
        else
          load(rhs, weight + i * LINE, ready, column + i, k, group);
#pragma unroll 1  // as its registers allow
      for (int i = rank; i < boxes; i += 2)
        load_shared(lhs, rows + i * BOX_ROWS * LINE, ready, k, cursor.row + i * BOX_ROWS);
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  put(which(ring), make_int4(0, 0, 0, 0));
  arrive(ring.full());
}

// Of one consumer. The accumulators hold the transposes of rows x 64 results, of one box after the other.
struct Result {
  int consumer;
  u32 staged;  // room for two pieces
  int width;
  u8* out;
#if WIDE
  int4 tile;

  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void send_some() {}
  __device__ __forceinline__ void send_rest() {}
  __device__ __forceinline__ void begin(int4 of) { tile = of; }

  // There are no registers in which it could wait.
  __device__ __forceinline__ void take(const float (&d)[SUMS]) {
    const int row = tile.x, rows = tile.y, end = tile.z, column = column_of(tile);
    const int end_column = is_alone(tile) ? min(column + NEXT, width) : width;
    const int thread = threadIdx.x % 128, lane = thread % 32;
    const int mine = column + consumer * BOX + thread / 32 * 16 + lane / 4;
    const int line = row + lane % 4 * 2;
    float* to = (float*)out + (u64)line * width + mine;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      const int first = i % (MAX_ROWS / 2) / 4 * 8, r = first + i % 2, c = i / (MAX_ROWS / 2) * NEXT + i % 4 / 2 * 8;
      if (line + r < end && first < rows && mine + c < end_column) to[(u64)r * width + c] = d[i];
    }
  }
#else
  // Where this lane's row of 8 x 8 matrices goes, 16 bytes swizzled by the row, for all banks; and where
  // this thread's part of a row is then.
  u32 to, from;
  u32 at;  // this thread's part of a row, in the result's first rows; in 16 bytes from `out` on
  int live = 0;  // rows from this thread's first one on; those of a second box above them
  int pieces = 0;  // of a box
  int piece = 1;  // to stage next, counted over boxes; beyond their number nothing is left to send
  u32 packed[SUMS / 2];

  // Hides the two from the compiler, which would compute them for each piece, while the tensor cores wait.
  __device__ __forceinline__ void settle() {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, line = thread / 8;
    to = staged + (lane / 16 * 8 + lane % 8) * LINE + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    from = staged + line * LINE + (thread % 8 ^ line % 8) * 16;
    asm volatile("" : "+r"(to), "+r"(from));
  }

  // What is known of a tile (row, rows, end of the group, column) before its sums are.
  __device__ __forceinline__ void begin(int4 tile) {
    send_rest();
    const int row = tile.x, rows = min(tile.y, tile.z - row);
    const int line = threadIdx.x % 128 / 8, mine = column_of(tile) + consumer * BOX + threadIdx.x % 8 * 8;
    pieces = (rows + PIECE - 1) / PIECE, piece = 0;
    live = mine < width ? max(rows - line, 0) : 0;
    if (BOXES == 2 && !is_alone(tile) && mine + NEXT < width) live |= max(rows - line, 0) << 16;
    at = ((u64)(row + line) * width + mine) / 8;
    asm volatile("" : "+r"(at), "+r"(live));  // now, not when the tensor cores wait
  }

  __device__ __forceinline__ void take(const float (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) packed[i] = pack(d[2 * i], d[2 * i + 1]);
  }

  template <int P>
  __device__ __forceinline__ void stage(u32 to) const {
#pragma unroll
    for (int i = P * 8; i < P * 8 + 8; i += 4)
      put_transposed(to + i % 8 * 4 * LINE, packed[i], packed[i + 1], packed[i + 2], packed[i + 3]);
  }

  // Stages the next piece in shared memory, where it is transposed, and stores the one before, which all have staged.
  __device__ __forceinline__ void send_piece() {
    asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory");
    // There is room for two, which take turns.
    const u32 turn = piece % 2 * (PIECE * LINE);
    const int4 upper = get(from + turn), lower = get(from + turn + PIECE / 2 * LINE);
    if (piece < BOXES * pieces) {
      const u32 here = to + (turn ^ PIECE * LINE);
      switch (BOXES == 2 && piece >= pieces ? piece - pieces + MAX_ROWS / PIECE : piece) {
        case 0: stage<0>(here); break;
        case 1: stage<1>(here); break;
        case 2: stage<2>(here); break;
        case 3: stage<3>(here); break;
        case 4: stage<4>(here); break;
        case 5: stage<5>(here); break;
        case 6: stage<6>(here); break;
        default: stage<7>(here); break;
      }
    }
    if (piece > 0) {
      const int before = piece - 1;
      const bool second = BOXES == 2 && before >= pieces;
      const int line = (before - (second ? pieces : 0)) * PIECE;
      const int rows = BOXES == 2 ? live >> (second ? 16 : 0) & 0xFFFF : live;
      u8* to = out + 16ull * (at + (u32)line / 8 * width + (second ? NEXT / 8 : 0));
      if (line < rows) store(to, upper);
      if (line + PIECE / 2 < rows) store(to + (long long)PIECE * width, lower);
    }
    piece++;
  }

  __device__ __forceinline__ void send_some() {
    if (piece <= BOXES * pieces) send_piece();
  }

  __device__ __forceinline__ void send_rest() {
    while (piece <= BOXES * pieces) send_piece();
  }
#endif
};

// A group of products: half of a step's contraction, from slice `first` on.
template <int ROWS, bool LOW>
__device__ __forceinline__ void multiply_half(float* d, u64 columns, u64 rows, int first, int accumulate) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = first; k < first + SLICES / 2; k++)
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
      float* sums = d + i * MAX_ROWS / 2;
      const u64 of_columns = columns + (i * NEXT * LINE + k * (TRANSPOSED ? 32 : 2048)) / 16, of_rows = rows + k * 2;
      if constexpr (LOW)
        multiply_low_rank<ROWS>(sums, of_columns, of_rows, 1);
      else
        multiply<ROWS>(sums, of_columns, of_rows, accumulate || k > first);
    }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int ROWS, bool LOW>
__device__ __forceinline__ void multiply_steps(float (&d)[SUMS], Ring& ring, Result& result, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    wait_barrier(ring.full(), ring.parity);
    const u64 columns = descriptor(ring.at() + result.consumer * BOX * LINE);
    const u64 rows = descriptor(ring.at() + COLUMNS * LINE);
    multiply_half<ROWS, LOW>(d, columns, rows, 0, step > 0);
    wait_products<1>();  // half a step stays under way; the stage of the step before is free
    if (step > 0) ring.release_before();
    multiply_half<ROWS, LOW>(d, columns, rows, SLICES / 2, true);
    result.send_some();
    wait_products<1>();
    ring.next();
  }
}

template <int ROWS>
__device__ __forceinline__ void multiply_tile(
    float (&d)[SUMS], Ring& ring, Result& result, const Scales& scales, Steps steps) {
  multiply_steps<ROWS, false>(d, ring, result, SCALED_BEFORE ? steps.own : steps.all());
  if constexpr (SCALED_BEFORE) {
    finish(d);
    ring.release_before();
    scales.apply(d);
    multiply_steps<ROWS, true>(d, ring, result, steps.more);
  }
}

__device__ __forceinline__ void multiply_tiles(Steps steps, Ring ring, Result result, Scales scales) {
  float d[SUMS];
  result.settle();
  wait_barrier(ring.full(), ring.parity);
  int4 tile = get(which(ring));
  scales.read(tile);
  while (tile.y) {
    switch ((u32)tile.y / GRAIN) {
      CASES
    }
    // What can be done is done while the last products run.
    wait_barrier(ring.full(), ring.parity);
    const int4 next = get(which(ring));
    result.begin(tile);
    finish(d);
    ring.release_before();
    if (!SCALED_BEFORE) scales.apply(d);
    result.take(d);
    tile = next;
    scales.read(tile);
  }
  result.send_rest();
}

// The padding rows up to `end`.
__device__ __forceinline__ void store_zeros(int live, u8* out, int end, int width) {
  const u64 per_row = (u64)width * (WIDE ? 4 : 2) / 16, last = end * per_row;
  for (u64 i = live * per_row + blockIdx.x * CONSUMERS * 128 + threadIdx.x - 128; i < last;
       i += gridDim.x * CONSUMERS * 128)
    ((uint4*)out)[i] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) grouped_gemm_rows(
    const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap rhs, const int* sizes,
#if SCALED
    const float* lhs_scale, const float* rhs_scale,
#endif
#if LOW_RANK
    const __grid_constant__ TensorMap u, const __grid_constant__ TensorMap b, int more_steps,
#endif
    int zeros_end, int own_steps, int width, int num_groups, int most_parts, u8* out
#if WAVES
    , int* next_number
#endif
    ) {
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    prefetch_descriptor(&lhs), prefetch_descriptor(&rhs);
#if WAVES
    Queue{smem}.init();
#endif
    init_stages(smem, MAX_STAGES, 4 * CONSUMERS);
  }
  const int num_columns = (width + 2 * COLUMNS - 1) / (2 * COLUMNS);
  const int2 tiles = plan(sizes, num_groups, num_columns, most_parts, smem, table);
  cluster_sync();
  // Lower tiles leave shared memory for more stages.
  const int bytes = (COLUMNS + (tiles.x * GRAIN + BOX_ROWS - 1) / BOX_ROWS * BOX_ROWS) * LINE;
  const Ring ring{smem, STAGES_AT, bytes, min((int)(table - smem - STAGES_AT) / bytes, MAX_STAGES), consumer < 0};
#if LOW_RANK
  const Operands low_rank{&u, &b};
  const Steps steps{own_steps, more_steps};
#else
  const Operands low_rank{};
  const Steps steps{own_steps, 0};
#endif
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    if (threadIdx.x == 0)
      load_tiles({&lhs, &rhs}, low_rank, Cursor{table, num_columns}, tiles.y * num_columns, most_parts, steps, ring);
#if WAVES
    if (threadIdx.x == 64 && rank_in_cluster() == 0) {
      const int items = tiles.y * num_columns, clusters = clusters_for(items);
      Queue{smem}.fill(next_number, clusters, numbers_of(items, clusters, most_parts));
    }
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
#if SCALED
    const Scales scales{lhs_scale, rhs_scale};
#else
    const Scales scales{};
#endif
    multiply_tiles(steps, ring, Result{consumer, smem + STAGED + consumer * STAGED_BYTES, width, out}, scales);
    store_zeros(get_word(smem + LIVE), out, zeros_end, width);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
}
