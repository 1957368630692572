// Numbers quantized in blocks along their features and again along their rows, for Hopper: rows as they are, at an index,
// or a gated activation of them, or its gradient, rounded to 16 bits and computed once. With what `quantize.cuh` has,
// which comes before this text; of an activation `activation.cuh`, too.
//
// Macros besides those: ACTIVATES. Without it, PANEL: 0, or rows are those of `x` at the index `source`, zeros where it
// is negative, and so many tiles beside each other come before all others; their scales lie with the rows contiguous,
// and rows behind the groups are undefined, which else are zeros. With it, GRADIENT (or the activation), WEIGHTED (times
// each row's routing weight, and 0 in rows that hold no token, of which nothing is read; the gradient has that of the
// weights, too, as sums over each tile's columns), NARROW (h is of KEPT_FORMAT, in blocks of 1 x BLOCK, with scales of
// the type KEPT; ROUNDS: its numbers are rounded to the 16 bits that they had).

#if ACTIVATES
#if NARROW
typedef KEPT Kept;
#else
typedef u8 Kept;  // of no scale
#endif

// Eight numbers of a half of h, as they were copied to shared memory.
struct Eight {
#if NARROW
  u32 words[2];
  float factor;

  __device__ __forceinline__ Eight(u32 from, Kept scale) : factor(factor_of(scale)) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
  }

  __device__ __forceinline__ float2 two(int j) const {
    u32 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2." KEPT_FORMAT "x2 %0, low;\n}"
        : "=r"(wide) : "r"(words[j / 2] >> 16 * (j % 2)));
    const float2 v = from_float16(wide);
    const float low = without_subnormal(v.x * factor), high = without_subnormal(v.y * factor);
    return ROUNDS ? unpack(pack(low, high)) : make_float2(low, high);
  }
#else
  u32 words[4];

  __device__ __forceinline__ Eight(u32 from, Kept) { unpack(words, get(from)); }
  __device__ __forceinline__ float2 two(int j) const { return unpack(words[j]); }
#endif
};

// A number of the activation, or of the gradients of gate and up, times `weight`; adds to a row's gradient of it.
__device__ __forceinline__ void compute(
    float gate, float up, float d, float weight, float (&out)[HALVES], float& d_weight) {
  const Gated act(gate, up);
  const float value = act.value();
#if GRADIENT
#if WEIGHTED
  d_weight += d * value;
  d *= weight;
#endif
  out[0] = act.d_gate(d);
  out[1] = act.d_up(d);
#else
  out[0] = WEIGHTED ? weight * value : value;
#endif
}

// Rows of a thread, on their way to shared memory.
struct Reader {
  const u8 *gate, *d;
  u32 held = 0;  // a bit for each row that is read
  u32 half;      // bytes of a row of a half of h
  u32 pitch;     // and of d

  __device__ __forceinline__ Reader(Place at, const u8* h, const u8* all_d, const int* source, u32 width)
      : half(width * (NARROW ? 1 : 2)), pitch(width * 2) {
    gate = h + (u64)at.row * (half * 2) + at.column * (NARROW ? 1 : 2);
    d = all_d + (u64)at.row * pitch + at.column * 2;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      held |= (i < at.live && (!WEIGHTED || __ldg(source + at.row + i) >= 0) ? 1u : 0u) << i;
  }

  __device__ __forceinline__ void read(int i, u32 to) const {
    const u8* from = gate + (u64)i * (half * 2);
    const bool wanted = held >> i & 1;
    of_h(to, from, wanted);
    of_h(to + THREADS * 16, from + half, wanted);
    if (GRADIENT) copy(to + THREADS * 32, d + (u64)i * pitch, wanted);
    end_copies();
  }

 private:
  __device__ __forceinline__ static void of_h(u32 to, const u8* from, bool wanted) {
#if NARROW
    copy_8(to, from, wanted);
#else
    copy(to, from, wanted);
#endif
  }
};

#else
// Rows of a thread, on their way to shared memory.
struct Reader {
  const u8* first;  // of its columns
  u32 pitch;        // bytes of a row
  int row[ROWS];    // -1: zeros

  __device__ __forceinline__ Reader(Place at, const u8* x, const u8*, const int* source, u32 width)
      : first(x + at.column * 2), pitch(width * 2) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      row[i] = i >= at.live ? -1 : PANEL ? __ldg(source + at.row + i) : at.row + i;
  }

  __device__ __forceinline__ void read(int i, u32 to) const {
    copy(to, first + (u64)max(row[i], 0) * pitch, row[i] >= 0);
    end_copies();
  }
};
#endif

// Where the scale of a row's block lies.
__device__ __forceinline__ u64 scale_at(int row, int half, int block, int blocks, int num_rows) {
  return PANEL ? (u64)block * num_rows + row : ((u64)row * HALVES + half) * blocks + block;
}

// What a thread has of a tile: its numbers, two in each word; the largest magnitudes of its columns; and those of both
// halves of the row that is its own, if its number is below that of rows.
struct Tile {
  u32 kept[HALVES][ROWS][4], of_columns[HALVES][4] = {}, of_my_row = 0;

  // Row i is there; `peer`: the number of this thread among those that have a block of a row.
  __device__ __forceinline__ void meet(int i, int peer) {
    u32 of_row[HALVES] = {};
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 of = magnitudes(kept[half][i][j]);
        of_columns[half][j] = larger(of_columns[half][j], of);
        of_row[half] = larger(of_row[half], of);
      }
    // The gate's in the low half of a word, the other's in the high one.
    const u32 other = of_row[HALVES - 1];
    u32 of_both = larger(__byte_perm(of_row[0], other, 0x5410), __byte_perm(of_row[0], other, 0x7632));
#pragma unroll
    for (int apart = PEERS / 2; apart; apart /= 2) of_both = larger(of_both, __shfl_xor_sync(~0u, of_both, apart));
    if (peer == i) of_my_row = of_both;
  }

  // Stores the scales of this thread's row.
  __device__ __forceinline__ void scale_row(
      Place here, int peer, int blocks, int num_rows, Stored* scale, float (&multipliers)[HALVES]) const {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const Scale<Stored> of = scale_of(of_my_row >> (16 * half) & 0xFFFF);
      multipliers[half] = of.multiplier;
      if (peer < ROWS && here.row + peer < num_rows && here.column / BLOCK < blocks)
        scale[scale_at(here.row + peer, half, here.column / BLOCK, blocks, num_rows)] = of.stored;
    }
  }

  // Leaves a warp's part of the columns' largest magnitudes in shared memory.
  __device__ __forceinline__ void put_largest(int thread, u32 smem) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      u32(&of)[4] = of_columns[half];
#pragma unroll
      for (int j = 0; j < 4; j++) of[j] = larger(of[j], __shfl_xor_sync(~0u, of[j], 16));
      if (lane < 16)
        put(largest_at(smem, (warp * HALVES + half) * COLUMNS + lane * 8), make_int4(of[0], of[1], of[2], of[3]));
    }
  }

  // Quantizes half of the tile and stores it, but for what lies along the rows if TRANSPOSED: that is left in shared
  // memory. `first`: of this thread's numbers.
  __device__ __forceinline__ void quantize(
      int half, float my_multiplier, int thread, u32 smem, int inside, u64 first, u32 pitch, u8* data,
      u8* data_rows) const {
    const int in_row = thread % 16, peer = thread % PEERS;
#pragma unroll
    for (int r = 0; r < ROWS; r += 4) {
      u32 along[4][2], down[8], also[4][2];
      float by_row[4];
#pragma unroll
      for (int k = 0; k < 4; k++) by_row[k] = __shfl_sync(~0u, my_multiplier, thread % 32 - peer + r + k);
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        float v[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float2 low = unpack(kept[half][r + k][j / 2]), high = unpack(kept[half][r + k][j / 2 + 1]);
          v[k][0] = low.x, v[k][1] = low.y, v[k][2] = high.x, v[k][3] = high.y;
          const float m = by_row[k];
          along[k][j / 4] = to_8_bits(v[k][0] * m, v[k][1] * m, v[k][2] * m, v[k][3] * m);
        }
        const float4 m = multipliers(smem, half * COLUMNS + in_row * 8 + j);
        const float of[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (TRANSPOSED)
            down[j + k] = to_8_bits(v[0][k] * of[k], v[1][k] * of[k], v[2][k] * of[k], v[3][k] * of[k]);
          else
            also[k][j / 4] = to_8_bits(v[k][0] * m.x, v[k][1] * m.y, v[k][2] * m.z, v[k][3] * m.w);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        if (r + k < inside) {
          const u64 at = first + (u64)(r + k) * HALVES * pitch;
          *(uint2*)(data + at) = make_uint2(along[k][0], along[k][1]);
          if (!TRANSPOSED) *(uint2*)(data_rows + at) = make_uint2(also[k][0], also[k][1]);
        }
      if (TRANSPOSED) transpose(down, r, 0, thread, smem);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) quantize_both(
    const u8* x,
#if NARROW
    const Kept* h_scale,
#endif
#if GRADIENT
    const u8* d,
#endif
#if WEIGHTED
    const float* weights,
#endif
#if PANEL || WEIGHTED
    const int* source,
#endif
    const int* sizes, int num_rows, int all_columns, int groups,
    u8* data, Stored* scale, u8* data_rows, Stored* scale_rows
#if GRADIENT && WEIGHTED
    , float* d_weights
#endif
#if QUEUED
    , int* next_number
#endif
    ) {
#if !GRADIENT
  const u8* d = x;
#endif
#if !(PANEL || WEIGHTED)
  const int* source = sizes;
#endif
#if !QUEUED
  int* next_number = nullptr;
#endif
  const u32 smem = shared_memory();
  const int num_live = min(sum(sizes, groups), num_rows);
  const int num_taken = ACTIVATES || PANEL ? num_live : num_rows;
  const int tiles = (all_columns + COLUMNS - 1) / COLUMNS * ((num_taken + BLOCK - 1) / BLOCK);
#if ACTIVATES
  u32 held;  // of this tile
#endif
  {
    const Reader first(Place(blockIdx.x, all_columns, num_live), x, d, source, all_columns);
#pragma unroll
    for (int i = 0; i < ROWS; i++) first.read(i, smem + threadIdx.x * 16 + i * READ);
#if ACTIVATES
    held = first.held;
#endif
  }
  Turns turns;
#pragma unroll 1
  while (turns.here < tiles) {
    const int number = turns.here, asked = turns.ask(next_number);
    const int thread = anew(threadIdx.x), width = anew(all_columns);
    const int blocks = (width + BLOCK - 1) / BLOCK;
    const u32 mine = smem + thread * 16;
    const int in_row = thread % 16, peer = thread % PEERS;

    const Reader next(Place(turns.next, width, num_live), x, d, source, width);
    Tile tile;
#if ACTIVATES
    const int across = (width + COLUMNS - 1) / COLUMNS;
    float weight[ROWS];
    Kept of_h[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      weight[i] = 0;
      of_h[i][0] = of_h[i][1] = 0;
#if NARROW
      if (held >> i & 1) {
        const u64 line = 2 * ((u64)(number / across) * BLOCK + thread / 16 * ROWS + i);
        const Kept* first = h_scale + line * blocks + (number % across * COLUMNS + in_row * 8) / BLOCK;
        of_h[i][0] = __ldg(first), of_h[i][1] = __ldg(first + blocks);
      }
#endif
#if WEIGHTED
      if (held >> i & 1) weight[i] = __ldg(weights + number / across * BLOCK + thread / 16 * ROWS + i);
#endif
    }
    held = next.held;
#endif
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      wait_for_copies<ROWS - 1>();
      const u32 from = mine + i * READ;
#if ACTIVATES
      u32 ds[4] = {};
      const Eight gates(from, of_h[i][0]), ups(from + THREADS * 16, of_h[i][1]);
      if (GRADIENT) unpack(ds, get(from + THREADS * 32));
      next.read(i, from);
      float d_weight = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 gate = gates.two(j), up = ups.two(j), d_out = unpack(ds[j]);
        float low[HALVES], high[HALVES];
        compute(gate.x, up.x, d_out.x, weight[i], low, d_weight);
        compute(gate.y, up.y, d_out.y, weight[i], high, d_weight);
#pragma unroll
        for (int half = 0; half < HALVES; half++) tile.kept[half][i][j] = pack(low[half], high[half]);
      }
#else
      unpack(tile.kept[0][i], get(from));
      next.read(i, from);
#endif
      tile.meet(i, peer);
#if GRADIENT && WEIGHTED
#pragma unroll
      for (int apart = 8; apart; apart /= 2) d_weight += __shfl_xor_sync(~0u, d_weight, apart);
      const int row = number / across * BLOCK + thread / 16 * ROWS + i;
      if (in_row == 0 && row < num_rows) d_weights[(u64)(number % across) * num_rows + row] = d_weight;
#endif
    }

    // The scales of rows: thread i of a block's has those of row i.
    const Place here(number, width, num_live);
    float my_multipliers[HALVES];
    tile.scale_row(here, peer, blocks, num_rows, scale, my_multipliers);

    const int first_column = here.column - in_row * 8;
    tile.put_largest(thread, smem);
    __syncthreads();
    scale_columns(thread, smem, here.block, first_column, width, scale_rows);
    turns.tell(asked, smem);
    __syncthreads();
    turns.go_on(asked, smem);
    const int inside = here.column < width ? num_rows - here.row : 0;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u64 first = ((u64)here.row * HALVES + half) * width + here.column;
      tile.quantize(half, my_multipliers[half], thread, smem, inside, first, width, data, data_rows);
      if (TRANSPOSED) {
        __syncthreads();
        store_lines(
            data_rows + (u64)half * width * num_rows, thread, smem, here.block * BLOCK, first_column, num_rows, width);
        __syncthreads();
      }
    }
  }
}
