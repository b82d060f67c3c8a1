// What the forms of the w2 kernel share: router weights, and rows that leave in whole lines.
//
// Compile-time: HIDDEN, BLOCK_ROWS.
#pragma once
#include "moe/marlin_stream.cuh"

// What lane r of every warp knows of row r: its slot, and the router weight times kWeightUnit.
static_assert(BLOCK_ROWS <= 32, "a lane a row");
struct Row {
  int slot;
  float weight;

  __device__ __forceinline__ Row(const int* slots, int rows, const float* router_weights)
      : slot((threadIdx.x & 31) < rows ? slots[threadIdx.x & 31] : 0),
        weight(router_weights[slot] * kWeightUnit) {}
  __device__ __forceinline__ u16* out(u16* y, int r) const {
    return y + (long long)__shfl_sync(~0u, slot, r) * HIDDEN;
  }
  // 16 columns x 8 rows from row `first`, weighted and rounded: two matrices of 8 columns.
  __device__ __forceinline__ void weigh(float4 v, int first, u32& low, u32& high) const {
    const float even = __shfl_sync(~0u, weight, first + (threadIdx.x & 3) * 2);
    const float odd = __shfl_sync(~0u, weight, first + (threadIdx.x & 3) * 2 + 1);
    low = pack_bf16(v.x * even, v.y * odd);
    high = pack_bf16(v.z * even, v.w * odd);
  }
};

// A warp's 64 columns, turned in its shared memory so that rows leave in whole 128-byte lines.
template <int NT>
__device__ __forceinline__ void store_tile(u32 scratch, const float4 (&acc)[4][NT],
                                           const Row& row, int row_count, u16* y) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll
  for (int t = 0; t < NT; ++t)
#pragma unroll
    for (int d = 0; d < 4; d += 2) {
      u32 r[4];
      row.weigh(acc[d][t], t * 8, r[0], r[1]);
      row.weigh(acc[d + 1][t], t * 8, r[2], r[3]);
      store_matrices_transposed(
          scratch + (t * 8 + (lane & 7)) * 128 + (((2 * d + (lane >> 3)) ^ (lane & 7)) << 4), r);
    }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 * NT; ++i) {
    const int r = i * 4 + (lane >> 3);
    u16* out = row.out(y, r);
    if (r < row_count)
      *reinterpret_cast<uint4*>(out + (lane & 7) * 8) =
          load_shared16(scratch + r * 128 + (((lane & 7) ^ (r & 7)) << 4));
  }
  __syncwarp();
}
