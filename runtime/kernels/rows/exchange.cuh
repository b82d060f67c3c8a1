// One row's sums to and from the other ranks, through memory that each of them can write.
//
// A rank's memory: fp32 [2][ranks][most][WIDTH], then flags u32 [most][ranks].
#pragma once
#include "common.cuh"

__device__ __forceinline__ void raise_flag(u32* flag, u32 epoch) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}
__device__ __forceinline__ u32 read_flag(const u32* flag) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

// A block calls it for its row blockIdx.x; returns where rank 0's row is, ranks most * WIDTH apart.
// The own row is not copied. Read the others' past the L1, which does not see their writes.
template <int WIDTH, int THREADS>
__device__ __forceinline__ const float* exchange_row(const float* own, const u64* peers, int ranks,
                                                     int rank, int most, u32* epochs) {
  const int row = blockIdx.x;
  const u32 epoch = epochs[row] + 1;
  const long long all = (long long)ranks * most * WIDTH;
  const long long buffer = (epoch & 1) * all + (long long)row * WIDTH;
  for (int p = 1; p < ranks; ++p) {
    float* to = reinterpret_cast<float*>(peers[(rank + p) % ranks]) + buffer +
                (long long)rank * most * WIDTH;
    for (int k = threadIdx.x * 4; k < WIDTH; k += THREADS * 4)
      *reinterpret_cast<float4*>(to + k) = *reinterpret_cast<const float4*>(own + k);
  }
  __threadfence_system();
  __syncthreads();
  const int p = threadIdx.x;
  if (p < ranks && p != rank) {
    u32* there = reinterpret_cast<u32*>(reinterpret_cast<float*>(peers[p]) + 2 * all);
    raise_flag(there + row * ranks + rank, epoch);
    const u32* here = reinterpret_cast<const u32*>(reinterpret_cast<float*>(peers[rank]) + 2 * all);
    while (read_flag(here + row * ranks + p) < epoch) {
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) epochs[row] = epoch;
  return reinterpret_cast<const float*>(peers[rank]) + buffer;
}
