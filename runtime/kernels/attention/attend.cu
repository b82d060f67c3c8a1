// One part of one row's attention: the up to 64 keys of positions 64 s … 64 s + 63 that it reads.
// Below `prefix` a position's slot is the position; from there on the row's window has it. So a
// drafted row reads the same values in the same order as a committed one, and a part's bits follow
// from row, position and history alone. attention/merge adds the parts.
//
// Keys that are not there are zeros with weight zero: a slot that is not read may hold NaN. The
// softmax's weights go to the tensor core as two bf16, which together hold 16 bits of each.
//
// Compile-time: HEADS, C (a multiple of 32), R; C + R a multiple of 16.
#include "common.cuh"

constexpr int kKeys = 64;
constexpr int kWidth = C + R;
constexpr int kLine = kWidth * 2 + 16;  // bytes; an odd number of 16: a matrix's rows lie in all banks
constexpr int kWeightLine = kKeys * 2 + 16;
constexpr int kScoreLine = kKeys + 4;
constexpr int kColumns = C / 4;  // a warp's
// Queries, and once scores are made, in their place, weights: high halves, then low ones.
constexpr int kQueries = 16 * kLine, kWeights = 2 * 16 * kWeightLine;
constexpr int kShared = kQueries > kWeights ? kQueries : kWeights;

extern __shared__ __align__(128) char smem[];

// The four 8 x 8 matrices at the lanes' addresses, each transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 addr, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// queries bf16 [rows, HEADS, C + R];  keys bf16 [slots, C + R]
// positions, prefix, counts int32 [rows]: a row with count 0 reads nothing
// windows int32 [rows, window];  parts fp32 [rows, most, HEADS, C]: sums, not yet divided
// scales  fp32 [rows, most, HEADS, 2]: the greatest score, and the sum of weights
// grid (most, rows, ceil(HEADS / 16)) x 128
extern "C" __global__ void __launch_bounds__(128)
    attention_attend(const u16* queries, const u16* keys, const int* positions, const int* prefix,
                     const int* counts, const int* windows, int window, float scale, int most,
                     float* parts, float* scales) {
  let_next_start();
  wait_for_previous();
  const int part = blockIdx.x, row = blockIdx.y, head0 = blockIdx.z * 16;
  const int first = part * kKeys, position = positions[row];
  if (counts[row] == 0 || first > position) return;
  const int count = min(kKeys, position - first + 1);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  char* key_lines = smem;
  char* query_lines = smem + kKeys * kLine;
  float* scores = reinterpret_cast<float*>(query_lines + kShared);
  char* weights = query_lines;

  const int begin = prefix[row];
  const int* slots = windows + (long long)row * window - begin;  // of position p: slots[p]
  for (int i = threadIdx.x; i < (kKeys + 16) * (kWidth / 8); i += 128) {
    const int r = i / (kWidth / 8), c = i % (kWidth / 8);
    const u16* from = nullptr;
    if (r < count) {
      const int p = first + r;
      from = keys + (long long)(p < begin ? p : slots[p]) * kWidth;
    } else if (r >= kKeys && head0 + r - kKeys < HEADS) {
      from = queries + ((long long)row * HEADS + head0 + r - kKeys) * kWidth;
    }
    const u32 to = smem_addr(smem) + r * kLine + c * 16;
    if (from)
      copy16_shared(to, from + c * 8);
    else
      store_shared_f4(to, make_float4(0, 0, 0, 0));
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();

  // Scores of 16 heads x 64 keys: a warp has 16 keys.
  const u32 q_at = smem_addr(query_lines) + (lane & 15) * kLine + (lane >> 4) * 16;
  const u32 k_at = smem_addr(key_lines) + (warp * 16 + (lane & 7) + ((lane >> 4) << 3)) * kLine +
                   ((lane >> 3) & 1) * 16;
  float4 score[2] = {};
#pragma unroll 4
  for (int k = 0; k < kWidth / 16; ++k) {
    u32 a[4], b[4];
    load_matrices(q_at + k * 32, a);
    load_matrices(k_at + k * 32, b);
    mma(score[0], a, b[0], b[1]);
    mma(score[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int column = warp * 16 + t * 8 + (lane & 3) * 2;
    float* low = scores + (lane >> 2) * kScoreLine + column;
    float* high = low + 8 * kScoreLine;
    low[0] = score[t].x * scale, low[1] = score[t].y * scale;
    high[0] = score[t].z * scale, high[1] = score[t].w * scale;
  }
  __syncthreads();

  // A warp has four heads; a lane the keys `lane` and `lane` + 32.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = warp * 4 + i;
    float s[2], weight[2];
    const float none = -__int_as_float(0x7f800000);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      s[j] = lane + 32 * j < count ? scores[head * kScoreLine + lane + 32 * j] : none;
    // A NaN among the scores must show: fmaxf would drop it.
    float greatest = s[0] > s[1] || s[0] != s[0] ? s[0] : s[1];
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const float other = __shfl_xor_sync(~0u, greatest, d);
      greatest = other > greatest || other != other ? other : greatest;
    }
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      weight[j] = lane + 32 * j < count ? expf(s[j] - greatest) : 0.0f;
      total += weight[j];
      const u32 high = pack_bf16(weight[j], 0.0f);
      char* to = weights + head * kWeightLine + (lane + 32 * j) * 2;
      *reinterpret_cast<u16*>(to) = high;
      *reinterpret_cast<u16*>(to + 16 * kWeightLine) =
          pack_bf16(weight[j] - bf16_low(high), 0.0f);
    }
#pragma unroll
    for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
    if (lane == 0 && head0 + head < HEADS) {
      float* to = scales + (((long long)row * most + part) * HEADS + head0 + head) * 2;
      to[0] = greatest, to[1] = total;
    }
  }
  __syncthreads();

  // Values: a warp has C / 4 columns.
  float4 sum[kColumns / 8] = {};
  const u32 w_at = smem_addr(weights) + (lane & 15) * kWeightLine + (lane >> 4) * 16;
  const u32 v_at = smem_addr(key_lines) + ((lane & 7) + ((lane >> 3) & 1) * 8) * kLine +
                   (warp * kColumns + (lane >> 4) * 8) * 2;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    u32 high[4], low[4];
    load_matrices(w_at + k * 32, high);
    load_matrices(w_at + k * 32 + 16 * kWeightLine, low);
#pragma unroll
    for (int t = 0; t < kColumns / 8; t += 2) {
      u32 b[4];
      load_matrices_transposed(v_at + k * 16 * kLine + t * 16, b);
      mma(sum[t], high, b[0], b[1]);
      mma(sum[t], low, b[0], b[1]);
      if (t + 1 < kColumns / 8) {
        mma(sum[t + 1], high, b[2], b[3]);
        mma(sum[t + 1], low, b[2], b[3]);
      }
    }
  }
  const int head = head0 + (lane >> 2);
  float* to = parts + (((long long)row * most + part) * HEADS + head) * C + warp * kColumns +
              (lane & 3) * 2;
#pragma unroll
  for (int t = 0; t < kColumns / 8; ++t) {
    if (head < HEADS) *reinterpret_cast<float2*>(to + t * 8) = make_float2(sum[t].x, sum[t].y);
    if (head + 8 < HEADS)
      *reinterpret_cast<float2*>(to + 8 * C + t * 8) = make_float2(sum[t].z, sum[t].w);
  }
}
