// One part of a row's attention: the up to 64 keys of positions 64 s … 64 s + 63 that it reads.
// Below `prefix` a position's slot is the position; from there on the row's window has it. So a
// drafted row reads the same values in the same order as a committed one, and a part's bits follow
// from row, position and history alone. attention/merge adds the parts.
//
// A part that lies below the prefix of several rows has the same keys for all: of a group of rows
// the first such one's block makes all of theirs, so many at once as an MMA has room for.
//
// Keys that are not there are zeros with weight zero: a slot that is not read may hold NaN. The
// softmax's weights go to the tensor core as two bf16, which together hold 16 bits of each.
//
// Compile-time: HEADS, C (a multiple of 64), R; C + R a multiple of 16.
#include "common.cuh"

constexpr int kKeys = 64;
constexpr int kWidth = C + R;
constexpr int kLine = kWidth * 2 + 16;  // bytes; an odd number of 16: a matrix's rows lie in all banks
constexpr int kWeightLine = kKeys * 2 + 16;
constexpr int kScoreLine = kKeys + 4;
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kColumns = C / kWarps;  // a warp's
constexpr int kTileRows = 16 % HEADS ? 1 : 16 / HEADS;  // rows that an MMA has room for
// Queries, and once scores are made, in their place, weights: high halves, then low ones.
constexpr int kQueries = 16 * kLine, kWeights = 2 * 16 * kWeightLine;
constexpr int kShared = kQueries > kWeights ? kQueries : kWeights;

extern __shared__ __align__(128) char smem[];

// A set of rows without the lowest `n` of them.
__device__ __forceinline__ u32 without_first(u32 rows, int n) {
  for (int i = 0; i < n; ++i) rows &= rows - 1;
  return rows;
}

// A line of C + R values into shared memory by a warp; zeros for none.
__device__ __forceinline__ void copy_line(u32 to, const u16* from) {
#pragma unroll
  for (int c = threadIdx.x & 31; c < kWidth / 8; c += 32) {
    if (from)
      copy16_shared(to + c * 16, from + c * 8);
    else
      store_shared_f4(to + c * 16, make_float4(0, 0, 0, 0));
  }
}

// queries bf16 [rows, HEADS, C + R];  keys bf16 [slots, C + R]
// positions, prefix, counts int32 [rows]: a row with count 0 reads nothing
// windows int32 [rows, window];  parts fp32 [rows, most, HEADS, C]: sums, not yet divided
// scales  fp32 [rows, most, HEADS, 2]: the greatest score, and the sum of weights
// group   rows that may share keys, at most 32: no effect on any bit
// grid (most, rows, ceil(HEADS / 16)) x 256
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    attention_attend(const u16* queries, const u16* keys, const int* positions, const int* prefix,
                     const int* counts, const int* windows, int window, float scale, int most,
                     int rows, int group, float* parts, float* scales) {
  let_next_start();
  wait_for_previous();
  const int part = blockIdx.x, row = blockIdx.y, head0 = blockIdx.z * 16;
  const int first = part * kKeys, position = positions[row];
  if (counts[row] == 0 || first > position) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row0 = row / group * group;
  const bool shares = lane < group && row0 + lane < rows && counts[row0 + lane] != 0 &&
                      first + kKeys <= prefix[row0 + lane];
  u32 left = __ballot_sync(~0u, shares);  // the rows of the group to be done here
  if (left >> (row - row0) & 1) {
    if (__ffs(left) - 1 != row - row0) return;
  } else {
    left = 1u << (row - row0);
  }
  const int count = min(kKeys, position - first + 1);
  char* key_lines = smem;
  char* query_lines = smem + kKeys * kLine;
  float* scores = reinterpret_cast<float*>(query_lines + kShared);
  char* weights = query_lines;

  const int begin = prefix[row];
  const int* slots = windows + (long long)row * window - begin;  // of position p: slots[p]
#pragma unroll 4
  for (int r = warp; r < kKeys; r += kWarps) {
    const int p = first + r;
    const long long slot = r < count ? (p < begin ? p : slots[p]) : -1;
    copy_line(smem_addr(key_lines) + r * kLine, slot < 0 ? nullptr : keys + slot * kWidth);
  }
  for (; left; left = without_first(left, kTileRows)) {
    // The MMA's 16 lines are heads of one row, or all heads of several.
    auto row_of = [&](int line) {  // -1: none
      if (kTileRows == 1) return head0 + line < HEADS ? row0 + __ffs(left) - 1 : -1;
      const u32 rest = without_first(left, line / HEADS);
      return rest ? row0 + __ffs(rest) - 1 : -1;
    };
    auto head_of = [&](int line) { return kTileRows == 1 ? head0 + line : line % HEADS; };
    auto place_of = [&](int line) {
      return ((long long)row_of(line) * most + part) * HEADS + head_of(line);
    };
    for (int line = warp; line < 16; line += kWarps) {
      const long long from = (long long)row_of(line) * HEADS + head_of(line);
      copy_line(smem_addr(query_lines) + line * kLine,
                row_of(line) < 0 ? nullptr : queries + from * kWidth);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();

    // Scores of 16 lines x 64 keys: a warp has 16 keys and half of C + R; the second half's sums
    // wait for the first's.
    constexpr int kSteps = kWidth / 16;
    const int half = warp / 4, keys16 = warp % 4 * 16;
    const u32 q_at = smem_addr(query_lines) + (lane & 15) * kLine + (lane >> 4) * 16;
    const u32 k_at = smem_addr(key_lines) + (keys16 + (lane & 7) + ((lane >> 4) << 3)) * kLine +
                     ((lane >> 3) & 1) * 16;
    float4 score[2] = {};
#pragma unroll 6
    for (int k = half * kSteps / 2; k < (half + 1) * kSteps / 2; ++k) {
      u32 a[4], b[4];
      load_matrices(q_at + k * 32, a);
      load_matrices(k_at + k * 32, b);
      mma(score[0], a, b[0], b[1]);
      mma(score[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int turn = 1; turn >= 0; --turn) {
      if (half == turn) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          float* low = scores + (lane >> 2) * kScoreLine + keys16 + t * 8 + (lane & 3) * 2;
          float* high = low + 8 * kScoreLine;
          float4 v = score[t];
          if (turn == 0) {
            v = add(v, make_float4(low[0], low[1], high[0], high[1]));
            v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
          }
          low[0] = v.x, low[1] = v.y, high[0] = v.z, high[1] = v.w;
        }
      }
      __syncthreads();
    }

    // A warp has some lines; a lane the keys `lane` and `lane` + 32.
#pragma unroll
    for (int line = warp; line < 16; line += kWarps) {
      float s[2], weight[2];
      const float none = -__int_as_float(0x7f800000);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        s[j] = lane + 32 * j < count ? scores[line * kScoreLine + lane + 32 * j] : none;
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
        char* to = weights + line * kWeightLine + (lane + 32 * j) * 2;
        *reinterpret_cast<u16*>(to) = high;
        *reinterpret_cast<u16*>(to + 16 * kWeightLine) =
            pack_bf16(weight[j] - bf16_low(high), 0.0f);
      }
#pragma unroll
      for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
      if (lane == 0 && row_of(line) >= 0) {
        float* to = scales + place_of(line) * 2;
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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = half * 8 + (lane >> 2);
      if (row_of(line) < 0) continue;
      float* to = parts + place_of(line) * C + warp * kColumns + (lane & 3) * 2;
#pragma unroll
      for (int t = 0; t < kColumns / 8; ++t)
        *reinterpret_cast<float2*>(to + t * 8) =
            half ? make_float2(sum[t].z, sum[t].w) : make_float2(sum[t].x, sum[t].y);
    }
    __syncthreads();  // before the next queries take the weights' place
  }
}
