// A linear of up to 32 rows, by blocks of which each has some of its weight rows: two threads load tiles into a ring in
// shared memory, and four warps multiply each 16 rows of x. two_linears.cu says what the constants are.

constexpr int WARPS = 4;                                               // of a group, each a quarter of the input columns
constexpr int GROUPS = (ROWS + 15) / 16, GROUP_ROWS = ROWS / GROUPS;  // each group has its rows of x
constexpr int CONSUMERS = WARPS * GROUPS;                             // warps that multiply

__device__ __forceinline__ void matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// sums [16 weight rows, 8 rows of x] += weight [16, 16] x [8, 16]: a thread has weight rows lane / 4 and + 8 of rows
// 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&weight)[4], u32 x0, u32 x1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(x0), "r"(x1));
}

template <int COUNT>
using Sums = float[COUNT / 16][GROUP_ROWS / 8][4];

__device__ __forceinline__ float widened(u16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }

__device__ __forceinline__ void consumers_meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
}

struct Ring {
    u32 tiles, weights, xs, empty;
    int next;  // stages that this thread has loaded, or consumed

    __device__ __forceinline__ int stage() const { return next % STAGES; }
    __device__ __forceinline__ u32 at() const { return tiles + stage() * STAGE_BYTES; }
    __device__ __forceinline__ u32 parity() const { return next / STAGES & 1; }
    __device__ __forceinline__ void wait_empty() const {
        if (next >= STAGES) barrier_wait(empty + 8 * stage(), parity() ^ 1);
    }
    __device__ __forceinline__ void wait_landed(int stages_ago) const {
        const int one = next - stages_ago;
        if (one >= 0) barrier_wait(weights + 8 * (one % STAGES), one / STAGES & 1);
    }
};

// What two threads load of one linear; EARLY if the ring is first filled while the linear before it is finished.
template <int COUNT, int TILES, int PARTS, bool EARLY>
struct Loads {
    const TensorMap *x_map, *weight_map;
    int row, columns, steps;

    __device__ __forceinline__ void weights(Ring& ring) const {
        constexpr int bytes = TILES * COUNT * 128, window = (WINDOW + bytes - 1) / bytes;
        const u64 once = 0x12F0000000000000ull;
        for (int step = 0; step < steps; ++step) {
            for (int half = 0; half < PARTS; ++half, ++ring.next) {
                ring.wait_empty();
                ring.wait_landed(min(STAGES, EARLY && step * PARTS + half < STAGES ? AHEAD : window));
                const u32 barrier = ring.weights + 8 * ring.stage();
                barrier_expect(barrier, bytes);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const int from = (step * TILES + t) * 64;
                    load(ring.at() + t * COUNT * 128, weight_map, barrier, from, row + half * columns, once);
                }
            }
        }
    }

    __device__ __forceinline__ void x(Ring& ring) const {
        const u64 again = 0x14F0000000000000ull;  // stay in L2: every block reads the same x
        for (int step = 0; step < steps; ++step) {
            for (int half = 0; half < PARTS; ++half, ++ring.next) {
                ring.wait_empty();
                const u32 barrier = ring.xs + 8 * ring.stage();
                if (half) {  // whose x is that of the half before
                    barrier_arrive(barrier);
                    continue;
                }
                barrier_expect(barrier, TILES * ROWS * 128);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const u32 to = ring.at() + (TILES * COUNT + t * ROWS) * 128;
                    load(to, x_map, barrier, (step * TILES + t) * 64, 0, again);
                }
            }
        }
    }
};

// This warp's part of the product.
template <int COUNT, int TILES, int PARTS>
__device__ __forceinline__ void consume(Sums<COUNT> (&sums)[PARTS], Ring& ring, int steps) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) % WARPS, swizzle = lane & 7;
    const u32 weight_at = (lane & 15) * 128 + ((2 * warp + (lane >> 4) ^ swizzle) << 4);
    const u32 x_row = swizzle + (GROUP_ROWS > 8 ? (lane >> 4) * 8 : 0) + (threadIdx.x >> 5) / WARPS * GROUP_ROWS;
    const u32 x_at = x_row * 128 + ((2 * warp + (lane >> 3 & 1) ^ swizzle) << 4);
#pragma unroll
    for (int i = 0; i < PARTS * COUNT / 16 * GROUP_ROWS / 8 * 4; ++i) (&sums[0][0][0][0])[i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
        u32 x[TILES][4];
#pragma unroll
        for (int half = 0; half < PARTS; ++half, ++ring.next) {
            barrier_wait(ring.weights + 8 * ring.stage(), ring.parity());
            barrier_wait(ring.xs + 8 * ring.stage(), ring.parity());
            const u32 at = ring.at();
            if (half == 0) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) matrices(x[t], at + (TILES * COUNT + t * ROWS) * 128 + x_at);
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
#pragma unroll
                for (int m = 0; m < COUNT / 16; ++m) {
                    u32 weight[4];
                    matrices(weight, at + (t * COUNT + m * 16) * 128 + weight_at);
#pragma unroll
                    for (int n = 0; n < GROUP_ROWS / 8; ++n)
                        multiply(sums[half][m][n], weight, x[t][2 * n], x[t][2 * n + 1]);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.empty + 8 * ring.stage());
        }
    }
}

// A warp's part of the product into shared memory: [WARPS, ROWS, COUNT + 4], the 4 against bank conflicts.
template <int COUNT>
__device__ __forceinline__ void share(const Sums<COUNT>& sums, float* shared, int warp) {
    const int lane = threadIdx.x & 31;
    const int row = warp % WARPS * ROWS + warp / WARPS * GROUP_ROWS;
    float* const at = shared + (row + 2 * (lane & 3)) * (COUNT + 4) + (lane >> 2);
#pragma unroll
    for (int m = 0; m < COUNT / 16; ++m)
#pragma unroll
        for (int n = 0; n < GROUP_ROWS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) at[(8 * n + (i & 1)) * (COUNT + 4) + 16 * m + 8 * (i >> 1)] = sums[m][n][i];
}

template <int COUNT>
__device__ __forceinline__ float added(const float* shared, int row, int column) {
    constexpr int part = ROWS * (COUNT + 4);
    const float* const at = shared + row * (COUNT + 4) + column;
    return (at[0] + at[part]) + (at[2 * part] + at[3 * part]);
}
