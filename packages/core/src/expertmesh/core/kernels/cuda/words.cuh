// What all kernels share: words of shared memory and of registers.
//
// Compiled at run time, without headers, before all other text. A macro that comes before this one: HALF (numbers of 16
// bits are float16, not bfloat16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ void put(u32 to, int4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ int4 get(u32 from) {
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void put_word(u32 to, int v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

__device__ __forceinline__ void put_pair(u32 to, int x, int y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ int get_word(u32 from) {
  int v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 get_u16(u32 from) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

// Two numbers of 16 bits.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
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

__device__ __forceinline__ u32 magnitudes(u32 both) { return both & 0x7FFF7FFF; }

// The larger of each two numbers of 16 bits; of magnitudes NaN is the largest.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
