// Parts of the rows' attention: sums of weights times values over the keys of a part, which spans.cuh
// cuts; attention/merge adds the parts. A line is a head of a row.
//
// A block has a span and up to LINES lines, whatever rows they are of: below their prefix all rows
// have the same keys, whose slots are their positions. Or it has a part of one row's window, whose
// slots a list has. So a drafted row reads the same values in the same order as a committed one.
//
// A part goes tile by tile, as in flash attention: weights are exp(score - greatest so far), and
// sums are scaled when the greatest grows. A score is two MMA chains, over the halves of C + R; the
// weights of the softmax go to the tensor core as two bf16, which together hold 16 bits of each.
// Other lines, LINES and HALVES move work and no bit.
//
// Keys that are not there are zeros with weight zero: a slot that is not read may hold NaN.
//
// Compile-time: HEADS, C (a multiple of 64), R; C + R a multiple of 16; SPANS; LINES (16, 32, 64);
// HALVES of a tile in shared memory (2, 3, 4): those past 2 are the next tile's.
#include "attention/spans.cuh"
#include "attention/warpgroup.cuh"

#if defined(WARPGROUP_MMA) && LINES == 64 && C == 512 && R % 32 == 0
#define WARPGROUPS 1  // two, each with half of the sums' columns
constexpr bool kWarpgroups = true;
#else
constexpr bool kWarpgroups = false;
#endif
constexpr int kWidth = C + R;
constexpr int kBlocks = (kWidth + 63) / 64;            // of a line: 64 values, 128 bytes
constexpr int kLine = kBlocks * 128;                   // bytes
constexpr int kScoreLine = kKeys + 4;                  // floats
constexpr int kWeightLine = kScoreLine * 4;            // bytes: high halves, then low ones
constexpr int kWarps = 8, kThreads = kWarps * 32;
// Of the sums a warp has all lines of some columns, in warpgroups 16 lines of half the columns.
constexpr int kColumns = kWarpgroups ? C / 2 : C / kWarps, kSumLines = kWarpgroups ? 16 : LINES;
constexpr int kHalf = kKeys / 2 * kLine;
// Scores: half of the warps have half of C + R each; of lines and keys a warp has these.
constexpr int kKeyGroups = kWarpgroups ? 1 : LINES == 64 ? 2 : 4, kLineGroups = 4 / kKeyGroups;
constexpr int kScoreLines = LINES / kLineGroups, kScoreKeys = kKeys / kKeyGroups;
constexpr int kLanes = kThreads / LINES, kEach = kKeys / kLanes;  // of a line's softmax
constexpr int kChunks = (HEADS + LINES - 1) / LINES, kTails = 2 * kChunks;  // of a row's window
static_assert(LINES <= 32 * HEADS, "a lane for each row");

extern __shared__ __align__(1024) char smem[];

// What was copied, before a barrier, for MMAs after it.
__device__ __forceinline__ void show_copies() {
#ifdef WARPGROUPS
  fence_for_mma();
#endif
}

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

// Weights times values of half a tile, of the first M * 16 of a warp's lines.
template <int M>
__device__ __forceinline__ void add_values(float4 (&sum)[kSumLines / 16][kColumns / 8], u32 weights,
                                           u32 values) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 w_at = weights + (lane & 15) * kWeightLine + (lane >> 4) * 16;
#ifdef WARPGROUPS
    u32 high[2][4], low[2][4];
    const u64 v_at = describe_lines(values + warp / 4 * 4 * (32 * 128), 32 * 128);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      load_matrices(w_at + warp % 4 * 16 * kWeightLine + k * 32, high[k]);
      load_matrices(w_at + warp % 4 * 16 * kWeightLine + k * 32 + kKeys * 2, low[k]);
    }
    begin_mmas();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      mma_async_values(sum[0], high[k], v_at + (k * 16 * 128 >> 4));
      mma_async_values(sum[0], low[k], v_at + (k * 16 * 128 >> 4));
    }
    commit_mmas();
    settle(sum);
#else
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    u32 b[(kColumns + 15) / 16][4];
#pragma unroll
    for (int c = 0; c < kColumns / 8; c += 2)
      load_matrices_transposed(
          values + chunk_at<32>(k * 16 + (lane & 15), warp * (kColumns / 8) + c + (lane >> 4)),
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
#endif
}

// queries bf16 [rows, HEADS, C + R];  keys bf16 [slots, C + R]
// positions, prefix, counts int32 [rows]: a row with count 0 reads nothing
// windows int32 [rows, window];  parts fp32 [rows, most, HEADS, C]: sums, not yet divided
// scales  fp32 [rows, most, HEADS, 2]: the greatest score, and the sum of weights
// grid rows * kTails + spans there may be * ceil(rows * HEADS / LINES), x 256
extern "C" __global__ void __launch_bounds__(kThreads, LINES == 16 && HALVES == 2 ? 2 : 1)
    attention_attend(const u16* queries, const u16* keys, const int* positions, const int* prefix,
                     const int* counts, const int* windows, int window, float scale, int most,
                     int rows, float* parts, float* scales) {
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int windowed = rows * kTails, groups = (rows * HEADS + LINES - 1) / LINES;
  const int block = blockIdx.x, rest = block - windowed;
  const bool tail = block < windowed;
  const int span = tail ? block % 2 : rest / groups;
  const int line0 = tail ? block / kTails * HEADS + block % kTails / 2 * LINES : rest % groups * LINES;
  const int end = tail ? (block / kTails + 1) * HEADS : rows * HEADS;
  const int lines = min(LINES, end - line0), used = (lines + 15) / 16 * 16, row0 = line0 / HEADS;

  // Of row `row0 + lane` the keys of this part, from a position on.
  int from = 0, here = 0, part = span;
  if ((row0 + lane) * HEADS < line0 + lines && counts[row0 + lane] != 0) {
    const int below = prefix[row0 + lane], shift = span_shift(below);
    if (tail) {
      from = below + span * kKeys, here = min(kKeys, positions[row0 + lane] - from + 1);
      part += spans_of(below);
    } else {
      from = span * kKeys << shift, here = min(kKeys << shift, below - from);
    }
  }

  const u32 ring = smem_addr(smem), query_lines = ring + HALVES * kHalf;
  char* const score_lines = smem + HALVES * kHalf + LINES * kLine;
  float(*const scores)[LINES][kScoreLine] = reinterpret_cast<float(*)[LINES][kScoreLine]>(score_lines);
  float* const factors = scores[2][0];
  // In the place of a line's scores, once they are read: its weights, high halves and low ones.
  const u32 weights = smem_addr(score_lines);
  const int sum_line0 = (kWarpgroups ? warp % 4 * 16 : 0) + (lane >> 2);
  const int sum_column0 = (kWarpgroups ? warp / 4 : warp) * kColumns + (lane & 3) * 2;

  // Rows with the same keys at once. They are one set, but where a span is some rows' last one.
  for (u32 left = __ballot_sync(~0u, here > 0); left;) {
    const int leader = __ffs(left) - 1;
    const int count = __shfl_sync(~0u, here, leader), first = __shfl_sync(~0u, from, leader);
    const int place = __shfl_sync(~0u, part, leader);
    const u32 set = __ballot_sync(~0u, here == count && from == first);
    left &= ~set;
    auto takes = [&](int line) {
      return line < lines && (set >> ((line0 + line) / HEADS - row0) & 1);
    };
    auto place_of = [&](int line) {
      const int row = (line0 + line) / HEADS;
      return ((long long)row * most + place) * HEADS + (line0 + line) % HEADS;
    };
    const int tiles = (count + kKeys - 1) / kKeys;
    const int* slots = windows + (long long)row0 * window + span * kKeys;  // of a tail's keys
    auto load = [&](int i) {  // half a tile
      if (i < 2 * tiles) {
        const u32 to = ring + i % HALVES * kHalf;
#pragma unroll
        for (int r = warp; r < kKeys / 2; r += kWarps) {
          const int k = i * (kKeys / 2) + r;
          const long long slot = k >= count ? -1 : tail ? slots[k] : first + k;
          copy_line<kKeys / 2>(to, r, slot < 0 ? nullptr : keys + slot * kWidth);
        }
      }
      commit_copies();
    };

    for (int line = warp; line < used; line += kWarps)
      copy_line<LINES>(query_lines, line,
                takes(line) ? queries + (long long)(line0 + line) * kWidth : nullptr);
#pragma unroll
    for (int i = 0; i < HALVES; ++i) load(i);
    float4 sum[kSumLines / 16][kColumns / 8] = {};
    float greatest = -__int_as_float(0x7f800000), total = 0.0f;  // of a line, in its lanes
    for (int t = 0; t < tiles; ++t) {
      if (t == 0 || HALVES == 2) {
        wait_copies<HALVES - 2>();
        show_copies();
        __syncthreads();
      }

      const int lines0 = warp % 4 / kKeyGroups * kScoreLines, keys0 = warp % kKeyGroups * kScoreKeys;
      if (kWarpgroups || lines0 < used) {
        constexpr int kSteps = kWidth / 16;
        const int half = warp / 4, begin = half * kSteps / 2;
        float4 score[kScoreLines / 16][kScoreKeys / 8] = {};
#ifdef WARPGROUPS
          const u64 q_at = describe_lines(query_lines, 0);
          const u64 low = describe_lines(ring + 2 * t % HALVES * kHalf, 0);
          const u64 high = describe_lines(ring + (2 * t + 1) % HALVES * kHalf, 0);
          float4(&c)[8] = score[0];
          begin_mmas();
#pragma unroll
          for (int i = 0; i < kSteps / 2; ++i) {
            const int k = begin + i;
            const u32 q_k = (k / 4 * (LINES * 128) + k % 4 * 32) >> 4;
            const u32 k_k = (k / 4 * (kKeys / 2 * 128) + k % 4 * 32) >> 4;
            mma_async_scores(c[0], c[1], c[2], c[3], q_at + q_k, low + k_k);
            mma_async_scores(c[4], c[5], c[6], c[7], q_at + q_k, high + k_k);
          }
          commit_mmas();
          settle(score);
#else
        const u32 q_at = query_lines + (lines0 + (lane & 15)) * 128;
        const u32 k_at = ring + (2 * t + keys0 / 32) % HALVES * kHalf +
                         (keys0 % 32 + (lane & 7) + ((lane >> 4) << 3)) * 128;
        const u32 q_flip = flip(lane, lane >> 4), k_flip = flip(lane, (lane >> 3) & 1);
#pragma unroll 3
        for (int k = begin; k < (half + 1) * kSteps / 2; ++k) {
          const u32 q_k = q_at + k / 4 * (LINES * 128) + (k % 4 * 32 ^ q_flip);
          const u32 k_k = k_at + k / 4 * (kKeys / 2 * 128) + (k % 4 * 32 ^ k_flip);
          u32 a[kScoreLines / 16][4], b[kScoreKeys / 16][4];
#pragma unroll
          for (int m = 0; m < kScoreLines / 16; ++m) load_matrices(q_k + m * 16 * 128, a[m]);
#pragma unroll
          for (int n = 0; n < kScoreKeys / 16; ++n) load_matrices(k_k + n * 16 * 128, b[n]);
#pragma unroll
          for (int m = 0; m < kScoreLines / 16; ++m)
#pragma unroll
            for (int n = 0; n < kScoreKeys / 8; ++n)
              mma(score[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
#endif
#pragma unroll
        for (int m = 0; m < kScoreLines / 16; ++m)
#pragma unroll
          for (int n = 0; n < kScoreKeys / 8; ++n) {
            float* low = scores[half][lines0 + m * 16 + (lane >> 2)] + keys0 + n * 8 + (lane & 3) * 2;
            const float4 v = score[m][n];
            *reinterpret_cast<float2*>(low) = make_float2(v.x, v.y);
            *reinterpret_cast<float2*>(low + 8 * kScoreLine) = make_float2(v.z, v.w);
          }
      }
      __syncthreads();

      // A line has kLanes lanes, each some keys that lie side by side: sums are one tree, of
      // neighbours, whatever their number.
      const int line = threadIdx.x / kLanes, part_of_line = threadIdx.x % kLanes;
      if (line < used) {
        const int key0 = part_of_line * kEach, there = count - t * kKeys - key0;
        float w[kEach], added[kEach], tallest = greatest;
#pragma unroll
        for (int j = 0; j < kEach; j += 4) {
          const float4 v = add(*reinterpret_cast<const float4*>(scores[0][line] + key0 + j),
                               *reinterpret_cast<const float4*>(scores[1][line] + key0 + j));
          w[j] = __fmul_rn(v.x, scale), w[j + 1] = __fmul_rn(v.y, scale);
          w[j + 2] = __fmul_rn(v.z, scale), w[j + 3] = __fmul_rn(v.w, scale);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (j < there) tallest = fmaxf(tallest, w[j]);
#pragma unroll
        for (int d = 1; d < kLanes; d *= 2)
          tallest = fmaxf(tallest, __shfl_xor_sync(~0u, tallest, d));
#pragma unroll
        for (int j = 0; j < kEach; ++j)  // a NaN stays one
          added[j] = w[j] = j < there ? expf(w[j] - tallest) : 0.0f;
#pragma unroll
        for (int d = 1; d < kEach; d *= 2)
#pragma unroll
          for (int j = 0; j < kEach; j += 2 * d) added[j] += added[j + d];
#pragma unroll
        for (int d = 1; d < kLanes; d *= 2) added[0] += __shfl_xor_sync(~0u, added[0], d);
        const float factor = expf(greatest - tallest);
        total = fmaf(total, factor, added[0]), greatest = tallest;
        if (part_of_line == 0) factors[line] = factor;
        __syncwarp();  // all of its scores are read
        char* to = score_lines + line * kWeightLine + key0 * 2;
#pragma unroll
        for (int j = 0; j < kEach; j += 4) {
          const u32 one = pack_bf16(w[j], w[j + 1]), two = pack_bf16(w[j + 2], w[j + 3]);
          *reinterpret_cast<uint2*>(to + j * 2) = make_uint2(one, two);
          *reinterpret_cast<uint2*>(to + j * 2 + kKeys * 2) =
              make_uint2(pack_bf16(w[j] - bf16_low(one), w[j + 1] - bf16_high(one)),
                         pack_bf16(w[j + 2] - bf16_low(two), w[j + 3] - bf16_high(two)));
        }
      }
      __syncthreads();

      if (t) {
        float grown[kSumLines / 16][2];
        bool any = false;
#pragma unroll
        for (int m = 0; m < kSumLines / 16; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            grown[m][h] = factors[sum_line0 + m * 16 + h * 8];
            any |= grown[m][h] != 1.0f;
          }
        if (__any_sync(~0u, any)) {
#pragma unroll
          for (int m = 0; m < kSumLines / 16; ++m)
#pragma unroll
            for (int c = 0; c < kColumns / 8; ++c) {
              sum[m][c].x *= grown[m][0], sum[m][c].y *= grown[m][0];
              sum[m][c].z *= grown[m][1], sum[m][c].w *= grown[m][1];
            }
        }
      }
      auto half_of_values = [&](int h) {
        const u32 v_at = ring + (2 * t + h) % HALVES * kHalf;
        if (kSumLines == 16 || used <= 16)
          add_values<1>(sum, weights + h * kKeys, v_at);
        else
          add_values<kSumLines / 16>(sum, weights + h * kKeys, v_at);
      };
      half_of_values(0);
      if (HALVES == 3) {
        __syncthreads();
        load(2 * t + 3);
      }
      half_of_values(1);
      if (HALVES > 2) wait_copies<0>(), show_copies();
      __syncthreads();
#pragma unroll
      for (int i = HALVES + HALVES % 2; i < HALVES + 2; ++i) load(2 * t + i);
    }

    const int line = threadIdx.x / kLanes;
    if (threadIdx.x % kLanes == 0 && takes(line))
      *reinterpret_cast<float2*>(scales + place_of(line) * 2) = make_float2(greatest, total);
#pragma unroll
    for (int m = 0; m < kSumLines / 16; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int line = sum_line0 + m * 16 + h * 8;
        if (!takes(line)) continue;
        float* to = parts + place_of(line) * C + sum_column0;
#pragma unroll
        for (int c = 0; c < kColumns / 8; ++c)
          *reinterpret_cast<float2*>(to + c * 8) =
              h ? make_float2(sum[m][c].z, sum[m][c].w) : make_float2(sum[m][c].x, sum[m][c].y);
      }
  }
}
