// attend's two products, by mma.sync and, for 64 lines on sm_90a, by warpgroup MMA: each sum is the
// same chain of steps of 16, which was measured to have the same bits.
#pragma once
#include "attention/lines.cuh"

#ifdef WARPGROUPS
// Lines of 128 bytes, swapped as in lines.cuh, in groups of 8; `blocks` bytes lie between blocks of
// 64 values, where values are the MMA's columns. The address is the same in all lanes.
__device__ __forceinline__ u64 describe_lines(u32 addr, u32 blocks) {
  return (u64)(__shfl_sync(~0u, addr, 0) >> 4) | (u64)(blocks >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         1ull << 62;
}
// c[64 x 32] += a[64 x 16] times b[32 x 16] transposed.
__device__ __forceinline__ void mma_async_scores(float4& c0, float4& c1, float4& c2, float4& c3,
                                                 u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SUMS4
               "}, %16, %17, 1, 1, 1, 0, 0;"
               : SUMS(c0), SUMS(c1), SUMS(c2), SUMS(c3)
               : "l"(a), "l"(b));
}
// c[64 x 256] += a[64 x 16] times b[16 x 256].
__device__ __forceinline__ void mma_async_values(float4 (&c)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
      "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
      "%126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : OUT12(c), SUMS(c[12]), SUMS(c[13]), SUMS(c[14]), SUMS(c[15]), SUMS(c[16]), SUMS(c[17]),
        SUMS(c[18]), SUMS(c[19]), SUMS(c[20]), SUMS(c[21]), SUMS(c[22]), SUMS(c[23]), SUMS(c[24]),
        SUMS(c[25]), SUMS(c[26]), SUMS(c[27]), SUMS(c[28]), SUMS(c[29]), SUMS(c[30]), SUMS(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

// What was copied, before a barrier, for MMAs after it.
__device__ __forceinline__ void show_copies() {
#ifdef WARPGROUPS
  fence_for_mma();
#endif
}

// The first `used` queries times a tile's keys, whose halves lie at low and high: scores, of the
// first 32 of every 64 values by one half of the warps, of the others by the other.
__device__ __forceinline__ void make_scores(float (*scores)[LINES][kScoreLine], u32 queries, u32 low,
                                            u32 high, int used) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp / 4;
  const int line0 = warp % 4 / kKeyGroups * kScoreLines, key0 = warp % kKeyGroups * kScoreKeys;
  float4 score[kScoreLines / 16][kScoreKeys / 8] = {};
#ifdef WARPGROUPS
  const u64 q_at = describe_lines(queries + half * 64, 0);
  const u64 low_at = describe_lines(low + half * 64, 0);
  const u64 high_at = describe_lines(high + half * 64, 0);
  float4(&c)[8] = score[0];
  begin_mmas();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const u64 q = q_at + (block * (LINES * 128) + j * 32 >> 4);
      const u32 k = block * (kKeys / 2 * 128) + j * 32 >> 4;
      mma_async_scores(c[0], c[1], c[2], c[3], q, low_at + k);
      mma_async_scores(c[4], c[5], c[6], c[7], q, high_at + k);
    }
  commit_mmas();
  settle(score);
#else
  if (line0 >= used) return;
  const u32 q_at = queries + (line0 + (lane & 15)) * 128;
  const u32 k_at = (key0 < kKeys / 2 ? low : high) +
                   (key0 % (kKeys / 2) + (lane & 7) + ((lane >> 4) << 3)) * 128;
  const u32 q_flip = flip(lane, lane >> 4), k_flip = flip(lane, (lane >> 3) & 1);
  // Operands are asked for some steps ahead: an MMA waits for the one before it alone.
  constexpr int kAhead = LINES == 64 ? 0 : 2, kTurns = 2 * kBlocks;
  u32 a[kAhead + 1][kScoreLines / 16][4], b[kAhead + 1][kScoreKeys / 16][4];
  auto there = [&](int i) {
    return i < kTurns && (i / 2 * 4 + 4 <= kSteps || i / 2 * 4 + half * 2 + i % 2 < kSteps);
  };
  auto ask = [&](int i) {
    if (!there(i)) return;
    const int to = i % (kAhead + 1), block = i / 2, step = half * 2 + i % 2;
    const u32 q_k = q_at + (step * 32 ^ q_flip) + block * (LINES * 128);
    const u32 k_k = k_at + (step * 32 ^ k_flip) + block * (kKeys / 2 * 128);
#pragma unroll
    for (int m = 0; m < kScoreLines / 16; ++m) load_matrices(q_k + m * 16 * 128, a[to][m]);
#pragma unroll
    for (int n = 0; n < kScoreKeys / 16; ++n) load_matrices(k_k + n * 16 * 128, b[to][n]);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ask(i);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    ask(i + kAhead);
    if (!there(i)) continue;
    const int of = i % (kAhead + 1);
#pragma unroll
    for (int m = 0; m < kScoreLines / 16; ++m)
#pragma unroll
      for (int n = 0; n < kScoreKeys / 8; ++n)
        mma(score[m][n], a[of][m], b[of][n / 2][n % 2 * 2], b[of][n / 2][n % 2 * 2 + 1]);
  }
#endif
#pragma unroll
  for (int m = 0; m < kScoreLines / 16; ++m)
#pragma unroll
    for (int n = 0; n < kScoreKeys / 8; ++n) {
      float* to = scores[half][line0 + m * 16 + (lane >> 2)] + key0 + n * 8 + (lane & 3) * 2;
      const float4 v = score[m][n];
      *reinterpret_cast<float2*>(to) = make_float2(v.x, v.y);
      *reinterpret_cast<float2*>(to + 8 * kScoreLine) = make_float2(v.z, v.w);
    }
}

typedef float4 Sums[kSumLines / 16][kColumns / 8];  // a lane's

// Weights times half a tile of values, of the first M * 16 lines.
template <int M>
__device__ __forceinline__ void add_half(Sums& sum, u32 weights, u32 values) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 w_at = weights + (lane & 15) * kWeightLine + (lane >> 4) * 16;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    u32 b[(kColumns + 15) / 16][4];
#pragma unroll
    for (int c = 0; c < kColumns / 8; c += 2)
      load_matrices_transposed(values + chunk_at<kKeys / 2>(k * 16 + (lane & 15),
                                                            warp * (kColumns / 8) + c + (lane >> 4)),
                               b[c / 2]);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      u32 high[4], low[4];
      load_matrices(w_at + m * 16 * kWeightLine + k * 32, high);
      load_matrices(w_at + m * 16 * kWeightLine + k * 32 + kKeys * 2, low);
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c)
        mma(sum[m][c], high, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
#pragma unroll
      for (int c = 0; c < kColumns / 8; ++c)
        mma(sum[m][c], low, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
    }
  }
}

// Weights of the first `used` lines times a tile's values; `between` once its first half is read.
template <typename Between>
__device__ __forceinline__ void add_values(Sums& sum, u32 weights, u32 low, u32 high, int used,
                                           const Between& between) {
#ifdef WARPGROUPS
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 w_at = weights + (warp % 4 * 16 + (lane & 15)) * kWeightLine + (lane >> 4) * 16;
  constexpr int kBlock = kKeys / 2 * 128;
  const u64 at[2] = {describe_lines(low + warp / 4 * (kColumns / 64) * kBlock, kBlock),
                     describe_lines(high + warp / 4 * (kColumns / 64) * kBlock, kBlock)};
  u32 above[kKeys / 16][4], below[kKeys / 16][4];
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k)
    load_matrices(w_at + k * 32, above[k]), load_matrices(w_at + k * 32 + kKeys * 2, below[k]);
  begin_mmas();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    const u64 v_at = at[k / 2] + (k % 2 * 16 * 128 >> 4);
    mma_async_values(sum[0], above[k], v_at);
    mma_async_values(sum[0], below[k], v_at);
    if (k % 2) commit_mmas();
  }
  wait_mmas<1>();
  between();
  settle(sum);
#else
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (used <= 16)
      add_half<1>(sum, weights + h * kKeys, h ? high : low);
    else
      add_half<LINES / 16>(sum, weights + h * kKeys, h ? high : low);
    if (h == 0) between();
  }
#endif
}
