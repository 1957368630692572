// Weight gradient of 16-bit operands for Hopper: out[g] = sum over the rows r of group g of lhs[r]^T dy[r], zeros for a
// group without rows.
//
// Operands are taken as they lie, [rows, columns]: of 16 bits the tensor cores read contiguous columns too. TMA has
// them as windows of a step's rows, one from each row on, and what lies beyond a window is zeros: the last step of a
// group is a part of the window that ends where the group ends. In a block one producer warp loads, and two consumer
// warpgroups multiply 64 columns of lhs by 256 of dy each: at their own pace, so that one multiplies while the other
// ends a tile. A consumer keeps a result in registers, rounded, of which a piece leaves in each step of the next tile.
// Products and loads have all of the 128 bytes that shared memory gives in a clock.
//
// Rows of one operand may be those of another array at an index. Two more warps then copy them, a unit of 16 bytes a
// thread, to where TMA would have them. A block copies for itself what it would share.
//
// Compiled at run time after `weight_gradients.cuh`, whose macros are this one's too, and GATHERS: the operand whose
// rows are found by an index, 1 lhs, 2 dy, 0 none. What stands alone on a line is replaced: INSTRUCTIONS (`multiply`
// for both widths).

constexpr int ROWS = 64;               // of a step, and of a window
constexpr int DEPTH = 16;              // rows of one instruction
constexpr int PANEL = ROWS * 128;      // bytes of 64 columns of an operand, which TMA loads at once
constexpr int OF_LHS = TILE_N / 64 * PANEL;  // in a stage
constexpr int OF_ROW = 128 / 16;       // in a matrix descriptor
static_assert(STAGE_BYTES == OF_LHS + TILE_M / 64 * PANEL, "as launched");
constexpr bool GATHERS_LHS = GATHERS == 1, GATHERS_DY = GATHERS == 2;
static_assert(!(GATHERS && WAVES), "no warp is left that fills the queue");
constexpr int GATHERERS = GATHERS ? 64 : 0;  // threads that copy: the last ones of the producer's

template <int WIDTH>
__device__ void multiply(float* d, u64 lhs, u64 dy, int accumulate);

INSTRUCTIONS

// What the producer notes of a tile before its first step, 16 bytes: group, the columns of lhs and of dy where it
// begins, and its extent. Consumers, which have no registers for it, read it until the tile has left: while they
// multiply the next one, when the producer is at most as many tiles further as there are stages.
constexpr int NOTES = 256, NOTE_BYTES = 16, NUM_NOTES = 8;
static_assert(LIVE + 4 <= NOTES && NOTES + NUM_NOTES * NOTE_BYTES <= 1024 && STAGES + 1 < NUM_NOTES, "there is room");

// The rows of a tile (none: there is no other tile), whether its window has rows of the next group, too, and whether it
// has half of the columns.
struct Extent {
  int word;

  __device__ __forceinline__ static Extent of(int rows, bool mixed, bool narrow) {
    return {rows << 2 | mixed << 1 | (int)narrow};
  }
  __device__ __forceinline__ int rows() const { return word >> 2; }
  __device__ __forceinline__ bool mixed() const { return word & 2; }
  __device__ __forceinline__ bool narrow() const { return word & 1; }
};

// A consumer's part of a tile, whose place in the result is read from its note.
struct Cut {
  u32 note;
  int consumer, columns;

  __device__ __forceinline__ Done place() const {
    const int4 of = get(note);
    return {of.x, of.y + consumer * PART_M, of.z};
  }
};

using Sending = Sender<Cut>;

// Tiles, of which those left for a last round are halved where that round has room. One of whose columns half are
// beyond dy is a half, too. Where no more than 128 columns of lhs are left for both blocks, these share them, and
// have columns of dy beside each other.
struct CutTiles : Tiles {
  int width;  // of dy
  int columns;
  bool beside;

  __device__ __forceinline__ CutTiles(u32 smem, u32 table, int live, int K, int N)
      : CutTiles(smem, table, live, K, N, (K + TILE_M - 1) / (2 * TILE_M), (N + TILE_N - 1) / TILE_N) {}
  __device__ __forceinline__ CutTiles(u32 smem, u32 table, int live, int K, int N, int num_m, int num_n)
      : Tiles(smem, table, num_m, num_n, live, num_m * num_n + (num_m * 2 * TILE_M < K ? (num_n + 1) / 2 : 0)),
        width(N) {}

  // 1 if tiles of the round of this first number are halved, else 0.
  __device__ __forceinline__ int halved_from(int first) const { return 2 * (items - first) <= clusters_of_wave(); }

  // How many numbers there are.
  __device__ __forceinline__ int numbers() const {
    const int clusters = clusters_of_wave(), first = items / clusters * clusters;
    return first + ((items - first) << halved_from(first));
  }

  __device__ __forceinline__ bool next() {
    while (true) {
      const Turn turn = turns.take(clusters_of_wave());
      const int halved = halved_from(turn.first);
      const int item = turn.first + (turn.place >> halved), half = turn.place & halved;
      if (item >= items) return false;
      const int within = begin(item), left = within - num_m * num_n;
      beside = left >= 0;
      if (beside)
        m = num_m * 2 * TILE_M, n = left * 2 * TILE_N;
      else
        locate(within);
      n += half * PART_N;
      const bool more = n < width;  // in both blocks, or in the first one
      if (beside) n += rank_in_cluster() * TILE_N;
      columns = halved || width - n <= PART_N ? PART_N : TILE_N;
      if (more || !WAVES) return more;  // without a queue an empty half is a cluster's last tile
    }
  }
};

__device__ __forceinline__ u32 note_at(u32 smem, int tile) { return smem + NOTES + tile % NUM_NOTES * NOTE_BYTES; }

__device__ __forceinline__ void load_tiles(const TensorMap* lhs, const TensorMap* dy, CutTiles tiles, Ring ring) {
  constexpr int OF_TILE = TILE_M / 64;  // panels of lhs
  const int rank = rank_in_cluster();
  int tile = 0;
  for (; tiles.next(); tile++) {
    const int panels = tiles.columns / 64;
    for (int row = tiles.start; row < tiles.end; row += ROWS) {
      // The last window of a group ends where the group ends, unless none does.
      const int window = max(min(row, tiles.end - ROWS), 0), y = row - window;
      const u32 at = ring.at(), ready = ring.full();
      wait_barrier(ring.empty(), ring.parity);
      if (row == tiles.start) {
        const Extent extent = Extent::of(tiles.end - row, tiles.end < ROWS, panels < TILE_N / 64);
        put(note_at(ring.smem, tile), make_int4(tiles.group, tiles.m, tiles.n, extent.word));
      }
      expect_bytes(ready, (panels * !GATHERS_DY + OF_TILE * !GATHERS_LHS) * PANEL);
      // A block loads half of what both have.
      if (tiles.beside) {
        if (!GATHERS_LHS) load_shared(lhs, at + OF_LHS + rank * PANEL, ready, tiles.m + rank * 64, y, window);
#pragma unroll 1
        for (int i = 0; i < panels * !GATHERS_DY; i++) load(dy, at + i * PANEL, ready, tiles.n + i * 64, y, window);
      } else {
#pragma unroll 1
        for (int i = rank * panels / 2; i < (rank + 1) * panels / 2 * !GATHERS_DY; i++)
          load_shared(dy, at + i * PANEL, ready, tiles.n + i * 64, y, window);
#pragma unroll
        for (int i = 0; i < OF_TILE * !GATHERS_LHS; i++)
          load(lhs, at + OF_LHS + i * PANEL, ready, tiles.m + i * 64, y, window);
      }
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  put(note_at(ring.smem, tile), make_int4(0, 0, 0, 0));
  arrive(ring.full());
}

#if GATHERS
// Begins to read a row's place; -1 from `end` on.
__device__ __forceinline__ int read_place(const int* index, int row, int end) {
  int place = -1;
  if (row < end) asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(place) : "l"(index + row));
  return place;
}

// The places of 64 rows from this one on, two of each thread of a warp.
struct Places {
  int low, high;

  __device__ __forceinline__ static Places read(const int* index, int row, int end) {
    const int lane = threadIdx.x % 32;
    return {read_place(index, row + lane, end), read_place(index, row + 32 + lane, end)};
  }

  __device__ __forceinline__ int of(int row) const { return __shfl_sync(~0u, row < 32 ? low : high, row % 32); }
};

// The rows of an operand of this width at their index, negative where there is none: eight rows at once, of each panel
// eight units. A thread's rows have one place in the swizzle. Places are read a step ahead. GATHERERS threads.
__device__ __forceinline__ void gather_tiles(const u8* from, const int* index, int width, CutTiles tiles, Ring ring) {
  constexpr int PANELS = GATHERS_LHS ? TILE_M / 64 : TILE_N / 64;
  const int line = threadIdx.x % GATHERERS / 8, unit = threadIdx.x % 8;
  const u32 to = (GATHERS_LHS ? OF_LHS : 0) + unit_at(0, line, unit);
  while (tiles.next()) {
    const int first = (GATHERS_LHS ? tiles.m : tiles.n) + unit * (UNIT / 2);  // the thread's column
    Places next = Places::read(index, tiles.start, tiles.end);
    for (int row = tiles.start; row < tiles.end; row += ROWS) {
      const Places places = next;
      next = Places::read(index, row + ROWS, tiles.end);
      wait_barrier(ring.empty(), ring.parity);
      const u32 at = ring.at() + to;
#pragma unroll
      for (int i = 0; i < ROWS; i += 8) {
        const int place = places.of(i + line);
        const u8* const source = from + ((u64)(u32)max(place, 0) * width + first) * 2;
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
          copy_unit(at + panel * PANEL + i * 128, source + panel * 128, place >= 0 && first + panel * 64 < width);
      }
      arrive_after_copies(ring.full());
      ring.next();
    }
  }
  wait_barrier(ring.empty(), ring.parity);
  arrive(ring.full());
}
#endif

// Zeros in the rows of some panels from `live` on, whatever they hold. A consumer.
__device__ __forceinline__ void clear_rows(u32 panel, int panels, int live) {
#pragma unroll 1
  for (int i = 0; i < panels; i++)
#pragma unroll 1
    for (int byte = live * 128 + threadIdx.x % 128 * 16; byte < PANEL; byte += 128 * 16)
      put(panel + i * PANEL + byte, make_int4(0, 0, 0, 0));
}

// A step, whose operands are there. While it is multiplied a piece of the tile before leaves. `rows` are left of the
// group; `mixed`: the window has rows of the next group, too.
template <int WIDTH, bool FIRST>
__device__ __forceinline__ void step(
    float (&sums)[PARTS * SUMS], Ring& ring, int rows, bool mixed, Sending& sender) {
  const u32 dy = ring.at(), lhs = dy + OF_LHS + sender.way.result.consumer * PANEL;
  const u64 of_lhs = descriptor(lhs), of_dy = descriptor(dy, PANEL);
  if (GATHERS) fence_shared();  // rows were copied by threads
  if (mixed) {
    clear_rows(lhs, 1, rows);
    clear_rows(dy, WIDTH / 64, rows);  // by both consumers, which write the same
    fence_shared();
    sender.way.result.meet();
  }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < ROWS; k += DEPTH) multiply<WIDTH>(sums, of_lhs + k * OF_ROW, of_dy + k * OF_ROW, !FIRST || k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  sender.send_some();
  // The other consumer multiplies meanwhile: a stage that were kept for the next step would be missed more.
  wait_products<0>();
  ring.release();
  ring.next();
}

// The sums of a tile, whose first step is there.
template <int WIDTH>
__device__ __forceinline__ void multiply_rows(
    float (&sums)[PARTS * SUMS], Ring& ring, Extent extent, Sending& sender) {
  int rows = extent.rows();
  step<WIDTH, true>(sums, ring, rows, extent.mixed(), sender);
#pragma unroll 1
  while ((rows -= ROWS) > 0) {
    wait_barrier(ring.full(), ring.parity);
    step<WIDTH, false>(sums, ring, rows, false, sender);
  }
}

__device__ __forceinline__ void multiply_tiles(Ring ring, Sending sender) {
  float sums[PARTS * SUMS];
  for (int tile = 0;; tile++) {
    wait_barrier(ring.full(), ring.parity);
    const u32 note = note_at(ring.smem, tile);
    const Extent extent{get_word(note + 12)};
    if (!extent.rows()) break;
    if (extent.narrow())
      multiply_rows<PART_N>(sums, ring, extent, sender);
    else
      multiply_rows<TILE_N>(sums, ring, extent, sender);
    finish(sums);
    sender.send_rest();
    sender.take(sums, 1, {note, sender.way.result.consumer, extent.narrow() ? PART_N : TILE_N});
  }
  sender.send_rest();
  wait_for_stores();
}

// With GATHERS, of the operands the one that TMA loads, then the other and its index.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) grouped_gemm_weights(
#if GATHERS
    const __grid_constant__ TensorMap lhs, const u8* gathered, const int* index,
#else
    const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap dy,
#endif
    const int* sizes, int K, int N, int num_groups, u8* zeros, const __grid_constant__ TensorMap out
#if WAVES
    , int* next_number
#endif
    ) {
#if GATHERS
  const TensorMap& dy = lhs;
#endif
  const auto [smem, table] = Memory(num_groups);
  const int consumer = consumer_of_warp();
  if (threadIdx.x == 32) {
    prefetch_descriptor(&lhs), prefetch_descriptor(&dy), prefetch_descriptor(&out);
#if WAVES
    Queue{smem}.init();
#endif
    init_stages(smem, STAGES, 4 * CONSUMERS, 1 + GATHERERS);
  }
  const int live = order(sizes, num_groups, smem, table);
  cluster_sync();
  const CutTiles tiles(smem, table, live, K, N);
  if (consumer < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_PRODUCER));
    if (threadIdx.x == 0) load_tiles(&lhs, &dy, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1});
    if (threadIdx.x / 32 == 1) store_zeros(zeros, table, live, num_groups, K, N);
#if WAVES
    if (threadIdx.x == 64 && rank_in_cluster() == 0) Queue{smem}.fill(next_number, clusters_of_wave(), tiles.numbers());
#endif
#if GATHERS
    if (threadIdx.x >= 128 - GATHERERS)
      gather_tiles(gathered, index, GATHERS_LHS ? K : N, tiles, Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 1});
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS_CONSUMER));
    const Sending sender{{{consumer, smem + STAGED + consumer * STAGED_BYTES, &out}}};
    multiply_tiles(Ring{smem, STAGES_AT, STAGE_BYTES, STAGES, 0}, sender);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here, or write to its stages
}
