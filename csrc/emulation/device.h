// What the facade (csrc/cuda/device) calls when a kernel is compiled by g++. Each call that can be misused takes the caller's
// position, so that a report names the kernel's line.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "site.h"

#pragma GCC visibility push(default)  // the runtime hides the rest
namespace emu {

struct ThreadContext {
  uint3 thread_index, block_index;
  dim3 block_dim, grid_dim;
  unsigned char* shared;  // dynamic shared memory
  size_t shared_bytes;
};
// The running thread's. Constant for a fiber, which never leaves its stack, so the compiler may keep it.
const ThreadContext& self() __attribute__((const));

// Barriers. Named barriers 1-15 count threads; barrier 0 is __syncthreads.
void sync_threads(Site where);
int sync_threads_reduce(int predicate, int kind, Site where);  // kind 0 count, 1 and, 2 or
void barrier_sync(int id, int threads, Site where);
void barrier_arrive(int id, int threads, Site where);
void sync_warp(unsigned mask, Site where);
void yield(Site where);  // a spin loop's turn: lets the other threads run

// Warp collectives.
enum class Shuffle : int { index, up, down, exclusive_or };
uint64_t shuffle(unsigned mask, uint64_t value, Shuffle kind, int operand, int width, Site where);
unsigned ballot(unsigned mask, bool predicate, Site where);
unsigned match_any(unsigned mask, uint64_t value, Site where);
enum class Reduce : int { add, min, max, min_signed, max_signed, bit_and, bit_or, bit_xor };
uint32_t reduce(unsigned mask, uint32_t value, Reduce kind, Site where);
unsigned active_mask();
bool elect_one(unsigned mask, Site where);

// Matrices in fragments (PTX ISA, "Matrix Fragments").
enum class Element : int { f16, bf16, e4m3, e5m2, s8 };
void ldmatrix(uint32_t* registers, int count, uint32_t address, bool transposed, Site where);
void stmatrix(uint32_t address, const uint32_t* registers, int count, bool transposed, Site where);
void mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, Element type, Site where);  // m16n8kK
void mma(int32_t* d, const uint32_t* a, const uint32_t* b, const int32_t* c, int k, Site where);            // m16n8k32 s8

// Shared memory by address: byte offsets into dynamic shared memory.
uint32_t shared_address(const void* p, Site where);

// Copies from global to shared memory. Bytes past `valid` are zero.
void async_copy(uint32_t to, const void* from, int bytes, int valid, Site where);
void async_commit();
void async_wait(int groups_left);
void async_arrive(uint32_t mbarrier, Site where);  // the mbarrier is arrived at when this thread's copies so far have landed

// Hopper: mbarriers.
void mbarrier_init(uint32_t mbarrier, int arrivals, Site where);
void mbarrier_invalidate(uint32_t mbarrier, Site where);
void mbarrier_arrive(uint32_t mbarrier, int count, int expected_bytes, Site where);
void mbarrier_expect(uint32_t mbarrier, int bytes, Site where);
bool mbarrier_test(uint32_t mbarrier, int parity, Site where);
void mbarrier_wait(uint32_t mbarrier, int parity, Site where);
void proxy_fence();

// Hopper: tensor maps and bulk copies.
enum class Swizzle : int { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };
struct alignas(64) TensorMap {
  const unsigned char* base;
  int element_bytes, rank;
  Swizzle swizzle;
  uint64_t size[5];
  uint64_t stride_bytes[5];  // of dimension i; stride_bytes[0] == element_bytes
  uint32_t box[5];
};
void tensor_load(uint32_t to, const TensorMap* map, const int* coordinates, int rank, uint32_t mbarrier, Site where);
void tensor_store(const TensorMap* map, const int* coordinates, int rank, uint32_t from, Site where);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t mbarrier, Site where);
void bulk_commit();
void bulk_wait(int groups_left);  // until the sources may be overwritten

// Hopper: warpgroup matrix multiply, m64 x n x k16. `a` null: A is in shared memory by descriptor.
struct WarpgroupMma {
  float* d;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  int n;
  Element type;
  bool accumulate, a_transposed, b_transposed;  // transposed: M- or N-major
};
void wgmma(const WarpgroupMma& operation, Site where);
void wgmma_fence(Site where);
void wgmma_commit(Site where);
void wgmma_wait(int groups_left, Site where);

void memory_fence();

// Atomics: one read-modify-write on shared or global memory.
uint32_t atomic_u32(void* p, uint32_t (*update)(uint32_t old, const void* operand), const void* operand, Site where);
uint64_t atomic_u64(void* p, uint64_t (*update)(uint64_t old, const void* operand), const void* operand, Site where);

}  // namespace emu
#pragma GCC visibility pop
