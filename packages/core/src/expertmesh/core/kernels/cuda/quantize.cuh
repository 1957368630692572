// What kernels share that quantize numbers of 16 bits in blocks along their rows, and perhaps their columns, on Hopper.
//
// A program takes tiles of BLOCK rows and 128 columns one after the other. A thread has 8 columns of ROWS rows. What it
// reads of the next tile it copies to shared memory while it works on this one, so that memory never waits; the numbers
// stay in registers, two in each, so largest magnitudes are found two at a time, as integers. The copy along the rows
// is transposed in shared memory, four rows in a word, and leaves in lines of 128 bytes.
//
// Compiled at run time, without headers, before a kernel's own text. Macros that come before this one: BLOCK, WARPS,
// PER_SM (programs of a multiprocessor), HALVES (arrays of numbers in a tile, side by side), ROW_BYTES (bytes that a
// thread reads of a row), SHARED (bytes), HALF (numbers are float16, not bfloat16), SCALE, LARGEST and FLOOR (bits of
// float32), LIMIT, FORMAT (of PTX) and TRANSPOSED (the copy along the rows lies with its rows contiguous). If there is
// one, PANEL divides the tiles beside each other: so many of them come before all others, block by block.

constexpr int THREADS = WARPS * 32;
constexpr int COLUMNS = 128;               // of a tile, for 16 threads
constexpr int ROWS = BLOCK / (2 * WARPS);  // of a thread, from its first one on
constexpr int PEERS = BLOCK / 8;           // threads that have a block of a row
static_assert(ROWS % 4 == 0 && ROWS <= PEERS, "four rows fill a word, and each row's scale is a thread's");

// Shared memory: what was read, by rows of a thread; the multipliers of columns; and the columns' largest numbers by
// warp, where later a half of the tile is transposed.
constexpr int READ = THREADS * ROW_BYTES;
constexpr int MULTIPLIERS = ROWS * READ;
constexpr int ROOM = MULTIPLIERS + HALVES * COLUMNS * 4;
constexpr int ROOM_BYTES = TRANSPOSED ? COLUMNS * BLOCK : WARPS * HALVES * COLUMNS * 2;
static_assert(ROOM + ROOM_BYTES == SHARED, "as launched");

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
  const float amax = __int_as_float(normal ? magnitude : 0x3F800000);
  const float quotient = fminf(__fdiv_rn(__int_as_float(LARGEST), amax), LIMIT);
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
#if PANEL
    const int of_panel = max(1, (num_live + BLOCK - 1) / BLOCK) * PANEL, panel = tile / of_panel;
    block = tile % of_panel / PANEL;
    column = panel * PANEL + tile % PANEL;
#else
    block = tile / across;
    column = tile % across;
#endif
    row = block * BLOCK + thread / 16 * ROWS;
    column = column * COLUMNS + thread % 16 * 8;
    live = column < width ? num_live - row : 0;
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

__device__ __forceinline__ u32 shared_memory() {
  extern __shared__ int4 memory[];
  u32 smem;
  asm("{\n.reg .u64 at;\ncvta.to.shared.u64 at, %1;\ncvt.u32.u64 %0, at;\n}" : "=r"(smem) : "l"(memory));
  return smem;
}

// Hides a number from the compiler, which would keep what follows from it over all tiles: registers are short.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Stores the scales of a tile's columns and leaves their multipliers in shared memory. All threads; each has a part of
// 8 columns' largest magnitudes.
__device__ __forceinline__ void scale_columns(
    u32 (&largest)[HALVES][4], int thread, u32 smem, Place here, int first_column, int width, Stored* scale_rows) {
  const int lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    u32(&of)[4] = largest[half];
#pragma unroll
    for (int j = 0; j < 4; j++) of[j] = larger(of[j], __shfl_xor_sync(~0u, of[j], 16));
    if (lane < 16)
      put(smem + ROOM + ((warp * HALVES + half) * COLUMNS + lane * 8) * 2, make_int4(of[0], of[1], of[2], of[3]));
  }
  __syncthreads();
#pragma unroll
  for (int first = 0; first < HALVES * COLUMNS; first += THREADS) {
    const int c = first + thread, column = first_column + c % COLUMNS;
    if (HALVES * COLUMNS % THREADS && c >= HALVES * COLUMNS) break;
    u32 magnitude = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      magnitude = max(magnitude, get_u16(smem + ROOM + (w * HALVES * COLUMNS + c) * 2));
    const Scale<Stored> of = scale_of(magnitude);
    put_word(smem + MULTIPLIERS + c * 4, __float_as_int(of.multiplier));
    if (column < width) scale_rows[((u64)here.block * HALVES + c / COLUMNS) * width + column] = of.stored;
  }
  __syncthreads();
}

// The multipliers of four columns.
__device__ __forceinline__ float4 multipliers(u32 smem, int column) {
  const int4 v = get(smem + MULTIPLIERS + column * 4);
  return make_float4(__int_as_float(v.x), __int_as_float(v.y), __int_as_float(v.z), __int_as_float(v.w));
}

// Four rows, from row `r` of this thread on, of its 8 columns: eight rows of a column lie together, at places that
// are swizzled by the thread, for all banks.
__device__ __forceinline__ void transpose(const u32 (&down)[8], int r, int thread, u32 smem) {
  const int in_row = thread % 16, line = thread / 16 * ROWS + r, to = (line / 8 ^ in_row) * 8 + line % 8;
#pragma unroll
  for (int j = 0; j < 8; j++) put_word(smem + ROOM + (in_row * 8 + j) * BLOCK + to, down[j]);
}

// Stores a transposed tile of BLOCK rows, which is in shared memory when all threads are here, and waits for all.
__device__ __forceinline__ void store_transposed(
    u8* out, int thread, u32 smem, int first_row, int first_column, int num_rows, int width) {
  __syncthreads();
#pragma unroll
  for (int first = 0; first < COLUMNS; first += THREADS / 8) {
    const int c = first + thread / 8, places = c / 8, row = first_row + thread % 8 * 16;
    int4 v = get(smem + ROOM + c * BLOCK + (thread % 8 ^ places / 2) * 16);
    if (places % 2) v = make_int4(v.z, v.w, v.x, v.y);
    if (row < num_rows && first_column + c < width) {
      int4* to = (int4*)(out + (u64)(first_column + c) * num_rows + row);
#if PANEL
      __stcs(to, v);  // what is read at an index stays in L2
#else
      *to = v;
#endif
    }
  }
  __syncthreads();
}
