// How attend's queries, keys, scores and weights lie in shared memory, and who works on which.
//
// Compile-time: HEADS, C, R, LINES: attend.cu.
#pragma once
#include "attention/spans.cuh"

#if defined(WARPGROUP_MMA) && LINES == 64 && C == 512 && R % 32 == 0
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
// Scores: half of the warps have half of C + R each; of lines and keys a warp has these.
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

// A line of C + R values into shared memory by a warp; zeros for none.
template <int N>
__device__ __forceinline__ void copy_line(u32 lines, int line, const u16* from) {
#pragma unroll
  for (int c = threadIdx.x & 31; c < kWidth / 8; c += 32) {
    const u32 to = lines + chunk_at<N>(line, c);
    if (from)
      copy16_l2(to, from + c * 8);
    else
      store_shared_f4(to, make_float4(0, 0, 0, 0));
  }
}
