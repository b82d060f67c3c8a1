// x + the ranks' sums, in rank order, rounded; and that normed, rounded. A block a row.
//
// The others' sums are there already, or they are exchanged here: a row is written into every other
// rank's memory, and the row's flag there is raised to its epoch, the count of its exchanges, which
// needs no number from the host. Two buffers take turns: who begins an exchange has ended the one
// before, for which every rank had read the one before that.
//
// Compile-time: SIZE (D, a multiple of 8).
#include "rows/exchange.cuh"
#include "rows/reduce.cuh"

// So few threads that a block finds room beside the kernel before: what it asks for early is then
// there when that ends.
constexpr int kEach = (SIZE / 8 + 511) / 512;  // groups of 8 values a thread
constexpr int kThreads = ((SIZE / 8 + kEach - 1) / kEach + 31) / 32 * 32;

// x       bf16 [rows, SIZE] or null: nothing is added to
// sums    fp32 [ranks, rows, SIZE];  ranks 0: none. With peers fp32 [rows, SIZE], this rank's
// peers   null, or each rank's memory, exchange.cuh, for `most` rows;  epochs u32 [most]
// weight  bf16 [SIZE];  total, normed bf16 [rows, SIZE], total null where ranks is 0
// grid rows x kThreads
extern "C" __global__ void __launch_bounds__(kThreads)
    rows_add_norm(const u16* x, const float* sums, int ranks, const u16* weight, float epsilon,
                  u16* total, u16* normed, const u64* peers, int rank, int most, u32* epochs) {
  let_next_start();
  uint4 factors[kEach];  // of the norm: asked for ahead of the wait
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = (j * kThreads + threadIdx.x) * 8;
    if (k < SIZE) factors[j] = *reinterpret_cast<const uint4*>(weight + k);
  }
  wait_for_previous();
  const long long row = (long long)blockIdx.x * SIZE, all = (long long)gridDim.x * SIZE;
  const float* others = nullptr;
  if (peers)
    others = exchange_row<SIZE, kThreads>(sums + row, peers, ranks, rank, most, epochs);
  // All loads come before the first store, which they would wait for: it might be to where they are.
  uint4 own[kEach];
  float v[kEach][8] = {};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = (j * kThreads + threadIdx.x) * 8;
    if (x && k < SIZE) own[j] = *reinterpret_cast<const uint4*>(x + row + k);
  }
  for (int r = 0; r < ranks; ++r) {
    const float* from = !peers || r == rank ? sums + (peers ? 0 : r * all) + row
                                            : others + (long long)r * most * SIZE;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int k = (j * kThreads + threadIdx.x) * 8;
      if (k >= SIZE) continue;
      const float4 a = __ldcg(reinterpret_cast<const float4*>(from + k));
      const float4 b = __ldcg(reinterpret_cast<const float4*>(from + k) + 1);
      const float part[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) v[j][i] = r ? v[j][i] + part[i] : part[i];
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = (j * kThreads + threadIdx.x) * 8;
    if (k >= SIZE) continue;
    if (x) {
      const u32 pair[4] = {own[j].x, own[j].y, own[j].z, own[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[j][2 * i] = ranks ? bf16_low(pair[i]) + v[j][2 * i] : bf16_low(pair[i]);
        v[j][2 * i + 1] = ranks ? bf16_high(pair[i]) + v[j][2 * i + 1] : bf16_high(pair[i]);
      }
    }
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = pack_bf16(v[j][2 * i], v[j][2 * i + 1]);
      v[j][2 * i] = bf16_low(out[i]), v[j][2 * i + 1] = bf16_high(out[i]);
    }
    if (total) *reinterpret_cast<uint4*>(total + row + k) = make_uint4(out[0], out[1], out[2], out[3]);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += v[j][i] * v[j][i];
  }
  const float scale = norm_scale(block_sum<kThreads>(squares), SIZE, epsilon);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int k = (j * kThreads + threadIdx.x) * 8;
    if (k >= SIZE) continue;
    const u32 pair[4] = {factors[j].x, factors[j].y, factors[j].z, factors[j].w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = pack_bf16(bf16_low(pair[i]) * (v[j][2 * i] * scale),
                         bf16_high(pair[i]) * (v[j][2 * i + 1] * scale));
    *reinterpret_cast<uint4*>(normed + row + k) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
