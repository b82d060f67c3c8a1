// w13 of the routed experts with SiLU(gate) * up fused, the form for many rows an expert on sm_90a.
//
// A block stays on its multiprocessor and goes through units of work: an item's rows times up to
// four runs of gate columns and the four of up, over all of K. Eight warps, in two warpgroups, hold
// a run of 64 columns each and multiply. Two more copy, ahead of the others by a ring of stages,
// from one unit into the next: weights lie in whole lines and come by the bulk copy engine, rows
// come 16 bytes a thread. Chunks are folded as moe_w13 folds them, term by term: the CHUNKS of a
// part in registers, the SPLIT parts in shared memory. No block waits for another.
//
// Compile-time, besides moe_w13's: BLOCK_ROWS.
#include "moe_w13.cuh"

#ifdef WARPGROUP_MMA
constexpr int kWarps = 8;  // that multiply
constexpr int kThreads = (kWarps + 4) * 32;
constexpr int kPairsAtOnce = kWarps / 2;
constexpr int kUnits = (kPairs + kPairsAtOnce - 1) / kPairsAtOnce;  // an item

// A stage is 32 k: rows, words (two k-tiles of gate runs and up runs), scales.
constexpr int kRows = BLOCK_ROWS * kBlockK * 2;
constexpr int kWords = kWarps * kWeightBytes;
constexpr int kStage = kRows + kWarps * kBlockBytes;
constexpr int kRing = STAGES * kStage;
constexpr int kTotal = BLOCK_ROWS * 256;            // a warp's 64 columns x rows, fp32
constexpr int kBarriers = kRing + kWarps * kTotal;  // full and empty ones, and one for nothing
constexpr int kLate = 5;                            // stages after which rows are waited for
static_assert(STAGES > kLate + 1, "the ring must turn");

extern __shared__ __align__(1024) char smem[];  // ring, totals, barriers

struct Ring {
  u32 base, stage, full, parity;

  __device__ __forceinline__ Ring()
      : base(smem_addr(smem)), stage(base), full(base + kBarriers), parity(0) {}
  __device__ __forceinline__ u32 empty() const { return full + STAGES * 8; }
  __device__ __forceinline__ u32 nothing() const { return base + kBarriers + STAGES * 16; }
  __device__ __forceinline__ void advance() {
    stage += kStage, full += 8;
    if (full == base + kBarriers + STAGES * 8) stage = base, full = base + kBarriers, parity ^= 1;
  }
  // By every thread of the block, before anything else.
  __device__ __forceinline__ void make() const {
    if (threadIdx.x < STAGES) {
      make_barrier(full + threadIdx.x * 8, 2);  // weights were asked for, rows are there
      make_barrier(empty() + threadIdx.x * 8, kWarps);
      if (threadIdx.x == 0) make_barrier(nothing(), kWarps);
      show_barriers();
    }
    __syncthreads();
  }
};

struct Unit {
  int expert, position, rows, first, pairs;

  // Items come largest first: blocks take units in turn, there and back, so that all get as much.
  __device__ __forceinline__ static int at(int turn) {
    return turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
  __device__ __forceinline__ Unit(const int4* items, int turn) {
    const int4 it = items[at(turn) / kUnits];
    expert = it.x, position = it.y, rows = it.z;
    first = at(turn) % kUnits * kPairsAtOnce;
    pairs = min(kPairsAtOnce, kPairs - first);
  }
};

// ---- the warps that copy -------------------------------------------------------------------

// By one thread.
__device__ __forceinline__ void copy_weights(Ring& ring, const Unit& u, const char* words,
                                             const char* scales) {
  constexpr int kRow = INTERMEDIATE * 16;                  // of words, gate and up; scales: 1/4
  constexpr int kPieces = kPairs == kPairsAtOnce ? 1 : 2;  // one where gate and up adjoin
  const int runs = u.pairs * 2 / kPieces;
  words += (long long)u.expert * (HIDDEN / 16 * kRow) + u.first * 512;
  scales += (long long)u.expert * (HIDDEN / GROUP * (kRow / 4)) + u.first * kScaleBytes;
#pragma unroll 1
  for (int s = 0; s < kSteps; ++s, words += 2 * kRow, ring.advance()) {
    const u32 to = ring.stage + kRows;
    const char* from = scales + s * kBlockK / GROUP * (kRow / 4);
    wait_barrier(ring.empty(), ring.parity ^ 1);
    arrive_expecting(ring.full, u.pairs * (2 * kBlockBytes));
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int kt = 0; kt < 2; ++kt)
        copy_bulk_once(to + (kt * kPieces + p) * (kWarps / kPieces * 512),
                       words + kt * kRow + p * (kRow / 2), runs * 512, ring.full);
      copy_bulk_once(to + kWords + p * (kWarps / kPieces * kScaleBytes), from + p * (kRow / 8),
                     runs * kScaleBytes, ring.full);
    }
  }
}

// By one warp. The copies are waited for, and shown to the MMAs, kLate stages later.
struct RowCopier {
  Ring ring, late;
  int behind = 0;

  __device__ __forceinline__ void copy(const Unit& u, const char* x, const int* slots) {
    const int lane = threadIdx.x & 31;
    int from[BLOCK_ROWS / 8];
#pragma unroll
    for (int t = 0; t < BLOCK_ROWS / 8; ++t)
      from[t] = token_offset(slots + u.position, u.rows, t, lane);
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      wait_barrier(ring.empty(), ring.parity ^ 1);
#pragma unroll
      for (int t = 0; t < BLOCK_ROWS / 8; ++t)
        if (from[t] >= 0)
          copy16_shared(ring.stage + t * kTokenBytes + token_write_offset(lane),
                        x + from[t] + s * (kBlockK * 2));
      commit_copies();
      ring.advance();
      if (behind < kLate) {
        ++behind;
      } else {
        wait_copies<kLate>();
        show();
      }
    }
  }
  __device__ __forceinline__ void finish() {
    wait_copies<0>();
    for (; behind > 0; --behind) show();
  }
  __device__ __forceinline__ void show() {
    fence_for_mma();
    __syncwarp();
    arrive_once(late.full);
    late.advance();
  }
};

// ---- the warps that multiply ---------------------------------------------------------------

struct Multiplier {
  Ring ring;
  u32 done;  // the empty barrier of the stage before, whose rows MMAs may still be reading

  // acc = the MMA chain of `steps` stages, of this warp's run.
  template <int NT>
  __device__ __forceinline__ void chain(int steps, float4 (&acc)[4][NT]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 words = kRows + warp * 512 + lane * 16;
    const u32 scales = kRows + kWords + warp * kScaleBytes + (lane >> 2) * 16;
    fill<NT>(acc, 0.0f);
    keep<NT>(acc);
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_barrier(ring.full, ring.parity);
      multiply_block_async<NT, kWarps * 512>(ring.stage + words, ring.stage + scales,
                                             describe_rows(ring.stage), acc);
      arrive_once(done);
      done = ring.empty();
      ring.advance();
    }
    settle<NT>(acc);
  }

  // Warps pair and kPairsAtOnce + pair hold gate and up of the same columns.
  template <int NT>
  __device__ __forceinline__ void multiply(const Unit& u, u16* act) {
    const int warp = threadIdx.x >> 5, half = warp / kPairsAtOnce, pair = warp % kPairsAtOnce;
    const u32 totals = ring.base + kRing + pair * (2 * kTotal);
    const u32 total = totals + half * (4 * NT * 512);
    auto sync_pair = [=] { asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory"); };
#pragma unroll 1
    for (int q = 0; q < SPLIT; ++q) {
      float4 part[4][NT];
      fill<NT>(part, -0.0f);  // plus anything is that, to the sign of zero
#pragma unroll 1
      for (int c = q * CHUNKS; c < (q + 1) * CHUNKS; ++c) {
        float4 acc[4][NT];
        chain<NT>(chunk_begin(c + 1) - chunk_begin(c), acc);
#pragma unroll
        for (int d = 0; d < 4; ++d)
#pragma unroll
          for (int t = 0; t < NT; ++t) part[d][t] = add(part[d][t], acc[d][t]);
      }
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
};

// Arguments as moe_w13's.
// grid: as many blocks as multiprocessors; 8 warps multiply, 2 of the other 4 copy
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_w13_group(const char* x, const char* packed, const char* scales, const int4* items,
                  const int* item_count, const int* slots, u16* act) {
  const int warp = threadIdx.x >> 5;
  const Ring ring;
  ring.make();
  wait_for_previous();
  let_next_start();
  // Read anew each time: a register more would spill.
  auto more = [=](int turn) { return Unit::at(turn) < item_count[0] * kUnits; };
  if (warp < kWarps) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Multiplier with{ring, ring.nothing()};
    for (int turn = 0; more(turn); ++turn) {
      const Unit u(items, turn);
      switch ((u.rows + 7) / 8) {
        case 1: with.multiply<1>(u, act); break;
        case 2: with.multiply<2>(u, act); break;
#if BLOCK_ROWS >= 32
        case 3: with.multiply<3>(u, act); break;
        case 4: with.multiply<4>(u, act); break;
#endif
      }
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kWarps && threadIdx.x % 32 == 0) {
      Ring to = ring;
      for (int turn = 0; more(turn); ++turn) copy_weights(to, Unit(items, turn), packed, scales);
    } else if (warp == kWarps + 1) {
      RowCopier copier;
      for (int turn = 0; more(turn); ++turn) copier.copy(Unit(items, turn), x, slots);
      copier.finish();
    }
  }
}
#endif
