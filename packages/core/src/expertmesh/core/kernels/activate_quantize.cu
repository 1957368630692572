// A gated activation, or its gradient, quantized in blocks along its features and again along its rows, for Hopper.
//
// A program takes tiles of BLOCK rows and 128 columns, of a gradient both halves, one after the other. A thread has 8
// columns of ROWS rows. What it reads of the next tile it copies to shared memory while it works on this one, so that
// memory never waits; its results stay in registers, two numbers in each, and are computed once. They are rounded to 16
// bits first, so largest magnitudes are found two at a time, as integers. The copy along the rows turns in shared
// memory, four rows in a word, and leaves in lines of 128 bytes.
//
// Compiled at run time, without headers. Macros that come before this text: GRADIENT (or the activation), BLOCK, WARPS,
// PER_SM (programs of a multiprocessor), SHARED (bytes), HALF (h and d are float16, not bfloat16), FUNCTION, UP_OFFSET,
// BOUND (if there is one), SCALE, LARGEST and FLOOR (bits of float32), LIMIT, FORMAT (of PTX) and TURNED (the copy along
// the rows lies with its rows contiguous).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = WARPS * 32;
constexpr int HALVES = GRADIENT ? 2 : 1;    // of a result
constexpr int ARRAYS = 2 + GRADIENT;        // that are read: gate, up, d
constexpr int COLUMNS = 128;                // of a tile, for 16 threads
constexpr int ROWS = BLOCK / (2 * WARPS);   // of a thread, from its first one on
constexpr int PEERS = BLOCK / 8;            // threads that have a block of a row
static_assert(ROWS % 4 == 0 && ROWS <= PEERS, "four rows fill a word, and each row's scale is a thread's");

// Shared memory: what was read, for each thread; the multipliers of columns; and the columns' largest numbers by warp,
// where later a half of the tile is turned.
constexpr int READ = ARRAYS * THREADS * 16;  // of a row of each thread
constexpr int MULTIPLIERS = ROWS * READ;
constexpr int ROOM = MULTIPLIERS + HALVES * COLUMNS * 4;
constexpr int ROOM_BYTES = TURNED ? COLUMNS * BLOCK : WARPS * HALVES * COLUMNS * 2;
static_assert(ROOM + ROOM_BYTES == SHARED, "as launched");

__device__ __forceinline__ void put(u32 to, int4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void put(u32 to, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ int4 get(u32 from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 get_u16(u32 from) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

// 16 bytes, or zeros, for which nothing is read.
__device__ __forceinline__ void copy(u32 to, const u8* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last N ends have come.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float2 unpack(u32 both) {
#if HALF
  float2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y) : "r"(both));
  return v;
#else
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000));
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}

__device__ __forceinline__ u32 to_8_bits(float a, float b, float c, float d) {
  u32 four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite." FORMAT "x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite." FORMAT "x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// The larger of each two numbers of 16 bits; of magnitudes NaN is the largest.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

__device__ __forceinline__ float most(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

__device__ __forceinline__ float least(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

// Within two units of the last place; zero below -87.
__device__ __forceinline__ float sigmoid(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(-1.4426950408889634f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1 + y));
  return y;
}

struct ValueAndSlope {
  float value, slope;
};

__device__ __forceinline__ ValueAndSlope swish(float x, float factor) {
  const float gate = sigmoid(factor * x), value = x * gate;
  return {value, gate + factor * value * (1 - gate)};
}

__device__ __forceinline__ ValueAndSlope silu(float x) { return swish(x, 1); }

__device__ __forceinline__ ValueAndSlope quick_gelu(float x) { return swish(x, 1.702f); }

// (1 + tanh(y)) / 2 is the sigmoid of 2 y.
__device__ __forceinline__ ValueAndSlope gelu(float x) {
  const float square = x * x, twice = 1.5957691216057308f * x;
  const float gate = sigmoid(twice * (1 + 0.044715f * square)), inner = twice * (1 + 0.134145f * square);
  return {x * gate, gate * (1 + inner * (1 - gate))};
}

__device__ __forceinline__ ValueAndSlope relu(float x) { return {most(x, 0), x > 0 ? 1.0f : 0.0f}; }

__device__ __forceinline__ ValueAndSlope squared_relu(float x) {
  const float positive = most(x, 0);
  return {positive * positive, 2 * positive};
}

// A number of the activation, or of the gradients of gate and up.
__device__ __forceinline__ void compute(float gate, float up, float d, float (&out)[HALVES]) {
#ifdef BOUND
  const bool gate_moves = !(gate > BOUND), up_moves = !(fabsf(up) > BOUND);
  gate = least(gate, BOUND);
  up = most(least(up, BOUND), -BOUND);
#else
  const bool gate_moves = true, up_moves = true;
#endif
  const ValueAndSlope act = FUNCTION(gate);
#if GRADIENT
  out[0] = gate_moves ? d * act.slope * (up + UP_OFFSET) : 0;
  out[1] = up_moves ? d * act.value : 0;
#else
  out[0] = act.value * (up + UP_OFFSET);
#endif
}

// 2^(biased - 127) for 0 .. 254, NaN for 255.
__device__ __forceinline__ float power_of_2(int biased) {
  return __int_as_float(biased == 255 ? 0x7FC00000 : biased == 0 ? 0x00400000 : biased << 23);
}

constexpr int INF = 0x7F800000;

// The biased exponent of the least power of two that is at least amax / largest.
__device__ __forceinline__ int excess(int magnitude) {
  return (magnitude >> 23) - (LARGEST >> 23) + 127 + ((magnitude & 0x7FFFFF) > (LARGEST & 0x7FFFFF));
}

template <class T>
struct Scale {
  float multiplier;
  T stored;
};

// Of a block whose amax has these bits.
__device__ __forceinline__ Scale<u8> scale_float8_e8m0fnu(int magnitude) {
  int byte = min(max(excess(magnitude), 0), 254);
  byte = magnitude == INF ? 254 : magnitude > INF ? 255 : byte;
  return {power_of_2(byte == 255 ? 255 : 254 - byte), (u8)byte};
}

__device__ __forceinline__ Scale<float> scale_power_of_2(int magnitude) {
  magnitude = max(magnitude, FLOOR);
  const bool regular = magnitude > 0 && magnitude < INF;
  const int biased = regular ? min(254 - excess(magnitude), 254) : 127;
  return {power_of_2(biased), power_of_2(254 - biased)};
}

__device__ __forceinline__ Scale<float> scale_float32(int magnitude) {
  magnitude = max(magnitude, FLOOR);
  const bool regular = magnitude > 0 && magnitude < INF, normal = regular && magnitude > 0x7FFFFF;
  const float quotient = fminf(__fdiv_rn(__int_as_float(LARGEST), __int_as_float(normal ? magnitude : 0x3F800000)), LIMIT);
  const float multiplier = regular ? (normal ? quotient : LIMIT) : 1.0f;
  return {multiplier, __fdiv_rn(1.0f, multiplier)};
}

typedef decltype(SCALE(0).stored) Stored;

__device__ __forceinline__ Scale<Stored> scale_of(u32 magnitude) { return SCALE(__float_as_int(unpack(magnitude).x)); }

// Of a tile what one thread has: its first row and column, and how many of its rows are read.
struct Place {
  int block, row, column, live;

  __device__ __forceinline__ Place(int tile, int width, int num_live) {
    const int across = (width + COLUMNS - 1) / COLUMNS, thread = threadIdx.x;
    block = tile / across;
    row = block * BLOCK + thread / 16 * ROWS;
    column = tile % across * COLUMNS + thread % 16 * 8;
    live = column < width ? num_live - row : 0;
  }
};

// Rows of a thread, on their way to shared memory.
struct Reader {
  const u8 *gate, *d;
  int live;
  u32 pitch;  // bytes of a row of d

  __device__ __forceinline__ Reader(Place at, const u8* h, const u8* all_d, u32 width) : live(at.live), pitch(width * 2) {
    gate = h + (u64)at.row * (pitch * 2) + at.column * 2;
    d = all_d + (u64)at.row * pitch + at.column * 2;
  }

  __device__ __forceinline__ void read(int i, u32 to) const {
    const u8* from = gate + (u64)i * (pitch * 2);
    copy(to, from, i < live);
    copy(to + THREADS * 16, from + pitch, i < live);
    if (GRADIENT) copy(to + THREADS * 32, d + (u64)i * pitch, i < live);
    end_copies();
  }
};

__device__ __forceinline__ int sum(const int* sizes, int count) {
  int total = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) total += __ldg(sizes + i);
  return __reduce_add_sync(~0u, total);
}

__device__ __forceinline__ void unpack(u32 (&words)[4], int4 v) {
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) activate_quantize(
    const u8* h,
#if GRADIENT
    const u8* d,
#endif
    const int* sizes, int num_rows, int all_columns, int groups, u8* data, Stored* scale, u8* data_rows, Stored* scale_rows) {
#if !GRADIENT
  const u8* d = h;
#endif
  extern __shared__ int4 memory[];
  u32 smem;
  asm("{\n.reg .u64 at;\ncvta.to.shared.u64 at, %1;\ncvt.u32.u64 %0, at;\n}" : "=r"(smem) : "l"(memory));
  const int tiles = (all_columns + COLUMNS - 1) / COLUMNS * ((num_rows + BLOCK - 1) / BLOCK), num_live = min(sum(sizes, groups), num_rows);
  {
    const Reader first(Place(blockIdx.x, all_columns, num_live), h, d, all_columns);
#pragma unroll
    for (int i = 0; i < ROWS; i++) first.read(i, smem + threadIdx.x * 16 + i * READ);
  }
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int thread = threadIdx.x, width = all_columns;
    asm volatile("" : "+r"(thread), "+r"(width));  // what follows from them is computed for each tile: registers are short
    const int across = (width + COLUMNS - 1) / COLUMNS, blocks = (width + BLOCK - 1) / BLOCK;
    const u32 mine = smem + thread * 16, room = smem + ROOM, multipliers = smem + MULTIPLIERS;
    const int lane = thread % 32, warp = thread / 32, in_row = thread % 16, peer = thread % PEERS;

    const Reader next(Place(tile + gridDim.x, width, num_live), h, d, width);
    u32 kept[HALVES][ROWS][4], of_columns[HALVES][4] = {}, of_my_row = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      wait_for_copies<ROWS - 1>();
      const u32 from = mine + i * READ;
      u32 gates[4], ups[4], ds[4] = {};
      unpack(gates, get(from));
      unpack(ups, get(from + THREADS * 16));
      if (GRADIENT) unpack(ds, get(from + THREADS * 32));
      next.read(i, from);
      u32 of_row[HALVES] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 gate = unpack(gates[j]), up = unpack(ups[j]), d_out = unpack(ds[j]);
        float low[HALVES], high[HALVES];
        compute(gate.x, up.x, d_out.x, low);
        compute(gate.y, up.y, d_out.y, high);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          kept[half][i][j] = pack(low[half], high[half]);
          const u32 magnitudes = kept[half][i][j] & 0x7FFF7FFF;
          of_columns[half][j] = larger(of_columns[half][j], magnitudes);
          of_row[half] = larger(of_row[half], magnitudes);
        }
      }
      // The gate's in the low half of a word, the other's in the high one.
      const u32 other = of_row[HALVES - 1];
      u32 of_both = larger(__byte_perm(of_row[0], other, 0x5410), __byte_perm(of_row[0], other, 0x7632));
#pragma unroll
      for (int apart = PEERS / 2; apart; apart /= 2)
        of_both = larger(of_both, __shfl_xor_sync(~0u, of_both, apart));
      if (peer == i) of_my_row = of_both;
    }

    // The scales of rows: thread i of a block's has those of row i.
    const Place here(tile, width, num_live);
    float my_multipliers[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const Scale<Stored> of = scale_of(of_my_row >> (16 * half) & 0xFFFF);
      my_multipliers[half] = of.multiplier;
      if (peer < ROWS && here.row + peer < num_rows && here.column / BLOCK < blocks)
        scale[((u64)(here.row + peer) * HALVES + half) * blocks + here.column / BLOCK] = of.stored;
    }

    // The scales of columns, of which each warp has a part.
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      u32(&of)[4] = of_columns[half];
#pragma unroll
      for (int j = 0; j < 4; j++) of[j] = larger(of[j], __shfl_xor_sync(~0u, of[j], 16));
      if (lane < 16)
        put(room + ((warp * HALVES + half) * COLUMNS + in_row * 8) * 2, make_int4(of[0], of[1], of[2], of[3]));
    }
    __syncthreads();
    const int first_column = tile % across * COLUMNS;
#pragma unroll
    for (int first = 0; first < HALVES * COLUMNS; first += THREADS) {
      const int c = first + thread, column = first_column + c % COLUMNS;
      if (HALVES * COLUMNS % THREADS && c >= HALVES * COLUMNS) break;
      u32 magnitude = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) magnitude = max(magnitude, get_u16(room + (w * HALVES * COLUMNS + c) * 2));
      const Scale<Stored> of = scale_of(magnitude);
      put(multipliers + c * 4, __float_as_uint(of.multiplier));
      if (column < width) scale_rows[((u64)here.block * HALVES + c / COLUMNS) * width + column] = of.stored;
    }
    __syncthreads();

    const int inside = here.column < width ? num_rows - here.row : 0;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u64 first = ((u64)here.row * HALVES + half) * width + here.column;
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        u32 along[4][2], down[8], also[4][2];
        float by_row[4];
#pragma unroll
        for (int k = 0; k < 4; k++) by_row[k] = __shfl_sync(~0u, my_multipliers[half], lane - peer + r + k);
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
          const int4 of = get(multipliers + (half * COLUMNS + in_row * 8 + j) * 4);
          const float m[4] = {__int_as_float(of.x), __int_as_float(of.y), __int_as_float(of.z), __int_as_float(of.w)};
#pragma unroll
          for (int k = 0; k < 4; k++)
            if (TURNED)
              down[j + k] = to_8_bits(v[0][k] * m[k], v[1][k] * m[k], v[2][k] * m[k], v[3][k] * m[k]);
            else
              also[k][j / 4] = to_8_bits(v[k][0] * m[0], v[k][1] * m[1], v[k][2] * m[2], v[k][3] * m[3]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (r + k < inside) {
            const u64 at = first + (u64)(r + k) * HALVES * width;
            *(uint2*)(data + at) = make_uint2(along[k][0], along[k][1]);
            if (!TURNED) *(uint2*)(data_rows + at) = make_uint2(also[k][0], also[k][1]);
          }
        if (TURNED) {
          // Eight rows of a column lie together, at places that turn with the thread, for all banks.
          const int line = thread / 16 * ROWS + r, to = (line / 8 ^ in_row) * 8 + line % 8;
#pragma unroll
          for (int j = 0; j < 8; j++) put(room + (in_row * 8 + j) * BLOCK + to, down[j]);
        }
      }
      if (TURNED) {
        __syncthreads();
#pragma unroll
        for (int first = 0; first < COLUMNS; first += THREADS / 8) {
          const int c = first + thread / 8, turn = c / 8, row = here.block * BLOCK + thread % 8 * 16;
          int4 v = get(room + c * BLOCK + (thread % 8 ^ turn / 2) * 16);
          if (turn % 2) v = make_int4(v.z, v.w, v.x, v.y);
          if (row < num_rows && first_column + c < width)
            *(int4*)(data_rows + ((u64)half * width + first_column + c) * num_rows + row) = v;
        }
        __syncthreads();
      }
    }
  }
}
