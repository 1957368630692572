// Weights [matrices, M, parts, N] quantized in blocks of BLOCK x BLOCK, or with a scale for each matrix, whose largest
// magnitude is known; and the same numbers once more with their M contiguous, [matrices, parts, N, M], for Hopper: with
// what `quantize.cuh` has, which comes before this text.
//
// A program has one tile, which is one block, and ends. Memory is kept busy by the programs beside it. Where matrices have
// a scale each, the first program has the last tile, which L2 has of the kernel that found the largest magnitudes.
//
// Macros besides those: BOTH (orders, or the second one alone), SINGLE (float32, not 16 bits) and WHOLE (a scale for each
// matrix).

static_assert(TRANSPOSED && IN_ROW * 8 == COLUMNS && ROW_BYTES == 0, "as launched");

constexpr int WORDS = SINGLE ? 8 : 4;  // of eight numbers

// Bits of the largest magnitude of a thread's numbers.
__device__ __forceinline__ u32 largest_of(const u32 (&kept)[ROWS][WORDS]) {
  u32 of = 0;  // if not SINGLE, two
#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int j = 0; j < WORDS; j++)
      of = SINGLE ? max(of, kept[i][j] & 0x7FFFFFFF) : larger(of, magnitudes(kept[i][j]));
  return SINGLE ? of : max(of & 0xFFFF, of >> 16);
}

// That of all threads.
__device__ __forceinline__ u32 largest_of_all(u32 mine, int thread, u32 smem) {
  static_assert(WARPS % 4 == 0);
  const u32 of_warp = __reduce_max_sync(~0u, mine);
  if (thread % 32 == 0) put_word(smem + ROOM + thread / 32 * 4, of_warp);
  __syncthreads();
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i += 4) {
    u32 of[4];
    unpack(of, get(smem + ROOM + i * 4));
#pragma unroll
    for (int j = 0; j < 4; j++) largest = max(largest, of[j]);
  }
  __syncthreads();  // a tile comes where they are
  return largest;
}

// Numbers 2 j and 2 j + 1 of eight.
__device__ __forceinline__ float2 two(const u32 (&words)[WORDS], int j) {
#if SINGLE
  return make_float2(__uint_as_float(words[2 * j]), __uint_as_float(words[2 * j + 1]));
#else
  return unpack(words[j]);
#endif
}

// The bits of a magnitude as float32.
__device__ __forceinline__ int wide(u32 magnitude) {
  return SINGLE ? magnitude : __float_as_int(unpack(magnitude).x);
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) quantize_square(
    const u8* x,
#if WHOLE
    const int* largest,  // of each matrix
#endif
    int num_rows, int parts, int width,
#if BOTH
    u8* data,
#if !WHOLE
    Stored* scale,
#endif
#endif
    u8* data_rows, Stored* scale_rows) {
  const u32 smem = shared_memory();
  const int thread = threadIdx.x;
  const int across = (width + BLOCK - 1) / BLOCK, high = (num_rows + BLOCK - 1) / BLOCK;
  const u32 tile = WHOLE ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int n = tile % across, part = tile / across % parts, line = tile / across / parts;
  const int m = line % high, matrix = line / high;
  const Place here(m, n, width, num_rows);
  const u64 pitch = (u64)parts * width;  // from a row to the next one
  const u64 first = ((u64)matrix * num_rows + here.row) * pitch + (u64)part * width + here.column;

  u32 kept[ROWS][WORDS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int4* from = (const int4*)(x + (first + i * pitch) * (SINGLE ? 4 : 2));
#pragma unroll
    for (int j = 0; j < WORDS; j += 4) {
      u32 words[4];
      unpack(words, i < here.live ? __ldg(from + j / 4) : make_int4(0, 0, 0, 0));
#pragma unroll
      for (int k = 0; k < 4; k++) kept[i][j + k] = words[k];
    }
  }
#if WHOLE
  const Scale<Stored> made = SCALE(__ldg(largest + matrix));
  if (thread == 0 && m + part + n == 0) scale_rows[matrix] = made.stored;
#else
  const Scale<Stored> made = SCALE(wide(largest_of_all(largest_of(kept), thread, smem)));
  if (thread == 0) {
#if BOTH
    scale[(((u64)matrix * high + m) * parts + part) * across + n] = made.stored;
#endif
    scale_rows[(((u64)matrix * parts + part) * across + n) * high + m] = made.stored;
  }
#endif
#pragma unroll
  for (int r = 0; r < ROWS; r += 4) {
    u32 along[4][2], down[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      float v[4][4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float2 low = two(kept[r + k], j / 2), high = two(kept[r + k], j / 2 + 1);
        v[k][0] = low.x * made.multiplier, v[k][1] = low.y * made.multiplier;
        v[k][2] = high.x * made.multiplier, v[k][3] = high.y * made.multiplier;
        along[k][j / 4] = to_8_bits(v[k][0], v[k][1], v[k][2], v[k][3]);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) down[j + k] = to_8_bits(v[0][k], v[1][k], v[2][k], v[3][k]);
    }
#if BOTH
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (r + k < here.live) *(uint2*)(data + first + (r + k) * pitch) = make_uint2(along[k][0], along[k][1]);
#endif
    transpose(down, r, 0, thread, smem);
  }
  __syncthreads();
  store_lines(
      data_rows + ((u64)matrix * parts + part) * width * num_rows, thread, smem, m * BLOCK, n * COLUMNS, num_rows,
      width);
}
