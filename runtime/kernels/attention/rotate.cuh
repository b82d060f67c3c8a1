// RoPE on interleaved pairs: each product and each sum is rounded by itself, as on the CPU.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 rotate_pair(u32 pair, float cos, float sin) {
  const float even = bf16_low(pair), odd = bf16_high(pair);
  return pack_bf16(__fsub_rn(__fmul_rn(even, cos), __fmul_rn(odd, sin)),
                   __fadd_rn(__fmul_rn(odd, cos), __fmul_rn(even, sin)));
}
