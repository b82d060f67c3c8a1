// A block's rows over the context and the block. The rows of all heads that share a head of keys are
// an MMA's lines, 16 a warp; the keys go to the 8 blocks of a cluster in turn, 64 at a time, and the
// blocks' sums are added at the end, in their order.
//
// Compile-time: Q_HEADS, KV_HEADS, DIM (32, 64 or 128), BLOCK (rows), WINDOW (0: none), CAUSAL.
#include "common.cuh"

constexpr int kSplits = 8, kKeys = 64, kLines = 64;  // of a block
constexpr int kShare = Q_HEADS / KV_HEADS, kAll = kShare * BLOCK;
constexpr int kLine = DIM * 2 + 16;  // bytes; an odd number of 16: a matrix's rows lie in all banks
constexpr int kTile = kKeys * kLine, kStage = 2 * kTile;  // keys, then values
constexpr int kSums = DIM * 4 + 16;
static_assert(kLines * kSums <= 2 * kStage, "sums must fit where keys and values were");

extern __shared__ __align__(128) char smem[];

// q bf16 [BLOCK, Q_HEADS, DIM];  cache bf16 [capacity, 2 KV_HEADS, DIM]
// length int32: the context's, and the position of the block's first row
// out bf16 [BLOCK, Q_HEADS, DIM]
// grid (KV_HEADS clusters of 8, ceil(BLOCK Q_HEADS / KV_HEADS / 64)) x 128
extern "C" __global__ void __launch_bounds__(128)
    drafter_attend(const u16* q, const u16* cache, const int* length, float scale, u16* out) {
  let_next_start();
  wait_for_previous();
  const int kv = blockIdx.x / kSplits, rank = blockIdx.x % kSplits, line0 = blockIdx.y * kLines;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int context = *length, end = context + BLOCK;
  const float none = -__int_as_float(0x7f800000);
  const u32 tiles = smem_addr(smem), queries = tiles + 2 * kStage, totals = queries + kLines * kLine;

  auto fetch = [&](int tile, u32 to) {
    for (int i = threadIdx.x; i < 2 * kKeys * (DIM / 8); i += 128) {
      const int key = i / (DIM / 8), c = i % (DIM / 8), position = tile * kKeys + key % kKeys;
      const int head = key < kKeys ? kv : KV_HEADS + kv;
      const u32 at = to + key * kLine + c * 16;
      if (position < end)
        copy16_shared(at, cache + ((long long)position * 2 * KV_HEADS + head) * DIM + c * 8);
      else
        store_shared_f4(at, make_float4(0, 0, 0, 0));
    }
  };
  for (int i = threadIdx.x; i < kLines * (DIM / 8); i += 128) {
    const int line = line0 + i / (DIM / 8), c = i % (DIM / 8);
    const u32 at = queries + i / (DIM / 8) * kLine + c * 16;
    if (line < kAll)
      copy16_shared(at, q + ((long long)(line / kShare) * Q_HEADS + kv * kShare + line % kShare) *
                                DIM + c * 8);
    else
      store_shared_f4(at, make_float4(0, 0, 0, 0));
  }
  const int begin = (WINDOW ? max(0, context - WINDOW + 1) : 0) / kKeys;
  const int after = (end + kKeys - 1) / kKeys;
  if (begin + rank < after) fetch(begin + rank, tiles);
  commit_copies();

  // Of a lane's two lines, which rows' they are, and what each may see.
  int first[2], last[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = context + min(line0 + warp * 16 + h * 8 + (lane >> 2), kAll - 1) / kShare;
    first[h] = WINDOW ? max(0, own - WINDOW + 1) : 0;
    last[h] = CAUSAL ? own + 1 : WINDOW ? min(end, own + WINDOW) : end;
  }
  float greatest[2] = {none, none}, total[2] = {};
  float4 sum[DIM / 8] = {};
  u32 stage = tiles;
  for (int tile = begin + rank; tile < after; tile += kSplits) {
    const u32 other = stage == tiles ? tiles + kStage : tiles;
    if (tile + kSplits < after) fetch(tile + kSplits, other);
    commit_copies();
    wait_copies<1>();
    __syncthreads();
    float4 score[kKeys / 8] = {};
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
      u32 a[4];
      load_matrices(queries + (warp * 16 + (lane & 15)) * kLine + k * 32 + (lane >> 4) * 16, a);
#pragma unroll
      for (int t = 0; t < kKeys / 8; t += 2) {
        u32 b[4];
        load_matrices(stage + (t * 8 + (lane & 7) + ((lane >> 4) << 3)) * kLine + k * 32 +
                          ((lane >> 3) & 1) * 16,
                      b);
        mma(score[t], a, b[0], b[1]);
        mma(score[t + 1], a, b[2], b[3]);
      }
    }
    float now[2] = {greatest[0], greatest[1]};
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
      const int key = tile * kKeys + t * 8 + (lane & 3) * 2;
      float* s = &score[t].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i >> 1, at = key + (i & 1);
        s[i] = at >= first[h] && at < last[h] ? s[i] * scale : none;
        now[h] = fmaxf(now[h], s[i]);
      }
    }
    float kept[2], base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      now[h] = fmaxf(now[h], __shfl_xor_sync(~0u, now[h], 1));
      now[h] = fmaxf(now[h], __shfl_xor_sync(~0u, now[h], 2));
      base[h] = now[h] == none ? 0.0f : now[h];  // a line that has seen no key yet
      kept[h] = expf(greatest[h] - base[h]);
      greatest[h] = now[h], total[h] *= kept[h];
    }
#pragma unroll
    for (int t = 0; t < DIM / 8; ++t)
      sum[t].x *= kept[0], sum[t].y *= kept[0], sum[t].z *= kept[1], sum[t].w *= kept[1];
    u32 weights[kKeys / 8][2];
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
      float* s = &score[t].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = expf(s[i] - base[i >> 1]), total[i >> 1] += s[i];
      weights[t][0] = pack_bf16(s[0], s[1]), weights[t][1] = pack_bf16(s[2], s[3]);
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const u32 a[4] = {weights[2 * k][0], weights[2 * k][1], weights[2 * k + 1][0],
                        weights[2 * k + 1][1]};
#pragma unroll
      for (int t = 0; t < DIM / 8; t += 2) {
        u32 b[4];
        load_matrices_transposed(stage + kTile + (k * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * kLine +
                                     (t * 8 + (lane >> 4) * 8) * 2,
                                 b);
        mma(sum[t], a, b[0], b[1]);
        mma(sum[t + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // before the next fetch takes this stage
    stage = other;
  }
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    const int line = warp * 16 + h * 8 + (lane >> 2);
    if ((lane & 3) == 0)
      store_shared_f4(totals + line * 16, make_float4(greatest[h], total[h], 0, 0));
    float* to = reinterpret_cast<float*>(smem + line * kSums) + (lane & 3) * 2;
#pragma unroll
    for (int t = 0; t < DIM / 8; ++t)
      *reinterpret_cast<float2*>(to + t * 8) =
          h ? make_float2(sum[t].z, sum[t].w) : make_float2(sum[t].x, sum[t].y);
  }
  cluster_sync();
  // Each block adds up its share of the lines.
  constexpr int kOwn = kLines / kSplits;
  for (int i = threadIdx.x; i < kOwn * (DIM / 4); i += 128) {
    const int line = rank * kOwn + i / (DIM / 4), c = i % (DIM / 4), whole = line0 + line;
    if (whole >= kAll) continue;
    float2 of[kSplits];
    float most = none, all = 0.0f;
#pragma unroll
    for (int p = 0; p < kSplits; ++p) {
      const float4 v = load_cluster_f4(totals + line * 16, p);
      of[p] = make_float2(v.x, v.y), most = fmaxf(most, v.x);
    }
    float4 result = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int p = 0; p < kSplits; ++p) {
      const float weight = expf(of[p].x - most);
      const float4 v = load_cluster_f4(tiles + line * kSums + c * 16, p);
      all = fmaf(weight, of[p].y, all);
      result.x = fmaf(weight, v.x, result.x), result.y = fmaf(weight, v.y, result.y);
      result.z = fmaf(weight, v.z, result.z), result.w = fmaf(weight, v.w, result.w);
    }
    u32* to = reinterpret_cast<u32*>(
        out + ((long long)(whole / kShare) * Q_HEADS + kv * kShare + whole % kShare) * DIM + c * 4);
    to[0] = pack_bf16(result.x / all, result.y / all);
    to[1] = pack_bf16(result.z / all, result.w / all);
  }
  cluster_wait_for_readers();
}
