// w2 of the routed experts with the router weight fused, the form for many rows an expert of a wide
// layer on sm_90a: one bf16 row for each (token, slot). Rows of act come with every stage, so that
// their length does not matter.
//
// A unit is an item's rows times some of its columns, eight runs of 64 at a time over all of K; a
// column's sum is moe_w2's, term by term. Weights do not depend on the kernel before: they are asked
// for ahead of the wait.
#include "moe/w2.cuh"
#include "moe/group.cuh"

#ifdef WARPGROUP_MMA
constexpr int kSteps = INTERMEDIATE / kBlockK;
constexpr int kTiles = HIDDEN / 64;
constexpr int kTilesAtOnce = 7 * kWarps;
constexpr int kUnits = (kTiles + kTilesAtOnce - 1) / kTilesAtOnce;  // an item
constexpr int kRowBytes = HIDDEN * 8;                               // of words

// Chunks are of whole 64 k.
__device__ constexpr int chunk_begin(int chunk) { return chunk * (INTERMEDIATE / 64) / CHUNKS * 2; }

struct Unit {
  int expert, position, rows, first, last;  // runs of columns

  __device__ __forceinline__ Unit(const int4* items, int unit) {
    const int4 it = items[unit / kUnits];
    expert = it.x, position = it.y, rows = it.z;
    first = unit % kUnits * kTilesAtOnce;
    last = min(first + kTilesAtOnce, kTiles);
  }
};

template <int NT>
__device__ __forceinline__ void multiply(Multiplier& with, const Unit& u, const Row& row, u16* y) {
  const int warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int first = u.first; first < u.last; first += kWarps) {
    float4 sum[4][NT];
    fill<NT>(sum, kNothing);
#pragma unroll 1
    for (int c = 0; c < CHUNKS; ++c)
      with.add_chain<NT>(chunk_begin(c + 1) - chunk_begin(c), sum);
    if (first + warp < u.last)
      store_tile<NT>(with.ring.scratch(warp), sum, row, u.rows, y + (first + warp) * 64);
  }
}

// Arguments as moe_w2's. Compile-time: HIDDEN, INTERMEDIATE, GROUP, BLOCK_ROWS, STAGES, CHUNKS.
// grid: as many blocks as multiprocessors
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_w2_group(const char* act, const char* packed, const char* scales, const int4* items,
                 const int* item_count, const int* slots, const float* router_weights, u16* y) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Ring ring;
  ring.make(1);
  let_next_start();
  // Items were written two kernels ago, and the kernel before waited for that one.
  auto more = [=](int turn) { return unit_at(turn) < item_count[0] * kUnits; };
  if (warp < kWarps) {
    take_registers();
    Multiplier with{ring, ring.nothing()};
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      const Row row(slots + u.position, u.rows, router_weights);
      switch ((u.rows + 7) / 8) {
        case 1: multiply<1>(with, u, row, y); break;
        case 2: multiply<2>(with, u, row, y); break;
        case 3: multiply<3>(with, u, row, y); break;
        case 4: multiply<4>(with, u, row, y); break;
      }
    }
    return;
  }
  give_registers();
  if (warp == kWarps && lane == 0) {
    Ring to = ring;
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      const char* w = packed + (long long)u.expert * (INTERMEDIATE / 16 * kRowBytes);
      const char* s = scales + (long long)u.expert * (INTERMEDIATE / GROUP * (kRowBytes / 4));
      for (int first = u.first; first < u.last; first += kWarps)
        copy_weights<kSteps, kRowBytes>(to, w + first * 512, s + first * kScaleBytes, 0,
                                        min(kWarps, u.last - first));
    }
  } else if (warp == kWarps + 1) {
    wait_for_previous();
    RowCopier rows;
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      int from[BLOCK_ROWS / 8];
#pragma unroll
      for (int t = 0; t < BLOCK_ROWS / 8; ++t) {
        const int r = t * 8 + (lane >> 2);
        from[t] = r < u.rows ? r * (INTERMEDIATE * 2) + (lane & 3) * 16 : -1;
      }
      for (int first = u.first; first < u.last; first += kWarps)
        rows.copy<kSteps>(act + (long long)u.position * (INTERMEDIATE * 2), from);
    }
    rows.finish();
  }
}
#endif
