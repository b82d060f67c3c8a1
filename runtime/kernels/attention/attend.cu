// Parts of the rows' attention: sums of weights times values over the keys of a part, which spans.cuh
// cuts; attention/merge adds the parts. A line is a head of a row.
//
// A block has a span and up to LINES lines, whatever rows they are of: below their prefix all rows
// have the same keys, whose slots are their positions. Or it has a part of one row's window, whose
// slots a list has. So a drafted row reads the same values in the same order as a committed one.
//
// A part goes tile by tile, as in flash attention: weights are 2^(score - greatest so far), and sums
// are scaled when the greatest grows. A score is two MMA chains, over the first 32 of every 64 values
// and over the others; the weights go to the tensor core as two bf16, which hold 16 bits of each.
// Other lines, LINES and HALVES move work and no bit.
//
// Keys that are not there are zeros with weight zero: a slot that is not read may hold NaN.
//
// Compile-time: HEADS, C (a multiple of 64), R; C + R a multiple of 16; SPANS; LINES (16, 32, 64);
// HALVES of a tile in shared memory (2, 3, 4): those past 2 are the next tile's.
#include "attention/products.cuh"

constexpr int kEights = kKeys / 2 / kWarps;  // lines of half a tile that a warp copies
constexpr int kLanes = kThreads / LINES, kEach = kKeys / kLanes;  // of a line's softmax
constexpr int kChunks = (HEADS + LINES - 1) / LINES, kTails = 2 * kChunks;  // of a row's window
static_assert(LINES <= 32 * HEADS, "a lane for each row");

extern __shared__ __align__(1024) char smem[];

// queries bf16 [rows, HEADS, C + R];  keys bf16 [slots, C + R]
// positions, prefix, counts int32 [rows]: a row with count 0 reads nothing
// windows int32 [rows, window];  parts fp32 [rows, most, HEADS, C]: sums, not yet divided
// scales  fp32 [rows, most, HEADS, 2]: the greatest score, and the sum of weights
// scale   of a score, times log2 e;  spans: those that a row may have
// grid spans * ceil(rows * HEADS / LINES) + rows * kTails, x 256: the longest first
extern "C" __global__ void __launch_bounds__(kThreads, LINES == 16 && HALVES == 2 ? 2 : 1)
    attention_attend(const u16* queries, const u16* keys, const int* positions, const int* prefix,
                     const int* counts, const int* windows, int window, float scale, int most,
                     int rows, int spans, float* parts, float* scales) {
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int groups = (rows * HEADS + LINES - 1) / LINES, rest = blockIdx.x - spans * groups;
  const bool tail = rest >= 0;
  const int span = tail ? rest % 2 : blockIdx.x / groups;
  const int line0 =
      tail ? rest / kTails * HEADS + rest % kTails / 2 * LINES : blockIdx.x % groups * LINES;
  const int end = tail ? (rest / kTails + 1) * HEADS : rows * HEADS;
  const int lines = min(LINES, end - line0), used = (lines + 15) / 16 * 16, row0 = line0 / HEADS;

  const u32 ring = smem_addr(smem), query_lines = ring + HALVES * kHalf;
#pragma unroll
  for (int i = 0; i < LINES / kWarps; ++i)
    if (i * kWarps + warp < lines)
      copy_line<LINES>(lane_at<LINES>(query_lines), i,
                       queries + (long long)(line0 + i * kWarps + warp) * kWidth);
  int slots[2] = {0, 0};  // of a window's keys: `lane` and `lane` + 32
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = span * kKeys + h * (kKeys / 2) + lane;
    if (tail && k < window) slots[h] = windows[(long long)row0 * window + k];
  }

  // Of row `row0 + lane` the keys of this part, from a position on.
  int from = 0, here = 0, part = span;
  if ((row0 + lane) * HEADS < line0 + lines && counts[row0 + lane] != 0) {
    const int below = prefix[row0 + lane], size = span_size(below);
    if (tail) {
      from = below + span * kKeys, here = min(kKeys, positions[row0 + lane] - from + 1);
      part += spans_of(below);
    } else {
      from = span * size, here = min(size, below - from);
    }
  }

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
    auto load = [&](int half) {  // of a tile
      if (half < 2 * tiles) {
        const u32 to = lane_at<kKeys / 2>(ring) + half % HALVES * kHalf;
        const int k0 = half * (kKeys / 2) + warp;
        const u16* from = keys + (long long)(first + k0) * kWidth;
        if (!tail) {
#pragma unroll
          for (int i = 0; i < kEights; ++i) copy_line<kKeys / 2>(to, i, from + i * kWarps * kWidth);
        } else {
#pragma unroll
          for (int i = 0; i < kEights; ++i) {
            const int slot = __shfl_sync(~0u, half ? slots[1] : slots[0], warp + i * kWarps);
            if (k0 + i * kWarps < count)
              copy_line<kKeys / 2>(to, i, keys + (long long)slot * kWidth);
            else
              clear_line<kKeys / 2>(to, i);
          }
        }
      }
      commit_copies();
    };

#pragma unroll
    for (int i = 0; i < HALVES; ++i) load(i);
    Sums sum = {};
    float greatest = -__int_as_float(0x7f800000), total = 0.0f;  // of a line, in its lanes
    for (int t = 0; t < tiles; ++t) {
      if (t == 0 || HALVES == 2) {
        wait_copies<HALVES - 2>();
        show_copies();
        __syncthreads();
      }

      const u32 low = ring + 2 * t % HALVES * kHalf, high = ring + (2 * t + 1) % HALVES * kHalf;
      make_scores(scores, query_lines, low, high, used);
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
          added[j] = w[j] = j < there ? power_of_2(w[j] - tallest) : 0.0f;
#pragma unroll
        for (int d = 1; d < kEach; d *= 2)
#pragma unroll
          for (int j = 0; j < kEach; j += 2 * d) added[j] += added[j + d];
#pragma unroll
        for (int d = 1; d < kLanes; d *= 2) added[0] += __shfl_xor_sync(~0u, added[0], d);
        const float factor = power_of_2(greatest - tallest);
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
      add_values(sum, weights, low, high, used, [&] {
        if (HALVES == 3) {
          __syncthreads();
          load(2 * t + 3);
        }
      });
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
  wait_all_copies();  // a block that had nothing to read has asked for queries
}
