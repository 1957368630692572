// Rows quantized in blocks along the rows, for Hopper: with what `quantize.cuh` has, which comes before this text. They
// have 16 bits, or 8 in blocks along their features (NARROW), and between the two quantizations 16.
//
// With a PANEL rows are those of `data` and `scale` at the index `source`, zeros where it is negative. Narrow ones are
// also written as they are, the scales with the rows contiguous, if MOVES.
static_assert(TRANSPOSED, "the copy leaves in whole lines alone");
static_assert(!MOVES || PANEL && NARROW, "else rows are there, or have no scales");
static_assert(ROW_BYTES == (NARROW ? 8 : 16), "eight numbers");

// 8 bytes, or zeros, for which nothing is read.
__device__ __forceinline__ void copy_8(u32 to, const u8* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(wanted ? 8 : 0) : "memory");
}

__device__ __forceinline__ uint2 get_8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

// The two numbers in the low, or high, half of a word.
__device__ __forceinline__ float2 from_8_bits(u32 four, bool high) {
  float2 v;
  asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2." FORMAT "x2 both, low;\n"
      "mov.b32 {low, high}, both;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y) : "r"(high ? four >> 16 : four));
  return v;
}

// Zeros of their sign in place of subnormal numbers.
__device__ __forceinline__ float without_subnormal(float x) {
  asm("mul.ftz.f32 %0, %0, 0f3F800000;" : "+f"(x));
  return x;
}

__device__ __forceinline__ float factor_of(float scale) { return scale; }
__device__ __forceinline__ float factor_of(u8 scale) { return power_of_2(scale); }

// Eight numbers of a row, as they were copied.
#if NARROW
typedef uint2 Eight;
__device__ __forceinline__ Eight get_eight(u32 from) { return get_8(from); }
#else
typedef int4 Eight;
__device__ __forceinline__ Eight get_eight(u32 from) { return get(from); }
#endif

// The j-th two of them, of 16 bits each.
__device__ __forceinline__ u32 two_of(uint2 eight, int j, float factor) {
  const float2 v = from_8_bits(j < 2 ? eight.x : eight.y, j % 2);
  return pack(without_subnormal(v.x * factor), without_subnormal(v.y * factor));
}
__device__ __forceinline__ u32 two_of(int4 eight, int j, float) {
  return j < 2 ? j < 1 ? eight.x : eight.y : j < 3 ? eight.z : eight.w;
}

// Rows of a thread, on their way to shared memory, and their scales.
struct Reader {
  const u8* data;
  const Stored* scale;
  int live, width, blocks;
#if PANEL
  int rows[ROWS];
#endif

  __device__ __forceinline__ Reader(
      Place at, const u8* all_data, const Stored* all_scales, const int* source, int width)
      : live(at.live), width(width), blocks((width + BLOCK - 1) / BLOCK) {
    data = all_data + at.column * (ROW_BYTES / 8);
    scale = all_scales + at.column / BLOCK;
#if PANEL
#pragma unroll
    for (int i = 0; i < ROWS; i++) rows[i] = i < live ? __ldg(source + at.row + i) : -1;
#else
    data += (u64)at.row * width * (ROW_BYTES / 8);
    scale += (u64)at.row * blocks;
#endif
  }

  __device__ __forceinline__ Stored read(int i, u32 to) const {
#if PANEL
    const int row = rows[i];
    const bool wanted = row >= 0;
#else
    const int row = i;
    const bool wanted = i < live;
#endif
    const u8* from = data + (u64)row * width * (ROW_BYTES / 8);
    NARROW ? copy_8(to, from, wanted) : copy(to, from, wanted);
    end_copies();
    return NARROW && wanted ? __ldg(scale + (u64)row * blocks) : Stored(0);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) grouped_requantize(
    const u8* data,
#if NARROW
    const Stored* scale,
#endif
#if PANEL
    const int* source,
#endif
    const int* sizes, int num_rows, int all_columns, int groups,
#if MOVES
    u8* moved, Stored* moved_scale,
#endif
    u8* data_rows, Stored* scale_rows) {
#if !NARROW
  const Stored* scale = scale_rows;
#endif
#if !PANEL
  const int* source = sizes;
#endif
  const u32 smem = shared_memory();
  const int num_live = min(sum(sizes, groups), num_rows);
  const int tiles = (all_columns + COLUMNS - 1) / COLUMNS * ((num_live + BLOCK - 1) / BLOCK);
  Stored scales[ROWS];
  {
    const Reader first(Place(blockIdx.x, all_columns, num_live), data, scale, source, all_columns);
#pragma unroll
    for (int i = 0; i < ROWS; i++) scales[i] = first.read(i, smem + threadIdx.x * ROW_BYTES + i * READ);
  }
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int thread = anew(threadIdx.x), width = anew(all_columns);
    const Reader next(Place(tile + gridDim.x, width, num_live), data, scale, source, width);
    const Place here(tile, width, num_live);
    u32 kept[ROWS][4], of_columns[1][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      wait_for_copies<ROWS - 1>();
      const u32 from = smem + thread * ROW_BYTES + i * READ;
      const Eight eight = get_eight(from);
#if MOVES
      if (i < here.live) {
        const u64 row = here.row + i;
        *(uint2*)(moved + row * width + here.column) = eight;
        if (thread % PEERS == 0) moved_scale[(u64)(here.column / BLOCK) * num_rows + row] = scales[i];
      }
#endif
      const float factor = factor_of(scales[i]);
      scales[i] = next.read(i, from);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        kept[i][j] = two_of(eight, j, factor);
        of_columns[0][j] = larger(of_columns[0][j], kept[i][j] & 0x7FFF7FFF);
      }
    }

    const int first_column = here.column - thread % 16 * 8;
    scale_columns(of_columns, thread, smem, here, first_column, width, scale_rows);
#pragma unroll
    for (int r = 0; r < ROWS; r += 4) {
      u32 down[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        float v[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float2 low = unpack(kept[r + k][j / 2]), high = unpack(kept[r + k][j / 2 + 1]);
          v[k][0] = low.x, v[k][1] = low.y, v[k][2] = high.x, v[k][3] = high.y;
        }
        const float4 m = multipliers(smem, thread % 16 * 8 + j);
        const float of[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
          down[j + k] = to_8_bits(v[0][k] * of[k], v[1][k] * of[k], v[2][k] * of[k], v[3][k] * of[k]);
      }
      transpose(down, r, thread, smem);
    }
    store_transposed(data_rows, thread, smem, here.block * BLOCK, first_column, num_rows, width);
  }
}
