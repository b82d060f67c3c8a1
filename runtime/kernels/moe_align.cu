// Groups (token, slot) pairs by expert: a counting sort in one block, and the list of work items.
#include "common.cuh"

constexpr int kThreads = 1024;  // at least EXPERTS

// Exclusive prefix sum over the block; total receives the whole sum.
__device__ __forceinline__ int scan(int value, int* warp_sums, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    int sum = warp_sums[lane];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  total = warp_sums[31];
  const int before = warp ? warp_sums[warp - 1] : 0;
  __syncthreads();
  return before + inclusive - value;
}

// ids         int32 [pairs]: global expert of pair token * top_k + slot; anything outside
//             [first_expert, first_expert + EXPERTS) is not on this rank and is left out
// items       int4 [..]: {local expert, first position, rows <= block_rows, 0}, expert order
// item_count  int32 [1];  slots int32 [pairs]: position -> pair, grouped by expert
// grid 1 x 1024. The order of rows inside an expert varies from run to run; no row's bits see it.
extern "C" __global__ void __launch_bounds__(kThreads)
    moe_align(const int* ids, int pairs, int first_expert, int block_rows, int4* items,
              int* item_count, int* slots) {
  __shared__ int count[kThreads];
  __shared__ int warp_sums[32];
  wait_for_previous();
  let_next_start();
  const int t = threadIdx.x;
  count[t] = 0;
  __syncthreads();
#pragma unroll 8
  for (int i = t; i < pairs; i += kThreads) {
    const u32 e = ids[i] - first_expert;
    if (e < EXPERTS) atomicAdd(&count[e], 1);
  }
  __syncthreads();
  const int rows = count[t];
  int total;
  const int position = scan(rows, warp_sums, total);
  const int item = scan((rows + block_rows - 1) / block_rows, warp_sums, total);
  for (int r = 0, i = item; r < rows; r += block_rows, ++i)
    items[i] = make_int4(t, position + r, min(block_rows, rows - r), 0);
  if (t == 0) item_count[0] = total;
  count[t] = position;
  __syncthreads();
#pragma unroll 8
  for (int i = t; i < pairs; i += kThreads) {
    const u32 e = ids[i] - first_expert;
    if (e < EXPERTS) slots[atomicAdd(&count[e], 1)] = i;
  }
}
