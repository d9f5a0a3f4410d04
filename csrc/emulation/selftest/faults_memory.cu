// Memory faults: each kernel in a sound version and one with a single mistake, whose line carries its name as a comment.
#include "faults.cuh"

namespace pk::selftest {
namespace {

using namespace device;

PK_DEVICE float* floats(unsigned char* p) { return reinterpret_cast<float*>(p); }

template <bool Faulty>
__global__ void missing_barrier(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  floats(smem)[threadIdx.x] = in[threadIdx.x];
  if constexpr (!Faulty) __syncthreads();
  out[threadIdx.x] = floats(smem)[127 - threadIdx.x];  // missing_barrier
}

template <bool Faulty>
__global__ void missing_syncwarp(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const int lane = threadIdx.x;
  store_shared_128(shared_address(smem) + lane * 16, load_global_128(in + lane * 4));
  if constexpr (!Faulty) __syncwarp();
  uint32_t r[4];
  ldmatrix(r, shared_address(smem) + (lane ^ 1) * 16);  // missing_syncwarp
  out[lane] = __uint_as_float(r[0]);
}

// Half of the lanes synchronise; the other half's stores are read all the same.
template <bool Faulty>
__global__ void partial_syncwarp(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const int lane = threadIdx.x;
  floats(smem)[lane] = in[lane];
  if (Faulty && lane < 16) __syncwarp(0xffffu);
  if (!Faulty) __syncwarp();
  if (lane < 16) out[lane] = floats(smem)[lane + 16];  // partial_syncwarp
}

template <bool Faulty>
__global__ void missing_async_wait(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  cp_async_16(shared_address(smem) + threadIdx.x * 16, in + threadIdx.x * 4);
  cp_async_commit();
  if constexpr (!Faulty) cp_async_wait<0>();
  __syncthreads();
  const uint4 v = load_shared_128(shared_address(smem) + (threadIdx.x ^ 32) * 16);  // missing_async_wait
  out[threadIdx.x] = __uint_as_float(v.x);
  cp_async_wait<0>();
}

// Waits for one group too few: the newest is still in flight.
template <bool Faulty>
__global__ void one_group_too_few(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t mine = shared_address(smem) + threadIdx.x * 16;
  for (int stage = 0; stage < 2; stage++) {
    cp_async_16(mine + stage * 1024, in + threadIdx.x * 4 + stage * 256);
    cp_async_commit();
  }
  if constexpr (Faulty)
    cp_async_wait<1>();
  else
    cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = floats(smem)[threadIdx.x * 4] + floats(smem)[256 + threadIdx.x * 4];  // one_group_too_few
  cp_async_wait<0>();
}

template <bool Faulty>
__global__ void stage_refilled_early(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const uint32_t mine = shared_address(smem) + threadIdx.x * 16;
  cp_async_16(mine, in + threadIdx.x * 4);
  cp_async_commit();
  float sum = 0.f;
  for (int i = 0; i < 4; i++) {
    if (i + 1 < 4) cp_async_16(mine + (i + 1) % 2 * 1024, in + threadIdx.x * 4 + (i + 1) * 256);  // stage_refilled_early
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    sum += floats(smem)[i % 2 * 256 + (threadIdx.x * 4 + 128) % 256];
    if constexpr (!Faulty) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

template <bool Faulty>
__global__ void global_read_past_end(float* out, const float* in) {
  out[threadIdx.x] = in[kFloats - 64 + threadIdx.x + (Faulty ? 1 : 0)];  // global_read_past_end
}
template <bool Faulty>
__global__ void global_read_before(float* out, const float* in) {
  out[threadIdx.x] = in[static_cast<int>(threadIdx.x) - (Faulty ? 1 : 0)];  // global_read_before
}
template <bool Faulty>
__global__ void global_write_past_end(float* out, const float*) {
  out[kFloats - 64 + threadIdx.x + (Faulty ? 1 : 0)] = 1.f;  // global_write_past_end
}
template <bool Faulty>
__global__ void global_write_before(float* out, const float*) {
  out[static_cast<int>(threadIdx.x) - (Faulty ? 1 : 0)] = 1.f;  // global_write_before
}
template <bool Faulty>
__global__ void cp_async_past_end(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  const int row = kFloats / 4 - 64 + threadIdx.x + (Faulty ? 1 : 0);
  cp_async_16(shared_address(smem) + threadIdx.x * 16, in + row * 4);  // cp_async_past_end
  cp_async_commit();
  cp_async_wait<0>();
  if constexpr (!Faulty) out[threadIdx.x] = floats(smem)[threadIdx.x * 4];
}
template <bool Faulty>
__global__ void atomic_past_end(float* out, const float*) {
  atomicAdd(out + kFloats - (Faulty ? 0 : 1), 1.f);  // atomic_past_end
}
template <bool Faulty>
__global__ void shared_read_past_end(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  floats(smem)[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = floats(smem)[threadIdx.x + (Faulty ? 1 : 0)];  // shared_read_past_end
}
template <bool Faulty>
__global__ void shared_write_before(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  floats(smem)[static_cast<int>(threadIdx.x) - (Faulty ? 1 : 0)] = in[threadIdx.x];  // shared_write_before
  out[threadIdx.x] = 0.f;
}
template <bool Faulty>
__global__ void ldmatrix_past_end(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  store_shared_128(shared_address(smem) + threadIdx.x * 16, load_global_128(in + threadIdx.x * 4));
  __syncwarp();
  uint32_t r[4];
  ldmatrix(r, shared_address(smem) + threadIdx.x * 16 + (Faulty ? 16 : 0));  // ldmatrix_past_end
  out[threadIdx.x] = __uint_as_float(r[0]);
}
template <bool Faulty>
__global__ void write_to_input(float* out, const float* in) {
  if (threadIdx.x == 0) (Faulty ? const_cast<float*>(in) : out)[3] = 1.f;  // write_to_input
}
template <bool Faulty>
__global__ void misaligned_load(float* out, const float* in) {
  const uint4 v = load_global_128(in + threadIdx.x * 4 + (Faulty ? 1 : 0));  // misaligned_load
  out[threadIdx.x] = __uint_as_float(v.x);
}

template <bool Faulty>
__global__ void uninitialised_dynamic(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  if (!Faulty || threadIdx.x != 17) floats(smem)[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = floats(smem)[63 - threadIdx.x];  // uninitialised_dynamic
}
template <bool Faulty>
__global__ void uninitialised_static(float* out, const float* in) {
  __shared__ float row[64];
  if (!Faulty || threadIdx.x != 17) row[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = row[63 - threadIdx.x];  // uninitialised_static
}
template <bool Faulty>
__global__ void uninitialised_tile(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  if (!Faulty || threadIdx.x != 5) store_shared_128(shared_address(smem) + threadIdx.x * 16, load_global_128(in + threadIdx.x * 4));
  __syncwarp();
  uint32_t r[4];
  ldmatrix(r, shared_address(smem) + threadIdx.x * 16);  // uninitialised_tile
  out[threadIdx.x] = __uint_as_float(r[0]);
}

template <bool Faulty>
__global__ void race_in_static(float* out, const float* in) {
  __shared__ float row[64];
  row[threadIdx.x] = in[threadIdx.x];
  if constexpr (!Faulty) __syncthreads();
  out[threadIdx.x] = row[threadIdx.x ^ 32];  // race_in_static
}
template <bool Faulty>
__global__ void counter_without_atomic(float* out, const float*) {
  __shared__ int hits;
  if (threadIdx.x == 0) hits = 0;
  __syncthreads();
  if constexpr (Faulty)
    hits = hits + 1;  // counter_without_atomic
  else
    atomicAdd(&hits, 1);
  __syncthreads();
  out[threadIdx.x] = static_cast<float>(hits);
}
template <bool Faulty>
__global__ void counter_read_early(float* out, const float*) {
  __shared__ int hits;
  if (threadIdx.x == 0) hits = 0;
  __syncthreads();
  atomicAdd(&hits, 1);
  if constexpr (!Faulty) __syncthreads();
  if (threadIdx.x == 0) out[0] = static_cast<float>(hits);  // counter_read_early
}
// Bytes of one word belong to different threads: no race; the faulty version shares a byte.
template <bool Faulty>
__global__ void bytes_of_a_word(float* out, const float*) {
  PK_DYNAMIC_SHARED(smem);
  const int mine = Faulty ? static_cast<int>(threadIdx.x) / 2 : static_cast<int>(threadIdx.x);
  smem[mine] = static_cast<unsigned char>(mine);  // bytes_of_a_word
  __syncthreads();
  out[threadIdx.x] = smem[threadIdx.x / 2];
}
template <bool Faulty>
__global__ void copy_never_awaited(float* out, const float* in) {
  PK_DYNAMIC_SHARED(smem);
  cp_async_16(shared_address(smem) + threadIdx.x * 16, in + threadIdx.x * 4);  // copy_never_awaited
  cp_async_commit();
  if constexpr (!Faulty) cp_async_wait<0>();
  out[threadIdx.x] = 0.f;
}

}  // namespace

const Entry kSharedMemoryFaults[] = {
    PK_SELFTEST(missing_barrier, 128, 512),     PK_SELFTEST(missing_syncwarp, 32, 512),
    PK_SELFTEST(partial_syncwarp, 32, 128),     PK_SELFTEST(missing_async_wait, 64, 1024),
    PK_SELFTEST(one_group_too_few, 64, 2048),   PK_SELFTEST(stage_refilled_early, 64, 2048),
    PK_SELFTEST(global_read_past_end, 64, 0),   PK_SELFTEST(global_read_before, 64, 0),
    PK_SELFTEST(global_write_past_end, 64, 0),  PK_SELFTEST(global_write_before, 64, 0),
    PK_SELFTEST(cp_async_past_end, 64, 1024),   PK_SELFTEST(atomic_past_end, 64, 0),
    PK_SELFTEST(shared_read_past_end, 64, 256), PK_SELFTEST(shared_write_before, 64, 256),
    PK_SELFTEST(ldmatrix_past_end, 32, 512),    PK_SELFTEST(write_to_input, 32, 0),
    PK_SELFTEST(misaligned_load, 32, 0),        PK_SELFTEST(uninitialised_dynamic, 64, 256),
    PK_SELFTEST(uninitialised_static, 64, 0),   PK_SELFTEST(uninitialised_tile, 32, 512),
    PK_SELFTEST(race_in_static, 64, 0),         PK_SELFTEST(counter_without_atomic, 64, 0),
    PK_SELFTEST(counter_read_early, 64, 0),     PK_SELFTEST(bytes_of_a_word, 64, 64),
    PK_SELFTEST(copy_never_awaited, 64, 1024),  {},
};

}  // namespace pk::selftest
