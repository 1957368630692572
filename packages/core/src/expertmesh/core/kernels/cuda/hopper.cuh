// What the GEMMs in CUDA C++ share: Hopper's clusters of two blocks, barriers, TMA and memory.
//
// Compiled at run time, without headers, before a kernel's own text, whose macros SHARED, REGISTERS_PRODUCER,
// REGISTERS_CONSUMER and perhaps PLACES, KEEPING (shared operands leave L2 last) and WAVES (of clusters that take tiles
// from a queue) are this one's too.

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// Among all clusters. Those of neighbouring places read the same operands.
__device__ __forceinline__ int place_of_cluster() {
#ifdef PLACES
  static __constant__ u16 places[] = {PLACES};
  return places[blockIdx.x / 2];
#else
  return blockIdx.x / 2;
#endif
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN_%=;\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier at the same place of block `rank` of the cluster. Not `release.cluster`: that is a fence of
// the whole GPU, and what was read needs none.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
      ::"r"(barrier), "r"(rank) : "memory");
}

#ifndef KEEPING
#define KEEPING 1
#endif
// What `createpolicy.fractional` makes of L2::evict_last (of L2::evict_normal, where operands are not kept) and of
// L2::evict_first.
constexpr u64 KEEP = KEEPING ? 0x14F0000000000000 : 0x1000000000000000, PASS = 0x12F0000000000000;

// A box of two dimensions, to the same place of both blocks.
__device__ __forceinline__ void load_shared(const TensorMap* map, u32 to, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"((u16)3), "l"(KEEP) : "memory");
}

// One of three.
__device__ __forceinline__ void load_shared(const TensorMap* map, u32 to, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((u16)3), "l"(KEEP) : "memory");
}

__device__ __forceinline__ void load(const TensorMap* map, u32 to, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void load(const TensorMap* map, u32 to, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

constexpr int UNIT = 16;  // bytes of a copy

// Copies a unit, or zeros where there is none. In L2 comes the line's other half, too.
__device__ __forceinline__ void copy_unit(u32 to, const u8* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(exists ? UNIT : 0) : "memory");
}

// This thread arrives when its copies so far are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four matrices of 8 x 8 of 16 bits each, each line at the place of one lane.
__device__ __forceinline__ void put_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Each of them transposed.
__device__ __forceinline__ void put_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store(u8* to, int4 v) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;"
               ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(PASS) : "memory");
}

__device__ __forceinline__ void prefetch_descriptor(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What one proxy wrote to shared memory is seen by TMA and by the tensor cores.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Division of numbers from 0 to 2^23 by their product with a reciprocal, which is off by less than one. An integer
// division takes a thread about 150 clocks, and the next tile waits for four of them.
struct Divisor {
  int by;

  // The quotient; `rest` is what is left.
  __device__ __forceinline__ int divide(int number, int& rest) const {
    // Made here each time: kept, it takes a register that the products of weight gradients need.
    int divisor = by;
    asm volatile("" : "+r"(divisor));
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"((float)divisor));
    int quotient = (int)((float)number * reciprocal);
    rest = number - quotient * by;
    if (rest < 0) quotient--, rest += by;
    if (rest >= by) quotient++, rest -= by;
    return quotient;
  }
};

// Writes sizes and starts of the groups to `room`, 16 bytes each, and returns where the last one ends. One warp.
__device__ __forceinline__ int read_sizes(const int* sizes, int num_groups, u32 room) {
  const int lane = threadIdx.x % 32;
  int start = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int g = first + lane, size = g < num_groups ? __ldg(sizes + g) : 0;
    int end = size;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    if (g < num_groups) put(room + 16 * g, make_int4(size, start + end - size, 0, 0));
    start += __shfl_sync(~0u, end, 31);
  }
  return start;
}

// The place of group g, whose number is `mine`, if larger ones come first; the numbers lie 16 bytes apart.
__device__ __forceinline__ int place_of(int g, int mine, u32 numbers, int num_groups) {
  int place = 0;
#pragma unroll 8
  for (int h = 0; h < num_groups; h++) {
    const int other = get_word(numbers + 16 * h);
    place += other > mine || (other == mine && h < g);
  }
  return place;
}

// Whether what the warpgroups take of registers is there: what a launch of so many threads has, of which one warpgroup
// gives some back. One that wants more waits forever.
__device__ constexpr bool fit(int threads, int consumers) {
  return 128 * (REGISTERS_PRODUCER + consumers * REGISTERS_CONSUMER) <= threads * (65536 / threads / 8 * 8);
}

// Begins to read a scale: what follows does not wait before it is used.
__device__ __forceinline__ float read_scale(const float* from) {
  float scale;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(scale) : "l"(from));
  return scale;
}

// Finite if both are, so that a sum of 0 stays 0.
__device__ __forceinline__ float product_of_scales(float a, float b) {
  constexpr float FINITE = 3.4028234663852886e38f;
  const float product = a * b;
  return product > FINITE ? FINITE : product;
}

// A shared memory descriptor of tiles in 128-byte swizzle: rows of 128 bytes, eight of them 1024 bytes. Where the
// contraction runs from row to row, an operand may have several tiles side by side, `next` bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address, u32 next = 16) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Until no more than so many groups of products are under way.
template <int GROUPS>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Until all products are complete, but so many GROUPS of the last ones: nothing reads these sums before.
template <int GROUPS = 0, int SIZE>
__device__ __forceinline__ void finish(float (&sums)[SIZE]) {
  wait_products<GROUPS>();
#pragma unroll
  for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

#ifndef WAVES
#define WAVES 0
#endif
// The clusters of a wave, or without a queue all.
__device__ __forceinline__ int clusters_of_wave() { return gridDim.x / 2 / (WAVES ? WAVES : 1); }

// Numbers of tiles on their way to the threads that load: one thread of a cluster takes the next one of all clusters
// while the tile before is loaded. Clusters that begin late then leave the others more. Where memory is what they wait
// for, clusters that take turns instead drift apart, and what they share has then left L2.
struct Queue {
  static constexpr int AT = 768, FILLED = AT + 8, TAKEN = FILLED + 8;  // a word, and its barriers
  u32 smem;
  u32 parity = 0;

  // One thread of a block.
  __device__ __forceinline__ void init() const {
    init_barrier(smem + FILLED, 1);
    init_barrier(smem + TAKEN, 2);  // by the thread of each block that loads
  }

  // Of the first block one thread sends the numbers of its cluster to both, until one is `end` or more. `next`: how many
  // numbers have been taken. Of one wave the first so many `clusters` take them. Of several all do, each until it has
  // had its share, so that a collective may begin where it ends; the last wave is for what is then left.
  __device__ __forceinline__ void fill(int* next, int clusters, int end) {
    int left = place_of_cluster() < clusters ? end : 0, number;
    if (WAVES > 1) left = end / (clusters * (WAVES - 1)) + 1;
    do {
      wait_barrier(smem + TAKEN, parity ^ 1);
      number = end;
      if (left-- > 0)
        asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(number) : "l"(next) : "memory");
#pragma unroll 1  // as registers allow
      for (int rank = 0; rank < 2; rank++) send(number, rank);
      parity ^= 1;
    } while (number < end);
  }

  // The thread that loads.
  __device__ __forceinline__ int take() {
    expect_bytes(smem + FILLED, 4);
    wait_barrier(smem + FILLED, parity);
    parity ^= 1;
    const int number = get_word(smem + AT);
    if (number >= 0) arrive_at(smem + TAKEN, 0);  // it always is, but so the number was read before
    return number;
  }

 private:
  __device__ __forceinline__ void send(int number, u32 rank) const {
    asm volatile(
        "{\n.reg .b32 word, filled;\nmapa.shared::cluster.u32 word, %0, %2;\nmapa.shared::cluster.u32 filled, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [word], %3, [filled];\n}"
        ::"r"(smem + AT), "r"(smem + FILLED), "r"(rank), "r"(number) : "memory");
  }
};

// A number as a round, by its first number, and a place in it.
struct Turn {
  int first, place;

  __device__ __forceinline__ int number() const { return first + place; }
};

// The numbers that one of so many `clusters` works on. From a queue; or one of each round, there and back, so that no
// cluster gets the larger tile of each.
struct Turns {
#if WAVES
  Queue queue;

  __device__ __forceinline__ explicit Turns(u32 smem) : queue{smem} {}
  __device__ __forceinline__ Turn take(int clusters) {
    Turn turn;
    turn.first = Divisor{clusters}.divide(queue.take(), turn.place) * clusters;
    return turn;
  }
#else
  int first = 0, place = place_of_cluster();

  __device__ __forceinline__ explicit Turns(u32) {}
  __device__ __forceinline__ Turn take(int clusters) {
    const Turn turn{first, place};
    first += clusters, place = clusters - 1 - place;
    return turn;
  }
#endif
};

// A block's shared memory: from its first multiple of 1024 bytes on, for swizzles repeat so; and the table of groups at
// its end, 16 bytes each.
struct Memory {
  u32 smem, table;

  __device__ __forceinline__ explicit Memory(int num_groups) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    smem = (base + 1023) / 1024 * 1024, table = base + SHARED - num_groups * 16;
  }
};

// -1 is the producer, which loads; consumers multiply. Shuffled, so that the compiler knows it to be the same in a
// warp: indices of stages then need no vector registers, nor the warp to gather before each product.
__device__ __forceinline__ int consumer_of_warp() { return __shfl_sync(~0u, (int)threadIdx.x / 128 - 1, 0); }

// Barriers of stages in shared memory: at most eight that are full, and as many that are empty.
constexpr int FULL = 0, EMPTY = 64;

// Of stages that so many threads fill, and so many warps release in each of both blocks. One thread.
__device__ __forceinline__ void init_stages(u32 smem, int stages, int warps, int filling = 1) {
  for (int i = 0; i < stages; i++) {
    init_barrier(smem + FULL + 8 * i, filling);
    init_barrier(smem + EMPTY + 8 * i, 2 * warps);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Operands on their way through shared memory: stages, each for those of a step.
struct Ring {
  u32 smem;
  int first, bytes, stages;  // where stages begin, bytes of one, how many there are
  u32 parity;
  int stage = 0;

  __device__ __forceinline__ u32 at() const { return smem + first + stage * bytes; }
  __device__ __forceinline__ u32 full() const { return smem + FULL + 8 * stage; }
  __device__ __forceinline__ u32 empty() const { return smem + EMPTY + 8 * stage; }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  // This stage is free, in both blocks.
  __device__ __forceinline__ void release() const {
    const int lane = threadIdx.x % 32;
    if (lane < 2) arrive_at(empty(), lane);
  }
  // So is the stage before this one.
  __device__ __forceinline__ void release_before() const {
    const int lane = threadIdx.x % 32;
    if (lane < 2) arrive_at(smem + EMPTY + 8 * (stage ? stage - 1 : stages - 1), lane);
  }
};
