// The scales of blocks, made of their largest magnitudes, and 8 bits of numbers of 16.
//
// Compiled at run time, without headers, before a kernel's own text. Macros that come before: SCALE, LARGEST and FLOOR
// (bits of float32), LIMIT, and FORMAT (of PTX).

__device__ __forceinline__ u32 to_8_bits(float a, float b, float c, float d) {
  u32 four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite." FORMAT "x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite." FORMAT "x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

__device__ __forceinline__ float2 from_float16(u32 two) {
  float2 v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(v.x), "=f"(v.y) : "r"(two));
  return v;
}

// Zeros of their sign in place of subnormal numbers.
__device__ __forceinline__ float without_subnormal(float x) {
  asm("mul.ftz.f32 %0, %0, 0f3F800000;" : "+f"(x));
  return x;
}

// 2^(biased - 127) for 0 .. 254, NaN for 255.
__device__ __forceinline__ float power_of_2(int biased) {
  return __int_as_float(biased == 255 ? 0x7FC00000 : biased == 0 ? 0x00400000 : biased << 23);
}

constexpr int INF = 0x7F800000;

__device__ __forceinline__ float factor_of(float scale) { return scale; }
__device__ __forceinline__ float factor_of(u8 scale) { return power_of_2(scale); }

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
