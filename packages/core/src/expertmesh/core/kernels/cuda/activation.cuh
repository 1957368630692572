// Gated activations, act(gate) * (up + UP_OFFSET), and their derivatives.
//
// Compiled at run time, without headers, before a kernel's own text. Macros that come before: FUNCTION, UP_OFFSET and
// BOUND (if there is one, gate is at most that, and up within it).

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

// Of a gate and an up number: act(gate) and its slope, up + UP_OFFSET, and which of the two are within the bound.
struct Gated {
  ValueAndSlope of_gate;
  float up;
  bool gate_moves = true, up_moves = true;

  __device__ __forceinline__ Gated(float gate, float plain_up) {
#ifdef BOUND
    gate_moves = !(gate > BOUND), up_moves = !(fabsf(plain_up) > BOUND);
    gate = least(gate, BOUND);
    plain_up = most(least(plain_up, BOUND), -BOUND);
#endif
    of_gate = FUNCTION(gate), up = plain_up + UP_OFFSET;
  }

  __device__ __forceinline__ float value() const { return of_gate.value * up; }
  // Gradients for the cotangent of `value`.
  __device__ __forceinline__ float d_gate(float d) const { return gate_moves ? d * of_gate.slope * up : 0; }
  __device__ __forceinline__ float d_up(float d) const { return up_moves ? d * of_gate.value : 0; }
};

// Of two numbers of 16 bits each, times a row's weight.
__device__ __forceinline__ u32 activate(u32 gates, u32 ups, float weight) {
  const float2 gate = unpack(gates), up = unpack(ups);
  return pack(weight * Gated(gate.x, up.x).value(), weight * Gated(gate.y, up.y).value());
}
