// SiLU(gate) * up, by the fast exponential and the fast division.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}
