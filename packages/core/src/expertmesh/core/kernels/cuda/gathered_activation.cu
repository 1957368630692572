// Up projection and gated activation for Hopper in one kernel, of rows that are read where their tokens are (GATHERS), or
// lie side by side: h[r] = rows[r] @ weights[group of r], a gate and an up half, and out[r] = weight of r * act(gate) *
// (up + UP_OFFSET), zeros in rows that hold no token. Padding rows are not written.
//
// A tile has 128 columns of each half; a part of it 64 of each. The fourth warpgroup stores h, computes the activation
// and stores that; of operands of 8 bits also amax[c][r], the largest magnitude of out[r] in the columns of tile c.
//
// Compiled at run time, without headers, after `hopper.cuh`, `gathered_rows.cuh` and `activation.cuh`. Macros that come
// before are theirs, and KEEPS_H (h is a result).

constexpr int APART = COLUMNS / 2;  // columns of a half, from one tile to the next

#if EIGHT_BITS
// Its box is 128 columns x 128 of the contraction.
__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int rank, int width, int4 tile, int step) {
  load_shared(weight, to + rank * (APART * LINE), ready, step * STEP, rank * width + tile.z, tile.w);
}

__device__ __forceinline__ u64 weight_at(u32 stage, int half, int k) {
  return descriptor(stage + half * (APART * LINE)) + 2 * k;
}
#else
// Its box is 64 of the contraction x 64 columns.
__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int rank, int width, int4 tile, int step) {
#pragma unroll
  for (int i = 0; i < APART / 64; i++)
    load_shared(weight, to + (rank * (APART / 64) + i) * PANEL, ready, rank * width + tile.z + i * 64, step * STEP,
                tile.w);
}

__device__ __forceinline__ u64 weight_at(u32 stage, int half, int k) {
  return descriptor(stage, PANEL) + half * (APART / 64 * PANEL / 16) + k * LINE;
}
#endif

// Of both halves.
__device__ __forceinline__ int pair_of(int part, int i) {
  return (i / (SUMS / 8) * 2 + part) * (SUMS / 4) + i % (SUMS / 8) * 2;
}

struct Results {
  u8 *h, *out;
  int* amax;
  int num_rows;
};

__device__ __forceinline__ void store_tiles(
    u32 smem, const float* weights, const int* index, int num_tokens, int width, Results results) {
  constexpr int UNITS = 8, TURNS = ROWS / 16;
  const RowOfLane rows;
  const int unit = threadIdx.x % UNITS, line = rows.taken(0);
  const u32 full = smem + STAGED_FULL, empty = smem + STAGED_EMPTY;
  const u32 from = smem + STAGED + line * PITCH + (unit ^ line % 8) * UNIT;
  u32 parity = 0;
#pragma unroll 1
  while (true) {
    wait_barrier(full, parity);
    const int4 tile = get(smem + NOTE);
    if (tile.y == END) break;
    const int place = rows.own() < tile.y ? __ldg(index + tile.x + rows.own()) : -1;
    const bool holds = (u32)place < (u32)num_tokens;
    const float weight_of_mine = holds ? __ldg(weights + tile.x + rows.own()) : 0;
    const u32 held = __ballot_sync(~0u, holds);
    u32 largest_of_mine = 0;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
      if (part) wait_barrier(full, parity);
      parity ^= 1;
      const u64 first = (u64)(tile.x + line) * width;
      const int column = tile.z + part * (APART / 2) + unit * 8;
      u8 *to_h = results.h + (first * 2 + column) * 2, *to = results.out + (first + column) * 2;
#pragma unroll 2
      for (int i = 0; i < TURNS; i++) {
        const int source = rows.lane_of_taken(i);
        const float weight = __shfl_sync(~0u, weight_of_mine, source);
        u32 largest = 0;
        if (i * 16 + line < tile.y) {
          const int4 gate = get(from + i * 16 * PITCH), up = get(from + i * 16 * PITCH + UNITS * UNIT);
          int4 both = make_int4(activate(gate.x, up.x, weight), activate(gate.y, up.y, weight),
                                activate(gate.z, up.z, weight), activate(gate.w, up.w, weight));
          if (!(held >> source & 1)) both = make_int4(0, 0, 0, 0);
#if KEEPS_H
          store(to_h, gate);
          store(to_h + width * 2, up);
#endif
          *(int4*)to = both;
          if (EIGHT_BITS) largest = largest_of(both);
        }
        if (EIGHT_BITS) {
          const u32 got = __shfl_sync(~0u, largest_of_lanes(largest), rows.lane % 4 * 8);
          if (rows.lane / 4 == i) largest_of_mine = larger(largest_of_mine, got);
        }
        to_h += (u64)16 * width * 4, to += (u64)16 * width * 2;
      }
      __syncwarp();
      if (rows.lane == 0) arrive(empty);
    }
    if (EIGHT_BITS && rows.own() < tile.y)
      results.amax[(u64)(tile.z / APART) * results.num_rows + tile.x + rows.own()] = amax_of(largest_of_mine);
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) gathered_activation(
    const __grid_constant__ TensorMap weights,
#if GATHERS
    const u8* rows,
#else
    const __grid_constant__ TensorMap rows,
#endif
    const int* index, const float* routing_weights, const int* sizes,
#if EIGHT_BITS
    const float* row_scales, const float* weight_scales,
#endif
    int num_tokens, int num_rows, int steps, int width, int num_groups,
#if KEEPS_H
    u8* h,
#endif
#if EIGHT_BITS
    u8* out, int* amax) {
  const Scales scales{row_scales, weight_scales};
#else
    u8* out) {
  int* amax = nullptr;
  const Scales scales{};
#endif
#if !KEEPS_H
  u8* h = out;
#endif
  const auto [smem, ends] = Memory((num_groups + 3) / 4);
  const int role = consumer_of_warp();
  begin(smem, ends, &weights, sizes, num_groups);
  const Ring ring{smem, STAGES_AT, STAGE_BYTES, STAGES, role < 0};
  if (role < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    const Tiles tiles(ends, num_groups, width, APART);
#if GATHERS
    load_tiles(&weights, rows, index, num_tokens, scales, steps, width, tiles, ring);
#else
    if (threadIdx.x == 0) load_tiles(&weights, &rows, scales, steps, width, tiles, ring);
#endif
  } else if (role < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    multiply_tiles(role, steps, ring);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_STORER));
    store_tiles(smem, routing_weights, index, num_tokens, width, Results{h, out, amax, num_rows});
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
}
