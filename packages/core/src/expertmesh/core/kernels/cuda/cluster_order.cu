// How long each cluster of two blocks waits for lines of memory, in clocks: what is near it on a Hopper GPU.
//
// An atomic operation is done in the slice of L2 that is the line's home. Blocks lie here as they do in a kernel of the
// same launch: one on each multiprocessor, for it takes all of the shared memory.
//
// Macros that come before this text: LINES, STRIDE (bytes from one line to the next), WARPS.

constexpr int TRIES = 8;  // of which the first one only brings the line

__device__ __forceinline__ u32 clock_now() {
  u32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  return now;
}

// zero: 0, which the compiler does not know: it then waits for what was read.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(WARPS * 32, 1)
    line_latencies(int zero, int* latencies, u8* lines) {
  if (blockIdx.x % 2 || threadIdx.x % 32) return;
  // Clusters begin with different lines, so that they do not wait for each other.
  for (int turn = threadIdx.x / 32; turn < LINES; turn += WARPS) {
    const int line = (turn + blockIdx.x / 2) % LINES;
    int best = 1 << 30;
    for (int i = 0; i < TRIES; i++) {
      u32 value;
      const u32 before = clock_now();
      // No bit of the line is changed.
      asm volatile("atom.global.or.b32 %0, [%1], %2;"
                   : "=r"(value) : "l"(lines + (long long)line * STRIDE), "r"(zero) : "memory");
      if (value & zero) return;
      const u32 after = clock_now();
      if (i > 0) best = min(best, (int)(after - before));
    }
    latencies[blockIdx.x / 2 * LINES + line] = best;
  }
}
