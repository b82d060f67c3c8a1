// What the forms for dozens of rows an expert share on sm_90a: a weight is made bf16 once for all of
// an item's rows, up to BLOCK_ROWS of them.
//
// A block stays on its multiprocessor and goes through units of work. Two warpgroups multiply: each
// holds two runs of 64 columns, a run one MMA of 64 columns x the item's rows, its A in registers,
// its B the rows in shared memory. The four warps of a third one copy, ahead of the others by a ring
// of stages, from one unit into the next: each has one of the block's four runs, and every fourth
// tile of rows, 16 bytes a lane. What a unit is they leave in a table, so that those who multiply read
// no list. No block waits for another.
//
// Which lane multiplies which word: an MMA's warp w takes 16 columns of the run, one word a lane, and
// a lane's words of the run's four fragments lie beside each other. Were all lanes of a warp to take
// fragment w, four would meet in each bank. So lane (a, b) = (lane / 4, lane % 4) takes fragment
// (w + a / 2) % 4 instead: no two meet, and rows of the MMA stand for columns in another order, which
// load_piece undoes where sums leave.
//
// Compile-time, besides marlin_stream's: GROUP, BLOCK_ROWS, STAGES.
#pragma once
#include "moe/marlin_stream.cuh"

#ifdef WARPGROUP_MMA
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kMultipliers = kGroups * 128, kCopiers = 128;  // threads
constexpr int kThreads = kMultipliers + kCopiers;
constexpr int kRuns = 2 * kGroups;  // warpgroup g has those at places g and kGroups + g
static_assert(BLOCK_ROWS % 32 == 0, "a warp that copies has every fourth tile of 8 rows");

// A stage is 32 k: rows, words (two k-tiles), scales.
constexpr int kRows = BLOCK_ROWS * kBlockK * 2;
constexpr int kTile = kRuns * 512;
constexpr int kWords = 2 * kTile;
constexpr int kStage = kRows + kRuns * kBlockBytes;
constexpr int kBarriers = 512;  // bytes, before the ring: a full and an empty one a stage, one more
constexpr int kAfterRing = kBarriers + STAGES * kStage;
static_assert((2 * STAGES + 1) * 8 <= kBarriers, "barriers must fit");

extern __shared__ __align__(1024) char smem[];  // barriers, ring, scratches, tables

// A barrier that nobody waits for.
__device__ __forceinline__ u32 nothing() { return smem_addr(smem) + STAGES * 16; }

struct Ring {
  u32 stage, full, parity;

  __device__ __forceinline__ Ring()
      : stage(smem_addr(smem) + kBarriers), full(smem_addr(smem)), parity(0) {}
  __device__ __forceinline__ u32 empty() const { return full + STAGES * 8; }
  __device__ __forceinline__ void advance() {
    stage += kStage, full += 8;
    if (full == smem_addr(smem) + STAGES * 8)
      stage = smem_addr(smem) + kBarriers, full = smem_addr(smem), parity ^= 1;
  }
  // By every thread of the block, before anything else.
  __device__ __forceinline__ static void make() {
    const u32 full = smem_addr(smem) + threadIdx.x * 8;
    if (threadIdx.x < STAGES) {
      make_barrier(full, kCopiers);
      make_barrier(full + STAGES * 8, kMultipliers);
      if (threadIdx.x == 0) make_barrier(nothing(), kMultipliers);
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

// By each warp that copies.
struct Copier {
  Ring ring;
  // The stage and lane * 16, counted up beside it: given the sum of a uniform and a lane's register, and
  // a cache hint, the assembler writes a copy whose uniform register is not the right one.
  u32 mine = ring.stage + (threadIdx.x & 31) * 16;

  static constexpr int kTiles = BLOCK_ROWS / 32;
  // Which run of the stage's, and which of every four tiles of rows.
  __device__ __forceinline__ static int place() { return (threadIdx.x >> 5) & 3; }
  // STEPS stages. This lane's 16 bytes of its tile i begin at x + rows.offset(i), if rows.has(i). Of the
  // run at this warp's place, if it is `there`, `words` and `scales` are the first; ROW bytes are 16 k
  // of words, a quarter of that a group of scales.
  template <int STEPS, int ROW, class Rows>
  __device__ __forceinline__ void copy(const char* x, const Rows& rows, const char* words,
                                       const char* scales, bool there) {
    const int lane = threadIdx.x & 31;
    const u32 row = place() * kTokenBytes + token_write_offset(lane) - lane * 16;
    const u32 word = kRows + place() * 512;
    const u32 scale = kRows + kWords + place() * kScaleBytes;
    words += lane * 16, scales += lane * 16;
#pragma unroll 1
    for (int s = 0; s < STEPS; ++s, x += kBlockK * 2, words += 2 * ROW) {
      wait_barrier(ring.empty(), ring.parity ^ 1);
      if (there) {
        copy16_once(mine + word, words);
        copy16_once(mine + word + kTile, words + ROW);
        if (lane < 8) copy16_once(mine + scale, scales + s * kBlockK / GROUP * (ROW / 4));
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        if (rows.has(i)) copy16_l2(mine + row + i * (4 * kTokenBytes), x + rows.offset(i));
      arrive_after_copies(ring.full);
      ring.advance();
      mine = ring.full == smem_addr(smem) ? smem_addr(smem) + kBarriers + lane * 16 : mine + kStage;
    }
  }
  // After the last unit: a stage without contents.
  __device__ __forceinline__ void finish() {
    wait_all_copies();
    wait_barrier(ring.empty(), ring.parity ^ 1);
    arrive(ring.full);
  }
};

// What a unit is: lies in a table at its turn's place, put there before its first stage is full.
struct Unit {
  int position, rows;  // the item's
  int first;           // run of columns
  int tiles;           // of 8 rows to multiply, never more than of the unit before; 0: there is no unit

  __device__ __forceinline__ static Unit load(u32 at) {
    const int4 v = load_shared_i4(at);
    return {v.x, v.y, v.z, v.w};
  }
  __device__ __forceinline__ void store(u32 at) const {
    store_shared_i4(at, make_int4(position, rows, first, tiles));
  }
};
// Copiers are at most STAGES stages ahead: so many tables, for units of so many stages or more, are
// enough for none to be written over before its unit's sums have left.
__device__ constexpr int tables_for(int steps) { return STAGES / steps + 2; }

struct Multiplier {
  Ring ring;
  u32 done = nothing();  // the empty barrier of the stage before, whose rows MMAs may be reading
  u32 words, scales;     // this lane's of its first run, in a stage

  __device__ __forceinline__ Multiplier() {
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 7;
    const int fragment = ((threadIdx.x >> 5) + (lane >> 3)) & 3;
    words = kRows + group * 512 + lane * 16 + fragment * 4;
    scales = kRows + kWords + group * kScaleBytes + (lane >> 2) * 16 + fragment * 4;
  }
  // Goes through units: work.multiply<NT>(this, table) takes one of NT tiles. Each NT has a loop
  // of its own, the largest first: with one loop and a branch for each the assembler runs out of
  // registers.
  template <int TABLES, int NT = BLOCK_ROWS / 8, class Work>
  __device__ __forceinline__ void run(const Work& work, u32 tables, int table_bytes, int turn = 0) {
    for (;; ++turn) {
      wait_barrier(ring.full, ring.parity);
      const u32 table = tables + turn % TABLES * table_bytes;
      if (Unit::load(table).tiles < NT) break;
      work.template multiply<NT>(*this, table);
    }
    if constexpr (NT > 1) run<TABLES, NT - 1>(work, tables, table_bytes, turn);
  }
  // sum += the MMA chain of `steps` stages, of both runs.
  template <int NT>
  __device__ __forceinline__ void add_chain(int steps, float4 (&sum)[2][NT]) {
    float4 acc[2][NT];
    fill(acc, 0.0f);
    keep(acc);
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait_barrier(ring.full, ring.parity);
      const u32 word = ring.stage + words;
      const u32 w[2][2] = {{load_shared4(word), load_shared4(word + kGroups * 512)},
                           {load_shared4(word + kTile), load_shared4(word + kTile + kGroups * 512)}};
      const ScalePair s[2] = {
          ScalePair(load_shared4(ring.stage + scales)),
          ScalePair(load_shared4(ring.stage + scales + kGroups * kScaleBytes))};
      const u64 rows = describe_rows(ring.stage);
      fence_for_mma();  // rows came by ordinary copies
#pragma unroll
      for (int kt = 0; kt < 2; ++kt)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          u32 a[4];
          wait_mmas<2>();  // those before the last two are through with their registers
          fragment(w[kt][r], s[r], a);
          begin_mmas();
          mma_async(acc[r], a, rows + 2 * kt);
          commit_mmas();
          if (kt == 1 && r == 0) arrive(done);
        }
      done = ring.empty();
      ring.advance();
    }
    settle(acc);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < NT; ++t) sum[r][t] = add(sum[r][t], acc[r][t]);
  }
};
// What a sum starts from: plus anything it is that, to the sign of zero.
constexpr float kNothing = -0.0f;

__device__ __forceinline__ void sync_group() {
  asm volatile("bar.sync %0, 128;" ::"r"((threadIdx.x >> 7) + 1) : "memory");
}

// ---- 64 columns of a run x rows, bf16, turned in a warpgroup's shared memory so that rows leave in
// whole 128-byte lines

// value(t, low, high) gives this lane's pairs of rows of tile t, for MMA rows a and a + 8. A row's
// 16-byte piece 2 w + h holds warp w's eight MMA rows of that half.
template <int NT, class Value>
__device__ __forceinline__ void leave_run(u32 scratch, Value value) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row = (lane >> 4) * 8 + (lane & 7), piece = 2 * warp + ((lane >> 3) & 1);
  const u32 at = scratch + row * 128 + ((piece ^ (lane & 7)) << 4);
#pragma unroll
  for (int t = 0; t < NT; t += 2) {
    u32 r[4] = {};
    value(t, r[0], r[1]);
    if (t + 1 < NT) value(t + 1, r[2], r[3]);
    store_matrices_transposed(at + t * 1024, r);
  }
}
// Columns 8 (lane % 8) and on of row `row`, the same in all eight lanes. By whole warps.
__device__ __forceinline__ uint4 load_piece(u32 scratch, int row) {
  const int lane = threadIdx.x & 31, piece = lane & 7;
  const uint4 v = load_shared16(scratch + row * 128 + ((piece ^ (row & 7)) << 4));
  // MMA rows 2 j and 2 j + 1 of warp w are of fragment (w + j) % 4.
  auto from = [=](u32 word, int j) {
    return __shfl_sync(~0u, word, (lane & 25) | ((piece - 2 * j) & 6));
  };
  return make_uint4(v.x, from(v.y, 1), from(v.z, 2), from(v.w, 3));
}
#endif
