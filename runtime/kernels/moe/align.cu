// Groups (token, slot) pairs by expert: a counting sort in one cluster of BLOCKS blocks, and the list
// of work items.
#include "common.cuh"

constexpr int kThreads = 1024;  // at least EXPERTS
constexpr int kBins = 16;

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
// items       int4 [..]: {local expert, first position, rows <= block_rows, tiles of 8 rows}, an
//             expert's together and about equal; those with most tiles first. The rows of an
//             expert's last may fill fewer tiles than it says.
// item_count  int32 [1];  slots int32 [pairs]: position -> pair, grouped by expert
// grid one cluster of BLOCKS blocks of 1024. The order of rows inside an expert, and of experts with
// like many, varies from run to run; no row's bits see it.
extern "C" __global__ void __launch_bounds__(kThreads)
    moe_align(const int* ids, int pairs, int first_expert, int block_rows, int4* items,
              int* item_count, int* slots) {
  __shared__ int count[kThreads];  // an expert's rows among this block's pairs
  __shared__ int place[kThreads];  // of the next one
  __shared__ int warp_sums[32];
  __shared__ int first_item[kBins];
  wait_for_previous();
  let_next_start();
  const int t = threadIdx.x;
  constexpr int kStride = BLOCKS * kThreads;
  count[t] = 0;
  if (t < kBins) first_item[t] = 0;
  __syncthreads();
#pragma unroll 8
  for (int i = blockIdx.x * kThreads + t; i < pairs; i += kStride) {
    const u32 e = ids[i] - first_expert;
    if (e < EXPERTS) atomicAdd(&count[e], 1);
  }
  if (BLOCKS > 1) cluster_sync(); else __syncthreads();
  int rows = BLOCKS > 1 ? 0 : count[t], before = 0;
  if (BLOCKS > 1)
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      if (b == blockIdx.x) before = rows;
      rows += load_cluster4(smem_addr(&count[t]), b);
    }
  // As few items as can be, then tiles as equal as can be.
  const int least = max(1, (rows + block_rows - 1) / block_rows);
  const int tiles = ((rows + least - 1) / least + 7) / 8;
  const int mine = rows > 0 ? (rows + tiles * 8 - 1) / (tiles * 8) : 0;
  int total;
  const int position = scan(rows, warp_sums, total);
  // Largest items first, in kBins classes: whoever takes items in turn ends in balance.
  const int bin = kBins - 1 - min(tiles, kBins - 1);
  if (rows > 0) atomicAdd(&first_item[bin], mine);
  __syncthreads();
  const int first = scan(t < kBins ? first_item[t] : 0, warp_sums, total);
  if (t < kBins) first_item[t] = first;
  __syncthreads();
  for (int r = 0, i = rows > 0 ? atomicAdd(&first_item[bin], mine) : 0; r < rows;
       r += tiles * 8, ++i)
    if (blockIdx.x == 0) items[i] = make_int4(t, position + r, min(tiles * 8, rows - r), tiles);
  if (blockIdx.x == 0 && t == 0) item_count[0] = total;
  place[t] = position + before;
  __syncthreads();
#pragma unroll 8
  for (int i = blockIdx.x * kThreads + t; i < pairs; i += kStride) {
    const u32 e = ids[i] - first_expert;
    if (e < EXPERTS) slots[atomicAdd(&place[e], 1)] = i;
  }
  if (BLOCKS > 1) cluster_wait_for_readers();
}
