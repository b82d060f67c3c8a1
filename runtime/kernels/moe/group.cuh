// What the forms for many rows an expert share on sm_90a.
//
// A block stays on its multiprocessor and goes through units of work. Eight warps, in two
// warpgroups, hold a run of 64 columns each and multiply. Warps of a third one copy, ahead of the
// others by a ring of stages, from one unit into the next: weights lie in whole lines and come by the
// bulk copy engine, rows come 16 bytes a thread. No block waits for another.
//
// Compile-time, besides marlin_stream's: GROUP, BLOCK_ROWS, STAGES.
#pragma once
#include "moe/marlin_stream.cuh"

#ifdef WARPGROUP_MMA
constexpr int kWarps = 8;  // that multiply
constexpr int kThreads = (kWarps + 4) * 32;

// A stage is 32 k: rows, words (two k-tiles), scales.
constexpr int kRows = BLOCK_ROWS * kBlockK * 2;
constexpr int kWords = kWarps * kWeightBytes;
constexpr int kStage = kRows + kWarps * kBlockBytes;
constexpr int kRing = STAGES * kStage;
constexpr int kScratch = BLOCK_ROWS * 256;  // a warp's 64 columns x rows, fp32
constexpr int kBarriers = kRing + kWarps * kScratch;  // full and empty ones, and one for nothing
constexpr int kLate = 5;  // stages after which rows are waited for
static_assert(STAGES > kLate + 1, "the ring must turn");

extern __shared__ __align__(1024) char smem[];  // ring, scratch, barriers

struct Ring {
  u32 base, stage, full, parity;

  __device__ __forceinline__ Ring()
      : base(smem_addr(smem)), stage(base), full(base + kBarriers), parity(0) {}
  __device__ __forceinline__ u32 empty() const { return full + STAGES * 8; }
  __device__ __forceinline__ u32 nothing() const { return base + kBarriers + STAGES * 16; }
  __device__ __forceinline__ u32 scratch(int warp) const { return base + kRing + warp * kScratch; }
  __device__ __forceinline__ void advance() {
    stage += kStage, full += 8;
    if (full == base + kBarriers + STAGES * 8) stage = base, full = base + kBarriers, parity ^= 1;
  }
  // By every thread of the block, before anything else; `pieces` threads copy weights.
  __device__ __forceinline__ void make(int pieces) const {
    if (threadIdx.x < STAGES) {
      make_barrier(full + threadIdx.x * 8, pieces + 32);
      make_barrier(empty() + threadIdx.x * 8, kWarps * 32);
      if (threadIdx.x == 0) make_barrier(nothing(), kWarps * 32);
      show_barriers();
    }
    __syncthreads();
  }
};

// Items come largest first: blocks take units in turn, there and back, so that all get as much.
__device__ __forceinline__ int unit_at(int turn) {
  return turn * gridDim.x + (turn & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// How the 168 registers a thread of three warpgroups are shared out.
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}

// STEPS stages of weights, by one thread: `runs` runs of 64 columns, the first at place `first` of
// the stage's eight. ROW bytes are 16 k of words; of scales a group is a quarter of that.
template <int STEPS, int ROW>
__device__ __forceinline__ void copy_weights(Ring& ring, const char* words, const char* scales,
                                             int first, int runs) {
#pragma unroll 1
  for (int s = 0; s < STEPS; ++s, words += 2 * ROW, ring.advance()) {
    const u32 to = ring.stage + kRows + first * 512;
    wait_barrier(ring.empty(), ring.parity ^ 1);
    arrive_expecting(ring.full, runs * kBlockBytes);
    copy_bulk_once(to, words, runs * 512, ring.full);
    copy_bulk_once(to + kWarps * 512, words + ROW, runs * 512, ring.full);
    copy_bulk_once(ring.stage + kRows + kWords + first * kScaleBytes,
                   scales + s * kBlockK / GROUP * (ROW / 4), runs * kScaleBytes, ring.full);
  }
}

// By one warp. The copies are waited for, and shown to the MMAs, kLate stages later.
struct RowCopier {
  Ring ring, late;
  int behind = 0;

  // STEPS stages; `from` says where in x this lane's 16 bytes of each tile of rows begin, negative
  // past the last row.
  template <int STEPS>
  __device__ __forceinline__ void copy(const char* x, const int (&from)[BLOCK_ROWS / 8]) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int s = 0; s < STEPS; ++s) {
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
    arrive(late.full);
    late.advance();
  }
};

struct Multiplier {
  Ring ring;
  u32 done;  // the empty barrier of the stage before, whose rows MMAs may still be reading

  // sum += the MMA chain of `steps` stages, of this warp's run.
  template <int NT>
  __device__ __forceinline__ void add_chain(int steps, float4 (&sum)[4][NT]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 words = kRows + warp * 512 + lane * 16;
    const u32 scales = kRows + kWords + warp * kScaleBytes + (lane >> 2) * 16;
    float4 acc[4][NT];
    fill<NT>(acc, 0.0f);
    keep<NT>(acc);
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_barrier(ring.full, ring.parity);
      multiply_block_async<NT, kWarps * 512>(ring.stage + words, ring.stage + scales,
                                             describe_rows(ring.stage), acc);
      arrive(done);
      done = ring.empty();
      ring.advance();
    }
    settle<NT>(acc);
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int t = 0; t < NT; ++t) sum[d][t] = add(sum[d][t], acc[d][t]);
  }
};
// What a sum starts from: plus anything it is that, to the sign of zero.
constexpr float kNothing = -0.0f;
#endif
