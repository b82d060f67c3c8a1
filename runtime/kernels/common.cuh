// Device helpers shared by every kernel. No toolkit header is needed: NVRTC's built-ins and PTX do.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 smem_addr(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Programmatic dependent launch: a kernel may start while the one before it is still finishing.
// Nothing the kernel before wrote may be read above wait_for_previous(). Every kernel of this
// package calls it, so the wait is transitive along the stream.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- asynchronous copies of 16 bytes, global to shared -------------------------------------

// Weights are read once a step: let them leave the L2 first, so that activations stay. The number
// is what createpolicy.fractional.L2::evict_first.b64 gives for 1.0; a constant needs no registers.
constexpr u64 kEvictFirst = 0x12f0000000000000ull;
__device__ __forceinline__ void copy16_once(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(kEvictFirst)
               : "memory");
}
__device__ __forceinline__ void copy16_shared(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// Past the L1, for what no other warp of this multiprocessor reads soon.
__device__ __forceinline__ void copy16_l2(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void wait_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- shared memory -------------------------------------------------------------------------

__device__ __forceinline__ u32 load_shared4(u32 addr) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared16(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared4(u32 addr, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}
__device__ __forceinline__ float2 load_shared_f2(u32 addr) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared_f4(u32 addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
__device__ __forceinline__ int4 load_shared_i4(u32 addr) {
  int4 v;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_i4(u32 addr, int4 v) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_f4(u32 addr, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

// ---- clusters ------------------------------------------------------------------------------

// The block's writes to shared memory are ordered by its own barrier; one warp then releases them
// to the cluster. (A release by every thread is a full memory barrier each.)
__device__ __forceinline__ void cluster_sync() {
  __syncthreads();
  if (threadIdx.x < 32)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Holds a block until the others of its cluster have read its shared memory. Orders no writes.
__device__ __forceinline__ void cluster_wait_for_readers() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::
                   : "memory");
}
// The same shared address in block `rank` of this cluster.
__device__ __forceinline__ u32 load_cluster4(u32 addr, u32 rank) {
  u32 there, v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_cluster_f4(u32 addr, u32 rank) {
  u32 there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}

// ---- bfloat16 ------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// ---- tensor cores --------------------------------------------------------------------------

// Transposes an 8 x 8 matrix of 16-bit values held in fragment order (row lane/4, columns
// 2 (lane%4) and the next).
__device__ __forceinline__ u32 transpose8x8(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
// Four 8 x 8 matrices; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrices(u32 addr, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
// The same, each transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 addr, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
// Stores four 8 x 8 matrices transposed; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void store_matrices_transposed(u32 addr, const u32 (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(r[0]),
      "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
// c[16 x 8] += a[16 x 16] b[16 x 8], bf16 operands, fp32 accumulators.
__device__ __forceinline__ void mma(float4& c, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- warpgroup MMA: sm_90a alone -----------------------------------------------------------

// Four warps, each with 16 rows of A in registers in mma's order, times one B in shared memory. The
// sums lie as mma's do and, measured, have its bits.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARPGROUP_MMA 1

// Rows in shared memory: lines of 64 bytes (32 k) in tiles of 8 rows, 512 bytes. The next 16 k are
// 32 bytes, which is 2 here. The address is the same in all lanes.
__device__ __forceinline__ u64 describe_rows(u32 addr) {
  return (u64)(__shfl_sync(~0u, addr, 0) >> 4) | (u64)(512 >> 4) << 32 | 2ull << 62;
}
// What ordinary stores and copies wrote to shared memory, before a barrier, for MMAs after it.
__device__ __forceinline__ void fence_for_mma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_mmas() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_mmas() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_mmas() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define SUMS(c) "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
#define SUMS1 "%0, %1, %2, %3"
#define SUMS2 SUMS1 ", %4, %5, %6, %7"
#define SUMS3 SUMS2 ", %8, %9, %10, %11"
#define SUMS4 SUMS3 ", %12, %13, %14, %15"
#define SUMS5 SUMS4 ", %16, %17, %18, %19"
#define SUMS6 SUMS5 ", %20, %21, %22, %23"
#define SUMS7 SUMS6 ", %24, %25, %26, %27"
#define SUMS8 SUMS7 ", %28, %29, %30, %31"
#define SUMS9 SUMS8 ", %32, %33, %34, %35"
#define SUMS10 SUMS9 ", %36, %37, %38, %39"
#define SUMS11 SUMS10 ", %40, %41, %42, %43"
#define SUMS12 SUMS11 ", %44, %45, %46, %47"
#define OUT1(c) SUMS(c[0])
#define OUT2(c) OUT1(c), SUMS(c[1])
#define OUT3(c) OUT2(c), SUMS(c[2])
#define OUT4(c) OUT3(c), SUMS(c[3])
#define OUT5(c) OUT4(c), SUMS(c[4])
#define OUT6(c) OUT5(c), SUMS(c[5])
#define OUT7(c) OUT6(c), SUMS(c[6])
#define OUT8(c) OUT7(c), SUMS(c[7])
#define OUT9(c) OUT8(c), SUMS(c[8])
#define OUT10(c) OUT9(c), SUMS(c[9])
#define OUT11(c) OUT10(c), SUMS(c[10])
#define OUT12(c) OUT11(c), SUMS(c[11])
// c[NT] += a b, NT tiles of 8 rows; operand numbers follow the 4 NT sums'.
#define MMA_ASYNC(NT, N, A0, A1, A2, A3, B)                                              \
  __device__ __forceinline__ void mma_async(float4 (&c)[NT], const u32 (&a)[4], u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS##NT   \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"     \
                 : OUT##NT(c)                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                  \
  }
MMA_ASYNC(1, 8, 4, 5, 6, 7, 8)
MMA_ASYNC(2, 16, 8, 9, 10, 11, 12)
MMA_ASYNC(3, 24, 12, 13, 14, 15, 16)
MMA_ASYNC(4, 32, 16, 17, 18, 19, 20)
MMA_ASYNC(5, 40, 20, 21, 22, 23, 24)
MMA_ASYNC(6, 48, 24, 25, 26, 27, 28)
MMA_ASYNC(7, 56, 28, 29, 30, 31, 32)
MMA_ASYNC(8, 64, 32, 33, 34, 35, 36)
MMA_ASYNC(9, 72, 36, 37, 38, 39, 40)
MMA_ASYNC(10, 80, 40, 41, 42, 43, 44)
MMA_ASYNC(11, 88, 44, 45, 46, 47, 48)
MMA_ASYNC(12, 96, 48, 49, 50, 51, 52)
// Sums are in these registers here: the compiler may not read them earlier, nor know their values.
template <int NT, int SETS>
__device__ __forceinline__ void keep(float4 (&acc)[SETS][NT]) {
#pragma unroll
  for (int d = 0; d < SETS; ++d)
#pragma unroll
    for (int t = 0; t < NT; ++t) asm volatile("" : SUMS(acc[d][t])::"memory");
}
template <int NT, int SETS>
__device__ __forceinline__ void settle(float4 (&acc)[SETS][NT]) {
  wait_mmas<0>();
  keep(acc);
}

// ---- barriers in shared memory, and copies that report to them ------------------------------

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when this thread's copies so far are done. Says nothing of its ordinary stores.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase also waits for so many bytes.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void copy_bulk_once(u32 dst, const void* src, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}
#endif
