// Weight gradient of 8-bit operands in blocks of 128 rows, for Hopper: out[g] = sum over the rows r of group g of
// (lhs[r] * its scales) (dy[r] * its scales)^T, zeros for a group without rows.
//
// Operands are K-major, [columns, rows]: the contraction is contiguous. A cluster of two blocks works on 256 columns of
// lhs and 256 of dy; the blocks have half of the former each, and share the latter by multicast. In a block one
// producer warp loads, and two consumer warpgroups have half of the columns of dy each: 64 columns of lhs at a time,
// for products of more would not fit into registers beside all sums. A step is a block of 128 rows: one consumer scales
// a product and adds it while the other multiplies. Results leave by TMA. Shared memory is busiest: products, loads,
// scales and results have 1570 of its clocks in a step, for which the tensor cores take 1024.
//
// Compiled at run time after `weight_gradients.cuh`, whose macros are this one's too. What stands alone on a line is
// replaced: INSTRUCTION (`multiply`).

// What a stage holds: both operands, then both scales.
constexpr int OF_LHS = TILE_N * BLOCK, SCALES_N = OF_LHS + TILE_M * BLOCK, SCALES_M = SCALES_N + TILE_N * 4;
constexpr int STAGE_LOADS = SCALES_M + TILE_M * 4;
static_assert(STAGE_BYTES >= STAGE_LOADS, "as launched");

INSTRUCTION

__device__ __forceinline__ float2 get_pair(u32 from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ float get_float(u32 from) { return __int_as_float(get_word(from)); }

__device__ __forceinline__ void load_tiles(
    const TensorMap* lhs, const TensorMap* lhs_scales, const TensorMap* dy, const TensorMap* dy_scales, Tiles tiles,
    Ring ring) {
  const int rank = rank_in_cluster();
  while (tiles.next())
    for (int chunk = tiles.start / BLOCK; chunk * BLOCK < tiles.end; chunk++) {
      const u32 at = ring.at(), ready = ring.full();
      wait_barrier(ring.empty(), ring.parity);
      expect_bytes(ready, STAGE_LOADS);
      load_shared(dy, at + rank * PART_N * BLOCK, ready, chunk * BLOCK, tiles.n + rank * PART_N);
      load(lhs, at + OF_LHS, ready, chunk * BLOCK, tiles.m);
      load(dy_scales, at + SCALES_N, ready, tiles.n, chunk);
      load(lhs_scales, at + SCALES_M, ready, tiles.m, chunk);
      ring.next();
    }
  // What is read beyond the last block is not used.
  wait_barrier(ring.empty(), ring.parity);
  arrive(ring.full());
}

// Zeros in the bytes of an operand's lines before `first` and from `end` on. One consumer.
__device__ __noinline__ void clear(u32 operand, int lines, int first, int end) {
  constexpr int UNITS = BLOCK / 16;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < lines * UNITS; i += 128) {
    const int byte = i % UNITS * 16;
    if (byte < first || byte + 16 > end) clear_unit(unit_at(operand, i / UNITS, i % UNITS), byte, first, end);
  }
}

// Stores a tile's sums: a consumer's columns of dy are its own, and its parts are of lhs.
__device__ __forceinline__ void store(const Result& result, const float (&sums)[PARTS][SUMS], Done to) {
  to.n += result.consumer * PART_N;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const u32 staged = result.stage(part);
#if WIDE
    stage_sums(staged, sums[part], 1);
#else
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
      const float* of = sums[part] + strip * PACKED * 2;
      u32 packed[PACKED];
#pragma unroll
      for (int i = 0; i < PACKED; i++) packed[i] = pack(of[2 * i], of[2 * i + 1]);
      stage_packed(staged + strip * STRIP, packed);
    }
#endif
    result.leave<PART_M, 0>(part, to);
  }
}

// The consumers multiply in turn, else both would multiply, and then both add. A turn ends while the last instruction
// of a product is under way.
__device__ __forceinline__ void take_turn(int mine) { asm volatile("bar.sync %0, 256;" ::"r"(mine + 3) : "memory"); }

__device__ __forceinline__ void let_turn(int mine) { asm volatile("bar.arrive %0, 256;" ::"r"(mine + 3) : "memory"); }

__device__ __forceinline__ void end_turn(int consumer) {
  wait_products<1>();
  let_turn(1 - consumer);
}

// Begins a product of 64 columns of lhs and 128 of dy.
__device__ __forceinline__ void begin(float (&product)[SUMS], u32 lhs, u32 dy) {
  const u64 of_lhs = descriptor(lhs), of_dy = descriptor(dy);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < BLOCK; k += SLICE) {
    multiply(product, of_lhs + k / 16, of_dy + k / 16, k > 0);
    if (k >= BLOCK - 2 * SLICE) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
}

// The scales of dy that a thread needs, 8 columns apart.
typedef float2 OfColumns[SUMS / 4];

__device__ __forceinline__ u32 columns_at(const Ring& ring, int consumer) {
  return ring.at() + SCALES_N + (consumer * PART_N + threadIdx.x % 4 * 2) * 4;
}

// sums + product, or only the latter, times both scales. If ANEW, each scale of columns makes room for the one of the
// next block as soon as it was used: it has a whole product's time to come, while the tensor cores keep shared memory.
template <bool FIRST, bool ANEW>
__device__ __forceinline__ void add(
    float (&sums)[SUMS], const float (&product)[SUMS], float upper, float lower, OfColumns& of_columns, u32 next) {
#pragma unroll
  for (int j = 0; j < SUMS / 4; j++) {
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i++) {
      const float of_column = i % 2 ? of_columns[j].y : of_columns[j].x, of_row = i % 4 < 2 ? upper : lower;
      sums[i] = FIRST ? product[i] * of_column * of_row : fmaf(product[i] * of_column, of_row, sums[i]);
    }
    if (ANEW) of_columns[j] = get_pair(next + j * 32);
  }
}

// A block of rows. The first one of a tile stores the tile before it, while its own first product is under way.
template <bool FIRST>
__device__ __forceinline__ void step(
    float (&sums)[PARTS][SUMS], float (&product)[SUMS], OfColumns& of_columns, int first, int end, Ring& ring,
    const Result& result, Done done) {
  const int consumer = result.consumer, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const u32 at = ring.at(), lhs = at + OF_LHS, dy = at + consumer * PART_N * BLOCK;
  if (first > 0 || end < BLOCK) {
    clear(lhs, TILE_M, first, end);
    clear(dy, PART_N, first, end);
    fence_shared();
    result.meet();
  }
  take_turn(consumer);
  begin(product, lhs, dy);
  if (FIRST) {
    end_turn(consumer);
    if (done.group >= 0) store(result, sums, done);
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) of_columns[j] = get_pair(columns_at(ring, consumer) + j * 32);
  }
  const u32 rows = at + SCALES_M + (warp * 16 + lane / 4) * 4;
  float upper = get_float(rows), lower = get_float(rows + 32);
  if (!FIRST) end_turn(consumer);
  finish(product);
  add<FIRST, false>(sums[0], product, upper, lower, of_columns, 0);
  take_turn(consumer);
  begin(product, lhs + PART_M * BLOCK, dy);
  upper = get_float(rows + PART_M * 4), lower = get_float(rows + PART_M * 4 + 32);
  end_turn(consumer);
  const Ring here = ring;
  ring.next();
  wait_barrier(ring.full(), ring.parity);
  finish(product);
  here.release();
  add<FIRST, true>(sums[1], product, upper, lower, of_columns, columns_at(ring, consumer));
}

__device__ __forceinline__ void multiply_tiles(Tiles tiles, Ring ring, const Result& result) {
  float sums[PARTS][SUMS], product[SUMS];
  OfColumns of_columns;
  Done done;
  if (result.consumer == 1) let_turn(0);
  wait_barrier(ring.full(), ring.parity);
  while (tiles.next()) {
    // Of the rows of the group, from the first row of a block.
    int first = tiles.start % BLOCK, end = tiles.end - tiles.start + first;
    step<true>(sums, product, of_columns, first, end, ring, result, done);
    done.group = tiles.group, done.m = tiles.m, done.n = tiles.n;
#pragma unroll 1
    while ((end -= BLOCK) > 0) step<false>(sums, product, of_columns, 0, end, ring, result, done);
  }
  if (result.consumer == 0) take_turn(0);  // of both the last one is taken
  if (done.group >= 0) store(result, sums, done);
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) block_scaled_gemm_weights(
    const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap lhs_scales,
    const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap dy_scales, const int* sizes,
    int K, int N, int num_groups, u8* zeros, const __grid_constant__ TensorMap out) {
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    prefetch_descriptor(&lhs), prefetch_descriptor(&lhs_scales), prefetch_descriptor(&dy);
    prefetch_descriptor(&dy_scales), prefetch_descriptor(&out);
    init_stages(smem, STAGES, 4 * CONSUMERS);
  }
  const int live = order(sizes, num_groups, smem, table);
  cluster_sync();
  const int num_m = (K + 2 * TILE_M - 1) / (2 * TILE_M), num_n = (N + TILE_N - 1) / TILE_N;
  const Tiles tiles(smem, table, num_m, num_n, live);
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    if (threadIdx.x == 0)
      load_tiles(&lhs, &lhs_scales, &dy, &dy_scales, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1});
    if (threadIdx.x / 32 == 1) store_zeros(zeros, table, live, num_groups, K, N);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Result result{consumer, smem + STAGED + consumer * STAGED_BYTES, &out};
    multiply_tiles(tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0}, result);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here, or write to its stages
}
