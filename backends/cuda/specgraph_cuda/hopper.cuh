// What the kernels for Hopper share: barriers in shared memory, tensor copies, pairs of bfloat16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ u32 address_of(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// A box of a tensor into shared memory, 128-byte rows swizzled; `hint` says how long L2 should keep it.
__device__ __forceinline__ void load(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(hint)
        : "memory");
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float unpacked(u32 both, int place) {
    return __uint_as_float(place ? both & 0xffff0000u : both << 16);
}

__device__ __forceinline__ float rounded(float value) { return unpacked(packed(value, 0.0f), 0); }

// silu(gate) * up of two columns, each product rounded before, as if it had been stored.
__device__ __forceinline__ u32 gated(float gate0, float gate1, float up0, float up1) {
    const u32 gate = packed(gate0, gate1), up = packed(up0, up1);
    float result[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float g = unpacked(gate, i);
        result[i] = __fdividef(g, 1.0f + __expf(-g)) * unpacked(up, i);
    }
    return packed(result[0], result[1]);
}
