// Grouped GEMM of 8-bit operands in blocks of 128, for Hopper: out[r] = sum over the blocks b of the contraction of
// (lhs[r, b] . rhs[group of r, :, b]) * row_scales[r, b] * weight_scales[group of r, :, b]; zeros in padding rows. Of
// operands without BLOCKS the scales are row_scales[group of r] and weight_scales[group of r].
//
// Compiled at run time, without headers, after `hopper.cuh` and `split_rows.cuh`, whose macros it has.

// The columns of a tile lie side by side. What lies beyond the width is not stored.
__device__ __forceinline__ Halves halves_of(int n, int parts) { return {2 * n, min(2 * n + 1, parts - 1)}; }

__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int k, Halves halves, int group) {
  load(weight, to, ready, k, halves.left * PART_N, group);
}

__device__ __forceinline__ int more_of(int, int) { return 0; }

// The way out of a consumer's results: parts of 64 x 128 are staged in shared memory, from where a warp stores them.
struct Result {
  u32 staged, ready, free;
  u32 parity;

  __device__ __forceinline__ Result(u32 smem, int consumer, u32 parity)
      : staged(smem + consumer * STAGED_BYTES), ready(smem + BARRIERS + READY + 8 * ROOMS * consumer),
        free(smem + BARRIERS + FREE + 8 * ROOMS * consumer), parity(parity) {}

  __device__ __forceinline__ Room room(int i) const { return {ready + 8 * i, free + 8 * i, staged + i * ROOM}; }

  // Of a part: when the last room was used, the first one is next.
  __device__ __forceinline__ u32 parity_of(int part) {
    const u32 now = parity;
    if (part % ROOMS == ROOMS - 1) parity ^= 1;
    return now;
  }

  __device__ __forceinline__ void begin(const Ring&) {}

  __device__ __forceinline__ void take(float (&left)[SUMS], float (&right)[SUMS]) {
    hand_over(room(0), parity_of(0), left), clear(left);
    hand_over(room(1 % ROOMS), parity_of(1), right), clear(right);
  }
};

__device__ __forceinline__ void store_tiles(Tiles tiles, int consumer, Result result, int width, u8* out) {
  constexpr int SIZE = WIDE ? 4 : 2;
  const u32 pitch = width * SIZE;
  while (tiles.next()) {
    const int row = tiles.row + consumer * PART_M;
    const int column = tiles.n * TILE_N, lines = tiles.end - row, bytes = (width - column) * SIZE;
    u8* to = out + (u64)row * pitch + column * SIZE;
    store_part(result.room(0), result.parity_of(0), to, pitch, lines, bytes);
    store_part(result.room(1 % ROOMS), result.parity_of(1), to + PART_N * SIZE, pitch, lines, bytes - PART_N * SIZE);
  }
}

// The padding rows up to `end`.
__device__ __forceinline__ void store_zeros(int live, u8* out, int end, int width) {
  const u64 per_row = (u64)width * (WIDE ? 4 : 2) / 16, last = end * per_row;
  for (u64 i = live * per_row + blockIdx.x * CONSUMERS * 128 + threadIdx.x - 128; i < last;
       i += gridDim.x * CONSUMERS * 128)
    ((uint4*)out)[i] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) split_gemm(
#if GATHERS
    const u8* tokens, const int* index, const float* row_scales,
#else
    const __grid_constant__ TensorMap lhs, const float* row_scales,
#endif
    const __grid_constant__ TensorMap rhs, const float* weight_scales, const int* sizes,
#if LOW_RANK
    const __grid_constant__ TensorMap u, const __grid_constant__ TensorMap b,
#endif
#if GATHERS
    int num_tokens, int bytes,
#endif
    int num_rows, int zeros_end, int steps, int width, int num_groups, u8* out) {
  extern __shared__ __align__(1024) u8 shared[];  // swizzles repeat so
  const u32 smem = (u32)__cvta_generic_to_shared(shared), table = smem + TABLE;
  const int consumer = consumer_of_warp(), warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
#if GATHERS
  begin_block(smem, warp, sizes, num_groups, &rhs, nullptr);
#else
  begin_block(smem, warp, sizes, num_groups, &rhs, &lhs);
#endif
  const Tiles tiles{table, num_groups, (width + TILE_N - 1) / TILE_N};
  Ring ring{smem + BARRIERS, STAGES_AT - BARRIERS, STAGE_BYTES, STAGES, consumer < 0};
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
#if GATHERS
    const Tokens of{tokens, index, num_tokens, bytes, num_rows};
    if (warp < 2) gather_tiles(of, &rhs, warp, tiles, steps, width, ring);
#else
#if LOW_RANK
    const Operands low_rank{&u, &b};
#else
    const Operands low_rank{};
#endif
    if (warp == 0) load_tiles({&lhs, &rhs}, low_rank, tiles, steps, width, ring);
#endif
    if (warp >= 2) store_tiles(tiles, warp - 2, Result(smem, warp - 2, 0), width, out);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Scales scales{row_scales, weight_scales, consumer, num_rows, steps};
    multiply_tiles(scales, consumer, ring, Result(smem, consumer, 1));
    store_zeros(get_word(table + 8 * num_groups + 4), out, zeros_end, width);
  }
}
