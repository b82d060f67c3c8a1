// y = x W^T for few rows of x: weights are the MMA's A operand, rows its 8-wide side.
//
// K is cut into SPLIT x 4 chunks by the shape alone; a chunk is one fp32 MMA chain, in steps of 64.
// A sum is the left fold over SPLIT of the left fold over four chunks, whatever the tiles are, so a
// row's bits do not depend on the others. A warp streams its weights through a ring of its own; the
// rows of a chunk are shared by its WARPS_N warps.
//
// Compile-time: SPLIT (blocks of a cluster), WARPS_N (warps side by side), TILES (of 16 columns of
// y, a warp), ROWS (tiles of 8 rows), STAGES.
#include "rows/silu.cuh"

constexpr int CHUNKS = 4;  // warps that share K
constexpr int kThreads = CHUNKS * WARPS_N * 32;
constexpr int kWeights = TILES * 16 * 128, kRowBytes = ROWS * 8 * 128;
constexpr int kStage = WARPS_N * kWeights + kRowBytes;
constexpr int kRing = STAGES * kStage;  // a chunk's
constexpr int kUnits = TILES * ROWS;    // of 16 columns x 8 rows
static_assert(kRing >= WARPS_N * kUnits * 512, "partials must fit where the ring was");

extern __shared__ __align__(128) char smem[];

// Lines of 128 bytes; the xor spreads the rows of a matrix over all banks.
__device__ __forceinline__ u32 line(int row, int chunk16) {
  return row * 128 + ((chunk16 ^ (row & 7)) << 4);
}

// The warps that share a chunk's rows; with one, its own lanes.
__device__ __forceinline__ void sync_chunk(int chunk) {
  if (WARPS_N == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(chunk + 1), "n"(WARPS_N * 32) : "memory");
}

// x   bf16 [m, k], rows x_row apart, k a multiple of 64;  w bf16 [n, k]
// sums fp32 [m, wide]: the first columns of y;  rounded bf16 [m, n - wide]: the others, or, where
// gated is not 0, SiLU(gate) * up [m, gated] of w's rows wide .. wide + gated and the gated after
// them: a tile is 8 columns of either
// heads: as many products, x, w and rounded x_head, w_head and y_head further on for each
// grid (ceil(n / (16 TILES WARPS_N)) clusters of SPLIT, ceil(m / (8 ROWS))), CHUNKS x WARPS_N warps
extern "C" __global__ void __launch_bounds__(kThreads)
    linear_linear(const u16* x, const u16* w, float* sums, u16* rounded, int wide, int gated,
                  int m, int n, int k, int x_row, int x_head, int w_head, int y_head) {
  let_next_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int chunk = warp % CHUNKS, side = warp / CHUNKS;
  const int rank = blockIdx.x % SPLIT;
  const int n0 = (blockIdx.x / SPLIT * WARPS_N + side) * (16 * TILES);
  const int m0 = blockIdx.y * (8 * ROWS);
  const int steps = k / 64, all = SPLIT * CHUNKS;
  const int begin = (rank * CHUNKS + chunk) * steps / all;
  const int end = (rank * CHUNKS + chunk + 1) * steps / all;
  const u32 ring = smem_addr(smem) + chunk * kRing;
  const int row4 = lane >> 3, part = lane & 7;
  const bool gates = gated && n0 >= wide;
  const int w0 = gates ? wide + (n0 - wide) / 2 : n0;  // w's row of the first column
  const long long tile_rows = gates ? 8 : 16, half_rows = gates ? gated : 8;
  w += (long long)blockIdx.z * w_head, x += (long long)blockIdx.z * x_head;
  const char* wp = reinterpret_cast<const char*>(w) + ((long long)(w0 + row4) * k + part * 8) * 2;
  const char* xp = reinterpret_cast<const char*>(x) + ((long long)(m0 + row4) * x_row + part * 8) * 2;

  const int y_row = y_head ? y_head * gridDim.z : n - wide;

  auto fetch_weights = [&](u32 stage, int step) {
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i)
      if (n0 + i * 4 + row4 < n)
        copy16_once(stage + side * kWeights + line(i * 4 + row4, part),
                    wp + ((i / 4 * tile_rows + i / 2 % 2 * half_rows + i % 2 * 4) * k + step * 64) * 2);
  };
  auto fetch_rows = [&](u32 stage, int step) {
#pragma unroll
    for (int i = side; i < ROWS * 2; i += WARPS_N)
      if (m0 + i * 4 + row4 < m)
        copy16_shared(stage + WARPS_N * kWeights + line(i * 4 + row4, part),
                      xp + ((long long)i * 4 * x_row + step * 64) * 2);
  };
  // Weights do not depend on the kernel before: ask for them ahead of the wait.
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s)
    if (begin + s < end) fetch_weights(ring + s * kStage, begin + s);
  wait_for_previous();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (begin + s < end) fetch_rows(ring + s * kStage, begin + s);
    commit_copies();
  }

  float4 acc[TILES][ROWS] = {};
  u32 stage = ring, ahead = ring + (STAGES - 1) * kStage;
  for (int step = begin; step < end; ++step) {
    wait_copies<STAGES - 2>();
    sync_chunk(chunk);
    if (step + STAGES - 1 < end) {
      fetch_weights(ahead, step + STAGES - 1);
      fetch_rows(ahead, step + STAGES - 1);
    }
    commit_copies();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 b[ROWS][4];
#pragma unroll
      for (int t = 0; t < ROWS; ++t)
        load_matrices(stage + WARPS_N * kWeights + line(t * 8 + (lane & 7), half * 4 + (lane >> 3)),
                      b[t]);
#pragma unroll
      for (int kt = 0; kt < 2; ++kt)
#pragma unroll
        for (int d = 0; d < TILES; ++d) {
          u32 a[4];
          load_matrices(stage + side * kWeights +
                            line(d * 16 + (lane & 15), half * 4 + kt * 2 + (lane >> 4)),
                        a);
#pragma unroll
          for (int t = 0; t < ROWS; ++t) mma(acc[d][t], a, b[t][2 * kt], b[t][2 * kt + 1]);
        }
    }
    ahead = stage;  // the stage just read is the next to fill
    stage = stage + kStage == ring + kRing ? ring : stage + kStage;
  }
  wait_copies<0>();
  sync_chunk(chunk);
#pragma unroll
  for (int d = 0; d < TILES; ++d)
#pragma unroll
    for (int t = 0; t < ROWS; ++t)
      store_shared_f4(ring + ((side * kUnits + d * ROWS + t) * 32 + lane) * 16, acc[d][t]);
  __syncthreads();

  const u32 partials = smem_addr(smem) + side * (kUnits * 512);
  for (int f = chunk * 32 + lane; f < kUnits * 32; f += CHUNKS * 32) {
    float4 sum = load_shared_f4(partials + f * 16);
#pragma unroll
    for (int c = 1; c < CHUNKS; ++c) sum = add(sum, load_shared_f4(partials + c * kRing + f * 16));
    store_shared_f4(partials + f * 16, sum);  // only this thread reads or writes f of chunk 0
  }
  if (SPLIT > 1) cluster_sync(); else __syncthreads();
  for (int u = chunk * SPLIT + rank; u < kUnits; u += CHUNKS * SPLIT) {
    const u32 addr = partials + (u * 32 + lane) * 16;
    float4 v = SPLIT > 1 ? load_cluster_f4(addr, 0) : load_shared_f4(addr);
#pragma unroll
    for (int q = 1; q < SPLIT; ++q) v = add(v, load_cluster_f4(addr, q));
    const int column = n0 + u / ROWS * 16 + (lane >> 2), row = m0 + u % ROWS * 8 + (lane & 3) * 2;
    const float value[4] = {v.x, v.y, v.z, v.w};
    if (gates) {
      const int c = w0 - wide + u / ROWS * 8 + (lane >> 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 gate_up = pack_bf16(value[i], value[2 + i]);
        if (row + i < m && c < gated)
          rounded[(long long)(row + i) * gated + c] =
              pack_bf16(silu_mul(bf16_low(gate_up), bf16_high(gate_up)), 0.0f);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + (i & 1), c = column + (i >> 1) * 8;
      if (r >= m || c >= n) continue;
      if (c < wide)
        sums[(long long)r * wide + c] = value[i];
      else
        rounded[(long long)r * y_row + blockIdx.z * y_head + c - wide] = pack_bf16(value[i], 0.0f);
    }
  }
  if (SPLIT > 1) cluster_wait_for_readers();
}
