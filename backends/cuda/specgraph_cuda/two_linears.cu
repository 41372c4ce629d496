// Two linears of a decoder layer with the residual sum and the norm between them, of 1 to 32 rows in bfloat16, in one
// kernel on Hopper. Weights of the second are on their way while the first is finished, so that the memory is not idle:
//
//   total  = x @ first.T + residual                          [rows, size]
//   scaled = total * norm                                    [rows, size]
//   out    = (scaled @ second.T) / root mean square of total [rows, columns], or silu(gate) * up of its two halves
//
// two_linears.py puts before this text the constants below, hopper.cuh and few_rows.cuh:
//   ROWS           rows of x, padded: 8, 16 or 32
//   FIRST, SECOND  weight rows of each linear that a block multiplies, multiples of 16
//   HALVES         2 if `second` is (gate | up) and out is gated: SECOND gates, then the SECOND ups of the same columns
//   FIRST_TILES, SECOND_TILES   tiles of 64 input columns in one stage of the ring; the input columns are whole stages
//   STAGES, STAGE_BYTES         the ring: a stage has the weights of these tiles, of one half, x with the first half
//   WINDOW         weight bytes that a block may have in flight: more would delay other loads and stores
//   AHEAD          stages that it may wait for while the first linear is finished
//   LATE           blocks that a test delays until the others stop waiting for them; else 0
//
// Warp w of the first four multiplies input columns 16 w to 16 w + 15 of each tile, and the four sums are added at the
// end. Each four more warps do the same for 16 more rows of x. Two warps load, one of them weights and the other x, and
// one adds squares.
//
// A block's second linear needs all blocks' first. Where some do not run, because another kernel has their
// multiprocessors (it may be one that waits like this one), a block that waited for long computes their parts itself.

constexpr int FIRST_STEP = 64 * FIRST_TILES, SECOND_STEP = 64 * SECOND_TILES;
constexpr int EACH = (FIRST + 31) / 32;  // columns of the first linear that a thread writes
constexpr int SUMS_BYTES = 4 * WARPS * ROWS * (FIRST + 4);
constexpr long long PATIENCE = 100000;  // cycles, about 50 us; parts usually arrive within 10 us

// 0 when a kernel starts; the last block to leave makes it so again.
struct Progress {
    u32 done, left;    // blocks that have written their part of the first linear; blocks that have ended
    u32 written[160];  // by block, whether its part is there, whoever wrote it
};

// What the first linear reads and writes.
struct First {
    const u16 *x, *weight, *residual, *norm;
    u16 *total, *scaled;
    float* squares;  // [rows, parts]: of the total's elements that each block wrote, the sum of the squares
    int rows, depth, size, x_stride, residual_stride;

    __device__ __forceinline__ int parts() const { return (size + FIRST - 1) / FIRST; }

    // What a thread adds to its columns of one row of a block's part.
    __device__ __forceinline__ void read_residual(float (&to)[EACH], int block, int row) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int m = (threadIdx.x & 31) + 32 * i, column = block * FIRST + m;
            const bool inside = m < FIRST && column < size && row < rows;
            to[i] = inside ? widened(__ldcg(residual + (long long)row * residual_stride + column)) : 0.0f;
        }
    }

    __device__ __forceinline__ void read_norm(float (&to)[EACH], int block) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int m = (threadIdx.x & 31) + 32 * i, column = block * FIRST + m;
            to[i] = m < FIRST && column < size ? widened(__ldg(norm + column)) : 0.0f;
        }
    }

    // total, scaled and squares of one row and one block's columns, by one warp.
    __device__ __forceinline__ void write(
        const float* shared, int block, int row, const float (&residuals)[EACH], const float (&norms)[EACH]) const {
        const int lane = threadIdx.x & 31;
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int m = lane + 32 * i, column = block * FIRST + m;
            if (m >= FIRST || column >= size) break;
            const float sum = rounded(rounded(added<FIRST>(shared, row, m)) + residuals[i]);
            total[row * size + column] = packed(sum, 0.0f);
            scaled[row * size + column] = packed(sum * norms[i], 0.0f);
            square += sum * sum;
        }
#pragma unroll
        for (int other = 16; other; other /= 2) square += __shfl_xor_sync(~0u, square, other);
        if (lane == 0) squares[row * parts() + block] = square;
    }

    // Two elements of a row, zeros after the last row.
    static __device__ __forceinline__ u32 pair(const u16* from, int row, int rows, int stride, int column) {
        return row < rows ? *reinterpret_cast<const u32*>(from + (long long)row * stride + column) : 0;
    }

    // Another block's part, by one warp, with the same bits: it multiplies and adds in the same order.
    __device__ __noinline__ void instead_of(int block, float* shared) const {
        const int lane = threadIdx.x & 31, group = lane >> 2;
        for (int warp = 0; warp < CONSUMERS; ++warp) {
            Sums<FIRST> sums = {};
            const int x_row = warp / WARPS * GROUP_ROWS + group;
            for (int from = 16 * (warp % WARPS) + 2 * (lane & 3); from < depth; from += 64) {
                for (int m = 0; m < FIRST / 16; ++m) {
                    const int row = block * FIRST + 16 * m + group;
                    const u32 part[4] = {
                        pair(weight, row, size, depth, from), pair(weight, row + 8, size, depth, from),
                        pair(weight, row, size, depth, from + 8), pair(weight, row + 8, size, depth, from + 8)};
                    for (int n = 0; n < GROUP_ROWS / 8; ++n)
                        multiply(sums[m][n], part, pair(x, 8 * n + x_row, rows, x_stride, from),
                            pair(x, 8 * n + x_row, rows, x_stride, from + 8));
                }
            }
            share<FIRST>(sums, shared, warp);
        }
        __syncwarp();
        float residuals[EACH], norms[EACH];
        read_norm(norms, block);
        for (int row = 0; row < rows; ++row) {
            read_residual(residuals, block, row);
            write(shared, block, row, residuals, norms);
        }
        __syncwarp();
    }
};

__device__ __forceinline__ u32 acquired(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Called by one thread, after a barrier with the threads that wrote the part.
__device__ __forceinline__ void say_written(Progress* progress, int block) {
    asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%0], 1;" ::"l"(progress->written + block) : "memory");
}

extern "C" __global__ void __launch_bounds__(32 * (CONSUMERS + 3), 1) two_linears(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap first_map,
    const __grid_constant__ TensorMap scaled_map, const __grid_constant__ TensorMap second_map,
    const __grid_constant__ First first, u16* out, Progress* progress, int columns, float eps) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ unsigned char memory[];
    const u32 tiles = (address_of(memory) + 1023) & ~1023u, barriers = tiles + STAGES * STAGE_BYTES + SUMS_BYTES + 4 * ROWS;
    unsigned char* const aligned = memory + (tiles - address_of(memory));
    float* const shared = reinterpret_cast<float*>(aligned + STAGES * STAGE_BYTES);  // sums of the first linear
    float* const factors = shared + SUMS_BYTES / 4;                                  // by row, of the second
    Ring ring = {tiles, barriers, barriers + 8 * STAGES, barriers + 16 * STAGES, 0};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = blockIdx.x, rows = first.rows;
    const int first_steps = block < first.parts() ? first.depth / FIRST_STEP : 0;
    const int second_steps = block * SECOND < columns ? first.size / SECOND_STEP : 0;
    const Loads<FIRST, FIRST_TILES, 1, false> first_loads = {&x_map, &first_map, block * FIRST, 0, first_steps};
    const Loads<SECOND, SECOND_TILES, HALVES, true> second_loads = {
        &scaled_map, &second_map, block * SECOND, columns, second_steps};
    if (block < LATE)
        for (const long long start = clock64(); clock64() < start + 4 * PATIENCE;) {}
    __shared__ volatile bool resolved;  // this block has written what was missing
    if (threadIdx.x == 32 * CONSUMERS) {
        resolved = false;
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(ring.weights + 8 * stage, 1);
            barrier_init(ring.xs + 8 * stage, 1);
            barrier_init(ring.empty + 8 * stage, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp == CONSUMERS) {
        if (lane == 0) {
            first_loads.weights(ring);
            second_loads.weights(ring);
        }
    } else if (warp == CONSUMERS + 1) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        if (lane == 0) first_loads.x(ring);
        __syncwarp();
        while (acquired(&progress->done) < first.parts() && !resolved) {}
        asm volatile("fence.proxy.async;" ::: "memory");  // tensor copies read what was stored
        if (lane == 0) second_loads.x(ring);
    } else if (warp == CONSUMERS + 2) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("bar.sync 3, %0;" ::"n"(32 * CONSUMERS + 32) : "memory");  // `shared` is free again
        const int parts = first.parts();
        const long long start = clock64();
        bool waiting = true;
        while (waiting && __any_sync(~0u, clock64() < start + PATIENCE))
            waiting = __any_sync(~0u, acquired(&progress->done) < parts);
        if (waiting) {
            for (int i = 0; i < parts; ++i) {
                const int other = (block + i) % parts;
                if (__all_sync(~0u, acquired(progress->written + other))) continue;
                first.instead_of(other, shared);
                if (lane == 0) say_written(progress, other);
                __syncwarp();
            }
            resolved = true;
        }
        for (int row = 0; row < rows; row += 8) {  // loads of eight rows at once
            float square[8] = {};
            for (int part = lane; part < parts; part += 32) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (row + i < rows) square[i] += __ldcg(first.squares + (row + i) * parts + part);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
#pragma unroll
                for (int other = 16; other; other /= 2) square[i] += __shfl_xor_sync(~0u, square[i], other);
                if (lane == 0 && row + i < rows) factors[row + i] = rsqrtf(square[i] / first.size + eps);
            }
        }
        asm volatile("bar.arrive 2, %0;" ::"n"(32 * CONSUMERS + 32) : "memory");
    } else {
        Sums<FIRST> sums[1];
        float residuals[ROWS / CONSUMERS][EACH], norms[EACH];
        asm volatile("griddepcontrol.wait;" ::: "memory");
        first.read_norm(norms, block);
#pragma unroll
        for (int i = 0; i < ROWS / CONSUMERS; ++i) first.read_residual(residuals[i], block, warp + CONSUMERS * i);
        consume<FIRST, FIRST_TILES, 1>(sums, ring, first_steps);
        share<FIRST>(sums[0], shared, warp);
        consumers_meet();
#pragma unroll
        for (int i = 0; i < ROWS / CONSUMERS; ++i) {
            const int row = warp + CONSUMERS * i;
            if (first_steps && row < rows) first.write(shared, block, row, residuals[i], norms);
        }
        asm volatile("bar.sync 3, %0;" ::"n"(32 * CONSUMERS + 32) : "memory");
        if (threadIdx.x == 0 && first_steps) {
            say_written(progress, block);
            asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(&progress->done) : "memory");
        }
        Sums<SECOND> products[HALVES];
        consume<SECOND, SECOND_TILES, HALVES>(products, ring, second_steps);
        consumers_meet();  // nobody reads the ring any more
        float* const gates = reinterpret_cast<float*>(aligned);
        float* const ups = gates + (HALVES - 1) * WARPS * ROWS * (SECOND + 4);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) share<SECOND>(products[half], half ? ups : gates, warp);
        asm volatile("bar.sync 2, %0;" ::"n"(32 * CONSUMERS + 32) : "memory");
        for (int row = warp; row < rows; row += CONSUMERS) {
            const float factor = factors[row];
            for (int m = 2 * lane; m < SECOND; m += 64) {
                const int column = block * SECOND + m;
                if (column >= columns) break;
                const float low = added<SECOND>(gates, row, m) * factor;
                const float high = added<SECOND>(gates, row, m + 1) * factor;
                const float up0 = added<SECOND>(ups, row, m) * factor, up1 = added<SECOND>(ups, row, m + 1) * factor;
                const u32 both = HALVES == 2 ? gated(low, high, up0, up1) : packed(low, high);
                *reinterpret_cast<u32*>(out + (long long)row * columns + column) = both;
            }
        }
    }
    __syncthreads();
    __shared__ u32 before;
    if (threadIdx.x == 0) before = atomicAdd(&progress->left, 1);
    __syncthreads();
    if (before == gridDim.x - 1) {  // nobody waits any more
        for (int i = threadIdx.x; i < first.parts(); i += blockDim.x) progress->written[i] = 0;
        if (threadIdx.x == 0) progress->left = progress->done = 0;
    }
}
