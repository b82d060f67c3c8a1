// Sums over a block in an order that its size alone fixes.
#pragma once
#include "common.cuh"

// The sum of every thread's value, in all threads; THREADS a multiple of 32, at most 1024.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[THREADS / 32];
#pragma unroll
  for (int d = 16; d; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = value;
  __syncthreads();
  float total = sums[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) total += sums[w];
  __syncthreads();
  return total;
}

// The factor of RMSNorm.
__device__ __forceinline__ float norm_scale(float squares, int size, float epsilon) {
  return 1.0f / sqrtf(squares / static_cast<float>(size) + epsilon);
}
