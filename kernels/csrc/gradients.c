/* Gradients to int8 by stochastic rounding: rows of dY with a scale each, for dX, or columns of
 * dY * s, for dW, which are turned into rows on the way. */

#include <stdatomic.h>
#include <string.h>

#include "isa.h"
#include "scratch.h"
#include "threads.h"

/* A tile of rounded numbers, 16 KiB, is turned while it is in L1. */
enum { TILE_ROWS = 64, TILE_COLUMNS = 256, STEP = 8 };

static const float MIN_LARGEST = 1e-30f;

struct gradient {
    const struct isa *isa;
    const float *x;       /* [m, n] */
    const float *x_scale; /* [m] */
    uint64_t key;
    int8_t *x_q;
    float *scale;
    int64_t m, n;
    const struct noise_row *noise; /* [m] */
    _Atomic int out_of_memory;
};

/* A NaN passes through. */
static float scale_of(float largest)
{
    return (largest < MIN_LARGEST ? MIN_LARGEST : largest) / 127.0f;
}

static void round_rows(void *context, int64_t begin, int64_t end)
{
    const struct gradient *g = context;
    const struct elementwise *elementwise = &g->isa->elementwise;
    for (int64_t row = begin; row < end; row++) {
        const float *x = g->x + row * g->n;
        g->scale[row] = scale_of(elementwise->absmax_float32(x, g->n));
        elementwise->round_row(x, g->scale[row], noise_of_row(g->key, row), g->n,
                               g->x_q + row * g->n);
    }
}

int megabit_round_rows(const struct isa *isa, const float *x, uint64_t key, int8_t *x_q,
                       float *scale, int64_t m, int64_t n, int threads)
{
    struct gradient g = {
        .isa = isa, .x = x, .key = key, .x_q = x_q, .scale = scale, .m = m, .n = n};
    parallel_for(m, threads_for((double)m * (double)n, threads), round_rows, &g);
    return MEGABIT_OK;
}

/* 8 x 8 bytes: rows of `from` become columns of `to`. Halves are swapped of pairs of rows 4, 2 and
 * 1 apart. */
static void turn_step(const int8_t *from, int64_t from_stride, int8_t *to, int64_t to_stride)
{
    static const uint64_t LOW[] = {0x00000000ffffffff, 0x0000ffff0000ffff, 0x00ff00ff00ff00ff};
    uint64_t row[STEP];
    UNROLLED(r, STEP)
        memcpy(&row[r], from + r * from_stride, sizeof *row);
    UNROLLED(stage, 3) {
        const int apart = 4 >> stage, shift = 8 * apart;
        UNROLLED(pair, STEP / 2) {
            int r = pair / apart * 2 * apart + pair % apart;
            uint64_t a = row[r], b = row[r + apart];
            row[r] = (a & LOW[stage]) | (b & LOW[stage]) << shift;
            row[r + apart] = (a >> shift & LOW[stage]) | (b & ~LOW[stage]);
        }
    }
    UNROLLED(r, STEP)
        memcpy(to + r * to_stride, &row[r], sizeof *row);
}

/* tile[rows][TILE_COLUMNS] to out[columns][m], from its column `first` on. */
static void turn_tile(const int8_t *tile, int64_t rows, int64_t columns, int8_t *out, int64_t m)
{
    int64_t whole_rows = rows / STEP * STEP, whole_columns = columns / STEP * STEP;
    for (int64_t c = 0; c < whole_columns; c += STEP)
        for (int64_t r = 0; r < whole_rows; r += STEP)
            turn_step(tile + r * TILE_COLUMNS + c, TILE_COLUMNS, out + c * m + r, m);
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = c < whole_columns ? whole_rows : 0; r < rows; r++)
            out[c * m + r] = tile[r * TILE_COLUMNS + c];
}

/* Some columns, up to TILE_COLUMNS. */
static void round_strip(const struct gradient *g, int64_t first, int64_t columns, int8_t *tile)
{
    const struct elementwise *elementwise = &g->isa->elementwise;
    float *scale = g->scale + first;
    memset(scale, 0, sizeof *scale * (size_t)columns);
    for (int64_t row = 0; row < g->m; row++)
        elementwise->absmax_columns(g->x + row * g->n + first, g->x_scale[row], columns, scale);
    for (int64_t c = 0; c < columns; c++)
        scale[c] = scale_of(scale[c]);
    for (int64_t row = 0; row < g->m; row += TILE_ROWS) {
        int64_t rows = smaller(TILE_ROWS, g->m - row);
        for (int64_t r = 0; r < rows; r++)
            elementwise->round_columns(g->x + (row + r) * g->n + first, g->x_scale[row + r], scale,
                                       g->noise[row + r], (uint32_t)first, columns,
                                       tile + r * TILE_COLUMNS);
        turn_tile(tile, rows, columns, g->x_q + first * g->m + row, g->m);
    }
}

static void round_strips(void *context, int64_t begin, int64_t end)
{
    struct gradient *g = context;
    int8_t *tile = scratch(SCRATCH_WEIGHTS, TILE_ROWS * TILE_COLUMNS);
    if (tile == NULL) {
        atomic_store(&g->out_of_memory, 1);
        return;
    }
    for (int64_t strip = begin; strip < end; strip++) {
        int64_t first = strip * TILE_COLUMNS;
        round_strip(g, first, smaller(TILE_COLUMNS, g->n - first), tile);
    }
}

int megabit_round_columns(const struct isa *isa, const float *x, const float *x_scale, uint64_t key,
                          int8_t *x_q, float *scale, int64_t m, int64_t n, int threads)
{
    struct noise_row *noise = scratch(SCRATCH_ACTIVATIONS, sizeof *noise * (size_t)m);
    if (noise == NULL)
        return MEGABIT_NO_MEMORY;
    for (int64_t row = 0; row < m; row++)
        noise[row] = noise_of_row(key, row);
    struct gradient g = {.isa = isa,
                         .x = x,
                         .x_scale = x_scale,
                         .key = key,
                         .x_q = x_q,
                         .scale = scale,
                         .m = m,
                         .n = n,
                         .noise = noise};
    parallel_for(ceil_div(n, TILE_COLUMNS), threads_for((double)m * (double)n, threads),
                 round_strips, &g);
    return g.out_of_memory ? MEGABIT_NO_MEMORY : MEGABIT_OK;
}
