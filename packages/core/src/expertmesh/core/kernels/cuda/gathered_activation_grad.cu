// Input gradient of the down projection and the gradient of the gated activation before it, for Hopper in one kernel:
// d[r] = rows[r] @ weights[group of r]^T, rounded, and with h[r], a gate and an up half, and the routing weight w of r,
//
//   d_h[r] = w * d[r] * the derivative at h[r],  a[r] = w * act(gate) * (up + UP_OFFSET)
//   dots[c][r] = <d[r], act(gate) * (up + UP_OFFSET)> of the columns of tile c
//
// zeros in rows that hold no token. Padding rows are not written. Rows are read where `source` says that their tokens
// are (GATHERS), or lie side by side. Of operands of 8 bits, amax[c][r], the largest magnitude of d_h[r] in both halves of
// the columns of tile c, takes the place of a.
//
// A part of a tile is 128 columns. The fourth warpgroup reads h itself.
//
// Compiled at run time, without headers, after `hopper.cuh`, `gathered_rows.cuh` and `activation.cuh`. Macros that come
// before are theirs.

// Its box is 128 columns x a step of the contraction.
__device__ __forceinline__ void load_weight(
    const TensorMap* weight, u32 to, u32 ready, int rank, int width, int4 tile, int step) {
  load_shared(weight, to + rank * (COLUMNS / 2 * LINE), ready, step * STEP, tile.z + rank * (COLUMNS / 2), tile.w);
}

__device__ __forceinline__ u64 weight_at(u32 stage, int half, int k) {
  return descriptor(stage + half * (COLUMNS / 2 * LINE)) + 2 * k;
}

__device__ __forceinline__ int pair_of(int part, int i) { return part * (SUMS / 2) + 2 * i; }

// Of two numbers; adds to `dot`. `held`: which bits of results stay, all or none.
__device__ __forceinline__ void differentiate(
    int gates, int ups, int ds, float weight, u32 held, int& d_gate, int& d_up, int& value, float& dot) {
  const float2 gate = unpack(gates), up = unpack(ups), d = unpack(ds);
  const Gated x(gate.x, up.x), y(gate.y, up.y);
  dot += d.x * x.value() + d.y * y.value();
  const float w = weight * d.x, z = weight * d.y;
  d_gate = pack(x.d_gate(w), y.d_gate(z)) & held;
  d_up = pack(x.d_up(w), y.d_up(z)) & held;
  value = pack(weight * x.value(), weight * y.value()) & held;
}

// A unit of the gate and one of the up half, on their way. Registers are written in place: nothing waits for a copy.
struct Ahead {
  int4 gate, up;

  __device__ __forceinline__ void read(const u8* from, u32 half, bool exists) {
    read_once(gate, from, exists), read_once(up, from + half, exists);
  }

  static __device__ __forceinline__ void read_once(int4& to, const u8* from, bool exists) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.ne.b32 there, %6, 0;\n"
        "@there ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;\n}"
        : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w) : "l"(from), "l"(PASS), "r"((int)exists));
  }
};

struct Results {
  u8 *d_h, *a;
  int* amax;
  float* dots;
  int num_rows;
};

// A lane works on units of h and d, and reads those of h so many ahead, through a tile's end.
__device__ __forceinline__ void differentiate_tiles(
    u32 smem, const float* weights, const int* source, int num_tokens, int width, const u8* h, Results to,
    Tiles tiles) {
  constexpr int DEPTH = 4, BYTES = 128, PART_BYTES = 2 * BYTES;  // of a unit's line, of a part
  constexpr int TURN = 16, TURNS = ROWS / TURN, AHEAD = DEPTH / 2;  // rows, turns of a part, turns ahead
  const RowOfLane rows;
  const int unit = threadIdx.x % 8, line = rows.taken(0);
  const u32 full = smem + STAGED_FULL, empty = smem + STAGED_EMPTY;
  const u32 from = smem + STAGED + line * PITCH + (unit ^ line % 8) * UNIT;
  const u32 half = width * 2, turn_of_h = TURN * 2 * half;  // bytes: from gate to up, from turn to turn
  auto offset_of = [&] { return (u64)(tiles.row + line) * (2 * half) + tiles.column * 2 + unit * UNIT; };
  auto source_of = [&] { return rows.own() < tiles.rows ? __ldg(source + tiles.row + rows.own()) : -1; };
  auto weight_of = [&] { return rows.own() < tiles.rows ? __ldg(weights + tiles.row + rows.own()) : 0.0f; };
  Ahead ahead[DEPTH] = {};
  u32 parity = 0;
  bool more = tiles.next();
  int place = more ? source_of() : -1;
  float weight_of_mine = more ? weight_of() : 0;
#pragma unroll
  for (int i = 0; i < DEPTH; i++)
    ahead[i].read(h + offset_of() + i / 2 * turn_of_h + i % 2 * BYTES, half, more && i / 2 * TURN + line < tiles.rows);
#pragma unroll 1
  while (more) {
    const int row = tiles.row, count = tiles.rows, column = tiles.column;
    u64 offset = offset_of();
    const float mine = weight_of_mine;
    const bool holds = (u32)place < (u32)num_tokens;
    const u32 held = __ballot_sync(~0u, holds);
    float dot_of_mine = 0;
    u32 largest_of_mine = 0;
    more = tiles.next();
    const u64 offset_of_next = more ? offset_of() : 0;
    const int count_of_next = more ? tiles.rows : 0;
    place = more ? source_of() : -1, weight_of_mine = more ? weight_of() : 0;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
      const int room = ROOMS == 2 ? part : 0;
      wait_barrier(full + 8 * room, parity);
      if (room == ROOMS - 1) parity ^= 1;
#pragma unroll 1
      for (int turn = 0; turn < TURNS; turn += AHEAD) {
        const bool last = turn == TURNS - AHEAD;
        const u64 of_next = part ? offset_of_next : offset + PART_BYTES;
        const u8* next = h + (last ? of_next : offset + (turn + AHEAD) * turn_of_h);
        const int limit = last && part ? count_of_next : count, first = last ? line : (turn + AHEAD) * TURN + line;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int of_row = rows.lane_of_taken(turn + i), of_tile = (turn + i) * TURN + line;
          const float weight = __shfl_sync(~0u, mine, of_row);
          const u32 is_held = held >> of_row & 1 ? ~0u : 0;
          float dot = 0;
          u32 largest = 0;
#pragma unroll
          for (int which = 0; which < 2; which++) {
            Ahead& x = ahead[2 * i + which];
            const int4 d = get(from + room * ROOM + (turn + i) * TURN * PITCH + which * BYTES);
            int4 d_gate, d_up, value;
            differentiate(x.gate.x, x.up.x, d.x, weight, is_held, d_gate.x, d_up.x, value.x, dot);
            differentiate(x.gate.y, x.up.y, d.y, weight, is_held, d_gate.y, d_up.y, value.y, dot);
            differentiate(x.gate.z, x.up.z, d.z, weight, is_held, d_gate.z, d_up.z, value.z, dot);
            differentiate(x.gate.w, x.up.w, d.w, weight, is_held, d_gate.w, d_up.w, value.w, dot);
#if EIGHT_BITS
            // No more of d_h than is stored: what lies beyond is not a number of this group.
            if (of_tile < count) largest = larger(largest, larger(largest_of(d_gate), largest_of(d_up)));
#endif
            x.read(next + i * turn_of_h + which * BYTES, half, first + i * TURN < limit);
            if (of_tile < count) {
              const u64 at = offset + (turn + i) * turn_of_h + which * BYTES;
              store(to.d_h + at, d_gate), store(to.d_h + at + half, d_up);
#if !EIGHT_BITS
              const int place_in_row = (column + part * (COLUMNS / 2)) * 2 + which * BYTES + unit * UNIT;
              *(int4*)(to.a + (u64)(row + of_tile) * half + place_in_row) = value;
#endif
            }
          }
#pragma unroll
          for (int by = 1; by < 8; by *= 2) dot += __shfl_xor_sync(~0u, dot, by);
          const float got = __shfl_sync(~0u, dot, rows.lane % 4 * 8);
          if (rows.lane / 4 == turn + i) dot_of_mine += got;
#if EIGHT_BITS
          const u32 most = __shfl_sync(~0u, largest_of_lanes(largest), rows.lane % 4 * 8);
          if (rows.lane / 4 == turn + i) largest_of_mine = larger(largest_of_mine, most);
#endif
        }
      }
      __syncwarp();
      if (rows.lane == 0) arrive(empty + 8 * room);
      offset += PART_BYTES;
    }
    if (rows.own() < count) {
      const u64 at = (u64)(column / COLUMNS) * to.num_rows + row + rows.own();
      to.dots[at] = holds ? dot_of_mine : 0;
      if (EIGHT_BITS) to.amax[at] = amax_of(largest_of_mine);
    }
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) gathered_activation_grad(
    const __grid_constant__ TensorMap weights,
#if GATHERS
    const u8* rows,
#else
    const __grid_constant__ TensorMap rows,
#endif
    const int* source, const float* routing_weights, const u8* h, const int* sizes,
#if EIGHT_BITS
    const float* row_scales, const float* weight_scales,
#endif
    int num_tokens, int num_rows, int steps, int width, int num_groups, u8* d_h,
#if EIGHT_BITS
    int* amax, float* dots) {
  u8* a = nullptr;
  const Scales scales{row_scales, weight_scales};
#else
    u8* a, float* dots) {
  int* amax = nullptr;
  const Scales scales{};
#endif
  const auto [smem, ends] = Memory((num_groups + 3) / 4);
  const int role = consumer_of_warp();
  begin(smem, ends, &weights, sizes, num_groups);
  const Ring ring{smem, STAGES_AT, STAGE_BYTES, STAGES, role < 0};
  if (role < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    const Tiles tiles(ends, num_groups, width, COLUMNS);
#if GATHERS
    load_tiles(&weights, rows, source, num_tokens, scales, steps, width, tiles, ring);
#else
    if (threadIdx.x == 0) load_tiles(&weights, &rows, scales, steps, width, tiles, ring);
#endif
  } else if (role < CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    multiply_tiles(role, steps, ring);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_STORER));
    differentiate_tiles(smem, routing_weights, source, num_tokens, width, h, Results{d_h, a, amax, dots, num_rows},
                        Tiles(ends, num_groups, width, COLUMNS));
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
}
