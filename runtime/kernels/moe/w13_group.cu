// w13 of the routed experts with SiLU(gate) * up fused, the form for many rows an expert on sm_90a.
//
// A unit is an item's rows times up to four runs of gate columns and the four of up, over all of K.
// Chunks are folded as moe_w13 folds them, term by term: the CHUNKS of a part in registers, the
// SPLIT parts in shared memory.
#include "moe/w13.cuh"
#include "moe/group.cuh"

#ifdef WARPGROUP_MMA
constexpr int kPairsAtOnce = kWarps / 2;
constexpr int kUnits = (kPairs + kPairsAtOnce - 1) / kPairsAtOnce;  // an item
constexpr int kRowBytes = INTERMEDIATE * 16;                        // of words, gate and up
constexpr int kPieces = kPairs == kPairsAtOnce ? 1 : 2;  // one where gate and up adjoin

struct Unit {
  int expert, position, rows, first, pairs;

  __device__ __forceinline__ Unit(const int4* items, int unit) {
    const int4 it = items[unit / kUnits];
    expert = it.x, position = it.y, rows = it.z;
    first = unit % kUnits * kPairsAtOnce;
    pairs = min(kPairsAtOnce, kPairs - first);
  }
};

// Warps pair and kPairsAtOnce + pair hold gate and up of the same columns.
template <int NT>
__device__ __forceinline__ void multiply(Multiplier& with, const Unit& u, u16* act) {
  const int warp = threadIdx.x >> 5, half = warp / kPairsAtOnce, pair = warp % kPairsAtOnce;
  const u32 totals = with.ring.scratch(2 * pair), total = totals + half * (4 * NT * 512);
  auto sync_pair = [=] { asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory"); };
#pragma unroll 1
  for (int q = 0; q < SPLIT; ++q) {
    float4 part[4][NT];
    fill<NT>(part, kNothing);
#pragma unroll 1
    for (int c = q * CHUNKS; c < (q + 1) * CHUNKS; ++c)
      with.add_chain<NT>(chunk_begin(c + 1) - chunk_begin(c), part);
    if (q > 0)
      fold_partial<NT>(total, part);
    else
      sync_pair();  // act of the unit before was made from what lies here
    leave_partial<NT>(total, part);
  }
  sync_pair();
  if (pair < u.pairs)
    for (int v = half; v < 4 * NT; v += 2)
      finish_unit<NT, 1>(totals, v, u.rows,
                         act + (long long)u.position * INTERMEDIATE + (u.first + pair) * 64);
}

// Arguments as moe_w13's; compile-time, besides moe_w13's: BLOCK_ROWS.
// grid: as many blocks as multiprocessors
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_w13_group(const char* x, const char* packed, const char* scales, const int4* items,
                  const int* item_count, const int* slots, u16* act) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Ring ring;
  ring.make(kPieces);
  wait_for_previous();
  let_next_start();
  // The count is read anew each time: a register more would spill.
  auto more = [=](int turn) { return unit_at(turn) < item_count[0] * kUnits; };
  if (warp < kWarps) {
    take_registers();
    Multiplier with{ring, ring.nothing()};
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      switch ((u.rows + 7) / 8) {
        case 1: multiply<1>(with, u, act); break;
        case 2: multiply<2>(with, u, act); break;
#if BLOCK_ROWS >= 32
        case 3: multiply<3>(with, u, act); break;
        case 4: multiply<4>(with, u, act); break;
#endif
      }
    }
    return;
  }
  give_registers();
  const int piece = warp - kWarps;
  if (piece < kPieces && lane == 0) {
    packed += piece * (kRowBytes / 2), scales += piece * (kRowBytes / 8);
    Ring to = ring;
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      copy_weights<kSteps, kRowBytes>(
          to, packed + (long long)u.expert * (HIDDEN / 16 * kRowBytes) + u.first * 512,
          scales + (long long)u.expert * (HIDDEN / GROUP * (kRowBytes / 4)) + u.first * kScaleBytes,
          piece * kPairsAtOnce, u.pairs * 2 / kPieces);
    }
  } else if (piece == kPieces) {
    RowCopier rows;
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, unit_at(turn));
      int from[BLOCK_ROWS / 8];
#pragma unroll
      for (int t = 0; t < BLOCK_ROWS / 8; ++t)
        from[t] = token_offset(slots + u.position, u.rows, t, lane);
      rows.copy<kSteps>(x, from);
    }
    rows.finish();
  }
}
#endif
