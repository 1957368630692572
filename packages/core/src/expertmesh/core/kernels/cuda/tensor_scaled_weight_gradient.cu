// Weight gradient of per-tensor FP8 operands, one scale per group, for Hopper: out[g] = (sum over the rows r of group g
// of lhs[r]^T other[r]) * both scales, zeros for a group without rows. Where lhs GATHERS, its rows are tokens' at an
// index, zeros where that is negative, and the result is [lhs, other] or, CROSSWISE, [other, lhs].
//
// Tensor cores read 8 bits along the contraction. Both operands are K-major, [columns, rows], and come by TMA; but tokens
// lie along their features, and two warps copy their rows to shared memory by `cp.async`. A consumer has 64 columns of
// lhs, which it brings to registers once a step, of tokens transposed: `ldmatrix.trans` gives a thread two features of
// four rows, and two byte permutations four rows of each. The rows of the instruction are thus features r and r + 8 of
// 16 INTERLEAVED. It multiplies them by 64 columns at a time, and adds a product in float32 while the next one is under
// way. Where a step has rows of other groups, they are cleared: by two warps that load nothing, else by consumers.
//
// Compiled at run time after `weight_gradients.cuh`, whose macros are this one's too, and GATHERS. What stands alone on a
// line is replaced: INSTRUCTION (`multiply`).

// What a stage holds: 256 columns of the other operand, then 128 of lhs, or rows of 128 features.
constexpr int OF_LHS = TILE_N * BLOCK;
static_assert(STAGE_BYTES == OF_LHS + BLOCK * TILE_M, "as launched");
static_assert(INTERLEAVED == GATHERS && (GATHERS || !CROSSWISE), "as consumers read lhs");
constexpr int HELPERS = 64;        // the last threads of the producer's: they copy rows, or clear those of other groups
constexpr int CLEAN = 192;         // barriers of stages without rows of other groups
constexpr int SLICES = BLOCK / SLICE, WORDS = 4;  // of a slice's features, of a thread

__device__ void multiply(float* d, const u32* lhs, u64 other, int accumulate);

INSTRUCTION

// Of one thread. `lhs`: unless it gathers.
__device__ __forceinline__ void load_tiles(const TensorMap* lhs, const TensorMap* other, Tiles tiles, Ring ring) {
  const int rank = rank_in_cluster();
  while (tiles.next())
    for (int row = first_row(tiles); row < tiles.end; row += BLOCK) {
      wait_barrier(ring.empty(), ring.parity);
      expect_bytes(ring.full(), GATHERS ? OF_LHS : STAGE_BYTES);
      load_shared(other, ring.at() + rank * SHARE * BLOCK, ring.full(), row, tiles.n + rank * SHARE);
      if (!GATHERS) load(lhs, ring.at() + OF_LHS, ring.full(), row, tiles.m);
      ring.next();
    }
}

// Zeros in rows before `first` and from `end` on, whatever they are, of so many lines. All of THREADS threads.
template <int THREADS>
__device__ __forceinline__ void clear_rows(u32 operands, int lines, int first, int end) {
#pragma unroll 1
  for (int unit = 0; unit < BLOCK / 16; unit++) {
    if (unit * 16 >= first && unit * 16 + 16 <= end) continue;
#pragma unroll 2
    for (int line = threadIdx.x % THREADS; line < lines; line += THREADS)
      clear_unit(unit_at(operands, line, unit), unit * 16, first, end);
  }
  fence_shared();
}

#if GATHERS
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
  const int line = threadIdx.x % HELPERS / 8, unit = threadIdx.x % 8;
  const u32 to = OF_LHS + line * BLOCK, swizzled = (unit ^ (line % 2 + line / 4 * 2)) * UNIT;
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
  return OF_LHS + row * BLOCK + (unit ^ i) * UNIT;
}

// Of a step, transposed: a slice's words are rows 4 c to 4 c + 3 of two features, and the same 16 rows on.
__device__ __forceinline__ void bring(u32 (&words)[SLICES * WORDS], u32 from) {
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    u32 a, b, c, d;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from + slice * SLICE * BLOCK) : "memory");
    u32* const to = words + slice * WORDS;
    to[0] = __byte_perm(a, b, 0x6420), to[1] = __byte_perm(a, b, 0x7531);
    to[2] = __byte_perm(c, d, 0x6420), to[3] = __byte_perm(c, d, 0x7531);
  }
}

// Until a step's operands are there; tokens of other groups are zeros.
__device__ __forceinline__ void wait_for_step(const Ring& ring, int first, int end, const Result& result) {
  wait_barrier(ring.full(), ring.parity);
  if (first == 0 && end >= BLOCK) return;
  clear_rows<128>(ring.at(), TILE_N, first, end);  // both consumers write the same
  result.meet();
}
#else
__device__ __forceinline__ u32 clean(const Ring& ring) { return ring.smem + CLEAN + 8 * ring.stage; }

__device__ __forceinline__ void clean_tiles(Tiles tiles, Ring ring) {
  while (tiles.next()) {
    const int row = first_row(tiles);
    int first = tiles.start - row;
    for (int end = tiles.end - row; end > 0; end -= BLOCK, first = 0) {
      wait_barrier(ring.full(), ring.parity);
      if (first > 0 || end < BLOCK) clear_rows<HELPERS>(ring.at(), TILE_N + TILE_M, first, end);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(clean(ring));
      ring.release();
      ring.next();
    }
  }
}

// Until a step's operands are there.
__device__ __forceinline__ void wait_for_step(const Ring& ring, int first, int end, const Result&) {
  wait_barrier(first == 0 && end >= BLOCK ? ring.full() : clean(ring), ring.parity);
}

// Where this lane finds its line of the matrices that a consumer reads of a slice: of columns r and r + 8 of 16, and of
// both 16 rows on.
__device__ __forceinline__ u32 place_of_lane(int consumer) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int line = consumer * PART_M + threadIdx.x % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8;
  return unit_at(OF_LHS, line, matrix / 2);
}

// Of a step: a slice's words are rows 4 c to 4 c + 3 of two columns, and the same 16 rows on.
__device__ __forceinline__ void bring(u32 (&words)[SLICES * WORDS], u32 from) {
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    u32* const to = words + slice * WORDS;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from ^ slice * SLICE) : "memory");
  }
}
#endif

constexpr int NARROW = 64, NARROW_SUMS = NARROW / 2, PRODUCTS = TILE_N / NARROW;  // columns of a product; of a step

// Begins a product of a consumer's columns of lhs and 64 of the other operand.
__device__ __forceinline__ void begin(float (&product)[NARROW_SUMS], const u32 (&words)[SLICES * WORDS], u64 other) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++)
    multiply(product, words + slice * WORDS, other + slice * (SLICE / 16), slice > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Adds a product, which is complete, to its sums, or begins them.
template <bool FIRST>
__device__ __forceinline__ void add(float* sums, const float (&product)[NARROW_SUMS], float factor) {
#pragma unroll
  for (int i = 0; i < NARROW_SUMS; i++) sums[i] = FIRST ? product[i] * factor : fmaf(product[i], factor, sums[i]);
}

__device__ __forceinline__ void clear(float* sums) {
#pragma unroll
  for (int i = 0; i < NARROW_SUMS; i++) sums[i] = 0;
}

// Two products of a consumer, of which one is added while the other is under way.
typedef float Products[2][NARROW_SUMS];

// A step, whose last product is complete in the end, and added in the next one. A tile's first step sends the columns of
// the tile before it, each while products are under way.
template <bool FIRST>
__device__ __forceinline__ void step(
    float (&sums)[PARTS * SUMS], Products& products, const Ring& ring, u32 lane, int first, int end, float factor,
    Sender<Done>& sender, const Done& done) {
  wait_for_step(ring, first, end, sender.way.result);
  const u32 other = ring.at();
  u32 words[SLICES * WORDS];
  bring(words, other + lane);
  const u64 of_other = descriptor(other);
  auto send = [&](int quarter) {
    if (FIRST && done.group >= 0) sender.send_columns(quarter, sums, done);
  };
  float* const last = sums + (PRODUCTS - 1) * NARROW_SUMS;
  begin(products[0], words, of_other);
  if (!FIRST) add<false>(last, products[1], factor);
#pragma unroll
  for (int i = 1; i < PRODUCTS; i++) {
    begin(products[i % 2], words, of_other + i * (NARROW * BLOCK / 16));
    send(i - 1);
    finish<1>(products[(i - 1) % 2]);
    add<FIRST>(sums + (i - 1) * NARROW_SUMS, products[(i - 1) % 2], factor);
  }
  send(PRODUCTS - 1);
  if (FIRST) clear(last);
  finish<0>(products[1]);
  ring.release();
}

__device__ __forceinline__ void multiply_tiles(
    const float* lhs_scale, const float* other_scale, Tiles tiles, Ring ring, Sender<Done>& sender) {
  float sums[PARTS * SUMS];
  Products products;
  const int consumer = sender.way.result.consumer;
  const u32 lane = place_of_lane(consumer);
  Done done;
  while (tiles.next()) {
    const int row = first_row(tiles);
    int end = tiles.end - row;
    const float factor = product_of_scales(read_scale(lhs_scale + tiles.group), read_scale(other_scale + tiles.group));
    step<true>(sums, products, ring, lane, tiles.start - row, end, factor, sender, done);
    done = {tiles.group, tiles.m + consumer * PART_M, tiles.n};
    ring.next();
#pragma unroll 1
    for (; (end -= BLOCK) > 0; ring.next()) step<false>(sums, products, ring, lane, 0, end, factor, sender, done);
    add<false>(sums + (PRODUCTS - 1) * NARROW_SUMS, products[1], factor);
  }
#pragma unroll
  for (int quarter = 0; quarter < PRODUCTS; quarter++)
    if (done.group >= 0) sender.send_columns(quarter, sums, done);
  wait_for_stores();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) tensor_scaled_gemm_weights(
#if GATHERS
    const u8* tokens, const int* index, const float* lhs_scale, const __grid_constant__ TensorMap other,
    const float* other_scale, const int* sizes, int K, int N, int num_groups, u8* zeros,
    const __grid_constant__ TensorMap out) {
  const TensorMap* const of_lhs = nullptr;
#else
    const __grid_constant__ TensorMap lhs, const float* lhs_scale, const __grid_constant__ TensorMap other,
    const float* other_scale, const int* sizes, int K, int N, int num_groups, u8* zeros,
    const __grid_constant__ TensorMap out) {
  const TensorMap* const of_lhs = &lhs;
#endif
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    if (!GATHERS) prefetch_descriptor(of_lhs);
    prefetch_descriptor(&other), prefetch_descriptor(&out);
    for (int i = 0; i < STAGES; i++) init_barrier(smem + CLEAN + 8 * i, HELPERS / 32);
    init_stages(smem, STAGES, 4 * CONSUMERS + (GATHERS ? 0 : HELPERS / 32), 1 + (GATHERS ? HELPERS : 0));
  }
  const int live = order(sizes, num_groups, smem, table);
  cluster_sync();
  const int num_m = (K + 2 * TILE_M - 1) / (2 * TILE_M), num_n = (N + TILE_N - 1) / TILE_N;
  const Tiles tiles(smem, table, num_m, num_n, live);
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    const Ring ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1};
    if (threadIdx.x == 0) load_tiles(of_lhs, &other, tiles, ring);
    if (threadIdx.x / 32 == 1) store_zeros(zeros, table, live, num_groups, K, N);
#if GATHERS
    if (threadIdx.x >= 128 - HELPERS) gather_tiles(tokens, index, K, tiles, ring);
#else
    if (threadIdx.x >= 128 - HELPERS) clean_tiles(tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0});
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    Sender<Done> sender{{{consumer, smem + STAGED + consumer * STAGED_BYTES, &out}}};
    multiply_tiles(lhs_scale, other_scale, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0}, sender);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here, or write to its stages
}
