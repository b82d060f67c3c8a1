// What the two forms of the w13 kernel share: where chunks of K end, how gate and up blocks are
// fetched, and the end of the sum with SiLU(gate) * up.
//
// K is cut into SPLIT x CHUNKS chunks by the shape alone. A column's sum is
//   fold over SPLIT ( fold over CHUNKS ( fp32 MMA chain of the chunk ) )
// whichever form runs and whatever rows share the pass, so a row's bits never depend on the others.
//
// Compile-time: HIDDEN (K), INTERMEDIATE (N), GROUP, TOP_K, STAGES, SPLIT, MIN_BLOCKS.
#pragma once
#include "moe/marlin_stream.cuh"

constexpr int CHUNKS = 4;
constexpr int kSteps = HIDDEN / kBlockK;
constexpr int kPairs = INTERMEDIATE / 64;  // runs of 64 gate columns, each with a run of up

__device__ constexpr int chunk_begin(int chunk) { return chunk * kSteps / (SPLIT * CHUNKS); }

// Where one expert's runs of 64 columns lie; run r of up is kPairs runs after run r of gate.
// Offsets are in units of 16 bytes, which 32 bits hold for any layer, and save registers.
struct RunSource {
  const uint4* packed;
  const uint4* all_scales;
  u32 words, scales;

  __device__ __forceinline__ RunSource(const uint4* packed, const uint4* all_scales, int expert,
                                       int run)
      : packed(packed), all_scales(all_scales) {
    const int lane = threadIdx.x & 31;
    words = expert * (HIDDEN / 16 * INTERMEDIATE) + run * 32 + lane;
    scales = expert * (HIDDEN / GROUP * (INTERMEDIATE / 4)) + run * 8 + (lane & 7) +
             (lane >> 3) * (INTERMEDIATE / 8);
  }
  // RUNS = 2: this run and the one of up beside it. Words of each, then scales of each.
  template <int RUNS>
  __device__ __forceinline__ void copy(u32 stage, int step) const {
    const int lane = threadIdx.x & 31;
    const uint4* from = packed + (words + step * (2 * INTERMEDIATE));
#pragma unroll
    for (int i = 0; i < 2 * RUNS; ++i)
      copy16_once(stage + i * 512 + lane * 16,
                  from + (i & 1) * INTERMEDIATE + (i >> 1) * (INTERMEDIATE / 2));
    if (lane < 8 * RUNS)
      copy16_once(stage + RUNS * kWeightBytes + lane * 16,
                  all_scales + (scales + step * kBlockK / GROUP * (INTERMEDIATE / 4)));
  }
};

template <int RUNS, int NT>
__device__ __forceinline__ void multiply_runs(u32 stage, u32 tokens, float4 (&acc)[RUNS][4][NT]) {
  u32 b[NT][4];
#pragma unroll
  for (int t = 0; t < NT; ++t) load_matrices(tokens + t * kTokenBytes, b[t]);
#pragma unroll
  for (int h = 0; h < RUNS; ++h)
    multiply_block<NT>(stage + h * kWeightBytes, stage + RUNS * kWeightBytes + h * kScaleBytes, b,
                       acc[h]);
}

// Where in x, in bytes, the 16 bytes of row t * 8 + lane / 4 lie that this lane copies; negative
// past the last row.
__device__ __forceinline__ int token_offset(const int* slots, int rows, int t, int lane) {
  const int r = t * 8 + (lane >> 2);
  return r < rows ? slots[r] / TOP_K * (HIDDEN * 2) + (lane & 3) * 16 : -1;
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
  gate *= kWeightUnit;
  return __fdividef(gate, 1.0f + __expf(-gate)) * (up * kWeightUnit);
}

// One unit of act, 16 columns x 8 rows from row `first_row`, from its sums. act is the unit's first
// column in the item's first row.
__device__ __forceinline__ void store_act(float4 gate, float4 up, int first_row, int rows,
                                          u16* act) {
  const int lane = threadIdx.x & 31, r = first_row + (lane >> 2);
  const u32 low = transpose8x8(pack_bf16(silu_mul(gate.x, up.x), silu_mul(gate.y, up.y)));
  const u32 high = transpose8x8(pack_bf16(silu_mul(gate.z, up.z), silu_mul(gate.w, up.w)));
  if (r < rows) {
    u32* out = reinterpret_cast<u32*>(act + (long long)r * INTERMEDIATE) + (lane & 3);
    out[0] = low;
    out[4] = high;
  }
}

// Folds the sums of one unit, gate and up, of a cluster of BLOCKS, and stores it.
template <int NT, int BLOCKS>
__device__ __forceinline__ void finish_unit(u32 totals, int unit, int rows, u16* act) {
  const int lane = threadIdx.x & 31;
  float4 half[2] = {};
  if (unit % NT * 8 + (lane & 3) * 2 < rows) {  // this lane's two rows are there
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 addr = totals + ((h * 4 * NT + unit) * 32 + lane) * 16;
      half[h] = BLOCKS > 1 ? load_cluster_f4(addr, 0) : load_shared_f4(addr);
#pragma unroll
      for (int q = 1; q < BLOCKS; ++q) half[h] = add(half[h], load_cluster_f4(addr, q));
    }
  }
  store_act(half[0], half[1], unit % NT * 8, rows, act + unit / NT * 16);
}
