// As `tensor_scaled_weight_gradient.cu`, where the rows of one operand are tokens' at an index, zeros where that is
// negative: out[g] = (sum over the rows r of group g of tokens[index[r]]^T other[r]) * both scales, [tokens, other] or,
// CROSSWISE, [other, tokens].
//
// Tokens lie along their features, and two warps copy their rows to shared memory by `cp.async`. Tensor cores read 8
// bits along the contraction, so that a consumer transposes its 64 features on their way to registers: `ldmatrix.trans`
// gives a thread two features of four rows, and two byte permutations four rows of each. The rows of the instruction
// are thus features r and r + 8 of 16 INTERLEAVED. The other operand is K-major, [columns, rows], and comes by TMA; a
// consumer clears in it the rows of other groups. While half of a step is multiplied, the other one is transposed.
//
// Compiled at run time after `weight_gradients.cuh`, whose macros are this one's too. What stands alone on a line is
// replaced: INSTRUCTION (`multiply`).

// What a stage holds: 256 columns of the other operand, then rows of 128 features.
constexpr int OF_ROWS = TILE_N * BLOCK;
static_assert(STAGE_BYTES == OF_ROWS + BLOCK * TILE_M, "as launched");
constexpr int GATHERERS = 64;      // threads that copy: the last ones of the producer's
constexpr int HALF_STEP = BLOCK / 2, WORDS = 4;  // of a slice's features, of a thread

__device__ void multiply(float* d, const u32* tokens, u64 other, int accumulate);

INSTRUCTION

__device__ __forceinline__ void load_tiles(const TensorMap* other, Tiles tiles, Ring ring) {
  const int rank = rank_in_cluster();
  while (tiles.next())
    for (int row = first_row(tiles); row < tiles.end; row += BLOCK) {
      wait_barrier(ring.empty(), ring.parity);
      expect_bytes(ring.full(), OF_ROWS);
      load_shared(other, ring.at() + rank * SHARE * BLOCK, ring.full(), row, tiles.n + rank * SHARE);
      ring.next();
    }
}

// The places of 128 rows from this one on, four of each thread of a warp; -1 outside of the group.
struct Places {
  static constexpr int EACH = BLOCK / 32;
  int of_lane[EACH];

  __device__ __forceinline__ void read(const int* index, int row, const Tiles& tiles) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int mine = row + i * 32 + threadIdx.x % 32;
      of_lane[i] = -1;
      if (mine >= tiles.start && mine < tiles.end)
        asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(of_lane[i]) : "l"(index + mine));
    }
  }
};

// Eight rows at once, of each 128 features, whose units are swizzled so that those of the rows which `ldmatrix` reads
// together lie in different banks.
__device__ __forceinline__ void gather_tiles(const u8* tokens, const int* index, int width, Tiles tiles, Ring ring) {
  const int line = threadIdx.x % GATHERERS / 8, unit = threadIdx.x % 8;
  const u32 to = OF_ROWS + line * BLOCK, swizzled = (unit ^ (line % 2 + line / 4 * 2)) * UNIT;
  while (tiles.next()) {
    const int feature = tiles.m + unit * UNIT;
    int row = first_row(tiles);
    Places next;
    next.read(index, row, tiles);
    for (; row < tiles.end; row += BLOCK) {
      const Places places = next;
      next.read(index, row + BLOCK, tiles);
      wait_barrier(ring.empty(), ring.parity);
      const u32 at = ring.at() + to;
#pragma unroll
      for (int i = 0; i < BLOCK; i += 8) {
        const int place = __shfl_sync(~0u, places.of_lane[i / 32], i % 32 + line);
        const u8* const from = tokens + (u64)(u32)max(place, 0) * width + feature;
        copy_unit(at + i * BLOCK + (swizzled ^ i / 8 % 2 * 4 * UNIT), from, place >= 0 && feature < width);
      }
      arrive_after_copies(ring.full());
      ring.next();
    }
  }
}

// Where this lane finds its row of the matrices that a consumer reads of a slice, from the first row on. Rows 4 c and
// 4 c + 1 of 16 are one matrix, 4 c + 2 and 4 c + 3 the next.
__device__ __forceinline__ u32 place_of_lane(int consumer) {
  const int lane = threadIdx.x % 32, i = lane % 8, matrix = lane / 8, unit = consumer * 4 + threadIdx.x % 128 / 32;
  const int row = i / 2 * 4 + i % 2 + matrix % 2 * 2 + matrix / 2 * 16;
  return OF_ROWS + row * BLOCK + (unit ^ i) * UNIT;
}

// Of half of a step, transposed: a slice's words are rows 4 c to 4 c + 3 of two features, and the same 16 rows on.
__device__ __forceinline__ void transpose(u32 (&words)[2 * WORDS], u32 from) {
#pragma unroll
  for (int slice = 0; slice < 2; slice++) {
    u32 a, b, c, d;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from + slice * SLICE * BLOCK) : "memory");
    u32* const to = words + slice * WORDS;
    to[0] = __byte_perm(a, b, 0x6420), to[1] = __byte_perm(a, b, 0x7531);
    to[2] = __byte_perm(c, d, 0x6420), to[3] = __byte_perm(c, d, 0x7531);
  }
}

__device__ __forceinline__ void multiply_half(
    float (&sums)[PARTS * SUMS], const u32 (&words)[2 * WORDS], u64 other, bool accumulate) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int slice = 0; slice < 2; slice++)
    multiply(sums, words + slice * WORDS, other + slice * (SLICE / 16), accumulate || slice > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Zeros in the other operand's rows of other groups, before `first` and from `end` on, whatever they are. Both
// consumers write the same.
__device__ __forceinline__ void clear_rows(u32 other, int first, int end) {
#pragma unroll 1
  for (int unit = 0; unit < BLOCK / 16; unit++) {
    if (unit * 16 >= first && unit * 16 + 16 <= end) continue;
#pragma unroll
    for (int line = threadIdx.x % 128; line < TILE_N; line += 128)
      clear_unit(unit_at(other, line, unit), unit * 16, first, end);
  }
}

// A step, of which the last half is under way in the end, and meanwhile a piece of the tile before leaves.
template <bool FIRST>
__device__ __forceinline__ void step(
    float (&sums)[PARTS * SUMS], u32 (&early)[2 * WORDS], u32 (&late)[2 * WORDS], const Ring& ring, u32 lane, int first,
    int end, Sender<Done>& sender) {
  wait_barrier(ring.full(), ring.parity);
  const u32 other = ring.at(), rows = other + lane;
  if (first > 0 || end < BLOCK) {
    clear_rows(other, first, end);
    fence_shared();
    sender.way.result.meet();
  }
  const u64 of_other = descriptor(other);
  if (!FIRST) wait_products<1>();
  transpose(early, rows);
  multiply_half(sums, early, of_other, !FIRST);
  if (!FIRST) {
    wait_products<1>();
    ring.release_before();
  }
  transpose(late, rows + HALF_STEP * BLOCK);
  multiply_half(sums, late, of_other + HALF_STEP / 16, true);
  sender.send_some();
}

__device__ __forceinline__ void multiply_tiles(
    const float* token_scale, const float* other_scale, Tiles tiles, Ring ring, Sender<Done> sender) {
  float sums[PARTS * SUMS];
  u32 early[2 * WORDS], late[2 * WORDS];
  const u32 lane = place_of_lane(sender.way.result.consumer);
  while (tiles.next()) {
    const int row = first_row(tiles);
    int end = tiles.end - row;
    step<true>(sums, early, late, ring, lane, tiles.start - row, end, sender);
#pragma unroll 1
    while ((end -= BLOCK) > 0) {
      ring.next();
      step<false>(sums, early, late, ring, lane, 0, end, sender);
    }
    // Not before: products leave no registers for it.
    const float of_tokens = read_scale(token_scale + tiles.group), of_other = read_scale(other_scale + tiles.group);
    sender.send_rest();
    finish(sums);
    ring.release();
    ring.next();
    const Done tile{tiles.group, tiles.m + sender.way.result.consumer * PART_M, tiles.n};
    sender.take(sums, product_of_scales(of_tokens, of_other), tile);
  }
  sender.send_rest();
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) gathered_gemm_weights(
    const u8* tokens, const int* index, const float* token_scale, const __grid_constant__ TensorMap other,
    const float* other_scale, const int* sizes, int K, int N, int num_groups, u8* zeros,
    const __grid_constant__ TensorMap out) {
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    prefetch_descriptor(&other), prefetch_descriptor(&out);
    init_stages(smem, STAGES, 4 * CONSUMERS, 1 + GATHERERS);
  }
  const int live = order(sizes, num_groups, smem, table);
  cluster_sync();
  const int num_m = (K + 2 * TILE_M - 1) / (2 * TILE_M), num_n = (N + TILE_N - 1) / TILE_N;
  const Tiles tiles(table, num_m, num_n, live);
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    const Ring ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1};
    if (threadIdx.x == 0) load_tiles(&other, tiles, ring);
    if (threadIdx.x / 32 == 1) store_zeros(zeros, table, live, num_groups, K, N);
    if (threadIdx.x >= 128 - GATHERERS) gather_tiles(tokens, index, K, tiles, ring);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Sender<Done> sender{{{consumer, smem + STAGED + consumer * STAGED_BYTES, &out}}};
    multiply_tiles(token_scale, other_scale, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0}, sender);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here, or write to its stages
}
