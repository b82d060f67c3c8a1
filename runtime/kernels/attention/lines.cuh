// How attend's queries, keys, scores and weights lie in shared memory, and who works on which.
//
// Compile-time: HEADS, C, R, LINES: attend.cu.
#pragma once
#include "attention/spans.cuh"

#if defined(WARPGROUP_MMA) && LINES == 64 && C == 512 && R % 64 == 0
#define WARPGROUPS 1  // two, of the eight warps
constexpr bool kWarpgroups = true;
#else
constexpr bool kWarpgroups = false;
#endif

constexpr int kWidth = C + R, kSteps = kWidth / 16;
constexpr int kBlocks = (kWidth + 63) / 64;      // of a line: 64 values, 128 bytes
constexpr int kLine = kBlocks * 128;             // bytes
constexpr int kHalf = kKeys / 2 * kLine;         // half a tile of keys
constexpr int kScoreLine = kKeys + 4;            // floats
constexpr int kWeightLine = kScoreLine * 4;      // bytes: high halves of the weights, then low ones
constexpr int kWarps = 8, kThreads = kWarps * 32;
// Scores: half of the warps have half of the values each; of lines and keys a warp has these.
constexpr int kKeyGroups = kWarpgroups ? 1 : LINES == 64 ? 2 : 4, kLineGroups = 4 / kKeyGroups;
constexpr int kScoreLines = LINES / kLineGroups, kScoreKeys = kKeys / kKeyGroups;
// Sums: a warp has some columns of all lines; in warpgroups half of the columns of 16 lines.
constexpr int kColumns = kWarpgroups ? C / 2 : C / kWarps, kSumLines = kWarpgroups ? 16 : LINES;

// N lines lie in blocks of 64 values, a block's lines one behind the other. Its chunks of 16 bytes
// are swapped, so that the rows of a matrix lie in all banks.
__device__ __forceinline__ u32 flip(int line, int chunk) { return ((chunk ^ line) & 7) << 4; }
template <int N>
__device__ __forceinline__ u32 chunk_at(int line, int chunk) {
  return (chunk >> 3) * (N * 128) + line * 128 + flip(line, chunk);
}

// Every eighth line, from a warp's own on, has its chunks swapped alike. So a lane's chunks of all of
// them lie at constant distances from its first one, which this is.
template <int N>
__device__ __forceinline__ u32 lane_at(u32 lines) {
  return lines + chunk_at<N>(threadIdx.x >> 5, threadIdx.x & 31);
}
// A warp's i-th line of C + R values, `to` being its lane_at.
template <int N>
__device__ __forceinline__ void copy_line(u32 to, int i, const u16* from) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int c = 0; c < kWidth / 8; c += 32)
    if (c + 32 <= kWidth / 8 || lane < kWidth / 8 - c)
      copy16_l2(to + i * kWarps * 128 + c / 8 * (N * 128), from + (c + lane) * 8);
}
template <int N>
__device__ __forceinline__ void clear_line(u32 to, int i) {
#pragma unroll
  for (int c = 0; c < kWidth / 8; c += 32)
    if (c + 32 <= kWidth / 8 || (threadIdx.x & 31) < kWidth / 8 - c)
      store_shared_f4(to + i * kWarps * 128 + c / 8 * (N * 128), make_float4(0, 0, 0, 0));
}
