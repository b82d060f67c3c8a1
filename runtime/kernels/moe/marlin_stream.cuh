// One warp's stream of Marlin weights: the inner loop of the MoE GEMMs.
//
// Weights are the MMA's A operand and tokens its 8-wide side, because one 32-bit Marlin word holds
// exactly one lane's share of a 16 n x 16 k fragment of W^T. A lane's 16 bytes are its share of
// four such fragments (64 columns), so a warp copies 512 contiguous bytes into a ring of its own
// and reads them back as it wrote them: no barrier between warps, no shuffle, no bank conflict.
//
// The unit is a block of 32 k x 64 columns: two k-tiles of 512 B, and 128 B of scales.
#pragma once
#include "common.cuh"

constexpr int kBlockK = 32;
constexpr int kWeightBytes = 1024;
constexpr int kScaleBytes = 128;
constexpr int kBlockBytes = kWeightBytes + kScaleBytes;
constexpr int kTokenBytes = 512;  // 8 rows x 32 k x bf16

// Weights go to the tensor core as (nibble - 8) * scale * 2^-21, rounded to bf16; kWeightUnit
// undoes the power of two, which costs no bit, where sums leave the kernel. That factor lets one
// fma do it all: read as bf16, whose numbers below 2^-125 are evenly spaced, a masked nibble is
// nibble * 2^-133 (or 2^-129, four bits up) as it lies, and 8 * scale is exact, so the fma's
// rounding is the only one. Scales must be below 2^15; a weight below 2^-105 rounds to a multiple
// of 2^-112.
constexpr float kWeightUnit = 2097152.0f;

// Two scales, of the rows n and n + 8 of a fragment, in the forms the fma needs.
struct ScalePair {
  u32 low, high, minus8;

  __device__ __forceinline__ explicit ScalePair(u32 pair) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(low) : "r"(pair), "r"(0x77807780u));     // 2^112
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(high) : "r"(pair), "r"(0x75807580u));    // 2^108
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(minus8) : "r"(pair), "r"(0xb680b680u));  // -2^-18
  }
};

// value * (one half of scale, twice) + (the same half of minus8, twice)
template <int HALF>
__device__ __forceinline__ u32 dequantize(u32 value, u32 scale, u32 minus8) {
  u32 r;
  if (HALF)
    asm("{\n\t.reg .b16 l, h, m, n;\n\t.reg .b32 s, c;\n\t"
        "mov.b32 {l, h}, %2;\n\tmov.b32 s, {h, h};\n\tmov.b32 {m, n}, %3;\n\tmov.b32 c, {n, n};\n\t"
        "fma.rn.bf16x2 %0, %1, s, c;\n\t}"
        : "=r"(r)
        : "r"(value), "r"(scale), "r"(minus8));
  else
    asm("{\n\t.reg .b16 l, h, m, n;\n\t.reg .b32 s, c;\n\t"
        "mov.b32 {l, h}, %2;\n\tmov.b32 s, {l, l};\n\tmov.b32 {m, n}, %3;\n\tmov.b32 c, {m, m};\n\t"
        "fma.rn.bf16x2 %0, %1, s, c;\n\t}"
        : "=r"(r)
        : "r"(value), "r"(scale), "r"(minus8));
  return r;
}

// Marlin nibble p of a word is k half p&1, n half (p>>1)&1, k parity p>>2.
__device__ __forceinline__ void fragment(u32 word, const ScalePair& s, u32 (&a)[4]) {
  a[0] = dequantize<0>(word & 0x000f000fu, s.low, s.minus8);
  a[2] = dequantize<0>(word & 0x00f000f0u, s.high, s.minus8);
  word >>= 8;
  a[1] = dequantize<1>(word & 0x000f000fu, s.low, s.minus8);
  a[3] = dequantize<1>(word & 0x00f000f0u, s.high, s.minus8);
}

// acc[64 columns x NT x 8 rows] += block at `words` with `scales`, times the rows' fragments b.
template <int NT>
__device__ __forceinline__ void multiply_block(u32 words, u32 scales, const u32 (&b)[NT][4],
                                               float4 (&acc)[4][NT]) {
  const int lane = threadIdx.x & 31;
  const uint4 w0 = load_shared16(words + lane * 16);
  const uint4 w1 = load_shared16(words + 512 + lane * 16);
  const uint4 sc = load_shared16(scales + (lane >> 2) * 16);
  const u32 s[4] = {sc.x, sc.y, sc.z, sc.w};
  const u32 w[2][4] = {{w0.x, w0.y, w0.z, w0.w}, {w1.x, w1.y, w1.z, w1.w}};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const ScalePair pair(s[d]);
#pragma unroll
    for (int kt = 0; kt < 2; ++kt) {
      u32 a[4];
      fragment(w[kt][d], pair, a);
#pragma unroll
      for (int t = 0; t < NT; ++t) mma(acc[d][t], a, b[t][2 * kt], b[t][2 * kt + 1]);
    }
  }
}

#ifdef WARPGROUP_MMA
// The same for a warpgroup, whose warps hold 64 columns each. Addresses are this lane's; the second
// k-tile lies NEXT bytes after the first. Returns with MMAs in flight, but none that was before.
template <int NT, int NEXT>
__device__ __forceinline__ void multiply_block_async(u32 words, u32 scales, u64 rows,
                                                     float4 (&acc)[4][NT]) {
  const uint4 w0 = load_shared16(words), w1 = load_shared16(words + NEXT);
  const uint4 sc = load_shared16(scales);
  const ScalePair s[4] = {ScalePair(sc.x), ScalePair(sc.y), ScalePair(sc.z), ScalePair(sc.w)};
  const u32 w[2][4] = {{w0.x, w0.y, w0.z, w0.w}, {w1.x, w1.y, w1.z, w1.w}};
#pragma unroll
  for (int kt = 0; kt < 2; ++kt) {
    u32 a[4][4];
#pragma unroll
    for (int d = 0; d < 4; ++d) fragment(w[kt][d], s[d], a[d]);
    wait_mmas<0>();  // those before are through with their registers
    begin_mmas();
#pragma unroll
    for (int d = 0; d < 4; ++d) mma_async(acc[d], a[d], rows + 2 * kt);
    commit_mmas();
  }
}
#endif

// Eight rows of 32 k lie in 64-byte lines; the xor spreads the rows of a matrix over all banks.
__device__ __forceinline__ u32 token_write_offset(int lane) {
  return (lane >> 2) * 64 + (((lane & 3) ^ ((lane >> 3) & 3)) << 4);
}
__device__ __forceinline__ u32 token_read_offset(int lane) {
  return (lane & 7) * 64 + (((lane >> 3) ^ ((lane >> 1) & 3)) << 4);
}

template <int NT, int R>
__device__ __forceinline__ void fill(float4 (&acc)[R][NT], float v) {
#pragma unroll
  for (int d = 0; d < R; ++d)
#pragma unroll
    for (int t = 0; t < NT; ++t) acc[d][t] = make_float4(v, v, v, v);
}

// A warp's partial in shared memory, in fragment order: float4 (unit = d * NT + t, lane). A unit is
// 16 columns x 8 rows. Sums over warps and blocks are left folds in k order.
template <int NT, int R>
__device__ __forceinline__ void leave_partial(u32 at, const float4 (&acc)[R][NT]) {
#pragma unroll
  for (int d = 0; d < R; ++d)
#pragma unroll
    for (int t = 0; t < NT; ++t)
      store_shared_f4(at + ((d * NT + t) * 32 + (threadIdx.x & 31)) * 16, acc[d][t]);
}
// acc = partial + acc
template <int NT, int R>
__device__ __forceinline__ void fold_partial(u32 at, float4 (&acc)[R][NT]) {
#pragma unroll
  for (int d = 0; d < R; ++d)
#pragma unroll
    for (int t = 0; t < NT; ++t)
      acc[d][t] =
          add(load_shared_f4(at + ((d * NT + t) * 32 + (threadIdx.x & 31)) * 16), acc[d][t]);
}
