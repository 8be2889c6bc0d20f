/* x [M, K] times W [N, K], both in floats. An element is summed over K in 16 lanes and these in a
 * fixed order (floats.h), so it is the same whatever M and N are. bfloat16 is widened, unless the
 * instruction set multiplies it. */

#include <stdatomic.h>
#include <string.h>

#include "isa.h"
#include "scratch.h"
#include "threads.h"

enum {
    COLUMNS = 24,          /* of a task: rows of W, which stay in L2 */
    BFLOAT16_COLUMNS = 48, /* where these are not widened */
    X_FLOATS = 1 << 21,    /* of x that are widened at a time */
};

struct dense {
    const struct isa *isa;
    const char *weight;
    char *out;
    int type;
    int64_t m, n, k;
    const void *x; /* float [m][stride], filled up with zeros; or bfloat16 [m][k] */
    int64_t stride;
    _Atomic int out_of_memory;
};

static void multiply_columns(void *context, int64_t begin, int64_t end)
{
    struct dense *dense = context;
    const struct float_kernels *floats = &dense->isa->floats;
    const int64_t size = dense->type == MEGABIT_FLOAT32 ? 4 : 2, tile = floats->dot_rows;
    /* One tile reads bfloat16 once and widens it on the way; for more, it is widened before. */
    bool is_widened =
        dense->type == MEGABIT_FLOAT16 || (dense->type == MEGABIT_BFLOAT16 && dense->m > tile);
    int64_t wide_floats = is_widened ? COLUMNS * dense->k : 0;
    float *wide = scratch(SCRATCH_SUMS, sizeof(float) * (size_t)(wide_floats + tile * COLUMNS));
    if (wide == NULL) {
        atomic_store(&dense->out_of_memory, 1);
        return;
    }
    float *results = wide + wide_floats;
    for (int64_t task = begin; task < end; task++) {
        int64_t first = task * COLUMNS, count = smaller(COLUMNS, dense->n - first);
        const void *weight = dense->weight + size * first * dense->k;
        int type = dense->type;
        if (is_widened) {
            floats->widen_rows(weight, type, 0, 1, count * dense->k, wide, 0);
            weight = wide;
            type = MEGABIT_FLOAT32;
        }
        for (int64_t row = 0; row < dense->m; row += tile) {
            int64_t rows = smaller(tile, dense->m - row);
            floats->dot_tile((int)rows, (const float *)dense->x + row * dense->stride,
                             dense->stride, weight, type, count, dense->k, results, COLUMNS);
            for (int64_t r = 0; r < rows; r++)
                floats->narrow_row(results + COLUMNS * r, 1.0f, count, dense->type,
                                   dense->out + size * ((row + r) * dense->n + first));
        }
    }
}

static void multiply_bfloat16(void *context, int64_t begin, int64_t end)
{
    const struct dense *dense = context;
    for (int64_t task = begin; task < end; task++) {
        int64_t first = task * BFLOAT16_COLUMNS;
        const uint16_t *weight = (const uint16_t *)dense->weight + first * dense->k;
        dense->isa->bfloat16_product(dense->x, weight, dense->m,
                                     smaller(BFLOAT16_COLUMNS, dense->n - first), dense->k,
                                     (uint16_t *)dense->out + first, dense->n);
    }
}

int megabit_dense_product(const struct isa *isa, const void *x, const void *weight, void *out,
                          int type, int64_t m, int64_t n, int64_t k, int threads)
{
    if (type == MEGABIT_BFLOAT16 && isa->bfloat16_product != NULL) {
        struct dense dense = {
            .isa = isa, .weight = weight, .out = out, .m = m, .n = n, .k = k, .x = x};
        double work = (double)m * (double)n * (double)k;
        parallel_for(ceil_div(n, BFLOAT16_COLUMNS), threads_for(work, threads), multiply_bfloat16,
                     &dense);
        return MEGABIT_OK;
    }
    const int64_t size = type == MEGABIT_FLOAT32 ? 4 : 2, stride = ceil_div(k, WORD) * WORD;
    int64_t most = X_FLOATS / (stride > 0 ? stride : 1);
    most = most > isa->floats.dot_rows ? most : isa->floats.dot_rows;
    for (int64_t row = 0; row < m; row += most) {
        struct dense dense = {
            .isa = isa,
            .weight = weight,
            .out = (char *)out + size * row * n,
            .type = type,
            .m = smaller(most, m - row),
            .n = n,
            .k = k,
            .stride = stride,
        };
        float *wide = scratch(SCRATCH_ACTIVATIONS, sizeof(float) * (size_t)(dense.m * stride));
        if (wide == NULL)
            return MEGABIT_NO_MEMORY;
        dense.x = wide;
        for (int64_t i = 0; i < dense.m; i++) {
            const char *from = (const char *)x + size * (row + i) * k;
            isa->floats.widen_rows(from, type, 0, 1, k, wide + i * stride, 0);
            memset(wide + i * stride + k, 0, sizeof(float) * (size_t)(stride - k));
        }
        double work = (double)dense.m * (double)n * (double)k;
        parallel_for(ceil_div(n, COLUMNS), threads_for(work, threads), multiply_columns, &dense);
        if (dense.out_of_memory)
            return MEGABIT_NO_MEMORY;
    }
    return MEGABIT_OK;
}
