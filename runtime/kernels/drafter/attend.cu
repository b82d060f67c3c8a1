// A block's rows over the context and the block: 128 keys at a time, a key a thread, then values.
//
// Compile-time: Q_HEADS, KV_HEADS, DIM (32, 64 or 128), BLOCK (rows), WINDOW (0: none), CAUSAL.
#include "common.cuh"

constexpr int kThreads = 128, kGroups = kThreads / DIM;

__shared__ float query[DIM], weights[kThreads], sums[kThreads / 32], values[kGroups][DIM];

template <bool MAX>
__device__ __forceinline__ float over_block(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const float other = __shfl_xor_sync(~0u, v, d);
    v = MAX ? fmaxf(v, other) : v + other;
  }
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  v = sums[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) v = MAX ? fmaxf(v, sums[w]) : v + sums[w];
  __syncthreads();
  return v;
}

// q bf16 [BLOCK, Q_HEADS, DIM];  cache bf16 [capacity, 2 KV_HEADS, DIM]
// length int32: the context's, and the position of the block's first row
// out bf16 [BLOCK, Q_HEADS, DIM];  grid (Q_HEADS, BLOCK) x 128
extern "C" __global__ void __launch_bounds__(kThreads)
    drafter_attend(const u16* q, const u16* cache, const int* length, float scale, u16* out) {
  let_next_start();
  wait_for_previous();
  const int head = blockIdx.x, row = blockIdx.y, t = threadIdx.x;
  const int kv = head / (Q_HEADS / KV_HEADS), context = *length, end = context + BLOCK;
  const int own = context + row;
  if (t < DIM) query[t] = bf16_low(q[((long long)row * Q_HEADS + head) * DIM + t]) * scale;
  __syncthreads();
  const int first = WINDOW ? max(0, own - WINDOW + 1) : 0;
  const int last = CAUSAL ? own + 1 : WINDOW ? min(end, own + WINDOW) : end;
  const float none = -__int_as_float(0x7f800000);
  float greatest = none, total = 0.0f, sum = 0.0f;
  const int group = t / DIM, column = t % DIM;
  for (int begin = first; begin < last; begin += kThreads) {
    const int key = begin + t;
    float score = none;
    if (key < last) {
      const uint4* k = reinterpret_cast<const uint4*>(cache + ((long long)key * 2 * KV_HEADS + kv) * DIM);
      score = 0.0f;
#pragma unroll
      for (int i = 0; i < DIM / 8; ++i) {
        const uint4 v = k[i];
        const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          score = fmaf(query[i * 8 + 2 * j], bf16_low(pair[j]), score);
          score = fmaf(query[i * 8 + 2 * j + 1], bf16_high(pair[j]), score);
        }
      }
    }
    const float now = fmaxf(greatest, over_block<true>(score));
    const float kept = expf(greatest - now), weight = key < last ? expf(score - now) : 0.0f;
    weights[t] = weight;
    total = total * kept + over_block<false>(weight);  // its barriers show `weights`
    sum *= kept;
    greatest = now;
    const int here = min(kThreads, last - begin);
    for (int j = group; j < here; j += kGroups)
      sum = fmaf(weights[j],
                 bf16_low(cache[((long long)(begin + j) * 2 * KV_HEADS + KV_HEADS + kv) * DIM + column]),
                 sum);
    __syncthreads();
  }
  values[group][column] = sum;
  __syncthreads();
  if (t >= DIM) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) sum += values[g][t];
  out[((long long)row * Q_HEADS + head) * DIM + t] = pack_bf16(sum / total, 0.0f);
}
