// Runs of 64 keys in a warp, the greatest first: key i is in lane i % 32, slot i / 32.
#pragma once
#include "common.cuh"

struct Run {
  u64 key[64];
};

__device__ __forceinline__ u64 greater(u64 a, u64 b) { return a > b ? a : b; }
__device__ __forceinline__ u64 lesser(u64 a, u64 b) { return a < b ? a : b; }

// One step of a bitonic network: partners `step` apart, the greater to the front where `up` is 0.
__device__ __forceinline__ void exchange_pairs(u64 (&run)[2], int step, bool down0, bool down1) {
  const int lane = threadIdx.x & 31;
  if (step == 32) {
    const u64 a = run[0], b = run[1];
    run[0] = down0 ? lesser(a, b) : greater(a, b);
    run[1] = down0 ? greater(a, b) : lesser(a, b);
    return;
  }
  const bool back = lane & step;
  const u64 a = __shfl_xor_sync(~0u, run[0], step), b = __shfl_xor_sync(~0u, run[1], step);
  run[0] = back != down0 ? lesser(run[0], a) : greater(run[0], a);
  run[1] = back != down1 ? lesser(run[1], b) : greater(run[1], b);
}
// A bitonic run becomes a sorted one.
__device__ __forceinline__ void sort_bitonic(u64 (&run)[2]) {
#pragma unroll
  for (int step = 32; step; step /= 2) exchange_pairs(run, step, false, false);
}
__device__ __forceinline__ void sort_run(u64 (&run)[2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int span = 2; span <= 32; span *= 2)
#pragma unroll
    for (int step = span / 2; step; step /= 2)
      exchange_pairs(run, step, span == 32 ? false : lane & span, span == 32 ? true : lane & span);
  sort_bitonic(run);
}
// best becomes the 64 greatest of both runs: against the other in reverse they are a bitonic run.
__device__ __forceinline__ void keep_greatest(u64 (&best)[2], const u64 (&run)[2]) {
  const u64 a = __shfl_xor_sync(~0u, run[1], 31), b = __shfl_xor_sync(~0u, run[0], 31);
  best[0] = greater(best[0], a), best[1] = greater(best[1], b);
  sort_bitonic(best);
}
// Over WARPS warps of a block (a power of two): the greatest in the first one's best. All call it.
template <int WARPS>
__device__ __forceinline__ void merge_warps(Run* runs, u64 (&best)[2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int half = WARPS / 2; half; half /= 2) {
    if (warp % WARPS >= half && warp % WARPS < 2 * half)
      runs[warp].key[lane] = best[0], runs[warp].key[32 + lane] = best[1];
    __syncthreads();
    if (warp % WARPS < half) {
      const u64 run[2] = {runs[warp + half].key[lane], runs[warp + half].key[32 + lane]};
      keep_greatest(best, run);
    }
    __syncthreads();
  }
}
