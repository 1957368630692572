// Rows quantized in blocks along the rows, for Hopper: with what `quantize.cuh` has, which comes before this text. They
// have 16 bits, or 8 in blocks along their features (NARROW), and between the two quantizations 16.
//
// With a PANEL rows are those of `data` and `scale` at the index `source`, zeros where it is negative. So many tiles
// beside each other come before all others, block by block. Where scales are powers of two (BINARY: of E4M3, with
// bfloat16 between), products are exact in float16 too, two at a time.
//
// The index is read two tiles ahead, rows and scales one. A tile is stored between the two barriers of the next one.
static_assert(TRANSPOSED && DEFERS, "the copy leaves in whole lines alone");
static_assert(EIGHTS == 2 && ROWS == 4 && BLOCK == COLUMNS, "a lane in four has the scale of a row");
static_assert(!BINARY || NARROW && !HALF, "else two factors have no power of two in common");
static_assert(ROW_BYTES == (NARROW ? 16 : 32) && APART == (NARROW ? 8 : 64), "whole sectors");

constexpr int BYTES = ROW_BYTES / 16;  // of a number, and pieces of 16 bytes that a thread has of a row
constexpr int PAIRS = 4 * EIGHTS;      // of columns

// Four numbers in float16.
__device__ __forceinline__ uint2 from_8_bits(u32 four) {
  uint2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2." FORMAT "x2 %0, low;\n"
      "cvt.rn.f16x2." FORMAT "x2 %1, high;\n}"
      : "=r"(v.x), "=r"(v.y) : "r"(four));
  return v;
}

// Tiles of a program, each found from the one before without a division.
class Walk {
  int of_one, wholes, rests, whole, rest;  // a whole one is a panel or, without panels, a block

 public:
  __device__ __forceinline__ Walk(int width, int num_live) {
    of_one = (width + COLUMNS - 1) / COLUMNS;
#if PANEL
    of_one = tiles_of_panel(num_live);
#endif
    wholes = gridDim.x / of_one, rests = gridDim.x % of_one;
    whole = blockIdx.x / of_one, rest = blockIdx.x % of_one;
  }

  // This tile, after which comes the next one.
  __device__ __forceinline__ Place go_on(int width, int num_live) {
    const Place here(whole, rest, width, num_live);
    rest += rests;
    const bool over = rest >= of_one;
    rest -= over ? of_one : 0;
    whole += wholes + over;
    return here;
  }
};

// A tile's rows of a thread, at their places or at the index.
struct Rows {
  int row[ROWS];

  __device__ __forceinline__ Rows(Place at, const int* source, int num_live) {
#if PANEL
    const int4 v = __ldg((const int4*)(source + (at.row < num_live ? at.row : 0)));
    row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
#else
    row[0] = at.row, row[1] = at.row + 1, row[2] = at.row + 2, row[3] = at.row + 3;
#endif
  }
};

// The scale of one row of each lane, which is 0 where none is held.
struct OwnScale {
  Stored stored;
  bool held;

  __device__ __forceinline__ Stored value() const { return held ? stored : Stored(0); }
};

// Begins to copy a tile's rows to shared memory.
__device__ __forceinline__ OwnScale read(
    Place at, const Rows& rows, const u8* data, const Stored* scale, int thread, int num_live, int width, u32 to) {
  const u8* first = data + at.column * BYTES;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const bool wanted = i < at.live && rows.row[i] >= 0;
    const u8* from = first + (long long)rows.row[i] * (width * BYTES);
#pragma unroll
    for (int piece = 0; piece < BYTES; piece++)
      copy(to + i * READ + piece * THREADS * 16, from + piece * APART * BYTES,
           wanted && (!piece || at.column + APART < width));
  }
  end_copies();
  OwnScale own = {};
#if NARROW
  const int mine = thread % ROWS;
  int row = rows.row[0];
#pragma unroll
  for (int i = 1; i < ROWS; i++) row = i == mine ? rows.row[i] : row;
  own.held = at.row + mine < num_live && at.column - thread % IN_ROW * STEP < width && row >= 0;
  const int blocks = (width + BLOCK - 1) / BLOCK;
  own.stored = __ldg(scale + (own.held ? (u64)row * blocks + at.column / BLOCK : 0));
#endif
  return own;
}

// What a lane's row is multiplied by, as a float or, where these are exact for its warp, as two of float16 and the
// power of two `base`.
struct Factor {
  u32 word;
  bool exact;
  float base;
};

#if BINARY
__device__ __forceinline__ u32 to_float16(float low, float high) {
  u32 two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// The larger magnitude of each two numbers of float16; NaN is the largest.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
  asm("{\n.reg .b32 first, second;\nabs.f16x2 first, %0;\nabs.f16x2 second, %1;\n"
      "max.NaN.f16x2 %0, first, second;\n}"
      : "+r"(a) : "r"(b));
  return a;
}

// E4M3 has the multiples of 2^-9 up to 1.75 * 2^8, float16 those of 2^-24 below 2^16. Times 2^-15 .. 2^6, the powers
// over the base, all numbers are exact and below 2^15. Times a multiplier they keep four bits, so that what float16
// rounds is below 2^-20, and 0 in E4M3; so is all that is multiplied by less than 2^-24, for which float16 has 0. From
// 2^-100 on no number becomes a subnormal one of bfloat16.
constexpr u32 SPAN = 21u << 23, ABOVE_LARGEST = 6u << 23, LEAST = 27u << 23, MOST = 227u << 23;

__device__ __forceinline__ Factor factor_of_warp(float mine) {
  const u32 bits = __float_as_uint(mine), power = bits & 0x7FFFFF ? ~0u : bits;
  const u32 most = max(__reduce_max_sync(~0u, power), LEAST + SPAN);
  const u32 least = __reduce_min_sync(~0u, bits ? bits : ~0u);  // zeros are exact
  const u32 base = most - ABOVE_LARGEST;
  const bool exact = most <= MOST && least >= most - SPAN;
  const float of_base = mine * __uint_as_float((254u << 23) - base);
  return {exact ? to_float16(of_base, of_base) : bits, exact, __uint_as_float(base)};
}
#else
__device__ __forceinline__ Factor factor_of_warp(float mine) { return {__float_as_uint(mine), false, 1}; }
#endif

// Rows of 8 bits in 16, and the largest magnitudes of their columns: EXACT in float16, over the base.
template <bool EXACT>
__device__ __forceinline__ void widen(
    const int4 (&raw)[ROWS][BYTES], u32 factor, int thread, u32 (&kept)[ROWS][PAIRS], u32 (&of_columns)[PAIRS]) {
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const u32 of_row = __shfl_sync(~0u, factor, i, ROWS);
    u32 words[4];
    unpack(words, raw[i][0]);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const uint2 four = from_8_bits(words[j / 2]);
      const u32 two = j % 2 ? four.y : four.x;
#if BINARY
      if (EXACT) {
        kept[i][j] = times(two, of_row);
        of_columns[j] = i ? larger_magnitudes(of_columns[j], kept[i][j]) : kept[i][j];
        continue;
      }
#endif
      const float2 v = from_float16(two);
      const float by = __uint_as_float(of_row);
      kept[i][j] = pack(without_subnormal(v.x * by), without_subnormal(v.y * by));
      const u32 magnitudes = kept[i][j] & 0x7FFF7FFF;
      of_columns[j] = i ? larger(of_columns[j], magnitudes) : magnitudes;
    }
  }
}

// The tile's numbers, and the largest magnitudes of their columns.
__device__ __forceinline__ void take(
    const int4 (&raw)[ROWS][BYTES], const Factor& factor, int thread, u32 (&kept)[ROWS][PAIRS],
    u32 (&of_columns)[PAIRS]) {
#if NARROW
  if (BINARY && factor.exact)
    widen<true>(raw, factor.word, thread, kept, of_columns);
  else
    widen<false>(raw, factor.word, thread, kept, of_columns);
#else
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      u32 words[4];
      unpack(words, raw[i][eight]);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int pair = eight * 4 + j;
        const u32 magnitudes = words[j] & 0x7FFF7FFF;
        kept[i][pair] = words[j];
        of_columns[pair] = i ? larger(of_columns[pair], magnitudes) : magnitudes;
      }
    }
#endif
}

__device__ __forceinline__ u32 of_base(u32 two, float base) {
  const float2 v = from_float16(two);
  return pack(v.x * base, v.y * base);
}

// Half of two lanes' words: of each one the larger of its own and the other lane's.
template <int COUNT>
__device__ __forceinline__ void halve(const u32 (&words)[2 * COUNT], bool upper, int apart, u32 (&half)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    const u32 other = __shfl_xor_sync(~0u, upper ? words[j] : words[COUNT + j], apart);
    half[j] = larger(upper ? words[COUNT + j] : words[j], other);
  }
}

// A warp's largest magnitudes of columns: of each four rows' threads one has four columns in the end.
__device__ __forceinline__ void put_largest(
    const u32 (&of_columns)[PAIRS], const Factor& factor, int thread, u32 smem) {
  const int part = thread % 32 / IN_ROW, eight = part / 2;
  u32 four[4], two[2];
  halve(of_columns, eight, 2 * IN_ROW, four);
  halve(four, part % 2, IN_ROW, two);
  if (factor.exact) two[0] = of_base(two[0], factor.base), two[1] = of_base(two[1], factor.base);
  const int column = thread % IN_ROW * STEP + eight * APART + part % 2 * 4;
  put_pair(largest_at(smem, thread / 32 * COLUMNS + column), two[0], two[1]);
}

#if BINARY
// Multipliers of a thread's columns, times the base, as two of float16; false if one of the warp's is too large.
__device__ __forceinline__ bool take_multipliers(u32 smem, int thread, float base, u32 (&of)[PAIRS]) {
  u32 most = 0;
#pragma unroll
  for (int j = 0; j < PAIRS; j += 2) {
    const float4 m = multipliers(smem, thread % IN_ROW * STEP + j / 4 * APART + j % 4 * 2);
    of[j] = to_float16(m.x * base, m.y * base), of[j + 1] = to_float16(m.z * base, m.w * base);
    most = larger(most, larger(of[j], of[j + 1]));
  }
  return !__any_sync(~0u, most + 0x04000400 & 0x80008000);
}

// Two rows of two columns.
__device__ __forceinline__ u32 to_8_bits(u32 first, u32 second) {
  u32 four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\nmov.b32 %0, {low, high};\n}"
      : "=r"(four) : "r"(first), "r"(second));
  return four;
}

__device__ __forceinline__ void transpose_exact(
    const u32 (&kept)[ROWS][PAIRS], const u32 (&of)[PAIRS], int thread, u32 smem) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; eight++) {
    u32 down[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int pair = eight * 4 + j;
      const u32 low = to_8_bits(times(kept[0][pair], of[pair]), times(kept[1][pair], of[pair]));
      const u32 high = to_8_bits(times(kept[2][pair], of[pair]), times(kept[3][pair], of[pair]));
      down[2 * j] = __byte_perm(low, high, 0x6420), down[2 * j + 1] = __byte_perm(low, high, 0x7531);
    }
    transpose(down, 0, eight, thread, smem);
  }
}
#endif

__device__ __forceinline__ void transpose_rounded(const u32 (&kept)[ROWS][PAIRS], int thread, u32 smem) {
#pragma unroll
  for (int eight = 0; eight < EIGHTS; eight++) {
    u32 down[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 m = multipliers(smem, thread % IN_ROW * STEP + eight * APART + j);
      const float of[4] = {m.x, m.y, m.z, m.w};
      float v[ROWS][4];
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        const int pair = eight * 4 + j / 2;
        const float2 low = unpack(kept[i][pair]), high = unpack(kept[i][pair + 1]);
        v[i][0] = low.x, v[i][1] = low.y, v[i][2] = high.x, v[i][3] = high.y;
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        down[j + k] = to_8_bits(v[0][k] * of[k], v[1][k] * of[k], v[2][k] * of[k], v[3][k] * of[k]);
    }
    transpose(down, 0, eight, thread, smem);
  }
}

// Quantizes what is kept, and leaves it transposed in shared memory.
__device__ __forceinline__ void quantize(u32 (&kept)[ROWS][PAIRS], const Factor& factor, int thread, u32 smem) {
#if BINARY
  if (factor.exact) {
    u32 of[PAIRS];
    if (take_multipliers(smem, thread, factor.base, of)) {
      transpose_exact(kept, of, thread, smem);
      return;
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int j = 0; j < PAIRS; j++) kept[i][j] = of_base(kept[i][j], factor.base);
  }
#endif
  transpose_rounded(kept, thread, smem);
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) grouped_requantize(
    const u8* data,
#if NARROW
    const Stored* scale,
#endif
#if PANEL
    const int* source,
#endif
    const int* sizes, int num_rows, int width, int groups,
    u8* data_rows, Stored* scale_rows) {
#if !NARROW
  const Stored* scale = scale_rows;
#endif
#if !PANEL
  const int* source = sizes;
#endif
  const u32 smem = shared_memory();
  const int thread = threadIdx.x, num_live = min(sum(sizes, groups), num_rows);
  const int tiles = (width + COLUMNS - 1) / COLUMNS * ((num_live + BLOCK - 1) / BLOCK);
  const u32 mine = smem + thread * 16;
  Walk walk(width, num_live);
  Place here = walk.go_on(width, num_live), next = walk.go_on(width, num_live);
  OwnScale own = read(here, Rows(here, source, num_live), data, scale, thread, num_live, width, mine);
  Rows rows(next, source, num_live);
  int stored_row = 0, stored_column = width;  // of the tile before, whose columns are none at first
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    wait_for_copies<0>();
    int4 raw[ROWS][BYTES];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int piece = 0; piece < BYTES; piece++) raw[i][piece] = get(mine + i * READ + piece * THREADS * 16);
    Factor factor = {};
#if NARROW
    factor = factor_of_warp(factor_of(own.value()));
#endif
    own = read(next, rows, data, scale, thread, num_live, width, mine);
    const Place after = walk.go_on(width, num_live);
    rows = Rows(after, source, num_live);

    u32 kept[ROWS][PAIRS], of_columns[PAIRS];
    take(raw, factor, thread, kept, of_columns);
    put_largest(of_columns, factor, thread, smem);
    const int first_column = here.column - thread % IN_ROW * STEP;
    __syncthreads();
    scale_columns(thread, smem, here.block, first_column, width, scale_rows);
    store_lines(data_rows, thread, smem, stored_row, stored_column, num_rows, width);
    __syncthreads();
    quantize(kept, factor, thread, smem);
    stored_row = here.block * BLOCK, stored_column = first_column;
    here = next, next = after;
  }
  __syncthreads();
  store_lines(data_rows, thread, smem, stored_row, stored_column, num_rows, width);
}
