// out[token] = sum over the token's slots, in slot order, in fp32, of the slots that are on this
// rank; then plus the shared expert's sums, if there are any.
#include "common.cuh"

// y    bf16 [tokens * TOP_K, HIDDEN], already weighted;  ids int32 [tokens, TOP_K]
// shared fp32 [tokens, HIDDEN] or null;  out fp32 [tokens, HIDDEN]
// grid (tokens, ceil(HIDDEN / 1024)), 128 threads, 8 columns a thread; those moe_w2 made last first,
// while they are in the L2
extern "C" __global__ void __launch_bounds__(128)
    moe_combine(const u16* y, const int* ids, const float* shared, float* out, int first_expert,
                int expert_count) {
  wait_for_previous();
  let_next_start();
  const int column = ((gridDim.y - 1 - blockIdx.y) * 128 + threadIdx.x) * 8;
  if (column >= HIDDEN) return;
  const int token = blockIdx.x;
  uint4 v[TOP_K];
  bool here[TOP_K];
#pragma unroll
  for (int s = 0; s < TOP_K; ++s) {
    const int slot = token * TOP_K + s;
    here[s] = static_cast<u32>(ids[slot] - first_expert) < static_cast<u32>(expert_count);
    if (here[s]) v[s] = *reinterpret_cast<const uint4*>(y + (long long)slot * HIDDEN + column);
  }
  float sum[8] = {};
#pragma unroll
  for (int s = 0; s < TOP_K; ++s) {
    if (!here[s]) continue;
    const u32 pair[4] = {v[s].x, v[s].y, v[s].z, v[s].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += bf16_low(pair[i]);
      sum[2 * i + 1] += bf16_high(pair[i]);
    }
  }
  const long long at = (long long)token * HIDDEN + column;
  if (shared) {
    const float4* more = reinterpret_cast<const float4*>(shared + at);
    const float4 a = more[0], b = more[1];
    const float value[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += value[i];
  }
  float4* to = reinterpret_cast<float4*>(out + at);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}
