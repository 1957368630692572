// What kernels share that quantize numbers of 16 bits in blocks along their rows, and perhaps their columns, on Hopper.
//
// A program takes tiles of BLOCK rows and 128 columns one after the other, or has one. A thread has eights of columns of
// ROWS rows. What it reads of the next tile it copies to shared memory while it works on this one, so that memory never
// waits; the numbers stay in registers, two in each, so largest magnitudes are found two at a time, as integers. The copy
// along the rows is transposed in shared memory, four rows in a word, and leaves in lines of 128 bytes.
//
// Compiled at run time, without headers, after `scales.cuh` and before a kernel's own text. Macros that come before
// both, besides those of `scales.cuh`: BLOCK, WARPS, PER_SM (programs of a multiprocessor), HALVES (arrays of numbers in
// a tile, side by side), EIGHTS (of a thread's columns), APART (columns from one of these to the next), ROW_BYTES (bytes
// that a thread reads of a row), DEFERS (a tile is stored during the next one), SHARED (bytes), TRANSPOSED (the copy
// along the rows lies with its rows contiguous) and QUEUED (programs take their tiles from one queue). There may be a
// PANEL, of rows that are read at an index.

constexpr int THREADS = WARPS * 32;
constexpr int COLUMNS = 128;                       // of a tile
constexpr int IN_ROW = COLUMNS / (8 * EIGHTS);     // threads that have a row
constexpr int STEP = APART == 8 ? 8 * EIGHTS : 8;  // columns from a thread's first one to the next thread's
constexpr int ROWS = BLOCK * IN_ROW / THREADS;     // of a thread, from its first one on
constexpr int PEERS = BLOCK * IN_ROW / COLUMNS;    // threads that have a block of a row
static_assert(APART == 8 || APART == IN_ROW * 8, "a row's threads have all of its columns");
static_assert(ROWS % 4 == 0 && ROWS <= PEERS, "four rows fill a word, and each row's scale is a thread's");

// Shared memory: what was read, by rows of a thread; the multipliers of columns, with gaps against bank conflicts; the
// place where half of a tile is transposed; and the columns' largest numbers by warp, in that place unless it DEFERS.
constexpr int READ = THREADS * ROW_BYTES;
constexpr int MULTIPLIERS = ROWS * READ;
constexpr int GAP = EIGHTS > 1 ? 16 : 0;  // bytes, after 32 columns
constexpr int ROOM = MULTIPLIERS + HALVES * COLUMNS / 32 * (128 + GAP);
constexpr int ROOM_BYTES = COLUMNS * BLOCK;
constexpr int LARGEST_BYTES = WARPS * HALVES * COLUMNS * 2;
constexpr int LARGEST_OF_WARPS = DEFERS ? ROOM + ROOM_BYTES : ROOM;
constexpr int NUMBER = LARGEST_OF_WARPS + (TRANSPOSED && !DEFERS ? ROOM_BYTES : LARGEST_BYTES);
static_assert(NUMBER + 16 * QUEUED == SHARED, "as launched");

// 16 bytes, or zeros, for which nothing is read.
__device__ __forceinline__ void copy(u32 to, const u8* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// Likewise 8 bytes.
__device__ __forceinline__ void copy_8(u32 to, const u8* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(wanted ? 8 : 0) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last N ends have come.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#if PANEL
// Panels come one after the other, each with so many tiles.
__device__ __forceinline__ int tiles_of_panel(int num_live) { return max(1, (num_live + BLOCK - 1) / BLOCK) * PANEL; }
#endif

// Of a tile what one thread has: its first row and column, and how many of its rows are read.
struct Place {
  int block, row, column, live;

  __device__ __forceinline__ Place(int tile, int width, int num_live) {
#if PANEL
    const int of_panel = tiles_of_panel(num_live);
    *this = Place(tile / of_panel, tile % of_panel, width, num_live);
#else
    const int across = (width + COLUMNS - 1) / COLUMNS;
    *this = Place(tile / across, tile % across, width, num_live);
#endif
  }

  // Of the tile number `rest` of a row of tiles or, if there are panels, of a panel.
  __device__ __forceinline__ Place(int one, int rest, int width, int num_live) {
#if PANEL
    const int in_row = one * PANEL + rest % PANEL;
    block = rest / PANEL;
#else
    const int in_row = rest;
    block = one;
#endif
    const int thread = threadIdx.x;
    row = block * BLOCK + thread / IN_ROW * ROWS;
    column = in_row * COLUMNS + thread % IN_ROW * STEP;
    live = column < width ? num_live - row : 0;
  }
};

// A program's tile, and its next one. From a queue, tiles that run at one time lie beside each other in memory, though
// some programs are faster. The first two of each need no queue.
struct Turns {
  int here = blockIdx.x, next = here + gridDim.x;

  // The number of the tile after the next one, which thread 0 waits for when it tells.
  __device__ __forceinline__ int ask(int* next_number) const {
    return QUEUED && threadIdx.x == 0 ? atomicAdd(next_number, 1) + 2 * gridDim.x : next + gridDim.x;
  }

  // Between two barriers.
  __device__ __forceinline__ void tell(int asked, u32 smem) const {
    if (QUEUED && threadIdx.x == 0) put_word(smem + NUMBER, asked);
  }

  // After those, and before the next ones.
  __device__ __forceinline__ void go_on(int asked, u32 smem) {
    here = next;
    next = QUEUED ? get_word(smem + NUMBER) : asked;
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

// Where a column's largest magnitude in a warp lies, those of all halves and warps one after the other.
__device__ __forceinline__ u32 largest_at(u32 smem, int number) { return smem + LARGEST_OF_WARPS + number * 2; }

__device__ __forceinline__ u32 multiplier_at(u32 smem, int column) {
  return smem + MULTIPLIERS + column * 4 + column / 32 * GAP;
}

// Stores the scales of a tile's columns and leaves their multipliers in shared memory. All threads, between barriers.
__device__ __forceinline__ void scale_columns(
    int thread, u32 smem, int block, int first_column, int width, Stored* scale_rows) {
#pragma unroll
  for (int first = 0; first < HALVES * COLUMNS; first += THREADS) {
    const int c = first + thread, column = first_column + c % COLUMNS;
    if (HALVES * COLUMNS % THREADS && c >= HALVES * COLUMNS) break;
    u32 magnitude = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      magnitude = max(magnitude, get_u16(largest_at(smem, w * HALVES * COLUMNS + c)));
    const Scale<Stored> of = scale_of(magnitude);
    put_word(multiplier_at(smem, c), __float_as_int(of.multiplier));
    if (column < width) scale_rows[((u64)block * HALVES + c / COLUMNS) * width + column] = of.stored;
  }
}

// The multipliers of four columns.
__device__ __forceinline__ float4 multipliers(u32 smem, int column) {
  const int4 v = get(multiplier_at(smem, column));
  return make_float4(__int_as_float(v.x), __int_as_float(v.y), __int_as_float(v.z), __int_as_float(v.w));
}

constexpr int TOGETHER = BLOCK / IN_ROW;  // rows

// Four rows, from row `r` of this thread on, of an eight of its columns: TOGETHER rows of a column lie together, at
// places that are swizzled by the thread, for all banks.
__device__ __forceinline__ void transpose(const u32 (&down)[8], int r, int eight, int thread, u32 smem) {
  const int in_row = thread % IN_ROW, line = thread / IN_ROW * ROWS + r;
  const int to = (line / TOGETHER ^ in_row) * TOGETHER + line % TOGETHER, column = in_row * STEP + eight * APART;
#pragma unroll
  for (int j = 0; j < 8; j++) put_word(smem + ROOM + (column + j) * BLOCK + to, down[j]);
}

// Stores a transposed tile of BLOCK rows, which is in shared memory. All threads, between barriers.
__device__ __forceinline__ void store_lines(
    u8* out, int thread, u32 smem, int first_row, int first_column, int num_rows, int width) {
#pragma unroll
  for (int first = 0; first < COLUMNS; first += THREADS / 8) {
    const int c = first + thread / 8, places = (APART == 8 ? c : c % APART) / STEP, row = first_row + thread % 8 * 16;
    int4 v = get(smem + ROOM + c * BLOCK + (thread % 8 ^ places / (16 / TOGETHER)) * 16);
    if (TOGETHER == 8 && places % 2) v = make_int4(v.z, v.w, v.x, v.y);
    if (row < num_rows && first_column + c < width) {
      int4* to = (int4*)(out + (u64)(first_column + c) * num_rows + row);
#if PANEL
      __stcs(to, v);  // what is read at an index stays in L2
#else
      *to = v;
#endif
    }
  }
}
