// w13 of the routed experts with SiLU(gate) * up fused, the form for many rows an expert.
//
// The eight warps of a block take four runs of gate columns and the four of up over the same k, so
// that rows of x are fetched once for 512 columns. Each goes through its block's CHUNKS chunks of K
// one after the other and folds them in shared memory. The sum is moe_w13's, term by term.
#include "moe/w13.cuh"

constexpr int kWarps = 8;
constexpr int kPairsAtOnce = kWarps / 2;
constexpr int kTogether = 2;   // steps whose rows are fetched, and waited for, together
constexpr int kTokenRing = 6;  // steps
constexpr int kTokenStage = BLOCK_ROWS / 8 * kTokenBytes;
constexpr int kRing = STAGES * kBlockBytes;
static_assert(STAGES <= 5, "the wait for weights must cover rows asked for four steps ago");
constexpr int kTotal = 4 * (BLOCK_ROWS / 8) * 512;  // a warp's 64 columns x rows, fp32

extern __shared__ __align__(128) char smem[];

template <int NT>
__device__ __forceinline__ void run(const u16* x, const RunSource& source, const int* slots,
                                    int rows, u16* act, int position, int first_pair) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x % SPLIT;
  const bool mine = first_pair + warp / 2 < kPairs;
  const int begin = chunk_begin(rank * CHUNKS), end = chunk_begin(rank * CHUNKS + CHUNKS);
  // Totals, then a ring of rows for all warps, then a ring of weights for each.
  const u32 base = smem_addr(smem), tokens = base + kWarps * kTotal;
  const u32 ring = tokens + kTokenRing * kTokenStage + warp * kRing;
  const u32 total = base + (warp / 2 * 2 * 4 + warp % 2 * 4) * NT * 512;

  // Of every two steps' rows this warp copies tile warp / 2 of step warp % 2.
  static_assert(kTogether == 2 && kWarps == 8 && BLOCK_ROWS <= 32, "a copy a warp");
  const int row_offset = warp / 2 < NT ? token_offset(slots, rows, warp / 2, lane) : -1;
  auto fetch_tokens = [&](u32 to, int step) {  // rows of step and step + 1
    step += warp % 2;
    if (row_offset >= 0 && step < end)
      copy16_shared(to + warp % 2 * kTokenStage + warp / 2 * kTokenBytes + token_write_offset(lane),
                    reinterpret_cast<const char*>(x) + row_offset + step * (kBlockK * 2));
  };
  auto fetch_weights = [&](u32 stage, int step) {
    if (mine && step < end) source.copy<1>(stage, step);
    commit_copies();
  };
  fetch_tokens(tokens, begin);
  fetch_tokens(tokens + 2 * kTokenStage, begin + 2);
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch_weights(ring + s * kBlockBytes, begin + s);

  u32 stage = ring, ahead = ring + (STAGES - 1) * kBlockBytes, row = tokens;
  int step = begin;
  for (int c = 0; c < CHUNKS; ++c) {
    float4 acc[1][4][NT] = {};
    for (const int stop = chunk_begin(rank * CHUNKS + c + 1); step < stop; ++step) {
      wait_copies<STAGES - 2>();
      if ((step - begin) % kTogether == 0) {
        __syncthreads();  // everyone's rows are here, and the two steps before are done with
        fetch_tokens(row == tokens ? tokens + 4 * kTokenStage : row - 2 * kTokenStage, step + 4);
      } else {
        __syncwarp();
      }
      fetch_weights(ahead, step + STAGES - 1);
      multiply_runs<1, NT>(stage, row + token_read_offset(lane), acc);
      ahead = stage;  // the stage just read is the next to fill
      stage = stage + kBlockBytes == ring + kRing ? ring : stage + kBlockBytes;
      row = row + kTokenStage == tokens + kTokenRing * kTokenStage ? tokens : row + kTokenStage;
    }
    if (c > 0) fold_partial<NT>(total, acc[0]);
    leave_partial<NT>(total, acc[0]);
  }
  if (SPLIT > 1) cluster_sync(); else __syncthreads();
  act += (long long)position * INTERMEDIATE + first_pair * 64;
  for (int v = warp * SPLIT + rank; v < kPairsAtOnce * 4 * NT; v += kWarps * SPLIT) {
    const int pair = v / (4 * NT);
    if (first_pair + pair < kPairs)
      finish_unit<NT, SPLIT>(base + pair * (8 * NT * 512), v % (4 * NT), rows, act + pair * 64);
  }
  if (SPLIT > 1) cluster_wait_for_readers();
}

// Compile-time, besides moe_w13's: BLOCK_ROWS. Arguments as moe_w13's.
// grid: items x ceil(kPairs / 4) clusters of SPLIT blocks of 8 warps
extern "C" __global__ void __launch_bounds__(kWarps * 32, MIN_BLOCKS)
    moe_w13_wide(const u16* x, const uint4* packed, const uint4* scales, const int4* items,
                 const int* item_count, const int* slots, u16* act) {
  wait_for_previous();
  let_next_start();
  constexpr int kBlocks = (kPairs + kPairsAtOnce - 1) / kPairsAtOnce;
  const int item = blockIdx.x / (SPLIT * kBlocks);
  const int pair = blockIdx.x / SPLIT % kBlocks * kPairsAtOnce;
  const int count = item_count[0];
  const int4 it = items[item];  // may be past the end of the list, never of the buffer
  if (item >= count) return;
  const int warp = threadIdx.x >> 5;
  const RunSource source(packed, scales, it.x, pair + warp / 2 + warp % 2 * kPairs);
  switch ((it.z + 7) / 8) {
    case 1: return run<1>(x, source, slots + it.y, it.z, act, it.y, pair);
#if BLOCK_ROWS >= 16
    case 2: return run<2>(x, source, slots + it.y, it.z, act, it.y, pair);
#endif
#if BLOCK_ROWS >= 32
    case 3: return run<3>(x, source, slots + it.y, it.z, act, it.y, pair);
    case 4: return run<4>(x, source, slots + it.y, it.z, act, it.y, pair);
#endif
  }
}
