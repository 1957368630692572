// Weight gradient of per-tensor FP8 operands, one scale per group, for Hopper: out[g] = (sum over the rows r of group g
// of lhs[r]^T dy[r]) * lhs_scale[g] * dy_scale[g], zeros for a group without rows.
//
// Operands are K-major, [columns, rows]: the contraction is contiguous, as the tensor cores read 8 bits alone. In a
// block one producer warp loads, two clear the rows of other groups, and two consumer warpgroups multiply 64 columns of
// lhs by 256 of dy each: at their own pace, so that one multiplies while the other ends a tile. A consumer keeps a
// result in registers, rounded, of which a piece leaves in each step of the next tile. Shared memory is as busy as the
// tensor cores: products and loads have all of its 128 bytes of a clock.
//
// Compiled at run time after `weight_gradients.cuh`, whose macros are this one's too. What stands alone on a line is
// replaced: INSTRUCTION (`multiply`).

// What a stage holds: both operands.
constexpr int OF_LHS = TILE_N * BLOCK, STAGE_LOADS = OF_LHS + TILE_M * BLOCK;
static_assert(STAGE_BYTES == STAGE_LOADS, "as launched");
constexpr int CLEAN = 192;         // barriers of stages without rows of other groups
constexpr int CLEANERS = 2;        // warps

INSTRUCTION

__device__ __forceinline__ void load_tiles(const TensorMap* lhs, const TensorMap* dy, Tiles tiles, Ring ring) {
  const int rank = rank_in_cluster();
  while (tiles.next())
    for (int row = first_row(tiles); row < tiles.end; row += BLOCK) {
      const u32 at = ring.at(), ready = ring.full();
      wait_barrier(ring.empty(), ring.parity);
      expect_bytes(ready, STAGE_LOADS);
      load_shared(dy, at + rank * SHARE * BLOCK, ready, row, tiles.n + rank * SHARE);
      load(lhs, at + OF_LHS, ready, row, tiles.m);
      ring.next();
    }
}

__device__ __forceinline__ u32 clean(const Ring& ring) { return ring.smem + CLEAN + 8 * ring.stage; }

// Zeros in a slice's rows of other groups, before `first` and from `end` on, whatever they are.
__device__ __forceinline__ void clear_slice(u32 operands, int slice, int first, int end) {
  const int thread = threadIdx.x % (CLEANERS * 32), unit = slice * (SLICE / 16) + thread % 2;
#pragma unroll 2
  for (int line = thread / 2; line < TILE_N + TILE_M; line += CLEANERS * 16)
    clear_unit(unit_at(operands, line, unit), unit * 16, first, end);
}

__device__ __forceinline__ void clean_tiles(Tiles tiles, Ring ring) {
  while (tiles.next()) {
    const int row = first_row(tiles);
    int first = tiles.start - row;
    for (int end = tiles.end - row; end > 0; end -= BLOCK, first = 0) {
      wait_barrier(ring.full(), ring.parity);
      if (first > 0 || end < BLOCK) {
        if (first > 0 && end >= SLICE) clear_slice(ring.at(), 0, first, BLOCK);
        if (end < BLOCK) clear_slice(ring.at(), end / SLICE, first, end);
        fence_shared();
        __syncwarp();
      }
      if (threadIdx.x % 32 == 0) arrive(clean(ring));
      ring.release();
      ring.next();
    }
  }
}

// Begins the products of two slices.
__device__ __forceinline__ void multiply_half(float (&sums)[PARTS * SUMS], u64 lhs, u64 dy, bool accumulate) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < BLOCK / 2; k += SLICE) multiply(sums, lhs + k / 16, dy + k / 16, accumulate || k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// A step, of which half is under way in the end, and meanwhile a piece of the tile before leaves.
template <bool FIRST>
__device__ __forceinline__ void step(
    float (&sums)[PARTS * SUMS], const Ring& ring, int first, int end, Sender<Done>& sender) {
  const u32 dy = ring.at(), lhs = dy + OF_LHS + sender.way.result.consumer * PART_M * BLOCK;
  const u64 of_lhs = descriptor(lhs), of_dy = descriptor(dy);
  const bool all = end >= BLOCK;
  wait_barrier(all && first == 0 ? ring.full() : clean(ring), ring.parity);
  if (all) {
    multiply_half(sums, of_lhs, of_dy, !FIRST);
  } else {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
    for (int k = 0; k < end; k += SLICE) multiply(sums, of_lhs + k / 16, of_dy + k / 16, !FIRST || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  if (!FIRST) {
    wait_products<1>();
    ring.release_before();
  }
  if (all) multiply_half(sums, of_lhs + BLOCK / 32, of_dy + BLOCK / 32, true);
  sender.send_some();
}

__device__ __forceinline__ void multiply_tiles(
    const float* lhs_scale, const float* dy_scale, Tiles tiles, Ring ring, Sender<Done> sender) {
  float sums[PARTS * SUMS];
  bool more = tiles.next();
  while (more) {
    const Done tile{tiles.group, tiles.m + sender.way.result.consumer * PART_M, tiles.n};
    const float of_lhs = read_scale(lhs_scale + tile.group), of_dy = read_scale(dy_scale + tile.group);
    const int row = first_row(tiles);
    int end = tiles.end - row;
    step<true>(sums, ring, tiles.start - row, end, sender);
#pragma unroll 1
    while ((end -= BLOCK) > 0) {
      ring.next();
      step<false>(sums, ring, 0, end, sender);
    }
    more = tiles.next();  // while the last products run
    sender.send_rest();
    finish(sums);
    ring.release();
    ring.next();
    sender.take(sums, product_of_scales(of_lhs, of_dy), tile);
  }
  sender.send_rest();
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) quantized_grouped_gemm_weights(
    const __grid_constant__ TensorMap lhs, const float* lhs_scale, const __grid_constant__ TensorMap dy,
    const float* dy_scale, const int* sizes, int K, int N, int num_groups, u8* zeros,
    const __grid_constant__ TensorMap out) {
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    prefetch_descriptor(&lhs), prefetch_descriptor(&dy), prefetch_descriptor(&out);
    for (int i = 0; i < STAGES; i++) init_barrier(smem + CLEAN + 8 * i, CLEANERS);
    init_stages(smem, STAGES, 4 * CONSUMERS + CLEANERS);
  }
  const int live = order(sizes, num_groups, smem, table);
  cluster_sync();
  const int num_m = (K + 2 * TILE_M - 1) / (2 * TILE_M), num_n = (N + TILE_N - 1) / TILE_N;
  const Tiles tiles(table, num_m, num_n, live);
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    if (threadIdx.x == 0) load_tiles(&lhs, &dy, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1});
    if (threadIdx.x / 32 >= CLEANERS) clean_tiles(tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0});
    if (threadIdx.x / 32 == 1) store_zeros(zeros, table, live, num_groups, K, N);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Sender<Done> sender{{{consumer, smem + STAGED + consumer * STAGED_BYTES, &out}}};
    multiply_tiles(lhs_scale, dy_scale, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0}, sender);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here, or write to its stages
}
